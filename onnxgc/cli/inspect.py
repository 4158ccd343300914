"""`onnxgc inspect`: the contents of a model, and the obstacles to training it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from onnxgc.api import inspect
from onnxgc.cli.arguments import (
    REPORT,
    Freeze,
    FreezeBn,
    InputShapes,
    JsonTarget,
    Loss,
    Model,
    Quiet,
    Trainable,
    Untie,
    check_json_target,
    check_verbosity,
    console_for,
    parse_shapes,
    progress_line,
    write_json,
)
from onnxgc.model.files.load import model_files
from onnxgc.model.weight_roles.classify import NOT_FLOATING
from onnxgc.report.terminal.command_tables import operators_table, weights_table
from onnxgc.report.text.units import megabytes


def inspect_command(
    model: Model,
    loss: Loss = "auto",
    trainable: Trainable = None,
    freeze: Freeze = None,
    freeze_bn: FreezeBn = False,
    untie: Untie = False,
    input_shapes: InputShapes = None,
    json_target: JsonTarget = None,
    quiet: Quiet = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", rich_help_panel=REPORT, help="List weights of other than floating types too."
        ),
    ] = False,
) -> None:
    """Show weights, operators, peaks and obstacles to training."""
    check_verbosity(quiet, verbose)
    shapes = parse_shapes(input_shapes or [])
    check_json_target(json_target, *model_files(model))
    with progress_line() as notify:
        notify("inspecting")
        found = inspect(
            model,
            input_shapes=shapes,
            loss=loss,
            trainable=tuple(trainable or ()),
            freeze=tuple(freeze or ()),
            freeze_bn=freeze_bn,
            untie=untie,
        ).as_json()
    _print(found, console_for(json_target, is_quiet=quiet), verbose=verbose)
    write_json(found, json_target)


def _print(found: Mapping[str, Any], console: Console, *, verbose: bool) -> None:
    # Shapes, axes and indices are never candidates for training.
    shown = [weight for weight in found["weights"] if weight["reason"] != NOT_FLOATING]
    console.print(weights_table(found["weights"] if verbose else shown))
    if found["operators"]:
        console.print(operators_table(found["operators"]))
    for note in found["notes"]:
        console.print(f"note: {note}", markup=False)
    for fault in found["runtime_faults"]:
        console.print(f"wrong in a default session: {fault['detail']}", markup=False)
    for name, shape in found["inputs"].items():
        console.print(f"input {name}: {'x'.join(map(str, shape)) or 'scalar'}", markup=False)
    roles = [weight["role"] for weight in shown]
    trained = sum(weight["bytes"] for weight in found["weights"] if weight["role"] == "parameter")
    console.print(
        f"parameters: {roles.count('parameter')} of {len(roles)} float weights, {megabytes(trained)}"
    )
    regular, planned = (found[kind]["simulated_peak_bytes"] for kind in ("regular", "planned"))
    if regular is not None:
        console.print(f"simulated peak: baseline {megabytes(regular)}, planned {megabytes(planned)} or less")
    if found["left_to_the_cpu"]:
        listed = ", ".join(f"{name} ({count})" for name, count in found["left_to_the_cpu"].items())
        console.print(f"without a CUDA kernel at opset {found['opset']}: {listed}", markup=False)
    for obstacle in found["obstacles"]:
        console.print(f"obstacle: {obstacle}", markup=False)
