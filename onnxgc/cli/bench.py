"""`onnxgc bench`: memory and time of the baseline and the planned step, measured here."""

from typer import Option

from onnxgc.api.benchmarking import bench
from onnxgc.cli.arguments import (
    BUDGET,
    DURATIONS,
    JSON,
    MARKDOWN,
    ORDER,
    PLAN,
    PLAN_FILE,
    QUIET,
    RUN,
    SEED,
    STEP_LIMIT,
    THREADS,
    UPDATES,
    CheckedReading,
    Model,
    OptimizerName,
    Options,
    check_json_target,
    check_needs_budget,
    console_for,
    progress_line,
    time_limit_option,
    with_flat_options,
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


class _Planning(Options, panel=PLAN):
    """What a plan minimises, and how it is found."""

    budget: str | None = BUDGET
    order: Order | None = ORDER
    solver: str | None = Option(None, help=f"One of {', '.join(_SOLVERS)} [default: peak].")
    plan: str | None = PLAN_FILE
    device: str | None = Option(
        None,
        rich_help_panel=DURATIONS,
        help=f"Predicted durations from a data sheet: {', '.join(DEVICES)} [default: cpu, on CUDA a100].",
    )
    calibrate: str | None = Option(
        None,
        rich_help_panel=DURATIONS,
        help="Measure durations on this machine and keep them in this file, in place of --device.",
    )
    time_limit: float | None = time_limit_option()
    step_limit: int | None = STEP_LIMIT
    seed: int = SEED


class _Runs(Options, panel=RUN):
    """The measured runs, and the report."""

    optimizer: OptimizerName = UPDATES
    provider: str | None = Option(None, help=f"One of {', '.join(PROVIDERS)} [default: cuda where available].")
    threads: int | None = THREADS
    runs: int = Option(5, min=1, help="Timed steps of each file.")
    warm_up: int = Option(2, min=0, help="Steps of each file before the timed ones.")
    markdown: bool = MARKDOWN
    json_target: str | None = JSON
    quiet: bool = QUIET


@with_flat_options
def bench_command(model: Model, planning: _Planning, reading: CheckedReading, how: _Runs) -> None:
    """Measure memory and time of the baseline and the planned step.

    The first table is a row of the paper's Table 1.
    """
    read = reading.arguments()
    check_model_file(model)
    for_budgets = {"--order": planning.order, "--step-limit": planning.step_limit}
    check_needs_budget(planning.budget is not None, for_budgets, "--budget, such as --budget 60%")
    if planning.solver == "manual":
        raise PlanError("bench takes checkpoints from a plan only; give --plan in place of --solver manual")
    check_json_target(how.json_target, *model_files(model), planning.plan, planning.calibrate)
    with progress_line() as notify:
        report = bench(
            model,
            **read,
            **planning.values("order"),
            **how.values("markdown", "json_target", "quiet"),
            order=(planning.order or Order.FREE).value,
            check=not reading.no_check,
            progress=notify,
        ).as_json()
    write = writer_to(console_for(how.json_target, is_quiet=how.quiet), markdown=how.markdown)
    for table in (paper_row(report), figures_table(report)):
        write(table)
    for line in (*run_lines(report), *(f"note: {note}" for note in report["notes"])):
        write(line)
    write_json(report, how.json_target)
