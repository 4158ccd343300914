"""Training on ONNX Runtime: memory under a budget, time against the prediction, and whether it learns."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxgc.api import bench, optimize, verify
from onnxgc.training import Event, Trainer, cosine
from scripts.benchmarking.records import ROOT, Progress, read_record
from scripts.benchmarking.tables import MEGABYTE, markdown_table, megabytes, where

TRANSFORMER = "bert"
BUDGET = "70%"
HEADINGS = ("network, batch", "storing everything, s", "planned, s", "extra time, %", "predicted, %")


@dataclass(frozen=True, slots=True)
class Options:
    """How many steps are timed, by how many threads, and whether networks are small, for a trial."""

    rounds: int = 7
    threads: int = 1
    small: bool = False
    time_limit: float = 20.0


def run_training(options: Options, tell: Progress) -> dict[str, Any]:
    """The figures of all three parts."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            "rounds": options.rounds,
            "times": [_resnet50(options, Path(folder), tell), _transformer(options, Path(folder), tell)],
            "memory": _memory(options, Path(folder), tell),
            "digits": _digits(options, tell),
        }


def _resnet50(options: Options, folder: Path, tell: Progress) -> dict[str, Any]:
    shape = (2, 3, 64, 64) if options.small else (16, 3, 224, 224)
    return _timed(ROOT / "models" / "resnet50.onnx", "resnet50", {"x": shape}, options, folder, tell)


def _transformer(options: Options, folder: Path, tell: Progress) -> dict[str, Any]:
    import torch

    from scripts.exports.torch_export import Export, export_module
    from scripts.exports.torch_models import TORCH_MODELS, Recipe

    tell(f"exporting {TRANSFORMER}")
    model = TORCH_MODELS[TRANSFORMER]
    torch.manual_seed(0)
    path = folder / f"{TRANSFORMER}.onnx"
    export_module(
        model.module(options.small), model.batch(options.small), path, Export(Recipe.DYNAMO, dynamic=False)
    )
    return _timed(path, TRANSFORMER, {}, options, folder, tell)


def _timed(
    path: Path,
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    options: Options,
    folder: Path,
    tell: Progress,
) -> dict[str, Any]:
    tell(f"{name}: times")
    found = bench(
        path,
        input_shapes=dict(shapes),
        calibrate=folder / f"{name}-times.json",
        provider="cpu",
        threads=options.threads,
        runs=options.rounds,
        check=False,
        progress=tell,
    ).as_json()
    return {**found, "model": name, "timing": "measured on this machine"}


def _memory(options: Options, folder: Path, tell: Progress) -> dict[str, Any]:
    """ResNet-18 with AdamW within a budget: what is promised and what the runtime's allocator has."""
    tell("resnet18: memory")
    model, training = ROOT / "models" / "resnet18.onnx", folder / "training.onnx"
    shape = (2, 3, 64, 64) if options.small else (8, 3, 224, 224)
    report = optimize(
        model,
        training,
        optimizer="adamw",
        budget="95%" if options.small else BUDGET,
        input_shapes={"x": shape},
        time_limit=options.time_limit,
        check=False,
        progress=tell,
    ).report
    found = verify(model, training, threads=options.threads, runs=3)
    state = report["optimizer"]["state_bytes"]
    return {
        "network": "resnet18",
        "input": "x".join(map(str, shape)),
        "optimizer": "adamw",
        "state_bytes": state,
        "budget_bytes": report["budget"]["bytes"],
        "regular_bytes": report["regular"]["simulated_peak_bytes"],
        "simulated_bytes": report["planned"]["simulated_peak_bytes"],
        "measured_bytes": [run.requested_peak_bytes + state for run in found.planned.runs],
        "measured_in_use_bytes": [run.in_use_peak_bytes + state for run in found.planned.runs],
        "holds": found.holds,
    }


def _digits(options: Options, tell: Progress) -> dict[str, Any]:
    """scikit-learn's digits by a small convolutional network, planned and storing everything."""
    from tests.training.networks import digits, digits_network

    train, test = digits()
    epochs, batch = 2 if options.small else 10, 64
    curves: list[list[float]] = []
    accuracies: list[float] = []
    for solver in ("peak", "store-all"):
        tell(f"digits: {solver}")
        trainer = Trainer(
            digits_network(),
            learning_rate=cosine(3e-3, epochs * -(-len(train["labels"]) // batch)),
            batch=batch,
            threads=options.threads,
            solver=solver,
            check=False,
        )
        losses: list[float] = []

        def note(event: Event, losses: list[float] = losses) -> None:
            if event.kind == "update":
                losses.append(event.loss)

        trainer.fit(train, epochs, callbacks=[note])
        curves.append(losses)
        accuracies.append(trainer.evaluate(test)["accuracy"])
    return {
        "epochs": epochs,
        "updates": len(curves[0]),
        "equal_losses": int(np.sum(np.array(curves[0]) == np.array(curves[1]))),
        "last_loss": curves[0][-1],
        "accuracies": accuracies,
        "test_samples": len(test["labels"]),
    }


def table_rows(figures: Mapping[str, Any]) -> list[list[str]]:
    """A row for each network that was timed."""
    return [
        [
            f"{row['model']}, {row['batch']}",
            f"{row['regular']['best_seconds']:.2f}",
            f"{row['planned']['best_seconds']:.2f}",
            f"{100 * row['extra_time_ratio']:.1f}",
            f"{100 * row['predicted_extra_time_ratio']:.1f}",
        ]
        for row in figures["times"]
    ]


def holds(figures: Mapping[str, Any]) -> bool:
    """Whether the budget was kept, and the planned run was the regular one."""
    memory, learnt = figures["memory"], figures["digits"]
    is_kept = max(memory["measured_bytes"]) <= memory["budget_bytes"]
    return bool(is_kept and memory["holds"] and learnt["equal_losses"] == learnt["updates"])


def block(folder: Path) -> str:
    """The part of the results' page."""
    record = read_record("training", folder)
    if record is None:
        return ""
    figures = record["figures"]
    memory, learnt = figures["memory"], figures["digits"]
    first, last = (f"{memory['measured_bytes'][place] / MEGABYTE:.1f} MB" for place in (0, -1))
    times = (
        "**Training.** Time of a step of the planned file beside that of the one that stores everything, in "
        f"turns (best of {figures['rounds']}; the extra time is the median over the turns), and what was "
        "predicted by measured times of the forward operators:"
    )
    kept = (
        f"{memory['network']}, {memory['input']}, with AdamW within {megabytes(memory['budget_bytes'])} MB "
        f"({BUDGET} of {megabytes(memory['regular_bytes'])} MB), of which the optimizer's state takes "
        f"{megabytes(memory['state_bytes'])} MB: simulated {memory['simulated_bytes'] / MEGABYTE:.1f} MB, "
        f"measured {first} in the first step and {last} in the third."
    )
    learning = (
        "scikit-learn's digits by a small convolutional network with BatchNormalization and Dropout, "
        f"{learnt['epochs']} epochs of AdamW: {learnt['accuracies'][0]:.1%} of {learnt['test_samples']} test "
        f"images are right, and {learnt['equal_losses']} of {learnt['updates']} losses of the planned run "
        f"have the bits of the one that stores everything. {where(record)}."
    )
    return "\n\n".join((times, markdown_table(HEADINGS, table_rows(figures)), kept, learning))
