"""`onnxgc inspect`: what is in a model, and what is in the way of training it."""

from __future__ import annotations

from typing import Annotated

import typer

from onnxgc.api import inspect
from onnxgc.cli.arguments import (
    AllAsJson,
    Freeze,
    FreezeBn,
    InputShapes,
    Loss,
    Model,
    Quiet,
    Trainable,
    Untie,
    check_json_target,
    check_talk,
    console_for,
    parse_shapes,
    stages,
    write_json,
)
from onnxgc.model.files.load import files_of
from onnxgc.model.weight_roles.classify import NOT_FLOATING
from onnxgc.report.tables import megabytes, operators_table, weights_table


def inspect_command(
    model: Model,
    loss: Loss = "auto",
    trainable: Trainable = None,
    freeze: Freeze = None,
    freeze_bn: FreezeBn = False,
    untie: Untie = False,
    input_shapes: InputShapes = None,
    json_target: AllAsJson = None,
    quiet: Quiet = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List weights that are no floating-point numbers as well.")
    ] = False,
) -> None:
    """Weights and their roles, operators and their gradient rules, peaks, and what is in the way."""
    check_talk(quiet, verbose)
    shapes = parse_shapes(input_shapes or [])
    check_json_target(json_target, *files_of(model))
    console = console_for(json_target, is_quiet=quiet)
    with stages() as tell:
        tell("inspecting")
        found = inspect(
            model,
            input_shapes=shapes,
            loss=loss,
            trainable=tuple(trainable or ()),
            freeze=tuple(freeze or ()),
            freeze_bn=freeze_bn,
            untie=untie,
        ).as_json()
    # Shapes, axes and indices are no decisions.
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
        console.print(
            f"simulated peak: {megabytes(regular)} storing everything, {megabytes(planned)} or less planned"
        )
    if found["left_to_the_cpu"]:
        listed = ", ".join(f"{name} ({count})" for name, count in found["left_to_the_cpu"].items())
        console.print(f"without a CUDA kernel at opset {found['opset']}: {listed}", markup=False)
    for obstacle in found["obstacles"]:
        console.print(f"in the way: {obstacle}", markup=False)
    write_json(found, json_target)
