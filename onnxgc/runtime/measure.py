"""Measuring training files, each in a separate process, since a process shares one arena."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from onnxgc.errors import RuntimeFailedError
from onnxgc.model.core.ir import Array
from onnxgc.runtime.ort import SessionSettings, load_onnxruntime, make_session
from onnxgc.runtime.profile import RunProfile, read_profile

if TYPE_CHECKING:
    import onnxruntime

# Memory of all other providers.
_HOST = "cpu"
_MEMORY_OF = {"CUDAExecutionProvider": "cuda"}


@dataclass(frozen=True, slots=True)
class Measurement:
    """Peaks and times of several runs of one file in one session; index 0 is the first run.

    `outputs` are those of the last run that the caller requested.
    """

    runs: tuple[RunProfile, ...]
    wall_seconds: tuple[float, ...]
    threads: int | None
    outputs: Mapping[str, Array] = field(default_factory=dict, repr=False)

    @property
    def steady(self) -> RunProfile:
        """The last run, which represents all later training steps."""
        return self.runs[-1]

    @property
    def requested_peak_bytes(self) -> int:
        """The highest of all runs: profiles show a workspace in its first run only."""
        return max(run.requested_peak_bytes for run in self.runs)

    @property
    def in_use_peak_bytes(self) -> int:
        """As `requested_peak_bytes`, with the arena's slack."""
        return max(run.in_use_peak_bytes for run in self.runs)

    def requested_peak_without(self, kept_bytes: Mapping[str, int]) -> int:
        """`requested_peak_bytes` without outputs that stay allocated, whose bytes are given by node."""
        return max(run.requested_peak_without(kept_bytes) for run in self.runs)


def random_feeds(inputs: Mapping[str, tuple[str, Sequence[int]]], seed: int, classes: int | None) -> dict[str, Array]:
    """Seeded values for fed tensors: `inputs` maps a name to numpy dtype and shape."""
    generator = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for name, (dtype, shape) in inputs.items():
        kind = np.dtype(dtype)
        if kind.kind == "f":
            feeds[name] = generator.standard_normal(shape).astype(kind)
        elif kind.kind == "b":
            feeds[name] = generator.integers(0, 2, shape).astype(kind)
        else:
            feeds[name] = generator.integers(0, classes or 2, shape).astype(kind)
    return feeds


def measure(
    path: str | os.PathLike[str],
    feeds: Mapping[str, Array],
    *,
    settings: SessionSettings,
    runs: int = 3,
    keep_outputs: bool | Sequence[str] = False,
    in_place: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Measurement:
    """Runs a training file `runs` times in a new process and reads its profile.

    `keep_outputs` are the names of outputs to return, or True for all. `in_place` maps outputs to inputs
    whose memory they overwrite, so that the next run reads them. `environment` adds environment variables.

    Raises:
        RuntimeFailedError: ONNX Runtime rejected the file or failed; the error includes its message.
    """
    with tempfile.TemporaryDirectory() as folder:
        kept = keep_outputs is True or list(keep_outputs or ())
        more = {"runs": runs, "keep_outputs": kept, "in_place": dict(in_place or {})}
        write_request(Path(folder), path, feeds, settings, **more)
        result = subprocess.run(
            [sys.executable, "-m", "onnxgc.runtime.measure", folder],
            capture_output=True,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        if result.returncode:
            raise RuntimeFailedError(failure_of(path, result.returncode, result.stderr))
        answer = json.loads((Path(folder) / "answer.json").read_text())
        with np.load(Path(folder) / "outputs.npz") as stored:
            outputs = {name: stored[f"arr_{index}"] for index, name in enumerate(answer["outputs"])}
    profiles = tuple(_profile_from(run) for run in answer["runs"])
    return Measurement(profiles, tuple(answer["wall_seconds"]), settings.threads, outputs)


def _profile_from(run: Mapping[str, Any]) -> RunProfile:
    """A profile from the process's JSON, with tuples restored."""
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in run.items()}
    return RunProfile(**fields)


def failure_of(path: str | os.PathLike[str], returncode: int, stderr: str) -> str:
    """One line with the reason why a measuring process failed."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    reason = lines[-1] if lines else f"the process ended with status {returncode}"
    if returncode < 0:
        reason = f"the process was killed by signal {-returncode}; memory may have run out"
    return f"'{os.fspath(path)}' does not run on ONNX Runtime: {reason}"


def executed_order(model: onnx.ModelProto, feeds: Mapping[str, Array], settings: SessionSettings) -> RunProfile:
    """Profile of one run in this process, for small models."""
    with tempfile.TemporaryDirectory() as folder:
        session = make_session(model, settings=settings, profile_prefix=str(Path(folder) / "profile"))
        session.run(None, dict(feeds))
        return read_profile(session.end_profiling())[0]


def write_request(
    folder: Path, path: str | os.PathLike[str], feeds: Mapping[str, Array], settings: SessionSettings, **more: Any
) -> None:
    """Writes a request for a measuring process, which `read_request` reads, into a folder."""
    np.savez(folder / "feeds.npz", *feeds.values())
    request = {"model": os.path.abspath(path), "names": list(feeds), "settings": asdict(settings), **more}
    (folder / "request.json").write_text(json.dumps(request))


def read_request(folder: Path) -> tuple[dict[str, Any], SessionSettings, dict[str, Array]]:
    """A request of `write_request`, with its settings and feeds."""
    request = json.loads((folder / "request.json").read_text())
    chosen = request["settings"]
    settings = SessionSettings(chosen["file_order"], chosen["threads"], tuple(chosen["providers"]))
    with np.load(folder / "feeds.npz") as stored:
        feeds = {name: stored[f"arr_{index}"] for index, name in enumerate(request["names"])}
    return request, settings, feeds


def session_of(
    request: Mapping[str, Any], settings: SessionSettings, profile_prefix: str | None = None
) -> onnxruntime.InferenceSession:
    """The session of a request; exits with a message if its provider does not start."""
    session = make_session(request["model"], settings=settings, profile_prefix=profile_prefix)
    wanted = settings.providers[0]
    if session.get_providers()[0] != wanted:
        sys.exit(
            f"{wanted} does not start: it finds no device, or not all of its libraries "
            "(pip install 'onnxruntime-gpu[cuda,cudnn]' installs them); or choose the provider cpu"
        )
    return session


def bound_step(
    session: onnxruntime.InferenceSession,
    feeds: Mapping[str, Array],
    settings: SessionSettings,
    in_place: Mapping[str, str] | None = None,
) -> tuple[Callable[[], float], onnxruntime.IOBinding]:
    """A function that runs one step and returns its seconds, and the binding with its results.

    Inputs and outputs stay in the provider's memory, as in a training loop; `in_place` as in `measure`.
    """
    memory = _MEMORY_OF.get(settings.providers[0], _HOST)
    from_numpy = load_onnxruntime().OrtValue.ortvalue_from_numpy
    binding = session.io_binding()
    values = {name: from_numpy(value, memory, 0) for name, value in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    names = [output.name for output in session.get_outputs()]
    shared = {output: values[name] for output, name in (in_place or {}).items()}

    def step() -> float:
        binding.clear_binding_outputs()  # Results of the last run would occupy the arena.
        for name in names:
            if name in shared:
                binding.bind_ortvalue_output(name, shared[name])
            else:
                binding.bind_output(name, memory, 0)
        started = time.perf_counter()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return time.perf_counter() - started

    return step, binding


def _answer(folder: Path) -> None:
    request, settings, feeds = read_request(folder)
    session = session_of(request, settings, str(folder / "profile"))
    step, binding = bound_step(session, feeds, settings, request["in_place"])
    seconds = [step() for _ in range(request["runs"])]
    runs = read_profile(session.end_profiling(), settings.providers[0])
    names, keep = [output.name for output in session.get_outputs()], request["keep_outputs"]
    kept = {
        name: value.numpy()
        for name, value in zip(names, binding.get_outputs(), strict=True)
        if keep is True or name in keep
    }
    np.savez(folder / "outputs.npz", *kept.values())
    answer = {"runs": [asdict(run) for run in runs], "wall_seconds": seconds, "outputs": list(kept)}
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
