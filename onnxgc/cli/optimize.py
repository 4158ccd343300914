"""`onnxgc optimize`: from a forward model to a training file that runs in less memory."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from onnxgc.api import optimize, verify
from onnxgc.api.budgeting import DEFAULT_DEVICE
from onnxgc.api.memory_pages import page_of
from onnxgc.budget.search import DEFAULT_TIME_LIMIT_SECONDS
from onnxgc.cli.arguments import (
    FiguresAsJson,
    Freeze,
    InputShapes,
    Model,
    NoCheck,
    OptimizerName,
    Plan,
    Quiet,
    Seed,
    Trainable,
    Updates,
    check_apart,
    check_json_target,
    check_talk,
    check_target,
    check_with_budget,
    console_for,
    finite,
    parse_shapes,
    settings_of,
    stages,
    write_json,
)
from onnxgc.emission.plan_files import write_plan
from onnxgc.emission.write import data_file, write_text
from onnxgc.errors import PlanError, VerificationError
from onnxgc.model.files.load import files_of
from onnxgc.planning.order import Order
from onnxgc.report.budgets import frontier_plot, frontier_table, plan_within_budget, verdict_on_time
from onnxgc.report.plots import curve_of, memory_plot
from onnxgc.report.tables import (
    before_and_after,
    checks_table,
    measured_line,
    megabytes,
    stages_line,
    verdict,
)
from onnxgc.solvers.registry import SOLVERS
from onnxgc.tracing.devices import DEVICES


class ObjectiveName(StrEnum):
    """What a plan is to make small."""

    PEAK = "peak"
    ACTIVATIONS = "activations"
    PAPER = "paper"


def optimize_command(
    context: typer.Context,
    model: Model,
    output: Annotated[
        str | None,
        typer.Argument(help="The training file to write [default: MODEL's name + -training.onnx]."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Least extra time in so much memory: 8GiB, 500MB, 60% (of the peak that stores everything), "
            "or min for the least peak found."
        ),
    ] = None,
    extra_time: Annotated[
        str | None,
        typer.Option(help="In place of --budget: the least peak at so much extra time, such as 10%."),
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Show extra time for a row of budgets, down to the least found.")
    ] = False,
    order: Annotated[
        Order | None,
        typer.Option(help="With a budget: first runs in any order, or in the model's own [default: free]."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help=f"With a budget: times of a card, {', '.join(DEVICES)} [default: {DEFAULT_DEVICE}]."
        ),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            help="With a budget: times measured on this machine, kept in this file; one that exists is read."
        ),
    ] = None,
    step_limit: Annotated[
        int | None,
        typer.Option(min=0, help="With a budget: rounds of the search, so that the seed alone decides."),
    ] = None,
    objective: Annotated[
        ObjectiveName | None,
        typer.Option(
            help="peak: simulated peak of what will run; activations: the same without the parameters' "
            "gradients; paper: checkpoints + heaviest segment [default: peak, or the solver's own]."
        ),
    ] = None,
    solver: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(SOLVERS)} [default: peak, for the paper's objective acg]."),
    ] = None,
    loss: Annotated[
        str, typer.Option(help="auto, cross-entropy, mse, bce, l1, or the name of a scalar output.")
    ] = "auto",
    trainable: Trainable = None,
    freeze: Freeze = None,
    freeze_bn: Annotated[
        bool,
        typer.Option("--freeze-bn", help="Keep the file's running statistics; their layers still train."),
    ] = False,
    untie: Annotated[
        bool, typer.Option("--untie", help="Give nodes that share a parameter in one role one each.")
    ] = False,
    input_shapes: InputShapes = None,
    checkpoints: Annotated[
        str | None, typer.Option(help="Tensors to keep, as a,b,c; chooses the solver manual.")
    ] = None,
    plan: Plan = None,
    save_plan: Annotated[
        str | None, typer.Option("--save-plan", help="Write the plan alone into this JSON file.")
    ] = None,
    optimizer: Updates = OptimizerName.NONE,
    keep_outputs: Annotated[
        bool, typer.Option("--keep-outputs", help="Return the model's own outputs too.")
    ] = False,
    verify_runs: Annotated[
        int, typer.Option("--verify", min=0, help="Run the file N times beside one that stores everything.")
    ] = 0,
    json_target: FiguresAsJson = None,
    page_target: Annotated[
        str | None, typer.Option("--report", help="A page, as HTML, that shows where the memory goes.")
    ] = None,
    quiet: Quiet = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Print the checkpoints and the time of each stage as well."),
    ] = False,
    no_check: NoCheck = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write no model.")] = False,
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            callback=finite,
            help="Seconds for the solver [with a budget and no --step-limit: "
            f"{DEFAULT_TIME_LIMIT_SECONDS:.0f}].",
        ),
    ] = None,
    seed: Seed = 0,
    save_external_data: Annotated[
        bool, typer.Option("--save-external-data", help="Weights into a file beside the model.")
    ] = False,
) -> None:
    """Find the checkpoints and write one ONNX file that trains: forward, recomputation, backward."""
    shapes = parse_shapes(input_shapes or [])
    names = tuple(name.strip() for name in (checkpoints or "").split(",") if name.strip())
    if solver == "manual" and checkpoints is None:
        raise PlanError("the solver 'manual' needs --checkpoints a,b,c")
    if checkpoints is not None and solver not in (None, "manual"):
        raise PlanError(f"--checkpoints chooses the solver 'manual', not '{solver}'; drop one of them")
    asked = budget is not None or extra_time is not None or pareto
    of_budgets = {
        "--order": order,
        "--device": device,
        "--calibrate": calibrate,
        "--step-limit": step_limit,
    }
    check_with_budget(asked, of_budgets, "--budget or --pareto; give one, such as --budget 60%")
    for option, is_given in {"--verify": verify_runs, "--save-external-data": save_external_data}.items():
        if is_given and dry_run:
            raise PlanError(f"{option} needs the file that --dry-run does not write; drop one of them")
    check_talk(quiet, verbose)
    target = output or f"{Path(model).stem}-training.onnx"
    check_apart("OUTPUT", target)
    check_json_target(json_target, *files_of(model), target, data_file(target), calibrate)
    check_apart("--calibrate", calibrate, *files_of(model), target, data_file(target))
    check_target("--save-plan", save_plan, *files_of(model), target, data_file(target), calibrate, plan)
    others = (*files_of(model), target, data_file(target), calibrate, json_target, plan, save_plan)
    check_target("--report", page_target, *others)
    console = console_for(json_target, is_quiet=quiet)
    with stages() as tell:
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
            progress=tell,
        )
        report = dict(result.report)
        if page_target is not None:
            tell("showing")
            settings = settings_of(context, "json_target", "page_target", "save_plan", "quiet", "verbose")
            write_text(page_of(result, settings), page_target)
        verification = None
        if verify_runs:
            verification = verify(model, target, seed=seed, runs=verify_runs, progress=tell)
            report["verification"] = verification.as_json()
    for note in report["notes"]:
        console.print(f"note: {note}", markup=False)
    if asked:
        console.print(plan_within_budget(report))
        if pareto:
            console.print(frontier_table(report))
            console.print(frontier_plot(report), markup=False)
        console.print(verdict_on_time(report), markup=False)
    else:
        console.print(before_and_after(report))
        console.print(verdict(report), markup=False)
    planned = result.planned
    regular = curve_of(planned.regular_schedule, planned.regular_profile, planned.state_bytes)
    chosen = curve_of(planned.schedule, planned.profile, planned.state_bytes)
    is_plain = not console.encoding.startswith("utf")
    console.print(memory_plot(regular, chosen, megabytes, is_plain=is_plain), markup=False)
    if verbose:
        console.print(stages_line(report), markup=False)
        console.print(f"checkpoints: {', '.join(report['checkpoints'])}", markup=False)
    if save_plan is not None:
        write_plan(result.plan, save_plan, solver=report["solver"], model=report["model"])
        console.print(f"wrote {save_plan}", markup=False)
    if report["output"]:
        console.print(f"wrote {report['output']}", markup=False)
    if page_target is not None:
        console.print(f"wrote {page_target}", markup=False)
    if verification is not None:
        console.print(checks_table(report["verification"]["checks"]))
        console.print(measured_line(report["verification"]), markup=False)
    write_json(report, json_target)
    if verification is not None and not verification.holds:
        raise VerificationError(f"'{target}' does not keep its promises; see the checks above")
