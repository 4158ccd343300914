"""One run of the GPU check: its options, clock and record."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from onnxgc import __version__
from scripts.gpu_checks.graph_runs import Measured, Prepared, measure_graph, prepare
from scripts.gpu_checks.settings import (
    LAST_STEPS_SECONDS,
    MAKE_SESSION,
    MIN_STEP_SECONDS,
    SCHEMA_VERSION,
    CheckError,
    Json,
    Network,
    Options,
    Setting,
    error_line,
)
from scripts.gpu_checks.worker_process import answer_of_worker

_DISTRIBUTIONS = ("numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "torch", "nvidia-cudnn-cu13")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a step: whether its law holds, one line, and figures."""

    holds: bool
    line: str
    details: Json


class Check:
    """One run of the script, with its record and earlier measurements. Workers may write to `folder`."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.options, self.folder = options, folder
        self._started = time.perf_counter()
        self._prepared: dict[str, Prepared] = {}
        self._measured: dict[tuple[str, str, str], Measured | CheckError] = {}
        self.record: Json = {
            "schema": SCHEMA_VERSION,
            "smoke": options.smoke,
            "provider": options.provider,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **machine(options.smoke),
            "threads": options.threads,
            "steps": {},
        }
        card = "cpu-smoke" if options.smoke else self.record["card"] or "unknown-card"
        self._path = options.out / f"{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}.json"

    def seconds_left(self) -> float:
        return self.options.limit_seconds - (time.perf_counter() - self._started)

    def write(self) -> None:
        """Replaces the record as a whole: a run may be interrupted at any time."""
        self.record["seconds"] = time.perf_counter() - self._started
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.record, indent=1) + "\n")
        os.replace(unfinished, self._path)

    def begin(self, number: int, name: str, details: Json) -> None:
        """Records a step whose details grow while it runs."""
        self.record["steps"][str(number)] = {"name": name, "status": "unfinished", **details}

    def worker(self, work: str, request: Json, folder: Path, timeout: float | None = None) -> Json:
        """The answer of a worker; `timeout` is the remaining time if `None`."""
        return answer_of_worker(work, request, folder, self.seconds_left() if timeout is None else timeout)

    def worker_with_session(self, work: str) -> Json:
        request = {"provider": self.options.provider, "threads": self.options.threads}
        return self.worker(work, request, self.folder / work)

    def first_network(self) -> Network:
        return self.options.network(self.options.networks[0])

    def prepared(self, network: Network) -> Prepared:
        if network.name not in self._prepared:
            self._prepared[network.name] = prepare(
                network, self.folder / network.name, "cpu" if self.options.smoke else "cuda"
            )
        return self._prepared[network.name]

    def measured(
        self, network: Network, graph: str, setting: Setting = MAKE_SESSION, timeout: float | None = None
    ) -> Measured:
        """The run of a graph; later steps do not repeat a failed run.

        Raises:
            CheckError: the process failed or took longer than `timeout` (or the network's limit).
        """
        key = (network.name, graph, setting.name)
        prepared = self.prepared(network)
        if key not in self._measured:
            limit = min(self.options.network_limit_seconds, self.seconds_left())
            try:
                self._measured[key] = measure_graph(
                    prepared, graph, setting, self.options, limit if timeout is None else timeout
                )
            except CheckError as error:
                self._measured[key] = error
        found = self._measured[key]
        if isinstance(found, CheckError):
            raise found
        return found

    def guarded_row(self, measure: Callable[[], Json]) -> Json:
        """A row of figures; one with another `status` if the time is up or the measurement fails."""
        if self.seconds_left() < LAST_STEPS_SECONDS + MIN_STEP_SECONDS:
            return {"status": "not reached"}
        try:
            return measure()
        except Exception as error:
            return {"status": "error", "error": error_line(error)}

    def network_seconds(self) -> float:
        """Seconds for one network, so that later steps have enough time."""
        return min(self.options.network_limit_seconds, self.seconds_left() - LAST_STEPS_SECONDS)

    def forget(self, network: Network) -> None:
        """Removes the files of a finished network."""
        self._prepared.pop(network.name, None)
        shutil.rmtree(self.folder / network.name, ignore_errors=True)


def machine(smoke: bool) -> Json:
    """Card, driver and versions; a smoke run uses no card."""
    card = None if smoke else _card()
    return {
        "card": card[0] if card else None,
        "driver": card[1] if card else None,
        "card_memory": card[2] if card else None,
        "processor": platform.machine(),
        "cpu_count": os.cpu_count(),
        "versions": {"python": platform.python_version(), "onnxgc": __version__, **_versions()},
    }


def _card() -> list[str] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True)
    lines = result.stdout.splitlines()
    return [part.strip() for part in lines[0].split(",")] if result.returncode == 0 and lines else None


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = dict.fromkeys(_DISTRIBUTIONS)
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
