"""Durations of a training step's operators, from a device or a calibration."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from onnxgc.model.core.draft import operator_name, reads_of
from onnxgc.model.core.ir import Array, Node, TensorType, dtype_name
from onnxgc.model.core.node_rewrites import ValueOf
from onnxgc.model.operators.reductions import REDUCTIONS, is_fast_reduction
from onnxgc.model.operators.registry import VIEW_OPERATORS, node_flops
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
    (views, shapes). `slow_bytes` of them are read by a reduction without a fast kernel on CUDA.
    """

    name: str
    origin: str
    kind: str
    dtype: str
    flops: int
    moved_bytes: int
    slow_bytes: int = field(default=0, compare=False)

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
    node = step.nodes[operator.name].with_changes(inputs=operator.inputs, outputs=operator.outputs)

    def constant(name: str) -> Array | None:
        return step.constants.get(name) if name in step.constants else step.model.constant(name)

    return work_of(node, step.types, step.graph.output_set, constant)


def work_of(node: Node, types: Mapping[str, TensorType], outputs: Collection[str], constant: ValueOf) -> Work:
    """The work of a node. `types` has each of its tensors, `outputs` are those of the graph.

    A view moves no data unless it is an output of the graph, which has its own memory.
    """
    written = [name for name in node.outputs if name]
    read = list(reads_of(node))
    sizes = [types[name].size_bytes for name in dict.fromkeys(read)]
    moved, slow = 0, 0
    is_view = node.op in VIEW_OPERATORS and written[0] not in outputs
    if node.op not in _READS_NOTHING and not is_view:
        moved_out = sum(types[name].size_bytes for name in written)
        if node.op in _READS_PART_OF_INPUT:
            sizes[0] = min(sizes[0], moved_out)
        moved = sum(sizes) + moved_out
        if node.op in REDUCTIONS and not is_fast_reduction(node, types[read[0]].shape, constant):
            slow = sizes[0]
    return Work(
        node.name,
        node.origin,
        operator_name(node),
        _element_type([types[name] for name in (*read, *written)]),
        node_flops(node, types),
        moved,
        slow,
    )


def _element_type(kinds: Iterable[TensorType]) -> str:
    """The element type of the largest floating tensor, or without one, of the largest tensor."""
    return dtype_name(max(kinds, key=lambda kind: (kind.is_floating, kind.size_bytes)).dtype)
