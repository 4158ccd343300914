"""Time of a step of exported models, as a multiple of torch eager's.

Each model is exported, planned and run in a separate process, on one thread by default. Steps of ONNX Runtime
and of torch are interleaved; ratios are of the best times.

    python -m scripts.benchmarking.step NAME REQUEST RESULT    one model in this process
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxgc.api import optimize
from onnxgc.report.text.units import shape_text
from onnxgc.runtime.ort import SessionSettings, make_session
from scripts.benchmarking.command_options import add_only, add_rounds, add_small, add_threads, options_of
from scripts.benchmarking.processes import result_of_process, write_result
from scripts.benchmarking.records import Progress, Record, write_record
from scripts.benchmarking.tables import machine_of, markdown_table, megabytes, print_table
from scripts.benchmarking.timing import interleaved_seconds

# Highest aim for the time of a step, as a multiple of torch eager's.
GOALS = {"resnet50": 1.2, "vit_b_16": 1.2, "bert": 1.3, "gpt2": 1.3, "mobilenet_v3_large": 2.0}
STORE_ALL, PLANNED, EAGER = "store-all", "planned", "torch eager"


@dataclass(frozen=True, slots=True)
class Options:
    """`only` has names of models; `rounds` is the number of timed steps."""

    only: tuple[str, ...] = ()
    small: bool = False
    rounds: int = 5
    threads: int = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    add_threads(parser, 1)
    add_only(parser, "a model")
    add_rounds(parser, 5)
    add_small(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Exit code 1: a process failed."""
    options = options_of(Options, arguments)
    figures = run_step(options, Progress())
    write_record("step", figures, threads=options.threads, folder=arguments.record)
    headings = ("torch eager, s", "baseline", "planned", "goal")
    rows = list(map(_terminal_row, figures["rows"]))
    print_table("time of a step, as a multiple of torch eager's", headings, rows)
    return 1 if any("error" in row for row in figures["rows"]) else 0


def run_step(options: Options, progress: Progress) -> dict[str, Any]:
    """One row a model: times of each contender, and ratios to torch eager."""
    rows = []
    for name in options.only or tuple(GOALS):
        progress(name)
        rows.append({"model": name, **result_of_process("scripts.benchmarking.step", name, options)})
    return {"rounds": options.rounds, "rows": rows}


def time_model(name: str, options: Options) -> dict[str, Any]:
    """The row of one model, in this process."""
    import torch

    from scripts.exports.torch_export import Export, export_module
    from scripts.exports.torch_models import TORCH_MODELS, Recipe

    progress = Progress()
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
            progress(f"{name}: {contender}")
            training = Path(folder) / f"{contender}.onnx"
            result = optimize(source, training, solver=solver, loss=model.loss, check=False)
            peaks[contender] = result.planned.profile.peak_bytes
            (label,) = result.planned.model.targets
            feeds = {key: value.numpy() for key, value in {**batch, label: target}.items()}
            steps[contender] = _session_step(training, feeds, options.threads)
        seconds = interleaved_seconds(steps, options.rounds, progress)
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


def results_section(record: Record) -> str:
    figures = record["figures"]
    headings = (
        "model, inputs", "torch eager, s", "baseline / torch", "planned / torch", "peak, MB: baseline",
        "planned",
    )  # fmt: skip
    rows = [_document_row(row) for row in figures["rows"] if "error" not in row]
    return (
        "**Time of a step**, forward and backward, of models exported from PyTorch, compared with PyTorch "
        "eager in the same process, best of "
        f"{figures['rounds']}:\n\n{markdown_table(headings, rows)}\n\n{machine_of(record)}."
    )


def inputs_label(row: Mapping[str, Any]) -> str:
    """A model and the shapes of its inputs."""
    return f"{row['model']}, {' and '.join(map(shape_text, row['inputs'].values()))}"


def _session_step(training: Path, feeds: Mapping[str, Any], threads: int) -> Callable[[], None]:
    session = make_session(training, settings=SessionSettings(threads=threads))
    names = {value.name for value in session.get_inputs()}
    fed = {key: value for key, value in feeds.items() if key in names}

    def run() -> None:
        session.run(None, fed)

    return run


def _terminal_row(row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return [row["model"], row["error"], "", "", ""]
    goal = "" if row["goal"] is None else f"{row['goal']:.1f}"
    return [row["model"], *_times(row), goal]


def _document_row(row: Mapping[str, Any]) -> list[str]:
    peaks = (megabytes(row["peak_bytes"][kind]) for kind in (STORE_ALL, PLANNED))
    return [inputs_label(row), *_times(row), *peaks]


def _times(row: Mapping[str, Any]) -> list[str]:
    figures = (min(row["seconds"][EAGER]), row["store_all_of_torch"], row["planned_of_torch"])
    return [f"{figure:.2f}" for figure in figures]


if __name__ == "__main__":
    write_result(time_model, Options)
