"""Measuring training files, each in a process of its own: the arena is shared within one."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx

from onnxgc.model.ir import Array
from onnxgc.runtime.ort import SessionSettings, make_session
from onnxgc.runtime.profile import RunProfile, read_profile


@dataclass(frozen=True, slots=True)
class Measurement:
    """Peaks and times of several runs of one file in one session; index 0 is the first run."""

    runs: tuple[RunProfile, ...]
    wall_seconds: tuple[float, ...]
    threads: int | None

    @property
    def steady(self) -> RunProfile:
        """The last run: what every later training step will look like."""
        return self.runs[-1]


def random_feeds(
    inputs: Mapping[str, tuple[str, Sequence[int]]], seed: int, classes: int | None
) -> dict[str, Array]:
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
    path: str | Path, feeds: Mapping[str, Array], *, settings: SessionSettings, runs: int = 3
) -> Measurement:
    """Run a training file `runs` times in a fresh process and read its profile."""
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "feeds.npz", **{f"feed{i}": value for i, value in enumerate(feeds.values())})
        request = {
            "model": str(Path(path).resolve()),
            "names": list(feeds),
            "settings": asdict(settings),
            "runs": runs,
        }
        (Path(folder) / "request.json").write_text(json.dumps(request))
        result = subprocess.run(
            [sys.executable, "-m", "onnxgc.runtime.measure", folder], capture_output=True, text=True
        )
        if result.returncode:
            raise RuntimeError(f"measuring {path} failed:\n{result.stderr}")
        answer = json.loads((Path(folder) / "answer.json").read_text())
    profiles = tuple(
        RunProfile(tuple(run["order"]), *(run[key] for key in list(run)[1:])) for run in answer["runs"]
    )
    return Measurement(profiles, tuple(answer["wall_seconds"]), settings.threads)


def executed_order(model: onnx.ModelProto, feeds: Mapping[str, Array], settings: SessionSettings) -> RunProfile:
    """Profile of one run in this process; for small models, where only the order matters."""
    with tempfile.TemporaryDirectory() as folder:
        session = make_session(model, settings=settings, profile_prefix=str(Path(folder) / "profile"))
        session.run(None, dict(feeds))
        return read_profile(session.end_profiling())[0]


def _answer(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    chosen = request["settings"]
    settings = SessionSettings(chosen["file_order"], chosen["threads"], tuple(chosen["providers"]))
    with np.load(folder / "feeds.npz") as stored:
        feeds = {name: stored[f"feed{index}"] for index, name in enumerate(request["names"])}
    session = make_session(request["model"], settings=settings, profile_prefix=str(folder / "profile"))
    seconds = []
    for _ in range(request["runs"]):
        started = time.perf_counter()
        outputs = session.run(None, feeds)
        seconds.append(time.perf_counter() - started)
        del outputs  # The next run must not share the arena with this one's results.
    runs = read_profile(session.end_profiling())
    answer = {"runs": [asdict(run) for run in runs], "wall_seconds": seconds}
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
