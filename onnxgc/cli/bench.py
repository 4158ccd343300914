"""`onnxgc bench`: a training step that stores everything beside the plan's, as both run here."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from onnxgc.api.benchmarking import bench
from onnxgc.cli.arguments import (
    Quiet,
    check_json_target,
    console_for,
    parse_shapes,
    stages,
    write_json,
    writer,
)
from onnxgc.errors import ModelFileError, PlanError
from onnxgc.model.load import files_of
from onnxgc.rematerialisation.search import Order
from onnxgc.report.benchmark import figures_table, paper_row, run_lines
from onnxgc.runtime.ort import PROVIDERS
from onnxgc.solvers.registry import SOLVERS
from onnxgc.tracing.devices import DEVICES

# Checkpoints by name come in a plan, and a budget chooses its solver.
_SOLVERS = tuple(name for name in SOLVERS if name not in ("manual", "budget"))


def bench_command(
    model: Annotated[str, typer.Argument(help="A forward ONNX model, from any framework.")],
    budget: Annotated[
        str | None, typer.Option(help="As in optimize: the least extra time in so much memory.")
    ] = None,
    solver: Annotated[str | None, typer.Option(help=f"One of {', '.join(_SOLVERS)} [default: peak].")] = None,
    plan: Annotated[
        str | None,
        typer.Option(help="A plan file, or a training file: its plan, in place of a search."),
    ] = None,
    order: Annotated[Order, typer.Option(help="With a budget, as in optimize.")] = Order.FREE,
    device: Annotated[
        str | None,
        typer.Option(help=f"Predicted times of a card, {', '.join(DEVICES)} [default: cpu, on CUDA a100]."),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(help="In place of --device, as in optimize: times measured here, kept in this file."),
    ] = None,
    loss: Annotated[str, typer.Option(help="As in optimize.")] = "auto",
    trainable: Annotated[
        list[str] | None, typer.Option(help="Glob of weights that train; repeatable.")
    ] = None,
    freeze: Annotated[list[str] | None, typer.Option(help="Glob of weights that do not; repeatable.")] = None,
    freeze_bn: Annotated[bool, typer.Option("--freeze-bn", help="As in optimize.")] = False,
    untie: Annotated[bool, typer.Option("--untie", help="As in optimize.")] = False,
    input_shapes: Annotated[
        list[str] | None, typer.Option(help="Shape of an input, as x:64,3,224,224; repeatable.")
    ] = None,
    provider: Annotated[
        str | None,
        typer.Option(help=f"Where to run: {', '.join(PROVIDERS)} [default: cuda where there is one]."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads of each operator.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Steps of each that are timed.")] = 5,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps of each before them.")] = 2,
    time_limit: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds for the solver, as in optimize.")
    ] = None,
    step_limit: Annotated[
        int | None, typer.Option(min=0, help="With a budget: rounds of the search, as in optimize.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything that is drawn.")] = 0,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not run the forward model once before planning.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables as Markdown.")] = False,
    json_target: Annotated[str | None, typer.Option("--json", help="Figures as JSON, - for stdout.")] = None,
    quiet: Quiet = False,
) -> None:
    """Run a step that stores everything beside the plan's: peaks and times, as in the paper's Table 1."""
    shapes = parse_shapes(input_shapes or [])
    if not os.path.isfile(model):
        raise ModelFileError(f"there is no file '{model}'; give the path of an ONNX model")
    if solver == "manual":
        raise PlanError(
            "bench takes checkpoints by name from a plan alone; give --plan in place of --solver manual"
        )
    check_json_target(json_target, *files_of(model), plan, calibrate)
    with stages() as tell:
        found = bench(
            model,
            input_shapes=shapes,
            budget=budget,
            plan=plan,
            solver=solver,
            order=order.value,
            device=device,
            calibrate=calibrate,
            time_limit=time_limit,
            step_limit=step_limit,
            loss=loss,
            trainable=tuple(trainable or ()),
            freeze=tuple(freeze or ()),
            freeze_bn=freeze_bn,
            untie=untie,
            check=not no_check,
            provider=provider,
            threads=threads,
            runs=runs,
            warm_up=warm_up,
            seed=seed,
            progress=tell,
        )
    report = found.as_json()
    say = writer(console_for(json_target, is_quiet=quiet), markdown=markdown)
    for table in (paper_row(report), figures_table(report)):
        say(table)
    for line in (*run_lines(report), *(f"note: {note}" for note in report["notes"])):
        say(line)
    write_json(report, json_target)
