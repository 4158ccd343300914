"""What PyTorch's exporters say of weights in the files that they write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx

from onnxgc.model.ir import Weight
from onnxgc.model.weights import ExportedAs, StoredWeight

_PRODUCER = "pytorch"
# Metadata of an initializer's value_info, written by torch.export and by onnxscript's optimiser.
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"
# How the older exporter calls what it computed itself.
_COMPUTED = ("onnx::", "/")


def as_exported(model: onnx.ModelProto, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The weights with what the exporter says that they are, where it says so.

    The newer exporter marks parameters and buffers, so that what it does not mark is a constant, unless
    it was folded from one of them. The older one keeps its constants as Constant nodes.
    """
    if model.producer_name != _PRODUCER:
        return dict(weights)
    told = {value.name: {e.key: e.value for e in value.metadata_props} for value in model.graph.value_info}
    is_marked = any(_KIND in found for found in told.values())
    return {
        name: replace(weight, exported_as=_marked(name, told) if is_marked else _by_older(name, weight))
        if isinstance(weight, StoredWeight)
        else weight
        for name, weight in weights.items()
    }


def folding_notes(model: onnx.ModelProto) -> tuple[str, ...]:
    """A line where the exporter computed with parameters, which are then none of the file's weights."""
    folded: dict[str, None] = {}
    stored = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.value_info:
        for entry in value.metadata_props:
            if entry.key == _FOLDED_FROM and value.name in stored:
                sources = (source.strip(" '[]") for source in entry.value.split(","))
                folded.update(dict.fromkeys(name for name in sources if "." in name and name not in stored))
    if not folded:
        return ()
    names = ", ".join(f"'{name}'" for name in list(folded)[:3])
    more = f" and {len(folded) - 3} more" if len(folded) > 3 else ""
    return (
        f"the exporter computed with {names}{more} and stored the result, which trains in their place; "
        "torch.onnx.export(..., optimize=False) keeps them",
    )


def _marked(name: str, told: Mapping[str, Mapping[str, str]]) -> ExportedAs:
    found = told.get(name, {})
    kind = found.get(_KIND, "")
    if kind:
        return ExportedAs.PARAMETER if kind == "PARAMETER" else ExportedAs.BUFFER
    sources = [source.strip(" '[]") for source in found.get(_FOLDED_FROM, "").split(",")]
    kinds = {told.get(source, {}).get(_KIND, "") for source in sources}
    if "PARAMETER" in kinds or any("." in source for source in sources):
        return ExportedAs.UNKNOWN
    return ExportedAs.CONSTANT


def _by_older(name: str, weight: StoredWeight) -> ExportedAs:
    if not weight.is_initializer:
        return ExportedAs.CONSTANT
    return ExportedAs.UNKNOWN if name.startswith(_COMPUTED) else ExportedAs.NAMED
