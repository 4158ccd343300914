"""Whether a model can run as a CUDA graph, which replays the kernels of its first run."""

import json
import os
from collections.abc import Sequence

import onnx

from onnxgc.errors import RuntimeUnavailableError

_CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
# Their outputs have a size that the host waits for.
_SYNCHRONIZING = frozenset({"Compress", "NonMaxSuppression", "NonZero", "StringNormalizer", "Unique"})
# The host draws their seed, which a replay repeats.
_SEEDED = frozenset(
    {
        "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"
    }
)  # fmt: skip


def check_capturable(model: str | os.PathLike[str] | bytes | onnx.ModelProto, providers: Sequence[str]) -> None:
    """Checks what is known before a session exists; ONNX Runtime rejects nodes that need copies itself.

    Raises:
        RuntimeUnavailableError: the model cannot run as a CUDA graph on these providers.
    """
    if providers[0] != "CUDAExecutionProvider":
        raise RuntimeUnavailableError("CUDA graphs need the provider cuda; leave cuda_graph out")
    if isinstance(model, bytes):
        model = onnx.load_from_string(model)
    elif not isinstance(model, onnx.ModelProto):
        model = onnx.load(os.fspath(model), load_external_data=False)
    if reason := capture_obstacle(model):
        raise RuntimeUnavailableError(f"the model cannot run as a CUDA graph: {reason}")


def capture_obstacle(model: onnx.ModelProto) -> str | None:
    """The first reason why a model cannot run as a CUDA graph, or None."""
    options = {entry.key: entry.value for entry in model.metadata_props}.get("onnxgc.options", "{}")
    if json.loads(options).get("has_barriers", True) and "has_barriers" in options:
        return "barriers compute shapes on the CPU; write the training file with --barriers none"
    for node in model.graph.node:
        named = f"node '{node.name or node.output[0]}' ({node.op_type})"
        if node.op_type in _CONTROL_FLOW:
            return f"{named} runs a subgraph"
        if node.op_type in _SYNCHRONIZING:
            return f"the size of the output of {named} depends on values"
        if node.op_type in _SEEDED or (node.op_type == "Dropout" and len(node.input) > 2):
            return f"{named} would draw the same numbers in every run; an optimizer in the file counts draws"
    return None
