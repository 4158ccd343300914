"""`onnxgc optimize`: from a forward model to a training file that needs less memory."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from onnxgc.api import OptimizeResult, Verification, optimize, verify
from onnxgc.api.html_pages import page_of
from onnxgc.budget.search import DEFAULT_TIME_LIMIT_SECONDS
from onnxgc.cli.arguments import (
    DURATIONS,
    FILES,
    PLAN,
    REPORT,
    Device,
    Freeze,
    FreezeBn,
    InputShapes,
    JsonTarget,
    Loss,
    Model,
    NoCheck,
    OptimizerName,
    OrderWithBudget,
    Plan,
    Quiet,
    Seed,
    StepLimit,
    Trainable,
    Untie,
    Updates,
    budget_option,
    check_distinct,
    check_json_target,
    check_needs_budget,
    check_target,
    check_verbosity,
    console_for,
    given_options,
    parse_shapes,
    progress_line,
    time_limit_option,
    write_json,
)
from onnxgc.emission.atomic_files import data_file, write_text
from onnxgc.emission.plan_files import write_plan
from onnxgc.errors import PlanError, VerificationError
from onnxgc.model.files.load import model_files
from onnxgc.planning.order_choice import Order
from onnxgc.report.terminal.budget_tables import (
    frontier_plot,
    frontier_table,
    plan_within_budget,
    verdict_on_time,
)
from onnxgc.report.terminal.command_tables import (
    before_and_after,
    checks_table,
    measured_line,
    stages_line,
    verdict,
)
from onnxgc.report.terminal.plots import curve_of, memory_plot
from onnxgc.report.text.units import megabytes
from onnxgc.solvers.registry import SOLVERS


class ObjectiveName(StrEnum):
    """The quantity that a plan minimises."""

    PEAK = "peak"
    ACTIVATIONS = "activations"
    PAPER = "paper"


def optimize_command(
    context: typer.Context,
    model: Model,
    output: Annotated[
        str | None,
        typer.Argument(help="Training file to write [default: MODEL's name + -training.onnx]."),
    ] = None,
    budget: Annotated[str | None, budget_option()] = None,
    extra_time: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=PLAN,
            help="Minimise the peak within this extra time, such as 10%; in place of --budget.",
        ),
    ] = None,
    pareto: Annotated[
        bool,
        typer.Option(
            "--pareto",
            rich_help_panel=PLAN,
            help="Show the trade-off of extra time and peak, down to the lowest peak found.",
        ),
    ] = False,
    order: OrderWithBudget = None,
    objective: Annotated[
        ObjectiveName | None,
        typer.Option(
            rich_help_panel=PLAN,
            help="Without a budget, minimise the simulated peak (peak), the same without parameter gradients "
            "(activations), or the sum of checkpoints and heaviest segment (paper) [default: peak, or the "
            "solver's own].",
        ),
    ] = None,
    solver: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=PLAN,
            help=f"One of {', '.join(SOLVERS)} [default: peak; for the paper's objective acg].",
        ),
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(rich_help_panel=PLAN, help="Tensors to keep, as a,b,c; selects the solver manual."),
    ] = None,
    plan: Plan = None,
    device: Device = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=DURATIONS,
            help="Measure durations on this machine and keep them in this file; an existing file is read.",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        time_limit_option(f"{DEFAULT_TIME_LIMIT_SECONDS:.0f} with a budget and no --step-limit"),
    ] = None,
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
    keep_outputs: Annotated[
        bool,
        typer.Option("--keep-outputs", rich_help_panel=FILES, help="Return the model's own outputs as well."),
    ] = False,
    save_external_data: Annotated[
        bool,
        typer.Option(
            "--save-external-data",
            rich_help_panel=FILES,
            help="Write weights to a file next to the training file.",
        ),
    ] = False,
    save_plan: Annotated[
        str | None,
        typer.Option("--save-plan", rich_help_panel=FILES, help="Write the plan to this JSON file as well."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", rich_help_panel=FILES, help="Do not write the training file.")
    ] = False,
    verify_runs: Annotated[
        int,
        typer.Option(
            "--verify",
            min=0,
            rich_help_panel=FILES,
            help="Run the file N times and check it, as verify does.",
        ),
    ] = 0,
    json_target: JsonTarget = None,
    page_target: Annotated[
        str | None,
        typer.Option(
            "--report", rich_help_panel=REPORT, help="Write an HTML page that shows memory over the step."
        ),
    ] = None,
    quiet: Quiet = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            rich_help_panel=REPORT,
            help="Also print the checkpoints and the seconds of each stage.",
        ),
    ] = False,
) -> None:
    """Write a training file that needs less memory than the baseline.

    The file is one ONNX graph: forward, recomputation, backward. Without a budget the plan has the lowest
    peak that the solver finds; with one it has the least extra time within the budget.

    Example: onnxgc optimize model.onnx training.onnx --budget 60% --verify 1
    """
    shapes = parse_shapes(input_shapes or [])
    names = tuple(name.strip() for name in (checkpoints or "").split(",") if name.strip())
    _check_solver(solver, checkpoints)
    has_budget = budget is not None or extra_time is not None or pareto
    for_budgets = {
        "--order": order,
        "--device": device,
        "--calibrate": calibrate,
        "--step-limit": step_limit,
    }
    check_needs_budget(has_budget, for_budgets, "--budget, --extra-time or --pareto, such as --budget 60%")
    for option, is_given in {"--verify": verify_runs, "--save-external-data": save_external_data}.items():
        if is_given and dry_run:
            raise PlanError(f"{option} needs the file that --dry-run does not write; drop one of them")
    check_verbosity(quiet, verbose)
    target = output or f"{Path(model).stem}-training.onnx"
    _check_files(model, target, json_target, page_target, save_plan, calibrate, plan)
    with progress_line() as notify:
        result = optimize(
            model,
            target,
            solver="manual" if checkpoints is not None else solver,
            objective=objective.value if objective else None,
            checkpoints=names,
            budget=budget,
            extra_time=extra_time,
            pareto=pareto,
            order=(order or Order.FREE).value,
            device=device,
            calibrate=calibrate,
            loss=loss,
            input_shapes=shapes,
            trainable=tuple(trainable or ()),
            freeze=tuple(freeze or ()),
            freeze_bn=freeze_bn,
            untie=untie,
            keep_outputs=keep_outputs,
            optimizer=optimizer.value,
            external_data=save_external_data,
            dry_run=dry_run,
            check=not no_check,
            seed=seed,
            time_limit=time_limit,
            step_limit=step_limit,
            plan=plan,
            progress=notify,
        )
        if page_target is not None:
            notify("writing the page")
            settings = given_options(context, "json_target", "page_target", "save_plan", "quiet", "verbose")
            write_text(page_of(result, settings), page_target)
        found = verify(model, target, seed=seed, runs=verify_runs, progress=notify) if verify_runs else None
    console = console_for(json_target, is_quiet=quiet)
    _print_plan(result, console, verbose=verbose)
    if save_plan is not None:
        write_plan(result.plan, save_plan, solver=result.report["solver"], model=result.report["model"])
    _print_files(console, (save_plan, result.report["output"], page_target))
    report: dict[str, Any] = {**result.report}
    if found is None:
        write_json(report, json_target)
        return
    _print_checks(found, console)
    write_json({**report, "verification": found.as_json()}, json_target)
    if not found.holds:
        raise VerificationError(f"'{target}': verification failed; see the checks above")


def _check_solver(solver: str | None, checkpoints: str | None) -> None:
    if solver == "manual" and checkpoints is None:
        raise PlanError("the solver 'manual' needs --checkpoints a,b,c")
    if checkpoints is not None and solver not in (None, "manual"):
        raise PlanError(f"--checkpoints selects the solver 'manual', not '{solver}'; drop one of them")


def _check_files(
    model: str,
    target: str,
    json_target: str | None,
    page_target: str | None,
    save_plan: str | None,
    calibrate: str | None,
    plan: str | None,
) -> None:
    files = (*model_files(model), target, data_file(target))
    check_distinct("OUTPUT", target)
    check_json_target(json_target, *files, calibrate, plan)
    check_distinct("--calibrate", calibrate, *files)
    check_target("--save-plan", save_plan, *files, calibrate, plan)
    check_target("--report", page_target, *files, calibrate, json_target, plan, save_plan)


def _print_plan(result: OptimizeResult, console: Console, *, verbose: bool) -> None:
    report, planned = result.report, result.planned
    for note in report["notes"]:
        console.print(f"note: {note}", markup=False)
    if planned.request.is_requested:
        console.print(plan_within_budget(report))
        if planned.request.pareto:
            console.print(frontier_table(report))
            console.print(frontier_plot(report), markup=False)
        console.print(verdict_on_time(report), markup=False)
    else:
        console.print(before_and_after(report))
        console.print(verdict(report), markup=False)
    regular = curve_of(planned.regular_schedule, planned.regular_profile, planned.state_bytes)
    chosen = curve_of(planned.schedule, planned.profile, planned.state_bytes)
    is_plain = not console.encoding.startswith("utf")
    console.print(memory_plot(regular, chosen, megabytes, is_plain=is_plain), markup=False)
    if verbose:
        console.print(stages_line(report), markup=False)
        console.print(f"checkpoints: {', '.join(report['checkpoints'])}", markup=False)


def _print_files(console: Console, written: Sequence[str | None]) -> None:
    for name in filter(None, written):
        console.print(f"wrote {name}", markup=False)


def _print_checks(found: Verification, console: Console) -> None:
    result = found.as_json()
    console.print(checks_table(result["checks"]))
    console.print(measured_line(result), markup=False)
