"""A trial run of the forward model before planning, which detects faulty exports."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from onnxgc.errors import ModelFileError, RuntimeUnavailableError, ShapeError
from onnxgc.model.core.ir import Array, Node, TensorType, TrainableModel, dtype_name
from onnxgc.model.files.load import is_text, load_proto, model_files
from onnxgc.model.files.module_paths import module_of
from onnxgc.model.operators.registry import node_flops
from onnxgc.runtime.isolated_run import STOCK, IsolatedRun, run_isolated
from onnxgc.runtime.measure import random_feeds
from onnxgc.runtime.ort import load_onnxruntime

# A few seconds on one core.
MAX_FLOPS = 50 * 10**9
MAX_SECONDS = 300.0
_SEED = 0
_PROVIDER = "CPUExecutionProvider"
_NOT_RUN = "the model was loaded, but not run before planning"
_SKIPPED, _UNFINISHED = "the trial run was skipped", "the trial run did not finish"
# Errors of a runtime that lacks a kernel for a valid file.
_RUNTIME_LIMITS = (
    "NOT_IMPLEMENTED",
    "Unsupported model IR version",
    "under development",
    "max supported",
    "does not support",
    # Pooling with auto_pad and a stride beyond its kernel, for which the training file needs no padding.
    "padding values must be non-negative",
)
_NO_KERNEL = re.compile(r"implementation for (?:[\w.]+:)?(\w+)\(\d+\)(?: node with name '([^']*)')?")
_HALF = frozenset((onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16))


def trial_run(
    source: str | os.PathLike[str] | onnx.ModelProto,
    model: TrainableModel,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> str:
    """Load the source model in ONNX Runtime and, unless that takes long, run it once on the CPU.

    The run is in a separate process, which may crash. Inputs have the shapes that the file declares, or else
    those that it was read with. Returns a note if the run was skipped or incomplete, else "".

    Raises:
        ModelFileError: the model does not load or does not run, or ONNX Runtime crashes on it.
        ShapeError: it runs, but a tensor has another type or shape than inferred.
    """
    proto, _ = load_proto(source)
    path = None if isinstance(source, onnx.ModelProto) else os.fspath(source)
    if obstacle := _obstacle(proto, path):
        return f"{_SKIPPED}: {obstacle}"
    note = _why_too_long(model)
    needed, available = _least_bytes(model, proto, is_run=not note), available_bytes()
    if available is not None and needed > available:
        return f"{_SKIPPED}: it needs at least {needed / 1e9:,.1f} GB, and {available / 1e9:,.1f} GB of memory are free"
    feeds = None if note else _feeds(proto, model, input_shapes or {})
    try:
        ran = _run(proto, path, feeds)
    except (MemoryError, ValueError, OSError) as error:
        # A model in memory over 2 GB cannot be written in one piece; or the disk is full.
        return f"{_SKIPPED}: {_first_line(str(error)) or type(error).__name__}"
    return _verdict(ran, note, proto, model, feeds)


def _obstacle(proto: onnx.ModelProto, path: str | None) -> str:
    """Why the model cannot be run at all, or ""."""
    try:
        load_onnxruntime()
    except RuntimeUnavailableError:
        return "ONNX Runtime is not installed"
    if not sys.executable:
        return "there is no Python interpreter to start in a separate process"
    if path is None and _has_external_data(proto):
        return "its weights are in other files, and no path was given"
    if path is not None and not all(map(os.path.exists, model_files(path))):
        return "the files of its weights are missing"
    return ""


def _why_too_long(model: TrainableModel) -> str:
    """A note if the model is loaded only, or ""."""
    flops = sum(node_flops(node, model.types) for node in model.nodes)
    if flops > MAX_FLOPS:
        return f"{_NOT_RUN}: one run takes {flops / 1e9:,.0f} GFLOP"
    loop = next((node for node in model.nodes if node.op == "Loop" and not node.domain), None)
    # On random data a loop may never end.
    return "" if loop is None else f"{_NOT_RUN}: the data decide how long '{loop.name}' runs"


def _run(proto: onnx.ModelProto, path: str | None, feeds: Mapping[str, Array] | None) -> IsolatedRun:
    # ONNX Runtime reads binary files only, and keeps the file's nodes only if it inlines no functions.
    is_direct = path is not None and not is_text(path) and not _has_functions(path)
    folder = os.path.dirname(os.path.abspath(path)) if path and _has_external_data(proto) else ""

    def run(**options: Any) -> IsolatedRun:
        return run_isolated(
            path if is_direct and path is not None else proto,
            feeds,
            data_folder="" if is_direct else folder,
            timeout_seconds=MAX_SECONDS,
            **options,
        )

    first = run()
    if first.ended_by and not first.lacks_memory and first.level != STOCK:
        # Some models run only with the runtime's optimisation.
        second = run(levels=(STOCK,))
        return second if second.has_run else first
    return first


def _has_external_data(proto: onnx.ModelProto) -> bool:
    return any(tensor.external_data for tensor in proto.graph.initializer)


def _verdict(
    ran: IsolatedRun, note: str, proto: onnx.ModelProto, model: TrainableModel, feeds: Mapping[str, Array] | None
) -> str:
    """The note on a run, or an error."""
    if ran.has_run:
        if feeds is not None:
            _check_types(ran, proto, model, feeds)
        return note
    doing = {"run": "running", "load": "loading"}.get(ran.stage, "starting on")
    if ran.lacks_memory:
        return f"{_UNFINISHED}: ONNX Runtime ran out of memory while {doing} the model"
    if ran.timed_out:
        return f"{_UNFINISHED}: ONNX Runtime was still {doing} the model after {MAX_SECONDS:.0f} s"
    if ran.ended_by:
        raise ModelFileError(
            f"ONNX Runtime crashed ({ran.signal_name}) while {doing} the model; export it again, give other "
            "--input-shapes, or pass --no-check to skip the trial run"
        )
    failure = ran.errors[-1] if ran.errors else "unknown reason"
    if limit := _missing_kernel(failure, proto, model):
        return limit
    reason = _reason(failure)
    if any(sign in failure for sign in _RUNTIME_LIMITS):
        return f"the trial run on the CPU is not possible: {reason}"
    raise ModelFileError(f"the model does not run on ONNX Runtime: {reason}; export it again, or pass --no-check")


def _check_types(ran: IsolatedRun, proto: onnx.ModelProto, model: TrainableModel, feeds: Mapping[str, Array]) -> None:
    """Compare types and shapes of the run with the inferred ones, tensor by tensor.

    Nodes are identified by their position in the file, operator and name. Nodes that the runtime adds or
    replaces are skipped, and all nodes if the model was read with other input shapes than it was run with.

    Raises:
        ShapeError: a tensor differs.
    """
    if any(name in model.types and model.types[name].shape != value.shape for name, value in feeds.items()):
        return
    own = dict(enumerate(proto.graph.node))
    for entry in ran.nodes:
        node = own.get(entry.index)
        if node is None or node.op_type != entry.op:
            continue
        if entry.name != (node.name or f"{entry.op}_{entry.index}"):
            continue
        for name, found in zip(filter(None, node.output), entry.outputs, strict=False):
            wanted = model.types.get(name)
            if wanted is None or found is None or _agree(wanted, found):
                continue
            where = Node(node.op_type, (), (), name=node.name or name, module=module_of(node)).location
            raise ShapeError(
                f"{where} gives '{name}' as {type_text(found)} on ONNX Runtime, but as "
                f"{type_text(wanted)} by its specification; write the operator so that both agree (for "
                "example, explicit pads in place of auto_pad), or pass --no-check"
            )


def _agree(wanted: TensorType, found: TensorType) -> bool:
    """Whether two types agree; a runtime without a kernel for half precision computes in float32."""
    widened = wanted.dtype in _HALF and found.dtype == onnx.TensorProto.FLOAT
    return wanted.shape == found.shape and (wanted.dtype == found.dtype or widened)


def type_text(kind: TensorType) -> str:
    return f"{dtype_name(kind.dtype)} {list(kind.shape)}"


def _missing_kernel(failure: str, proto: onnx.ModelProto, model: TrainableModel) -> str:
    """The note on an operator without a kernel, or ""."""
    match = _NO_KERNEL.search(failure)
    if match is None:
        return ""
    op, name = match[1], match[2] or ""
    nodes = [node for node in proto.graph.node if node.op_type == op and (not name or node.name == name)]
    read = [model.types[tensor] for node in nodes for tensor in node.input if tensor in model.types]
    kind = min(read, key=lambda one: one.dtype not in _HALF, default=None)
    of_type = f" for {dtype_name(kind.dtype)}" if kind is not None else ""
    where = next((f" ('{node.name or node.output[0]}')" for node in nodes), "")
    return (
        f"the trial run on the CPU is not possible: ONNX Runtime's {_PROVIDER} has no kernel of {op}"
        f"{of_type}{where}; train with a provider that has one, or export the model in float32"
    )


def _least_bytes(model: TrainableModel, proto: onnx.ModelProto, is_run: bool) -> int:
    """A lower bound on the bytes of a run: weights, and the largest outputs of a node."""
    if not is_run:
        return sum(
            TensorType(tensor.data_type, tuple(tensor.dims)).size_bytes
            for tensor in proto.graph.initializer
            if tensor.data_type not in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)
            and not tensor.external_data
        )
    weights = sum(weight.type.size_bytes for weight in model.weights.values())
    outputs = (
        sum(model.types[name].size_bytes for name in node.outputs if name in model.types) for node in model.nodes
    )
    return weights + max(outputs, default=0)


def available_bytes() -> int | None:
    """Memory available to a new process by Linux and its control groups; None if unknown."""
    found = [_meminfo(), _control_group()]
    return min((size for size in found if size is not None), default=None)


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _control_group() -> int | None:
    """Memory below the group's limit, with cached files counted as free."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - used + int(statistics.get("file", 0))
    except (OSError, ValueError):
        return None


def _has_functions(path: str) -> bool:
    return bool(onnx.load(path, load_external_data=False).functions)


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


def _reason(failure: str) -> str:
    return _first_line(failure).rpartition(" : ")[2]


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
