"""How long each operator of a training step takes, by whatever tells it: a device or a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from onnxgc.model.core.draft import operator_name
from onnxgc.model.core.ir import TensorType, dtype_name
from onnxgc.planning.schedule import Operator
from onnxgc.tracing.step_graph import TrainingStep

_READS_NOTHING = frozenset({"Shape", "Size"})
# Of their first input, these read no more than they write.
_READS_A_PART = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})


@dataclass(frozen=True, slots=True)
class Work:
    """What one run of an operator does, as far as its duration depends on it.

    `origin` is the node of the source model that a forward operator stands for, and the forward
    operator that a backward operator differentiates. `dtype` is the numpy name of the element type of
    most of what it touches. `moved_bytes` are read and written; an operator that touches no contents
    (a view, a shape) has none, and no duration.
    """

    name: str
    origin: str
    kind: str
    dtype: str
    flops: int
    moved_bytes: int

    @property
    def is_free(self) -> bool:
        return self.moved_bytes == 0


class Timing(Protocol):
    """Something that says how long an operator takes."""

    def duration_ns(self, work: Work) -> int:
        """Nanoseconds of one run."""
        ...


def durations_ns(step: TrainingStep, timing: Timing) -> dict[str, int]:
    """Nanoseconds of every operator of a training step, forward and backward, by name.

    Names of backward operators belong to the order of forward that the step was traced in.
    """
    return {work.name: timing.duration_ns(work) for work in (*forward_works(step), *backward_works(step))}


def forward_works(step: TrainingStep) -> tuple[Work, ...]:
    """The work of each forward operator, in order."""
    return tuple(_work(operator, step) for operator in step.graph.forward)


def backward_works(step: TrainingStep) -> tuple[Work, ...]:
    """The work of each operator of the backward chunks, in order."""
    return tuple(_work(operator, step) for operator in chain.from_iterable(step.graph.chunks))


def _work(operator: Operator, step: TrainingStep) -> Work:
    node = step.nodes[operator.name]
    return Work(
        operator.name,
        node.origin,
        operator_name(node),
        _element_type(operator, step.types),
        operator.flops,
        _moved_bytes(operator, node.op, step),
    )


def _element_type(operator: Operator, types: Mapping[str, TensorType]) -> str:
    """That of the largest floating tensor; where there is none, of the largest tensor."""
    touched = (*operator.inputs, *operator.outputs)
    largest = max(touched, key=lambda name: (types[name].is_floating, types[name].size_bytes))
    return dtype_name(types[largest].dtype)


def _moved_bytes(operator: Operator, op: str, step: TrainingStep) -> int:
    """Bytes of the distinct tensors that are read, and of those that are written.

    A view moves nothing, unless it is an output of the step, which has memory of its own.
    """
    if op in _READS_NOTHING or (operator.is_view and operator.outputs[0] not in step.graph.outputs):
        return 0
    written = sum(step.types[name].size_bytes for name in operator.outputs)
    read = [step.types[name].size_bytes for name in dict.fromkeys(operator.inputs)]
    if op in _READS_A_PART:
        read[0] = min(read[0], written)
    return sum(read) + written
