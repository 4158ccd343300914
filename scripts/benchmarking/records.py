"""Recorded figures: one JSON file a benchmark, with all that is needed to read its figures."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
BENCHMARKS = ROOT / "benchmarks"
MODELS = ROOT / "models"
_DISTRIBUTIONS = ("onnx", "onnxruntime", "onnxruntime-gpu", "numpy", "torch")


def environment(threads: int | None = None) -> dict[str, Any]:
    """Versions, machine and its load; `threads` only where something ran."""
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else [],
        "system": platform.system(),
        "versions": {"python": platform.python_version(), "onnxgc": _version("onnxgc"), **_versions()},
    }
    if threads is not None:
        found["threads"] = threads
    return found


def write_record(
    name: str,
    figures: Any,
    *,
    threads: int | None = None,
    folder: Path = BENCHMARKS,
) -> Path:
    """Put the figures into `<folder>/<name>.json`, on one line; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    record = {"benchmark": name, "environment": environment(threads), "figures": figures}
    path.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
    return path


def read_record(name: str, folder: Path = BENCHMARKS) -> dict[str, Any] | None:
    """A recorded benchmark, or None where it has not been taken yet."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


class Progress:
    """Lines on stderr that say what is being done, with the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def __call__(self, stage: str) -> None:
        print(f"[{time.perf_counter() - self._started:6.1f} s] {stage}", file=sys.stderr, flush=True)


def _versions() -> dict[str, str]:
    versions = {name: _version(name) for name in _DISTRIBUTIONS}
    return {name: version for name, version in versions.items() if version}


def _version(distribution: str) -> str:
    if distribution == "onnxgc":
        from onnxgc import __version__

        return __version__
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
