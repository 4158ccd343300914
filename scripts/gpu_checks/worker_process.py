"""Calls of the worker processes that use the card, and their arrays in files."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from onnxgc.model.core.ir import Array
from scripts.gpu_checks.settings import ROOT, CheckError, Json

_MAX_REASON_CHARACTERS = 800
# Modules with a function `work_<name>`; each process imports one of them.
_MODULE_OF = {
    "load": "runtime_work",
    "exchange": "runtime_work",
    "prepare": "preparation",
    "run": "graph_runs",
    "fixed": "graph_runs",
    "kernels": "graph_runs",
    "reductions": "races",
    "weights": "races",
    "torch": "torch_runs",
    "optimizer": "optimizer_work",
    "rules": "rules",
}


def work(name: str, folder: Path) -> None:
    """Answers the request in `folder`, in a worker process."""
    module = importlib.import_module(f"scripts.gpu_checks.{_MODULE_OF[name]}")
    request = json.loads((folder / "request.json").read_text())
    answer: Json = getattr(module, f"work_{name}")(request, folder)
    (folder / "answer.part").write_text(json.dumps(answer))
    os.replace(folder / "answer.part", folder / "answer.json")


def answer_of_worker(name: str, request: Json, folder: Path, timeout: float) -> Json:
    """The answer of a worker, even if it crashed afterwards.

    Raises:
        CheckError: the worker gave no answer within `timeout` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "request.json").write_text(json.dumps(request))
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--worker", name, str(folder)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=max(timeout, 1.0))
    except subprocess.TimeoutExpired:
        raise CheckError(f"'{name}' took longer than {timeout:.0f} s and was stopped") from None
    if not answer.exists():
        raise CheckError(f"'{name}' ended with status {result.returncode}: {_reason(result.stderr)}")
    found: Json = json.loads(answer.read_text())
    return found if result.returncode == 0 else {**found, "exit_status": result.returncode}


def save_arrays(path: Path, values: Iterable[Array]) -> None:
    np.savez(path, *values)


def load_arrays(path: Path, names: Sequence[str]) -> dict[str, Array]:
    with np.load(path) as stored:
        return {name: stored[f"arr_{index}"] for index, name in enumerate(names)}


def _reason(stderr: str) -> str:
    """The lines of an exception without its traceback."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stderr)
    plain = plain.replace(f"{CheckError.__module__}.{CheckError.__name__}: ", "")
    lines = [line.strip() for line in plain.splitlines() if re.match(r"\S", line)]
    reason = " | ".join(line for line in lines if not line.startswith("Traceback"))
    return reason[-_MAX_REASON_CHARACTERS:] or "no message"
