"""What PyTorch's exporters say of weights in the files that they write."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx

from onnxgc.model.core.ir import Weight
from onnxgc.model.core.stored_weights import ExportedAs, StoredWeight

_PRODUCER = "pytorch"
# Metadata of an initializer's value_info, written by torch.export and by onnxscript's optimiser.
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"
# Metadata of the graph: a line for each parameter and buffer of the module, folded ones too.
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
# Metadata of a node: the modules that it lies in.
_SCOPES = "pkg.torch.onnx.name_scopes"
# What its optimiser puts a normalisation into keeps its name without marks; the bias is named after it.
_FUSED_BIAS = "_bias"
_IN_SIGNATURE = re.compile(r"^\w+: (\w+) target='([^']*)'", re.MULTILINE)
# How the older exporter calls what it computed itself; the path of a module begins with a slash.
_COMPUTED = ("onnx::", "/")
_OF_CONSTANT_NODE = re.compile(r"^/(.*/)?Constant(_\d+)?_output_0$")
_FIRST_OF_NEWER = 2


def as_exported(model: onnx.ModelProto, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The weights with what the exporter says that they are, where it says so.

    The newer exporter marks parameters and buffers, so that what it does not mark is a constant, unless
    it was folded from one of them, or has the name of one after a normalisation was put into it. The older
    one keeps its constants as Constant nodes. Where a tool has lost the marks of the newer one, nothing is
    said of what lies beside constants without a module's name.
    """
    if model.producer_name != _PRODUCER:
        return dict(weights)
    told = {value.name: {e.key: e.value for e in value.metadata_props} for value in model.graph.value_info}
    is_marked = any(_KIND in found for found in told.values())
    declared, is_older = _declared(model.graph), _is_by_older(model)

    def said(name: str, weight: StoredWeight) -> ExportedAs:
        if is_marked:
            return _marked(name, told, declared)
        return _by_older(name, weight) if is_older else _unmarked(name, weight)

    return {
        name: replace(weight, exported_as=said(name, weight)) if isinstance(weight, StoredWeight) else weight
        for name, weight in weights.items()
    }


def module_of(node: onnx.NodeProto) -> str:
    """The path of the module that a node was written for, as `layer1.0.conv1`, where the file has it."""
    scopes = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "")
    # The modules from the outermost on, which has no name, and the name of the operation.
    modules = _names(scopes)[:-1]
    return modules[-1] if modules else ""


def folding_notes(model: onnx.ModelProto) -> tuple[str, ...]:
    """A line where the exporter computed with parameters, which are then none of the file's weights."""
    folded: dict[str, None] = {}
    stored = {tensor.name for tensor in model.graph.initializer}
    declared = _declared(model.graph)
    for value in model.graph.value_info:
        for entry in value.metadata_props:
            if entry.key == _FOLDED_FROM and value.name in stored:
                sources = (name for name in _names(entry.value) if name not in stored)
                folded.update(dict.fromkeys(name for name in sources if _is_parameter(name, declared)))
    marked = {value.name for value in model.graph.value_info if value.metadata_props}
    if marked & stored:
        unmarked = (tensor.name for tensor in model.graph.initializer if tensor.name not in marked)
        folded.update(dict.fromkeys(name for name in unmarked if declared.get(name) == "PARAMETER"))
    gone = [name for name, kind in declared.items() if kind == "PARAMETER" and name not in {*stored, *folded}]
    return (*_folding_note(folded), *_note_of_gone(gone))


def _note_of_gone(names: Sequence[str]) -> tuple[str, ...]:
    """A line where parameters of the module are not in the file at all."""
    if not names:
        return ()
    listed = ", ".join(f"'{name}'" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"parameters of the module are not in the file: {listed}{more}; forward does not use them, or the "
        "exporter took them out since they change nothing at their first values, as a factor of 1 does "
        "(torch.onnx.export(..., optimize=False) keeps those)",
    )


def _folding_note(folded: Mapping[str, None]) -> tuple[str, ...]:
    if not folded:
        return ()
    names = ", ".join(f"'{name}'" for name in list(folded)[:3])
    more = f" and {len(folded) - 3} more" if len(folded) > 3 else ""
    return (
        f"the exporter computed with {names}{more} and stored the result, which trains in their place; "
        "torch.onnx.export(..., optimize=False) keeps them",
    )


def _marked(name: str, told: Mapping[str, Mapping[str, str]], declared: Mapping[str, str]) -> ExportedAs:
    found = told.get(name, {})
    kind = found.get(_KIND, "")
    if kind:
        return ExportedAs.PARAMETER if kind == "PARAMETER" else ExportedAs.BUFFER
    if not found and _is_fused(name, declared):
        return ExportedAs.UNKNOWN
    sources = _names(found.get(_FOLDED_FROM, ""))
    known = {**{source: told[source].get(_KIND, "") for source in sources if source in told}, **declared}
    return ExportedAs.UNKNOWN if any(_is_parameter(s, known) for s in sources) else ExportedAs.CONSTANT


def _declared(graph: onnx.GraphProto) -> dict[str, str]:
    """Parameters and buffers of the exported module with their kinds, where the graph has its signature."""
    text = next((entry.value for entry in graph.metadata_props if entry.key == _SIGNATURE), "")
    return {target: kind for kind, target in _IN_SIGNATURE.findall(text)}


def _is_parameter(name: str, declared: Mapping[str, str]) -> bool:
    """Whether it is a parameter of the module; without its signature a dotted name is taken for one."""
    return declared[name] == "PARAMETER" if name in declared else "." in name


def _is_fused(name: str, declared: Mapping[str, str]) -> bool:
    return declared.get(name.removesuffix(_FUSED_BIAS), "") == "PARAMETER"


def _names(listed: str) -> list[str]:
    return [name.strip(" '[]") for name in listed.split(",")]


def _is_by_older(model: onnx.ModelProto) -> bool:
    """Whether the older exporter wrote the file: it names nodes and tensors by the paths of modules."""
    version = model.producer_version.partition(".")[0]
    if version.isdigit() and int(version) < _FIRST_OF_NEWER:
        return True
    names = (name for node in model.graph.node for name in (node.name, *node.input, *node.output))
    return any(name.startswith(_COMPUTED) for name in names)


def _unmarked(name: str, weight: StoredWeight) -> ExportedAs:
    """By the newer exporter, without its marks: what it computed has no module's name with a dot."""
    return ExportedAs.NAMED if weight.is_initializer and "." in name else ExportedAs.UNKNOWN


def _by_older(name: str, weight: StoredWeight) -> ExportedAs:
    """Simplifiers make initializers of Constant nodes, and keep their names."""
    if not weight.is_initializer or _OF_CONSTANT_NODE.search(name):
        return ExportedAs.CONSTANT
    return ExportedAs.UNKNOWN if name.startswith(_COMPUTED) else ExportedAs.NAMED
