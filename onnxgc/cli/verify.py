"""`onnxgc verify`: does a training file keep its promises?"""

from __future__ import annotations

from typing import Annotated

import typer

from onnxgc.api import verify
from onnxgc.cli.arguments import (
    AllAsJson,
    Quiet,
    Threads,
    check_json_target,
    console_for,
    parse_shapes,
    stages,
    write_json,
)
from onnxgc.emission.plan_files import is_plan_file
from onnxgc.errors import VerificationError
from onnxgc.model.files.load import check_model_file, files_of
from onnxgc.report.tables import checks_table, measured_line


def verify_command(
    model: Annotated[str, typer.Argument(help="The forward model that the training file was made from.")],
    training: Annotated[str, typer.Argument(help="The training file, or a plan file.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of inputs and of weights that are drawn anew.")] = 0,
    threads: Threads = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each graph; the last one counts.")] = 1,
    input_shapes: Annotated[
        list[str] | None,
        typer.Option(help="With a plan file: shape of an input, as x:64,3,224,224; repeatable."),
    ] = None,
    loss: Annotated[str, typer.Option(help="With a plan file: as in optimize.")] = "auto",
    json_target: AllAsJson = None,
    quiet: Quiet = False,
) -> None:
    """Loss and gradients equal to the graph that stores everything; order and peak as promised."""
    shapes = parse_shapes(input_shapes or [])
    for file in (model, training):
        check_model_file(file)
    files = (training,) if is_plan_file(training) else files_of(training)
    check_json_target(json_target, *files_of(model), *files)
    console = console_for(json_target, is_quiet=quiet)
    with stages() as tell:
        found = verify(
            model,
            training,
            seed=seed,
            threads=threads,
            runs=runs,
            input_shapes=shapes,
            loss=loss,
            progress=tell,
        )
    result = found.as_json()
    console.print(checks_table(result["checks"]))
    console.print(measured_line(result), markup=False)
    write_json(result, json_target)
    if not found.holds:
        failed = ", ".join(check.name for check in found.checks if not check.holds)
        raise VerificationError(f"'{training}' does not keep its promises: {failed}")
