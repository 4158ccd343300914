"""Loads and runs a model once in a separate process, which may crash or hang."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from onnxgc.model.core.ir import Array, TensorType

_CHILD = Path(__file__).with_name("isolated_child.py")
PLAIN, STOCK = "ORT_DISABLE_ALL", "ORT_ENABLE_ALL"
# Messages of the runtime, the C++ library and Python when memory runs out.
_OUT_OF_MEMORY = ("bad_alloc", "MemoryError", "Failed to allocate memory", "failed to allocate", "Cannot allocate")
_MAX_OUTPUT_BYTES = 2000
_NUMPY_KINDS = "biufcUSO"


@dataclass(frozen=True, slots=True)
class RanNode:
    """An executed node: its index in the file, and the runtime type of each output."""

    index: int
    op: str
    name: str
    outputs: tuple[TensorType | None, ...]


@dataclass(frozen=True, slots=True)
class IsolatedRun:
    """The outcome of an isolated run.

    Attributes:
        has_run: the model was loaded, and run if feeds were given, at the last level tried.
        errors: one message of the runtime for each optimisation level that failed.
        nodes: executed nodes.
        stage: the last stage reached: start, load, run or end.
        level: the last optimisation level tried.
        ended_by: the signal that ended the process, or 0.
        timed_out: the process was stopped at the time limit.
        lacks_memory: memory ran out.
    """

    has_run: bool
    errors: tuple[str, ...] = ()
    nodes: tuple[RanNode, ...] = ()
    stage: str = "start"
    level: str = PLAIN
    ended_by: int = 0
    timed_out: bool = False
    lacks_memory: bool = False

    @property
    def signal_name(self) -> str:
        """Name of the signal, such as SIGSEGV."""
        try:
            return signal.Signals(self.ended_by).name
        except ValueError:
            return f"signal {self.ended_by}"


def run_isolated(
    model: str | os.PathLike[str] | onnx.ModelProto,
    feeds: Mapping[str, Array] | None,
    *,
    levels: Sequence[str] = (PLAIN, STOCK),
    providers: Sequence[str] = ("CPUExecutionProvider",),
    data_folder: str = "",
    threads: int | None = None,
    timeout_seconds: float | None = None,
) -> IsolatedRun:
    """Loads a model at the first of `levels` that accepts it, and runs it once unless `feeds` is None.

    Only the child process reads the weights of a file. A model in memory is written to a temporary file,
    with its external data in `data_folder`. The child process ends with this one.
    """
    with tempfile.TemporaryDirectory(prefix="onnxgc-") as name:
        folder = Path(name)
        if isinstance(model, onnx.ModelProto):
            path = folder / "model.onnx"
            path.write_bytes(model.SerializeToString())
        else:
            path = Path(os.path.abspath(model))
        values = [(key, *_as_numpy(value)) for key, value in (feeds or {}).items()]
        np.savez(folder / "feeds.npz", *(value for _, value, _ in values))
        request = {
            "model": str(path),
            "data_folder": data_folder,
            "levels": list(levels),
            "providers": list(providers),
            "threads": threads,
            "run": feeds is not None,
            "feeds": [(key, kind) for key, _, kind in values],
        }
        (folder / "request.json").write_text(json.dumps(request))
        return _outcome(folder, timeout_seconds)


def _outcome(folder: Path, timeout_seconds: float | None) -> IsolatedRun:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    lifeline, parent_end = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, str(_CHILD), str(folder)],
            stdin=lifeline,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    except BaseException:
        os.close(parent_end)
        raise
    finally:
        os.close(lifeline)
    output, timed_out = b"", False
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        # Any end of the wait, Ctrl-C included, ends the process.
        os.close(parent_end)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    text = output[-_MAX_OUTPUT_BYTES:].decode(errors="replace")
    return _outcome_of(folder, text, process.returncode, timed_out)


def _outcome_of(folder: Path, text: str, status: int, timed_out: bool) -> IsolatedRun:
    try:
        answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    except (OSError, ValueError):
        answer = {"errors": []}
    errors = tuple(map(str, answer["errors"]))
    ended_by = -status if status < 0 and not timed_out else 0
    if status and not ended_by and not timed_out:
        lines = [line for line in text.splitlines() if line.strip()]
        errors = (*errors, lines[-1] if lines else f"the process ended with status {status}")
    output = "\n".join((*errors, text))
    return IsolatedRun(
        has_run=status == 0 and answer.get("stage") == "end" and "nodes" in answer,
        errors=errors,
        nodes=tuple(_node(*entry) for entry in answer.get("nodes", ())),
        stage=str(answer.get("stage", "start")),
        level=str(answer.get("level", PLAIN)),
        ended_by=ended_by,
        timed_out=timed_out,
        lacks_memory=ended_by == signal.SIGKILL or any(sign in output for sign in _OUT_OF_MEMORY),
    )


def _as_numpy(value: Array) -> tuple[Array, int | None]:
    """An array that NumPy can store, and its ONNX type if NumPy has none, else None."""
    array = np.asarray(value)
    if array.dtype.kind == "O":
        return array.astype(np.str_), None
    if array.dtype.kind in _NUMPY_KINDS and array.dtype.isbuiltin == 1:
        return array, None
    bits = np.dtype(f"u{array.dtype.itemsize}")
    return np.ascontiguousarray(array).view(bits), int(helper.np_dtype_to_tensor_dtype(array.dtype))


# Type names in the profile.
_TYPES = {
    "float": onnx.TensorProto.FLOAT,
    "double": onnx.TensorProto.DOUBLE,
    **{
        name.lower(): number
        for name, number in onnx.TensorProto.DataType.items()
        if name not in ("FLOAT", "DOUBLE", "UNDEFINED")
    },
}


def _node(index: int, op: str, name: str, outputs: Sequence[Mapping[str, Sequence[int]]]) -> RanNode:
    return RanNode(index, op, name, tuple(map(_type, outputs)))


def _type(described: Mapping[str, Sequence[int]]) -> TensorType | None:
    for name, shape in described.items():
        if name in _TYPES:
            return TensorType(_TYPES[name], tuple(map(int, shape)))
    return None
