"""One group of the GPU check: its options, clock, record and earlier measurements."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from onnxgc import __version__
from scripts.benchmarking.records import installed_versions, rounded
from scripts.gpu_checks.graph_runs import Measured
from scripts.gpu_checks.settings import (
    MAKE_SESSION,
    MIN_ROW_SECONDS,
    SCHEMA_VERSION,
    CheckError,
    Json,
    Options,
    Setting,
    error_line,
)
from scripts.gpu_checks.training_files import Recipe, TrainingFiles
from scripts.gpu_checks.worker_process import answer_of_worker

_DISTRIBUTIONS = (
    "numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "torch", "torchvision", "transformers",
    "nvidia-cudnn-cu13",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a step: whether its law holds, one line, and figures."""

    holds: bool
    line: str
    details: Json


class Check:
    """One run of a group. The record of the card keeps the results of other groups.

    Workers may write to `folder`.
    """

    def __init__(self, options: Options, group: str, folder: Path) -> None:
        self.options, self.folder = options, folder
        self._started = time.perf_counter()
        self._step_end = self._end = self._started + options.limit_seconds
        self._files: dict[str, TrainingFiles | CheckError] = {}
        self._measured: dict[tuple[str, str, str], Measured | CheckError] = {}
        card = None if options.smoke else _card()
        name = "cpu-smoke" if options.smoke else card[0] if card else "unknown-card"
        self._path = options.out / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
        groups = _known_groups(self._path)
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

    # -- clock and record --------------------------------------------------------------------------

    def open_step(self, share: float) -> None:
        """Gives the next step a share of the remaining time."""
        now = time.perf_counter()
        self._step_end = now + max(self._end - now, 0.0) * share

    def seconds_left(self) -> float:
        """Seconds for the current step."""
        return self._step_end - time.perf_counter()

    def write(self) -> None:
        """Replaces the record as a whole: a run may be interrupted at any time."""
        self._entry["seconds"] = time.perf_counter() - self._started
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps(rounded(self.record), separators=(",", ":")) + "\n")
        os.replace(unfinished, self._path)

    def begin(self, name: str, details: Json) -> None:
        """Records a step whose details grow while it runs."""
        self.steps[name] = {"status": "unfinished", **details}

    def add_row(
        self, rows: Json, name: str, measure: Callable[[], Json], line: Callable[[Json], str]
    ) -> None:
        """Measures a row of figures, prints its line and records it.

        Its `status` is `not reached` without time for it, `error` if the measurement failed.
        """
        if self.seconds_left() < MIN_ROW_SECONDS:
            row: Json = {"status": "not reached"}
        else:
            try:
                row = measure()
                row.setdefault("status", "held")
            except Exception as error:
                row = {"status": "error", "error": error_line(error)}
        rows[name] = row
        failed = row["status"] in ("error", "not reached")
        text = f"{row['status']} {row.get('error', '')}".rstrip() if failed else line(row)
        print(f"    {name}: {text}", flush=True)
        self.write()

    # -- workers -----------------------------------------------------------------------------------

    def worker(self, name: str, request: Json, folder: str = "") -> Json:
        """The answer of a worker within the time of a row, with the session's settings in its request.

        Raises:
            CheckError: the process failed or took too long.
        """
        limit = min(self.options.row_limit_seconds, self.seconds_left())
        common = {
            "provider": self.options.provider,
            "threads": self.options.threads,
            "smoke": self.options.smoke,
        }
        where = re.sub(r"[^\w-]+", "-", folder or name)
        return answer_of_worker(name, {**common, **request}, self.folder / where, limit)

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
        found = self._files[recipe.name]
        if isinstance(found, CheckError):
            raise found
        return found

    def _prepared_or_made(self, recipe: Recipe) -> TrainingFiles:
        folder = self.options.prepared
        if folder is None or not recipe.is_prepared(folder):
            folder = self.folder / "files"
            request = {"recipe": asdict(recipe), "folder": str(folder)}
            self.worker("prepare", request, f"prepare-{recipe.name}")
        return TrainingFiles.load(folder, recipe.name)

    def run_request(self, recipe: Recipe, graph: str) -> Json:
        """The part of a request that names a training file."""
        files = self.files(recipe)
        return {"files": str(files.folder), "name": files.name, "graph": graph}

    def measured(self, recipe: Recipe, graph: str, setting: Setting = MAKE_SESSION) -> Measured:
        """The run of a training file; later steps do not repeat a failed run.

        Raises:
            CheckError: the process failed or took too long.
        """
        key = (recipe.name, graph, setting.name)
        if key not in self._measured:
            folder = "-".join(key)
            request = self.run_request(recipe, graph)
            request |= {"file_order": setting.file_order, "cuda_options": dict(setting.cuda_options)}
            try:
                answer = self.worker("run", request, folder)
                outputs = self.folder / re.sub(r"[^\w-]+", "-", folder) / "outputs.npz"
                self._measured[key] = Measured.of_answer(
                    self.files(recipe), graph, answer, outputs, self.options.provider
                )
            except CheckError as error:
                self._measured[key] = error
        found = self._measured[key]
        if isinstance(found, CheckError):
            raise found
        return found

    def forget(self, recipe: Recipe) -> None:
        """Removes the outputs of a network that no later step reads."""
        for path in self.folder.glob(f"{recipe.name}-*"):
            shutil.rmtree(path, ignore_errors=True)


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
