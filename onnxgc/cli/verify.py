"""`onnxgc verify`: compares a training file with the baseline."""

from __future__ import annotations

from typing import Annotated

import typer

from onnxgc.api import verify
from onnxgc.cli.arguments import (
    MODEL,
    RUN,
    JsonTarget,
    Quiet,
    Threads,
    check_json_target,
    console_for,
    parse_shapes,
    progress_line,
    write_json,
)
from onnxgc.emission.plan_files import is_plan_file
from onnxgc.errors import VerificationError
from onnxgc.model.files.load import check_model_file, model_files
from onnxgc.report.terminal.command_tables import checks_table, measured_line


def verify_command(
    model: Annotated[str, typer.Argument(help="Forward model that the training file was made from.")],
    training: Annotated[str, typer.Argument(help="Training file, or plan file.")],
    seed: Annotated[
        int,
        typer.Option(min=0, rich_help_panel=RUN, help="Random seed of inputs and of drawn weights."),
    ] = 0,
    threads: Threads = None,
    runs: Annotated[
        int, typer.Option(min=1, rich_help_panel=RUN, help="Runs of each graph; the last one counts.")
    ] = 1,
    input_shapes: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=MODEL,
            help="With a plan file, the shape of an input, such as x:64,3,224,224. Repeatable.",
        ),
    ] = None,
    loss: Annotated[
        str, typer.Option(rich_help_panel=MODEL, help="With a plan file, the loss, as in optimize.")
    ] = "auto",
    json_target: JsonTarget = None,
    quiet: Quiet = False,
) -> None:
    """Check a training file against the baseline.

    Loss and gradients must equal the baseline's bit for bit, nodes must run in file order, and the measured
    peak must be the simulated one.
    """
    shapes = parse_shapes(input_shapes or [])
    for file in (model, training):
        check_model_file(file)
    files = (training,) if is_plan_file(training) else model_files(training)
    check_json_target(json_target, *model_files(model), *files)
    console = console_for(json_target, is_quiet=quiet)
    with progress_line() as notify:
        found = verify(
            model,
            training,
            seed=seed,
            threads=threads,
            runs=runs,
            input_shapes=shapes,
            loss=loss,
            progress=notify,
        )
    result = found.as_json()
    console.print(checks_table(result["checks"]))
    console.print(measured_line(result), markup=False)
    write_json(result, json_target)
    if not found.holds:
        failed = ", ".join(check.name for check in found.checks if not check.holds)
        raise VerificationError(f"'{training}': verification failed: {failed}")
