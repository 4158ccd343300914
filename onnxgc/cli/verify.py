"""`onnxgc verify`: compares a training file with the baseline."""

from typing import Annotated

from rich.console import Console
from typer import Argument, Option

from onnxgc.api import verify
from onnxgc.cli.arguments import (
    JSON,
    MODEL,
    QUIET,
    RUN,
    THREADS,
    Options,
    check_json_target,
    console_for,
    parse_shapes,
    progress_line,
    with_flat_options,
    write_json,
)
from onnxgc.emission.plan_files import is_plan_file
from onnxgc.errors import VerificationError
from onnxgc.model.files.load import check_model_file, model_files
from onnxgc.report.data.verify_report import VerifyReport
from onnxgc.report.terminal.command_tables import checks_table, measured_line


class _Runs(Options, panel=RUN):
    """How the files run, and the report."""

    seed: int = Option(0, min=0, help="Random seed of inputs and of drawn weights.")
    threads: int | None = THREADS
    runs: int = Option(1, min=1, help="Runs of each graph; the last one counts.")
    input_shapes: list[str] | None = Option(
        None, rich_help_panel=MODEL, help="With a plan file, the shape of an input, such as x:64,3,224,224. Repeatable."
    )
    loss: str = Option("auto", rich_help_panel=MODEL, help="With a plan file, the loss, as in optimize.")
    device_memory: str | None = Option(
        None, rich_help_panel=MODEL, help="All memory of a device that the step must fit, such as 8GiB."
    )
    json_target: str | None = JSON
    quiet: bool = QUIET


@with_flat_options
def verify_command(
    model: Annotated[str, Argument(help="Forward model that the training file was made from.")],
    training: Annotated[str, Argument(help="Training file, or plan file.")],
    how: _Runs,
) -> None:
    """Check a training file against the baseline.

    Loss and gradients must equal the baseline's bit for bit, nodes must run in file order, and the measured
    peak must be the simulated one.
    """
    shapes = parse_shapes(how.input_shapes or [])
    for file in (model, training):
        check_model_file(file)
    files = (training,) if is_plan_file(training) else model_files(training)
    check_json_target(how.json_target, *model_files(model), *files)
    console = console_for(how.json_target, is_quiet=how.quiet)
    with progress_line() as notify:
        checked = verify(
            model, training, **how.values("input_shapes", "json_target", "quiet"), input_shapes=shapes, progress=notify
        )
    result = checked.as_json()
    print_checks(result, console)
    write_json(result, how.json_target)
    if not checked.holds:
        failed = ", ".join(check.name for check in checked.checks if not check.holds)
        raise VerificationError(f"'{training}': verification failed: {failed}")


def print_checks(result: VerifyReport, console: Console) -> None:
    console.print(checks_table(result["checks"]))
    console.print(measured_line(result), markup=False)
