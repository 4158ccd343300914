"""Recorded figures: one JSON file a benchmark, with the machine and versions that they belong to."""

import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from onnxgc import __version__
from onnxgc.emission.atomic_files import write_text
from onnxgc.runtime.calibrate import device_name

ROOT = Path(__file__).resolve().parent.parent.parent
BENCHMARKS = ROOT / "benchmarks"
MODELS = ROOT / "models"
Record = Mapping[str, Any]
"""The content of a record: `benchmark`, `environment` and `figures`. Records in gpu/ have keys of their
check."""
_DISTRIBUTIONS = ("onnx", "onnxruntime", "onnxruntime-gpu", "numpy", "torch")


class Progress:
    """Prints stages to stderr, with the seconds since the start, and writes the record of a benchmark."""

    def __init__(self, benchmark: str = "", folder: Path = BENCHMARKS, threads: int | None = None) -> None:
        """`threads` belongs to figures of runs."""
        self._started = time.perf_counter()
        self._benchmark, self._folder, self._threads = benchmark, folder, threads

    def __call__(self, stage: str) -> None:
        print(f"[{time.perf_counter() - self._started:6.1f} s] {stage}", file=sys.stderr, flush=True)

    def record(self, figures: Any) -> Record:
        """Writes figures to `<folder>/<benchmark>.json`; an interruption does not lose an earlier record."""
        record = {"benchmark": self._benchmark, "environment": environment(self._threads), "figures": figures}
        self._folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(packed(rounded(record)), separators=(",", ":"))
        write_text(text + "\n", self._folder / f"{self._benchmark}.json")
        return record

    def recorded(self) -> Any:
        """The figures of the record so far; none if there is no record."""
        return next((record["figures"] for record in read_records(self._benchmark, self._folder)), None)


def rounded(value: Any) -> Any:
    """The value with six significant digits in every float: a record holds no noise."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return list(map(rounded, value))
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_records(name: str, folder: Path = BENCHMARKS) -> list[Record]:
    """The record of a benchmark, or all records of the folder `name`; none if it has not run yet."""
    paths = [folder / f"{name}.json", *sorted((folder / name).glob("*.json"))]
    return [unpacked(json.loads(path.read_text(encoding="utf-8"))) for path in paths if path.exists()]


def packed(value: Any) -> Any:
    """The value with the keys of equal dictionaries stated once: `{"keys": [...], "rows": [[...], ...]}`.

    Those of a list are rows, those of a dictionary have their own key before their values.

    >>> packed([{"a": 1, "b": 2}, {"a": 3, "b": 4}, {"a": 5, "b": 6}])
    {'keys': ['a', 'b'], 'rows': [[1, 2], [3, 4], [5, 6]]}
    """
    if isinstance(value, dict):
        entries = {key: packed(entry) for key, entry in value.items()}
        if keys := _shared_keys(value.values()):
            rows = [[name, *map(packed, entry.values())] for name, entry in value.items()]
            return {"keys": [None, *keys], "rows": rows}
        return entries
    if isinstance(value, list):
        if keys := _shared_keys(value):
            return {"keys": keys, "rows": [list(map(packed, entry.values())) for entry in value]}
        return list(map(packed, value))
    return value


def _shared_keys(entries: Iterable[Any]) -> list[str]:
    """The keys of at least three dictionaries, or an empty list if they are not the same."""
    rows = list(entries)
    is_table = len(rows) > 2 and all(isinstance(row, dict) and list(row) == list(rows[0]) for row in rows)
    return list(rows[0]) if is_table else []


def unpacked(value: Any) -> Any:
    """The value that `packed` was given."""
    if isinstance(value, list):
        return list(map(unpacked, value))
    if not isinstance(value, dict):
        return value
    if list(value) != ["keys", "rows"]:
        return {key: unpacked(entry) for key, entry in value.items()}
    keys, rows = value["keys"], [list(map(unpacked, row)) for row in value["rows"]]
    if keys[0] is None:
        return {row[0]: dict(zip(keys[1:], row[1:], strict=True)) for row in rows}
    return [dict(zip(keys, row, strict=True)) for row in rows]


def environment(threads: int | None = None) -> dict[str, Any]:
    """Versions, machine and its load."""
    described: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "cpu": device_name("CPUExecutionProvider"),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else [],
        "system": platform.system(),
        "versions": {"python": platform.python_version(), "onnxgc": __version__, **installed_versions(_DISTRIBUTIONS)},
    }
    if threads is not None:
        described["threads"] = threads
    return described


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    versions = {}
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
