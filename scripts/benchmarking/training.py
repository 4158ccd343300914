"""Training on ONNX Runtime: memory under a budget, measured and predicted time, and learning curves."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxgc.api import bench, optimize, verify
from onnxgc.report.text.units import shape_text
from onnxgc.training import Event, Trainer, cosine
from scripts.benchmarking.records import MODELS, Progress, Record
from scripts.benchmarking.tables import machine_of, markdown_table, megabytes

TRANSFORMER = "bert"
BUDGET = "70%"
HEADINGS = ("network, batch", "baseline, s", "planned, s", "extra time, %", "predicted, %")


@dataclass(frozen=True, slots=True)
class Options:
    """`rounds` is the number of timed steps; `time_limit` is in seconds for each search."""

    rounds: int = 7
    threads: int = 1
    small: bool = False
    time_limit: float = 20.0


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """The figures of all three parts."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            "rounds": options.rounds,
            "times": [_resnet50(options, Path(folder), progress), _transformer(options, Path(folder), progress)],
            "memory": _memory(options, Path(folder), progress),
            "digits": _digits(options, progress),
        }


def failures(figures: Mapping[str, Any]) -> list[str]:
    memory, learnt = figures["memory"], figures["digits"]
    found = {
        "the measured peak exceeds the budget": max(memory["measured_bytes"]) > memory["budget_bytes"],
        "`verify` of the planned file fails": not memory["holds"],
        "losses differ from the baseline's": learnt["equal_losses"] != learnt["updates"],
    }
    return [text for text, fails in found.items() if fails]


def results_section(record: Record) -> str:
    figures = record["figures"]
    memory, learnt = figures["memory"], figures["digits"]
    first, last = (f"{megabytes(memory['measured_bytes'][place], 1)} MB" for place in (0, -1))
    times = (
        "**Training.** Time of a step of the planned file and of the baseline, interleaved (best of "
        f"{figures['rounds']}; the extra time is the median over the rounds). Extra time is predicted from "
        "measured durations of the forward operators:"
    )
    peaks = (
        f"{memory['network']}, {memory['input']}, with AdamW within {megabytes(memory['budget_bytes'])} MB "
        f"({BUDGET} of {megabytes(memory['regular_bytes'])} MB), {megabytes(memory['state_bytes'])} MB of it "
        f"for the optimizer's state: simulated peak {megabytes(memory['simulated_bytes'], 1)} MB, measured "
        f"peak {first} in the first step and {last} in the third."
    )
    learning = (
        "scikit-learn's digits, a small convolutional network with BatchNormalization and Dropout, "
        f"{learnt['epochs']} epochs of AdamW: accuracy {learnt['accuracy']:.1%} on "
        f"{learnt['test_samples']} test images; {learnt['equal_losses']} of {learnt['updates']} losses are "
        f"bit-identical to the baseline's. {machine_of(record)}."
    )
    rows = [
        [
            f"{row['model']}, {row['batch']}",
            f"{row['regular_seconds']:.2f}",
            f"{row['planned_seconds']:.2f}",
            f"{100 * row['extra_time_ratio']:.1f}",
            f"{100 * row['predicted_extra_time_ratio']:.1f}",
        ]
        for row in figures["times"]
    ]
    return "\n\n".join((times, markdown_table(HEADINGS, rows), peaks, learning))


def _resnet50(options: Options, folder: Path, progress: Progress) -> dict[str, Any]:
    shape = (2, 3, 64, 64) if options.small else (16, 3, 224, 224)
    return _timed(MODELS / "resnet50.onnx", "resnet50", {"x": shape}, options, folder, progress)


def _transformer(options: Options, folder: Path, progress: Progress) -> dict[str, Any]:
    from scripts.exports.torch_export import export_model

    progress(f"exporting {TRANSFORMER}")
    path = folder / f"{TRANSFORMER}.onnx"
    export_model(TRANSFORMER, path, options.small)
    return _timed(path, TRANSFORMER, {}, options, folder, progress)


def _timed(
    path: Path, name: str, shapes: Mapping[str, tuple[int, ...]], options: Options, folder: Path, progress: Progress
) -> dict[str, Any]:
    progress(f"{name}: times")
    found = bench(
        path,
        input_shapes=dict(shapes),
        calibrate=folder / f"{name}-times.json",
        provider="cpu",
        threads=options.threads,
        runs=options.rounds,
        check=False,
        progress=progress,
    ).as_json()
    return {
        "model": name,
        "batch": found["batch"],
        **{f"{kind}_seconds": found[kind]["best_seconds"] for kind in ("regular", "planned")},
        "extra_time_ratio": found["extra_time_ratio"],
        "predicted_extra_time_ratio": found["predicted_extra_time_ratio"],
    }


def _memory(options: Options, folder: Path, progress: Progress) -> dict[str, Any]:
    """Budget, simulated and measured peaks of ResNet-18 with AdamW."""
    progress("resnet18: memory")
    model, training = MODELS / "resnet18.onnx", folder / "training.onnx"
    shape = (2, 3, 64, 64) if options.small else (8, 3, 224, 224)
    report = optimize(
        model,
        training,
        optimizer="adamw",
        budget="95%" if options.small else BUDGET,
        input_shapes={"x": shape},
        time_limit=options.time_limit,
        check=False,
        progress=progress,
    ).report
    found = verify(model, training, threads=options.threads, runs=3)
    state = report["optimizer"]["state_bytes"]
    return {
        "network": "resnet18",
        "input": shape_text(shape),
        "state_bytes": state,
        "budget_bytes": report["budget"]["bytes"],
        "regular_bytes": report["regular"]["simulated_peak_bytes"],
        "simulated_bytes": report["planned"]["simulated_peak_bytes"],
        "measured_bytes": [run.requested_peak_bytes + state for run in found.planned.runs],
        "holds": found.holds,
    }


def _digits(options: Options, progress: Progress) -> dict[str, Any]:
    """Losses and accuracy on scikit-learn's digits, planned and in the baseline."""
    from tests.training.networks import digits, digits_network

    train, test = digits()
    epochs, batch = 2 if options.small else 10, 64
    curves: list[list[float]] = []
    accuracies: list[float] = []
    for solver in ("peak", "store-all"):
        progress(f"digits: {solver}")
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
        "accuracy": accuracies[0],
        "test_samples": len(test["labels"]),
    }
