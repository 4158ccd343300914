"""`onnxgc optimize`: from a forward model to a training file that needs less memory."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

from onnxgc.api import OptimizeResult, Verification, optimize, verify
from onnxgc.api.html_pages import page_of
from onnxgc.api.largest_size import largest_size
from onnxgc.cli.arguments import (
    BUDGET,
    DEVICE,
    DURATIONS,
    FILES,
    JSON,
    LOSS_MODEL,
    ORDER,
    PLAN,
    PLAN_FILE,
    QUIET,
    REPORT,
    SEED,
    STEP_LIMIT,
    TIME_LIMIT_WITH_BUDGET,
    UPDATES,
    CheckedReading,
    Model,
    OptimizerName,
    Options,
    ProviderName,
    check_distinct,
    check_json_target,
    check_needs_budget,
    check_target,
    check_verbosity,
    console_for,
    given_options,
    names_in,
    progress_line,
    with_flat_options,
    write_json,
)
from onnxgc.cli.verify import print_checks
from onnxgc.emission.atomic_files import data_file, write_text
from onnxgc.emission.plan_files import write_plan
from onnxgc.emission.state_file import state_file
from onnxgc.errors import PlanError, VerificationError
from onnxgc.model.files.load import model_files
from onnxgc.planning.order_choice import Order
from onnxgc.report.data.optimize_report import LargestReport
from onnxgc.report.terminal.budget_tables import (
    frontier_plot,
    frontier_table,
    plan_within_budget,
    sizes_plot,
    sizes_table,
    verdict_on_time,
)
from onnxgc.report.terminal.command_tables import before_and_after, peak_lines, stages_line, verdict
from onnxgc.report.terminal.plots import curve_of, memory_plot
from onnxgc.report.text.units import megabytes
from onnxgc.solvers.registry import SOLVERS

_NO_SETTINGS = ("json_target", "page_target", "save_plan", "quiet", "verbose")
"""Options that the page does not show."""


class ObjectiveName(StrEnum):
    """The quantity that a plan minimises."""

    PEAK = "peak"
    ACTIVATIONS = "activations"
    PAPER = "paper"


class StateName(StrEnum):
    """The place of the first values of parameters, statistics and states."""

    INITIALIZERS = "initializers"
    INPUTS = "inputs"


class WeightsName(StrEnum):
    """What becomes of weights in the model's external data."""

    COPY = "copy"
    REFERENCE = "reference"


class BarrierName(StrEnum):
    """Nodes that keep the schedule's order."""

    AUTO = "auto"
    NONE = "none"


class _Planning(Options, panel=PLAN):
    """What a plan minimises, and how it is found."""

    budget: str | None = BUDGET
    extra_time: str | None = Option(
        None, help="Minimise the peak within this extra time, such as 10%; in place of --budget."
    )
    device_memory: str | None = Option(
        None, help="All memory of a device, such as 8GiB, or its name, such as a100; in place of --budget."
    )
    largest_batch: bool = Option(
        False, help="Find the largest batch for --device-memory, within --extra-time [default: 20%]."
    )
    largest: str | None = Option(None, help="The same for other axes of an input, such as x:2,3 for a resolution.")
    pareto: bool = Option(False, help="Show the trade-off of extra time and peak, down to the lowest peak found.")
    order: Order | None = ORDER
    objective: ObjectiveName | None = Option(
        None,
        help="Without a budget, minimise the simulated peak (peak), the same without parameter gradients "
        "(activations), or the sum of checkpoints and heaviest segment (paper) [default: the "
        "solver's own].",
    )
    solver: str | None = Option(None, help=f"One of {', '.join(SOLVERS)} [default: budget, within 20% extra time].")
    checkpoints: str | None = Option(None, help="Tensors to keep, as a,b,c; selects the solver manual.")
    plan: str | None = PLAN_FILE
    device: str | None = DEVICE
    calibrate: str | None = Option(
        None,
        rich_help_panel=DURATIONS,
        help="Measure durations on this machine and keep them in this file; an existing file is read.",
    )
    time_limit: float | None = TIME_LIMIT_WITH_BUDGET
    step_limit: int | None = STEP_LIMIT
    seed: int = SEED

    def check(self) -> None:
        """Fail if options contradict each other."""
        if self.solver == "manual" and self.checkpoints is None:
            raise PlanError("the solver 'manual' needs --checkpoints a,b,c")
        if self.checkpoints is not None and self.solver not in (None, "manual"):
            raise PlanError(f"--checkpoints selects the solver 'manual', not '{self.solver}'; drop one of them")
        is_searched = (self.solver, self.objective, self.checkpoints, self.plan) == (None,) * 4
        if (self.largest_batch or self.largest) and self.device_memory is None:
            raise PlanError("--largest-batch and --largest need --device-memory, such as 8GiB")
        limits = (self.budget, self.extra_time, self.device_memory)
        has_budget = is_searched or self.pareto or any(limit is not None for limit in limits)
        for_budgets = {
            "--order": self.order,
            "--device": self.device,
            "--calibrate": self.calibrate,
            "--step-limit": self.step_limit,
        }
        check_needs_budget(has_budget, for_budgets, "--budget, --extra-time or --pareto, such as --budget 60%")

    def search(self) -> dict[str, Any]:
        """Arguments of `optimize`."""
        solver = "manual" if self.checkpoints is not None else self.solver
        chosen = {"solver": solver, "checkpoints": names_in(self.checkpoints or "")}
        return self.values("largest_batch", "largest") | chosen


class _Files(Options, panel=FILES):
    """The files that are written, and the report."""

    optimizer: OptimizerName = UPDATES
    keep_outputs: bool = Option(False, help="Return the model's own outputs as well.")
    provider: ProviderName | None = Option(
        None, help="Execution provider whose forms the gradients take [default: cuda where available]."
    )
    barriers: BarrierName = Option(
        BarrierName.AUTO, help="none leaves out the nodes that keep the order in sessions with default settings."
    )
    portable: bool = Option(
        False,
        help="Avoid what runtimes other than ONNX Runtime lack: MaxPool's indices, dimensions with names, "
        "unknown attributes.",
    )
    state: StateName = Option(
        StateName.INITIALIZERS,
        help="inputs makes parameters, statistics and states inputs that must be fed, as JavaScript and Java need; "
        "their first values go into a state file beside OUTPUT (.safetensors).",
    )
    loss_model: str | None = LOSS_MODEL
    evaluation: str | None = Option(
        None, help="Write the model in evaluation mode to this file, with its loss and the same inputs."
    )
    save_external_data: bool = Option(
        False, help="Write weights to a file next to the training file, as is done beyond 2 GB in any case."
    )
    weights: WeightsName = Option(
        WeightsName.COPY, help="reference leaves weights in MODEL's external data, in whose folder OUTPUT has to be."
    )
    save_plan: str | None = Option(None, help="Write the plan to this JSON file as well.")
    dry_run: bool = Option(False, help="Do not write the training file.")
    verify_runs: int = Option(0, "--verify", min=0, help="Run the file N times and check it, as verify does.")
    json_target: str | None = JSON
    page_target: str | None = Option(
        None, "--report", rich_help_panel=REPORT, help="Write an HTML page that shows memory over the step."
    )
    quiet: bool = QUIET
    verbose: bool = Option(
        False,
        "--verbose",
        "-v",
        rich_help_panel=REPORT,
        help="Also print the largest tensors at the peak, checkpoints and seconds of each stage.",
    )

    def emission(self) -> dict[str, Any]:
        """Arguments of `optimize`."""
        others = ("save_external_data", "save_plan", "verify_runs", "json_target", "page_target", "quiet", "verbose")
        return self.values(*others) | {"external_data": self.save_external_data}

    def check(self, model: str, target: str, calibrate: str | None, plan: str | None) -> None:
        """Fail if options contradict each other, or if a file is not writable or is one of the others."""
        needs_file = {
            "--verify": self.verify_runs,
            "--save-external-data": self.save_external_data,
            "--evaluation": self.evaluation,
        }
        for option, is_given in needs_file.items():
            if is_given and self.dry_run:
                raise PlanError(f"{option} needs the file that --dry-run does not write; drop one of them")
        check_verbosity(self.quiet, self.verbose)
        files = (*model_files(model), target, data_file(target))
        if self.state is StateName.INPUTS:
            check_target("the state file", state_file(target), *files, plan)
            files = (*files, state_file(target))
        check_target("--evaluation", self.evaluation, *files, plan)
        files = (*files, *filter(None, [self.evaluation]))
        check_distinct("OUTPUT", target)
        check_json_target(self.json_target, *files, calibrate, plan)
        check_distinct("--calibrate", calibrate, *files)
        check_target("--save-plan", self.save_plan, *files, calibrate, plan)
        check_target("--report", self.page_target, *files, calibrate, self.json_target, plan, self.save_plan)


Output = Annotated[str | None, Argument(help="Training file to write [default: MODEL's name + -training.onnx].")]


@with_flat_options
def optimize_command(
    context: typer.Context,
    model: Model,
    output: Output = None,
    *,
    planning: _Planning,
    reading: CheckedReading,
    files: _Files,
) -> None:
    """Write a training file that needs less memory than the baseline.

    The file is one ONNX graph: forward, recomputation, backward. Without a budget the plan has the lowest
    peak that a search of seconds finds within 20% extra time; with one it has the least extra time within it.

    Example: onnxgc optimize model.onnx training.onnx --budget 60% --verify 1
    """
    read = reading.arguments()
    planning.check()
    target = output or f"{Path(model).stem}-training.onnx"
    files.check(model, target, planning.calibrate, planning.plan)
    verification = sizes = None
    how = {**read, **planning.search(), **files.emission(), "check": not reading.no_check}
    with progress_line() as notify:
        if planning.largest_batch or planning.largest is not None:
            assert planning.device_memory is not None, "checked before"
            memory = how.pop("device_memory")
            found = largest_size(model, memory, target, dimension=planning.largest, progress=notify, **how)
            result, sizes = found.result, found.as_json()
        else:
            result = optimize(model, target, progress=notify, **how)
        if files.page_target is not None:
            notify("writing the page")
            write_text(page_of(result, given_options(context, *_NO_SETTINGS)), files.page_target)
        if files.verify_runs:
            verification = verify(
                model,
                target,
                seed=planning.seed,
                runs=files.verify_runs,
                device_memory=planning.device_memory,
                progress=notify,
            )
    _finish(result, verification, sizes, target, files)


def _finish(
    result: OptimizeResult, verification: Verification | None, sizes: LargestReport | None, target: str, files: _Files
) -> None:
    """Write the plan, and report on it and on the checks of the file."""
    console = console_for(files.json_target, is_quiet=files.quiet)
    report: dict[str, Any] = {**result.report}
    if sizes is not None:
        report["largest"] = sizes
        console.print(sizes_table(sizes))
        console.print(sizes_plot(sizes), markup=False)
    _print_plan(result, console, verbose=files.verbose)
    if files.save_plan is not None:
        write_plan(result.plan, files.save_plan, solver=report["solver"], model=report["model"])
    for name in filter(None, (files.save_plan, report["output"], *report["more_files"], files.page_target)):
        console.print(f"wrote {name}", markup=False)
    if verification is None:
        write_json(report, files.json_target)
        return
    checks = verification.as_json()
    print_checks(checks, console)
    write_json({**report, "verification": checks}, files.json_target)
    if not verification.holds:
        raise VerificationError(f"'{target}': verification failed; see the checks above")


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
    baseline = curve_of(planned.regular_schedule, planned.regular_profile, planned.state_bytes)
    chosen = curve_of(planned.schedule, planned.profile, planned.state_bytes)
    is_plain = not console.encoding.startswith("utf")
    console.print(memory_plot(baseline, chosen, megabytes, is_plain=is_plain), markup=False)
    if verbose:
        console.print(stages_line(report), markup=False)
        for line in peak_lines(report):
            console.print(line, markup=False)
