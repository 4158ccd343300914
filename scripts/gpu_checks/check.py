"""One group of the GPU check: its clock, its record and its worker processes."""

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from onnxgc import __version__
from scripts.benchmarking.records import installed_versions, rounded
from scripts.gpu_checks.graph_runs import Measured
from scripts.gpu_checks.settings import (
    MAX_ROW_SECONDS,
    MIN_ROW_SECONDS,
    SCHEMA_VERSION,
    CheckError,
    Json,
    Options,
    error_line,
)
from scripts.gpu_checks.training_files import Recipe, TrainingFiles
from scripts.gpu_checks.worker_process import answer_of_worker

_DISTRIBUTIONS = (
    "numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "torch", "torchvision", "transformers",
    "nvidia-cudnn-cu13",
)  # fmt: skip
_GOOD = ("held", "not available")
_MAX_LINE_CHARACTERS = 500
START_SECONDS = 20.0
"""For the start of a process that measures until a given time."""
Found = TypeVar("Found", TrainingFiles, Measured)
Jobs = Mapping[str, Callable[[], Json]]
"""Functions that measure the rows of a step. `status` of a row is `held` if it is not in the row."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step with its share of the group's time, relative to the other steps'.

    Time that a step leaves goes to the later ones.
    """

    name: str
    jobs: "Callable[[Check], Jobs]"
    share: float


class Check:
    """One run of a group. The record of the card keeps the results of other groups.

    Workers may write to `folder`.
    """

    def __init__(self, options: Options, group: str, folder: Path) -> None:
        self.options, self._group, self.folder = options, group, folder
        self._started = time.perf_counter()
        self._step_end = self._started + options.limit_seconds
        self._files: dict[str, TrainingFiles | CheckError] = {}
        self._measured: dict[tuple[str, str], Measured | CheckError] = {}
        card = None if options.smoke else _card()
        name = "cpu-smoke" if options.smoke else card[0] if card else "unknown-card"
        self.path = options.out / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
        groups = _known_groups(self.path)
        self.steps: Json = groups.get(group, {}).get("steps", {}) if options.only else {}
        self._entry: Json = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "driver": card[1] if card else None,
            "versions": {
                "python": platform.python_version(),
                "onnxgc": __version__,
                **dict.fromkeys(_DISTRIBUTIONS),
                **installed_versions(_DISTRIBUTIONS),
            },
            "steps": self.steps,
        }
        self.record: Json = {
            "schema": SCHEMA_VERSION,
            "smoke": options.smoke,
            "provider": options.provider,
            "card": card[0] if card else None,
            "card_memory": card[2] if card else None,
            "processor": platform.machine(),
            "cpu_count": os.cpu_count(),
            "threads": options.threads,
            "groups": groups | {group: self._entry},
        }

    def run(self, steps: tuple[Step, ...]) -> bool:
        """Runs the steps, or those that the user chose; `False` if one failed."""
        only, passed = self.options.only, True
        chosen = [step for step in steps if not only or step.name in only]
        for index, step in enumerate(chosen):
            now = time.perf_counter()
            left = max(self._started + self.options.limit_seconds - now, 0.0)
            self._step_end = now + left * step.share / sum(later.share for later in chosen[index:])
            passed = self._run_step(step) and passed
        return passed

    def _run_step(self, step: Step) -> bool:
        started = time.perf_counter()
        rows: dict[str, Json] = {}
        entry: Json = {"status": "unfinished", "rows": rows}
        self.steps[step.name] = entry
        try:
            for name, measure in step.jobs(self).items():
                rows[name] = self._row(measure)
                print(f"    {name}: {row_line(rows[name])}"[:_MAX_LINE_CHARACTERS], flush=True)
                self.write()
        except CheckError as error:
            rows[step.name] = {"status": "error", "error": error_line(error)}
            print(f"    {error}")
        reached = [row["status"] for row in rows.values() if row["status"] != "not reached"]
        is_good = all(status in _GOOD for status in reached)
        entry["status"] = ("held" if is_good else "not held") if reached else "not reached"
        entry["seconds"] = time.perf_counter() - started
        good = sum(status in _GOOD for status in reached)
        took = f"{entry['seconds']:.1f} s"
        print(f"{step.name}: {entry['status']}, {good} of {len(rows)} rows [{took}]", flush=True)
        self.write()
        return is_good

    def _row(self, measure: Callable[[], Json]) -> Json:
        if self._seconds_left() < MIN_ROW_SECONDS:
            return {"status": "not reached"}
        try:
            return {"status": "held", **measure()}
        except Exception as error:
            return {"status": "error", "error": error_line(error)}

    def _seconds_left(self) -> float:
        return self._step_end - time.perf_counter()

    def write(self) -> None:
        """Replaces the record as a whole: a run may be interrupted at any time."""
        self._entry["seconds"] = time.perf_counter() - self._started
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(rounded(self.record), separators=(",", ":")) + "\n")
        os.replace(unfinished, self.path)

    # -- workers -----------------------------------------------------------------------------------

    def worker(self, name: str, request: Json, folder: str = "", share: float = 1.0) -> Json:
        """The answer of a worker within a share of the step's time.

        Raises:
            CheckError: the process failed or took too long.
        """
        limit = min(MAX_ROW_SECONDS, self._seconds_left() * share)
        common: Json = {
            "provider": self.options.provider,
            "threads": self.options.threads,
            "smoke": self.options.smoke,
            "seconds": limit - START_SECONDS,
        }
        return answer_of_worker(name, common | request, self.worker_folder(folder or name), limit)

    def worker_folder(self, name: str) -> Path:
        return self.folder / re.sub(r"[^\w-]+", "-", name)

    def files(self, recipe: Recipe) -> TrainingFiles:
        """The training files of a recipe, prepared or made now.

        Raises:
            CheckError: they cannot be made in time.
        """
        if recipe.name not in self._files:
            try:
                self._files[recipe.name] = self._prepared_or_made(recipe)
            except CheckError as error:
                self._files[recipe.name] = error
        return _or_raise(self._files[recipe.name])

    def _prepared_or_made(self, recipe: Recipe) -> TrainingFiles:
        folder = self.options.prepared
        if folder is None or not recipe.is_prepared(folder):
            folder = self.folder / "files"
            request = {"group": self._group, "name": recipe.name, "folder": str(folder)}
            self.worker("prepare", request, f"prepare-{recipe.name}")
        return TrainingFiles.load(folder, recipe.name)

    def run_request(self, recipe: Recipe, graph: str) -> Json:
        """The part of a request that names a training file."""
        files = self.files(recipe)
        return {"files": str(files.folder), "name": files.name, "graph": graph}

    def measured(self, recipe: Recipe, graph: str) -> Measured:
        """The run of a training file; later steps do not repeat it, also if it failed.

        Raises:
            CheckError: the process failed or took too long.
        """
        key = (recipe.name, graph)
        if key not in self._measured:
            try:
                files, folder = self.files(recipe), "-".join(key)
                answer = self.worker("run", self.run_request(recipe, graph), folder)
                reports = {name: answer.pop(name) for name in ("fallback", "order", "names")}
                path = self.worker_folder(folder) / "outputs.npz"
                self._measured[key] = Measured(answer, **reports, loss=files.loss, path=path)
            except CheckError as error:
                self._measured[key] = error
        return _or_raise(self._measured[key])


def row_line(row: Json) -> str:
    """All single figures of a row."""
    return ", ".join(
        f"{name} ({row_line(value)})" if isinstance(value, dict) else f"{name} {value}"
        for name, value in rounded(row).items()
        if not isinstance(value, list)
    )


def _or_raise(found: Found | CheckError) -> Found:
    if isinstance(found, CheckError):
        raise found
    return found


def _known_groups(path: Path) -> Json:
    """Groups in the record of the card, none of another schema."""
    known: Json = json.loads(path.read_text()) if path.exists() else {}
    return known["groups"] if known.get("schema") == SCHEMA_VERSION else {}


def _card() -> list[str] | None:
    """Name, driver and memory of the card, or None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True)
    lines = result.stdout.splitlines()
    return [part.strip() for part in lines[0].split(",")] if result.returncode == 0 and lines else None
