"""`onnxgc bench`: memory and time of the baseline and the planned step, measured here."""

from __future__ import annotations

from typing import Annotated

import typer

from onnxgc.api.benchmarking import bench
from onnxgc.cli.arguments import (
    DURATIONS,
    PLAN,
    RUN,
    Freeze,
    FreezeBn,
    InputShapes,
    JsonTarget,
    Loss,
    Markdown,
    Model,
    NoCheck,
    OptimizerName,
    OrderWithBudget,
    Plan,
    Quiet,
    Seed,
    StepLimit,
    Threads,
    Trainable,
    Untie,
    Updates,
    budget_option,
    check_json_target,
    check_needs_budget,
    console_for,
    parse_shapes,
    progress_line,
    time_limit_option,
    write_json,
    writer_to,
)
from onnxgc.errors import PlanError
from onnxgc.model.files.load import check_model_file, model_files
from onnxgc.planning.order_choice import Order
from onnxgc.report.text.benchmark_tables import figures_table, paper_row, run_lines
from onnxgc.runtime.ort import PROVIDERS
from onnxgc.solvers.registry import SOLVERS
from onnxgc.tracing.devices import DEVICES

# A plan names its checkpoints, and a budget selects its solver.
_SOLVERS = tuple(name for name in SOLVERS if name not in ("manual", "budget"))


def bench_command(
    model: Model,
    budget: Annotated[str | None, budget_option()] = None,
    order: OrderWithBudget = None,
    solver: Annotated[
        str | None,
        typer.Option(rich_help_panel=PLAN, help=f"One of {', '.join(_SOLVERS)} [default: peak]."),
    ] = None,
    plan: Plan = None,
    device: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=DURATIONS,
            help=f"Predicted durations from a data sheet: {', '.join(DEVICES)} [default: cpu, on CUDA a100].",
        ),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=DURATIONS,
            help="Measure durations on this machine and keep them in this file, in place of --device.",
        ),
    ] = None,
    time_limit: Annotated[float | None, time_limit_option("")] = None,
    step_limit: StepLimit = None,
    seed: Seed = 0,
    loss: Loss = "auto",
    trainable: Trainable = None,
    freeze: Freeze = None,
    freeze_bn: FreezeBn = False,
    untie: Untie = False,
    input_shapes: InputShapes = None,
    no_check: NoCheck = False,
    optimizer: Updates = OptimizerName.NONE,
    provider: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=RUN, help=f"One of {', '.join(PROVIDERS)} [default: cuda where available]."
        ),
    ] = None,
    threads: Threads = None,
    runs: Annotated[int, typer.Option(min=1, rich_help_panel=RUN, help="Timed steps of each file.")] = 5,
    warm_up: Annotated[
        int, typer.Option(min=0, rich_help_panel=RUN, help="Steps of each file before the timed ones.")
    ] = 2,
    markdown: Markdown = False,
    json_target: JsonTarget = None,
    quiet: Quiet = False,
) -> None:
    """Measure memory and time of the baseline and the planned step.

    The first table is a row of the paper's Table 1.
    """
    shapes = parse_shapes(input_shapes or [])
    check_model_file(model)
    for_budgets = {"--order": order, "--step-limit": step_limit}
    check_needs_budget(budget is not None, for_budgets, "--budget, such as --budget 60%")
    if solver == "manual":
        raise PlanError("bench takes checkpoints from a plan only; give --plan in place of --solver manual")
    check_json_target(json_target, *model_files(model), plan, calibrate)
    with progress_line() as notify:
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
            progress=notify,
        )
    report = found.as_json()
    write = writer_to(console_for(json_target, is_quiet=quiet), markdown=markdown)
    for table in (paper_row(report), figures_table(report)):
        write(table)
    for line in (*run_lines(report), *(f"note: {note}" for note in report["notes"])):
        write(line)
    write_json(report, json_target)
