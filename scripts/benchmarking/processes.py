"""Benchmarks of one model in a separate process, which returns its memory to the system."""

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from scripts.benchmarking.records import ROOT, Progress

Options = TypeVar("Options")


def rows_of_processes(
    module: str, key: str, subjects: Iterable[str], options: Any, progress: Progress
) -> list[dict[str, Any]]:
    """One row a subject, named by `key`: the result of its process, or an error."""
    rows: list[dict[str, Any]] = []
    for subject in subjects:
        progress(subject)
        found = result_of_process(f"scripts.benchmarking.{module}", subject, options)
        rows += [{key: subject, **row} for row in (found if isinstance(found, list) else [found])]
    return rows


def failed_processes(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return [f"{row['model']}: {row['error']}" for row in rows if "error" in row]


def result_of_process(module: str, subject: str, options: Any) -> Any:
    """The result of `write_result` in `python -m module`; a dictionary with `error` if the process fails.

    `options` is a dataclass of values that JSON can represent.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        request = json.dumps(dataclasses.asdict(options))
        command = [sys.executable, "-m", module, subject, request, str(result)]
        status = subprocess.run(command, cwd=ROOT).returncode
        if status:
            return {"error": f"the process ended with status {status}"}
        return json.loads(result.read_text(encoding="utf-8"))


def write_result(compute: Callable[[str, Options], Any], kind: type[Options]) -> None:
    """Computes the result for the subject and options that `result_of_process` passed."""
    subject, request, result = sys.argv[1:]
    found = compute(subject, kind(**json.loads(request)))
    Path(result).write_text(json.dumps(found), encoding="utf-8")
