"""What no schedule of a training step goes below: the working set of one operator."""

from __future__ import annotations

from dataclasses import dataclass

from onnxgc.planning.schedule import Operator, StepGraph


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """The least peak that any schedule can have, and the operator that sets it.

    `operator` is empty where it is the step's outputs, which are all held at the end.
    """

    bytes: int
    operator: str


def floor_of(step: StepGraph) -> WorkingSet:
    """The largest working set of an operator, in whatever order and however often operators run.

    While it runs, everything that it reads and writes is in memory, and its workspace. What is fed
    or a parameter counts nothing, views count as what they show, and an operator that works in
    place may write where it reads.
    """
    root: dict[str, str] = {}
    floor = WorkingSet(sum(step.sizes[name] for name in set(step.outputs) - step.resident), "")
    for operator in (*step.forward, *(operator for chunk in step.chunks for operator in chunk)):
        if operator.is_view and operator.outputs[0] not in step.outputs:
            source = operator.inputs[0]
            root[operator.outputs[0]] = root.get(source, source)
        held = _working_set(operator, step, root)
        if held > floor.bytes:
            floor = WorkingSet(held, operator.name)
    return floor


def _working_set(operator: Operator, step: StepGraph, root: dict[str, str]) -> int:
    read = {root.get(name, name) for name in operator.inputs} - step.resident
    # Trailing outputs may be left out where nobody reads them.
    written = {root.get(name, name) for name in operator.outputs[:1]} - read - step.resident
    shared = 0
    if operator.in_place and operator.outputs and operator.outputs[0] not in step.outputs:
        source = root.get(operator.inputs[0], operator.inputs[0])
        if source in read and step.sizes[source] == step.sizes[operator.outputs[0]]:
            shared = step.sizes[source]
    return sum(step.sizes[name] for name in (*read, *written)) - shared + operator.workspace_bytes
