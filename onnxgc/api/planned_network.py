"""A file of a network with its own plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from onnxgc.api.planned_step import PlannedStep, schedule_solution, trace_problem
from onnxgc.api.read_options import ReadOptions, read_with_options
from onnxgc.api.step_planning import traced_step_with_plan
from onnxgc.errors import ShapeError
from onnxgc.model.core.ir import TrainableModel
from onnxgc.model.files.load import load_proto
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.registry import solver_for

Shapes = Mapping[str, tuple[int, ...]]
Source = str | os.PathLike[str] | onnx.ModelProto


@dataclass(frozen=True, slots=True)
class Network:
    """A file with its own plan; `note` reports if it was read with another batch size."""

    name: str
    model: TrainableModel
    planned: PlannedStep
    note: str = ""

    def batch(self) -> int:
        return batch_size(self.model)


def shapes_for(source: Source, name: str, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shapes of inputs that the model has.

    Raises:
        ShapeError: it has none of the inputs.
    """
    if not shapes:
        return {}
    found = _named_here(source, shapes)
    if not found:
        inputs = [value.name for value in load_proto(source)[0].graph.input]
        raise ShapeError(
            f"--input-shapes names {', '.join(map(repr, shapes))}, but the inputs of '{name}' are "
            f"{', '.join(map(repr, inputs[:5]))}; repeat the option with one of these"
        )
    return found


def _named_here(source: Source, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    inputs = {value.name for value in load_proto(source)[0].graph.input} if shapes else set()
    return {given: shape for given, shape in shapes.items() if given in inputs}


def planned_network(
    name: str,
    source: Source,
    read: ReadOptions,
    shapes: Shapes,
    options: SolverOptions,
    first: Network | None = None,
    plan: CheckpointPlan | None = None,
) -> Network:
    """A file with `plan`, or with a plan of the lowest peak found.

    Unless `shapes` contains its inputs, it is read with the batch size of the `first` file.

    Raises:
        ShapeError: it cannot be read with that batch size.
        PlanError: the plan contains a name that is not a tensor of the file.
    """
    own = shapes_for(source, name, shapes) if first is None else _named_here(source, shapes)
    model, note = read_with_options(source, read, own), ""
    if first is not None and not own and _differs_in_batch_only(first.model, model):
        batch, here = first.batch(), batch_size(model)
        wanted = {
            key: (batch, *model.types[key].shape[1:])
            for key in model.inputs
            if model.types[key].shape[:1] == (here,)
        }
        note = f"read with batch size {batch}, like '{first.name}', instead of {here}"
        try:
            model = read_with_options(source, read, wanted)
        except ShapeError as error:
            raise ShapeError(
                f"'{name}' has batch size {here} and cannot be read with {batch}, that of '{first.name}': "
                f"{error}"
            ) from error
    traced = trace_problem(model)
    if plan is not None:
        return Network(name, model, traced_step_with_plan(model, traced, plan), note)
    solution = solver_for(None).solve(traced.problem, options)
    return Network(name, model, schedule_solution(model, traced, solution), note)


def batch_size(model: TrainableModel) -> int:
    """The first dimension of the first input, or 1."""
    return next(iter(model.types[model.inputs[0]].shape), 1)


def _differs_in_batch_only(one: TrainableModel, other: TrainableModel) -> bool:
    samples = [sorted(sorted(model.types[name].shape[1:]) for name in model.inputs) for model in (one, other)]
    return samples[0] == samples[1] and batch_size(one) != batch_size(other)
