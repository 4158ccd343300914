"""Durations of a training step's operators, from a device or a calibration."""

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
# Operators that read no more of their first input than they write.
_READS_PART_OF_INPUT = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one run of an operator, on which its duration depends.

    `origin` of a forward operator is its node in the source model; of a backward operator, the forward
    operator that it differentiates. `dtype` is the numpy name of the element type of its largest tensor.
    `moved_bytes` are bytes read and written; zero, and no duration, for operators that access no contents
    (views, shapes).
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
    """A source of durations: a device or a calibration."""

    def duration_ns(self, work: Work) -> int:
        """Nanoseconds of one run."""
        ...


def durations_ns(step: TrainingStep, timing: Timing) -> dict[str, int]:
    """Nanoseconds of every operator of a training step, forward and backward, by name.

    Names of backward operators are valid for the forward order of this step only.
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
    """The element type of the largest floating tensor, or without one, of the largest tensor."""
    touched = (*operator.inputs, *operator.outputs)
    largest = max(touched, key=lambda name: (types[name].is_floating, types[name].size_bytes))
    return dtype_name(types[largest].dtype)


def _moved_bytes(operator: Operator, op: str, step: TrainingStep) -> int:
    """Bytes of the distinct tensors that are read, and of those that are written.

    A view moves no data unless it is an output of the step, which has its own memory.
    """
    if op in _READS_NOTHING or (operator.is_view and operator.outputs[0] not in step.graph.outputs):
        return 0
    written = sum(step.types[name].size_bytes for name in operator.outputs)
    read = [step.types[name].size_bytes for name in dict.fromkeys(operator.inputs)]
    if op in _READS_PART_OF_INPUT:
        read[0] = min(read[0], written)
    return sum(read) + written
