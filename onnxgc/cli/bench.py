"""`onnxgc bench`: a training step that stores everything beside the plan's, as both run here."""

from __future__ import annotations

from typing import Annotated

import typer

from onnxgc.api.benchmarking import bench
from onnxgc.cli.arguments import (
    FiguresAsJson,
    Freeze,
    FreezeBn,
    InputShapes,
    Loss,
    Markdown,
    Model,
    NoCheck,
    OptimizerName,
    OrderAsInOptimize,
    Plan,
    Quiet,
    Seed,
    Threads,
    Trainable,
    Untie,
    Updates,
    check_json_target,
    check_with_budget,
    console_for,
    finite,
    parse_shapes,
    stages,
    write_json,
    writer,
)
from onnxgc.errors import PlanError
from onnxgc.model.files.load import check_model_file, files_of
from onnxgc.planning.order import Order
from onnxgc.report.benchmark import figures_table, paper_row, run_lines
from onnxgc.runtime.ort import PROVIDERS
from onnxgc.solvers.registry import SOLVERS
from onnxgc.tracing.devices import DEVICES

# Checkpoints by name come in a plan, and a budget chooses its solver.
_SOLVERS = tuple(name for name in SOLVERS if name not in ("manual", "budget"))


def bench_command(
    model: Model,
    budget: Annotated[
        str | None, typer.Option(help="As in optimize: the least extra time in so much memory.")
    ] = None,
    solver: Annotated[str | None, typer.Option(help=f"One of {', '.join(_SOLVERS)} [default: peak].")] = None,
    plan: Plan = None,
    order: OrderAsInOptimize = None,
    device: Annotated[
        str | None,
        typer.Option(help=f"Predicted times of a card, {', '.join(DEVICES)} [default: cpu, on CUDA a100]."),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(help="In place of --device, as in optimize: times measured here, kept in this file."),
    ] = None,
    loss: Loss = "auto",
    trainable: Trainable = None,
    freeze: Freeze = None,
    freeze_bn: FreezeBn = False,
    untie: Untie = False,
    optimizer: Updates = OptimizerName.NONE,
    input_shapes: InputShapes = None,
    provider: Annotated[
        str | None,
        typer.Option(help=f"Where to run: {', '.join(PROVIDERS)} [default: cuda where there is one]."),
    ] = None,
    threads: Threads = None,
    runs: Annotated[int, typer.Option(min=1, help="Steps of each that are timed.")] = 5,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps of each before them.")] = 2,
    time_limit: Annotated[
        float | None, typer.Option(min=0.0, callback=finite, help="Seconds for the solver, as in optimize.")
    ] = None,
    step_limit: Annotated[
        int | None, typer.Option(min=0, help="With a budget: rounds of the search, as in optimize.")
    ] = None,
    seed: Seed = 0,
    no_check: NoCheck = False,
    markdown: Markdown = False,
    json_target: FiguresAsJson = None,
    quiet: Quiet = False,
) -> None:
    """Run a step that stores everything beside the plan's: peaks and times, as in the paper's Table 1."""
    shapes = parse_shapes(input_shapes or [])
    check_model_file(model)
    of_budgets = {"--order": order, "--step-limit": step_limit}
    check_with_budget(budget is not None, of_budgets, "--budget; give one, such as --budget 60%")
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
            order=(order or Order.FREE).value,
            device=device,
            calibrate=calibrate,
            time_limit=time_limit,
            step_limit=step_limit,
            loss=loss,
            trainable=tuple(trainable or ()),
            freeze=tuple(freeze or ()),
            freeze_bn=freeze_bn,
            untie=untie,
            optimizer=optimizer.value,
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
