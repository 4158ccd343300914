"""A model loaded and run once by ONNX Runtime in a process of its own, which may crash or not end."""

from __future__ import annotations

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
# What the runtime, the C++ library and Python say where memory has run out.
_OF_MEMORY = (
    "bad_alloc",
    "MemoryError",
    "Failed to allocate memory",
    "failed to allocate",
    "Cannot allocate",
)
_LAST_OF_OUTPUT = 2000
_NUMPY_KINDS = "biufcUSO"


@dataclass(frozen=True, slots=True)
class RanNode:
    """A node that ran: its place in the file, and the type of each output as the runtime made it."""

    index: int
    op: str
    name: str
    outputs: tuple[TensorType | None, ...]


@dataclass(frozen=True, slots=True)
class IsolatedRun:
    """How a model fared in a process of its own.

    `errors` are what the runtime said, by level of optimisation tried; the last level took the model
    where `has_run`. `ended_by` is the signal that ended the process, 0 if none did, and `stage` is how far
    it came (start, load, run or end); `timed_out` says that it was stopped.
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
        """Such as SIGSEGV."""
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
    """Load a model, and run it once unless `feeds` is None, at the first of these levels that takes it.

    The weights of a file are read by that process alone. A model in memory is written to a temporary file,
    with its external data in `data_folder`. The process ends with this one.
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
    lifeline, held = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, str(_CHILD), str(folder)],
            stdin=lifeline,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    except BaseException:
        os.close(held)
        raise
    finally:
        os.close(lifeline)
    said, timed_out = b"", False
    try:
        said, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        # Whatever ends the wait, Ctrl-C included, ends the process.
        os.close(held)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    text = said[-_LAST_OF_OUTPUT:].decode(errors="replace")
    return _outcome_of(folder, text, process.returncode, timed_out)


def _outcome_of(folder: Path, text: str, status: int, timed_out: bool) -> IsolatedRun:
    try:
        answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    except (OSError, ValueError):
        answer = {"errors": []}
    told = tuple(map(str, answer["errors"]))
    ended_by = -status if status < 0 and not timed_out else 0
    if status and not ended_by and not timed_out:
        lines = [line for line in text.splitlines() if line.strip()]
        told = (*told, lines[-1] if lines else f"the process ended with status {status}")
    said = "\n".join((*told, text))
    return IsolatedRun(
        has_run=status == 0 and answer.get("stage") == "end" and "nodes" in answer,
        errors=told,
        nodes=tuple(_node(*entry) for entry in answer.get("nodes", ())),
        stage=str(answer.get("stage", "start")),
        level=str(answer.get("level", PLAIN)),
        ended_by=ended_by,
        timed_out=timed_out,
        lacks_memory=ended_by == signal.SIGKILL or any(sign in said for sign in _OF_MEMORY),
    )


def _as_numpy(value: Array) -> tuple[Array, int | None]:
    """An array that NumPy alone can store, and its ONNX type where that is not NumPy's own."""
    array = np.asarray(value)
    if array.dtype.kind == "O":
        return array.astype(np.str_), None
    if array.dtype.kind in _NUMPY_KINDS and array.dtype.isbuiltin == 1:
        return array, None
    bits = np.dtype(f"u{array.dtype.itemsize}")
    return np.ascontiguousarray(array).view(bits), int(helper.np_dtype_to_tensor_dtype(array.dtype))


# As the profile has them.
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
