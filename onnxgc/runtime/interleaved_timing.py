"""Interleaved timing of training files, each in a separate process.

Interleaving spreads disturbances of a busy machine evenly over the files.

    python -m onnxgc.runtime.interleaved_timing FOLDER

runs a step for each line on standard input (used by `_Stepper`).
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from onnxgc.errors import RuntimeFailedError
from onnxgc.model.core.ir import Array
from onnxgc.runtime.measure import bound_step, failure_of, read_request, session_of, write_request
from onnxgc.runtime.ort import SessionSettings

# ONNX Runtime's threads spin for a moment after a step.
_PAUSE_SECONDS = 0.2
# File descriptor of standard output.
_ANSWERS = 1


def seconds_in_turns(
    files: Mapping[str, str | os.PathLike[str]],
    feeds: Mapping[str, Array],
    *,
    settings: SessionSettings,
    runs: int,
    warm_up: int,
    in_place: Mapping[str, str] | None = None,
) -> dict[str, tuple[float, ...]]:
    """Seconds of `runs` steps of each file, one step of each in turn, after `warm_up` rounds.

    Profiling is off, so that only the step is timed. All files are loaded at once. `in_place`: see `measure`.

    Raises:
        RuntimeFailedError: ONNX Runtime rejected a file or failed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in files}
    with ExitStack() as stack:
        steppers = {
            name: stack.enter_context(_Stepper(path, feeds, settings, in_place or {})) for name, path in files.items()
        }
        for number in range(warm_up + runs):
            for name, stepper in steppers.items():
                time.sleep(_PAUSE_SECONDS)
                taken = stepper.step()
                if number >= warm_up:
                    seconds[name].append(taken)
    return {name: tuple(times) for name, times in seconds.items()}


class _Stepper:
    """A process that loads one file and runs a step on request."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        feeds: Mapping[str, Array],
        settings: SessionSettings,
        in_place: Mapping[str, str],
    ) -> None:
        self._path, self._feeds, self._settings, self._in_place = path, feeds, settings, in_place

    def __enter__(self) -> "_Stepper":
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_request(folder, self._path, self._feeds, self._settings, in_place=dict(self._in_place))
            self._errors = folder / "errors"
            self._process = subprocess.Popen(
                [sys.executable, "-m", "onnxgc.runtime.interleaved_timing", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(self._errors.open("w")),
                text=True,
            )
            # Closes the pipes, which ends the process, and waits for it.
            stack.enter_context(self._process)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def step(self) -> float:
        """Seconds of one step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            raise RuntimeFailedError(failure_of(self._path, status, self._errors.read_text()))
        return float(line)


def _answer(folder: Path) -> None:
    request, settings, feeds = read_request(folder)
    step, _ = bound_step(session_of(request, settings), feeds, settings, request["in_place"])
    with open(_ANSWERS, "w") as answers:
        for _ in sys.stdin:
            answers.write(f"{step()}\n")
            answers.flush()


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
