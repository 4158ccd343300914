"""Seconds of one step, forward plus backward: ONNX Runtime against torch eager, one thread, one process.

Each model is exported, planned and run in a process of its own. Contenders take turns, so that a
machine that slows down slows all of them; the ratio is that of the best times.

    python -m scripts.benchmarking.step NAME RESULT REQUEST    one model in this process
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onnxgc.api import optimize
from onnxgc.runtime.ort import SessionSettings, make_session
from scripts.benchmarking.records import ROOT, Progress

# What a step may take, as a multiple of torch eager's.
GOALS = {
    "resnet50": 1.2,
    "vit_b_16": 1.2,
    "bert": 1.3,
    "gpt2": 1.3,
    "mobilenet_v3_large": 2.0,
}
STORE_ALL, PLANNED, EAGER = "store-all", "planned", "torch eager"


@dataclass(frozen=True, slots=True)
class Options:
    """Which models, in which size, and how many steps of each contender are timed."""

    only: tuple[str, ...] = ()
    small: bool = False
    rounds: int = 5
    threads: int = 1


def run_step(options: Options, tell: Progress) -> dict[str, Any]:
    """One row a model: the best time of each contender, and the ratios to torch eager."""
    rows = []
    for name in options.only or tuple(GOALS):
        tell(name)
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "row.json"
            command = [sys.executable, "-m", "scripts.benchmarking.step", name, str(result)]
            status = subprocess.run([*command, json.dumps(asdict(options))], cwd=ROOT).returncode
            if status:
                rows.append({"model": name, "error": f"the process ended with status {status}"})
            else:
                rows.append(json.loads(result.read_text(encoding="utf-8")))
    return {"rounds": options.rounds, "rows": rows}


def time_model(name: str, options: Options, tell: Callable[[str], None]) -> dict[str, Any]:
    """The row of one model, in this process."""
    import torch

    from scripts.exports.torch_export import Export, export_module
    from scripts.exports.torch_models import TORCH_MODELS, Recipe

    torch.set_num_threads(options.threads)
    model = TORCH_MODELS[name]
    module, batch = model.module(options.small), model.batch(options.small)
    with torch.no_grad():
        target = model.target(module(*batch.values()))

    def eager() -> None:
        module.zero_grad()
        model.loss_of(module(*batch.values()), target).backward()  # type: ignore[no-untyped-call]

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model.onnx"
        export_module(module, batch, source, Export(Recipe.DYNAMO, dynamic=False))
        steps: dict[str, Callable[[], None]] = {EAGER: eager}
        peaks = {}
        for contender, solver in ((STORE_ALL, "store-all"), (PLANNED, None)):
            tell(f"{name}: {contender}")
            training = Path(folder) / f"{contender}.onnx"
            result = optimize(source, training, solver=solver, loss=model.loss, check=False)
            peaks[contender] = result.planned.profile.peak_bytes
            session = make_session(training, settings=SessionSettings(threads=options.threads))
            feeds = {key: value.numpy() for key, value in batch.items()}
            (label,) = result.planned.model.targets
            feeds[label] = target.numpy()
            given = {
                key: value for key, value in feeds.items() if key in {i.name for i in session.get_inputs()}
            }

            def run(session: Any = session, given: Any = given) -> None:
                session.run(None, given)

            steps[contender] = run
        seconds = _in_turns(steps, options.rounds, tell)
    best = {contender: min(times) for contender, times in seconds.items()}
    return {
        "model": name,
        "inputs": {key: list(value.shape) for key, value in batch.items()},
        "seconds": seconds,
        "store_all_of_torch": best[STORE_ALL] / best[EAGER],
        "planned_of_torch": best[PLANNED] / best[EAGER],
        "goal": GOALS.get(name),
        "peak_bytes": peaks,
    }


def _in_turns(
    steps: dict[str, Callable[[], None]], rounds: int, tell: Callable[[str], None]
) -> dict[str, list[float]]:
    """Seconds of each contender in each round, after a first one that is not counted."""
    seconds: dict[str, list[float]] = {contender: [] for contender in steps}
    for number in range(rounds + 1):
        tell(f"round {number} of {rounds}")
        for contender, step in steps.items():
            started = time.perf_counter()
            step()
            if number:
                seconds[contender].append(time.perf_counter() - started)
    return seconds


def _main(name: str, result: str, request: str) -> None:
    given = json.loads(request)
    options = Options(tuple(given["only"]), given["small"], given["rounds"], given["threads"])
    row = time_model(name, options, Progress())
    Path(result).write_text(json.dumps(row), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
