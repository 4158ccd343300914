"""One run of the forward model before anything is planned: some exports are not what they seem."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper

from onnxgc.errors import ModelFileError, RuntimeUnavailableError
from onnxgc.model.costs import node_flops
from onnxgc.model.ir import Array, TrainableModel
from onnxgc.model.load import files_of, is_text, load_proto
from onnxgc.runtime.measure import random_feeds
from onnxgc.runtime.ort import SessionSettings, load_onnxruntime, make_session

# A few seconds on one core; the run is there to find out whether there is one, not to take time.
MOST_FLOPS = 50 * 10**9
_SEED = 0
# Stock optimisation does not take every file that the settings of training take.
_TRIED = (SessionSettings(file_order=False), SessionSettings())
_NOT_RUN = "the model was loaded but not run before planning"
# What a runtime says of types and versions that it has no kernels for, though the file is valid.
_ITS_OWN_LIMITS = (
    "NOT_IMPLEMENTED",
    "Unsupported model IR version",
    "under development",
    "max supported",
    "does not support",
    # Pooling with auto_pad and a stride beyond its kernel, for which the training file needs no padding.
    "padding values must be non-negative",
)


def trial_run(
    source: str | os.PathLike[str] | onnx.ModelProto,
    model: TrainableModel,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> str:
    """Load the source model in ONNX Runtime and, unless that would take long, run it once on the CPU.

    Inputs have the shapes that the file declares; those that it was read with where it declares none. Returns
    a note where the trial says less than a whole run, else nothing.

    Raises:
        ModelFileError: the model does not load or does not run.
    """
    try:
        load_onnxruntime()
    except RuntimeUnavailableError:
        return "the model was not tried: ONNX Runtime is not installed"
    proto, _ = load_proto(source)
    # ONNX Runtime reads binary files alone, and finds external data beside a file alone.
    path = None if isinstance(source, onnx.ModelProto) or is_text(source) else source
    if path is None and any(tensor.external_data for tensor in proto.graph.initializer):
        return "the model was not tried: it keeps its weights in other files, and no path was given"
    if path is not None and not all(map(os.path.exists, files_of(path))):
        return "the model was not tried: its weights are not there"
    flops = sum(node_flops(node, model.types) for node in model.nodes)
    loop = next((node for node in model.nodes if node.op == "Loop" and not node.domain), None)
    note = ""
    if flops > MOST_FLOPS:
        note = f"{_NOT_RUN}: one run takes {flops / 1e9:,.0f} GFLOP"
    elif loop is not None:
        # On random data it may never end.
        note = f"{_NOT_RUN}: the data decide how long '{loop.name}' runs"
    for settings in _TRIED:
        try:
            session = make_session(path or proto, settings=settings, is_silent=True)
            if not note:
                session.run(None, _feeds(proto, model, input_shapes or {}))
            return note
        except Exception as error:  # ONNX Runtime's exceptions have no base class of their own.
            failure = error
    reason = _reason(failure)
    if any(sign in str(failure) for sign in _ITS_OWN_LIMITS):
        return f"the model could not be tried on the CPU: {reason}"
    raise ModelFileError(
        f"the model does not run on ONNX Runtime as it is: {reason}; export it again, or pass --no-check"
    ) from failure


def _feeds(
    proto: onnx.ModelProto, model: TrainableModel, input_shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Array]:
    stored = {tensor.name for tensor in proto.graph.initializer}
    known_shapes = {name: model.types[name].shape for name in model.inputs} | dict(input_shapes)
    described = {}
    for value in proto.graph.input:
        if value.name in stored:
            continue
        kind = value.type.tensor_type
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
        given = known_shapes.get(value.name, (1,) * len(kind.shape.dim))
        if not kind.HasField("shape"):
            described[value.name] = (dtype, known_shapes.get(value.name, ()))
            continue
        sizes = tuple(
            dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else size
            for dim, size in zip(kind.shape.dim, given, strict=True)
        )
        described[value.name] = (dtype, sizes)
    return random_feeds(described, _SEED, None)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rpartition(" : ")[2] if lines else type(error).__name__
