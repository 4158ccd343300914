"""Interleaved timing of training steps, each contender in a separate process.

A contender answers each line on its standard input with the seconds of one step.

    python -m scripts.benchmarking.contenders FOLDER    run one contender (used by `Contender`)
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxgc.model.core.ir import Array
from onnxgc.runtime.ort import SessionSettings, make_session
from scripts.benchmarking.records import ROOT

_WARM_UP_STEPS = 2
# ONNX Runtime's threads spin for a moment after a step.
_PAUSE_SECONDS = 0.2


class Contender:
    """A process that runs a training step on request."""

    def __init__(self, folder: Path, request: Mapping[str, Any], arrays: Mapping[str, Mapping[str, Array]]):
        folder.mkdir()
        for kind, values in arrays.items():
            np.savez(folder / f"{kind}.npz", *values.values())
        names = {kind: list(values) for kind, values in arrays.items()}
        (folder / "request.json").write_text(json.dumps({**request, "names": names}))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.benchmarking.contenders", str(folder)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._read_answer()

    def step_seconds(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._read_answer()

    def close(self) -> None:
        with self._process:  # Closes the pipes, which ends the process, and waits for it.
            pass

    def _read_answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise RuntimeError(f"a contender ended with status {status}; see its message above")
        return float(line)


def interleaved_times(contenders: Mapping[str, Contender], rounds: int) -> dict[str, dict[str, Any]]:
    """Minimum, median and all times of each contender, in seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            time.sleep(_PAUSE_SECONDS)
            seconds[name].append(contender.step_seconds())
    return {
        name: {"minimum": min(times), "median": statistics.median(times), "all": times}
        for name, times in seconds.items()
    }


def main(folder: Path) -> None:
    """Answers lines until standard input is closed; the first answer follows the warm-up."""
    request = json.loads((folder / "request.json").read_text())
    arrays = {kind: _load(folder, kind, names) for kind, names in request["names"].items()}
    step = _STEPS[request["kind"]](request, arrays)
    for _ in range(_WARM_UP_STEPS):
        step()
        gc.collect()
    print(0.0, flush=True)
    for _ in sys.stdin:
        gc.collect()  # torch's graph of the previous step is a cycle of gigabytes.
        started = time.perf_counter()
        step()
        print(time.perf_counter() - started, flush=True)


def _load(folder: Path, kind: str, names: Sequence[str]) -> dict[str, Array]:
    with np.load(folder / f"{kind}.npz") as stored:
        return {name: stored[f"arr_{index}"] for index, name in enumerate(names)}


def _session_step(request: Mapping[str, Any], arrays: Mapping[str, dict[str, Array]]) -> Callable[[], Any]:
    session = make_session(request["model"], settings=SessionSettings(threads=request["threads"]))
    return lambda: session.run(None, arrays["feeds"])


def _torch_step(request: Mapping[str, Any], arrays: Mapping[str, dict[str, Array]]) -> Callable[[], Any]:
    import torch

    from tests.torch_reference import reference_step

    torch.set_num_threads(request["threads"])
    model = onnx.load(request["model"])
    feeds = dict(arrays["feeds"])
    labels = feeds.pop("labels")
    return lambda: reference_step(model, arrays["weights"], feeds, labels, dtype=torch.float32)


_STEPS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, dict[str, Array]]], Callable[[], Any]]] = {
    "onnxruntime": _session_step,
    "torch": _torch_step,
}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
