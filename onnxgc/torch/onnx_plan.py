"""A plan of an ONNX model applied in PyTorch: its tensors are kept, and its segments recomputed."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from onnxgc.budget.operator_problem import OperatorProblem
from onnxgc.errors import PlanError
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.torch.joint_problem import JointStep

ORIGIN = "onnx"
"""Key of the ONNX node in the metadata that tracing copies."""
_COPIED = "custom"
_BY_PRODUCT_RATIO = 16
"""Results at most this fraction of an operator's largest one, such as batch statistics, are always kept."""


def set_origin(node: fx.Node, origin: Any) -> None:
    """Gives operators traced from a node its origin."""
    node.meta[_COPIED] = {ORIGIN: origin}


@dataclass(frozen=True, slots=True)
class PlanFollower:
    """Applies an existing plan."""

    plan: CheckpointPlan

    def __call__(
        self, step: JointStep, available_bytes: int, alike: Sequence[tuple[int, ...]] = ()
    ) -> tuple[tuple[int, ...], int]:
        """Segments are recomputed before backward reads them.

        Raises:
            PlanError: the model has none of the plan's tensors.
        """
        kept = _kept(step, frozenset(map(str, self.plan.checkpoints)))
        if self.plan.keeps_last_segment and not self.plan.sequence:
            kept |= _first_segment_read(step, kept)
        return sequence_keeping(step, kept), 0


def _kept(step: JointStep, names: frozenset[str]) -> set[int]:
    problem = step.problem
    last = results_by_origin(step)
    known = {name for origin in last for name in origin.outputs}
    if names and not names & known:
        raise PlanError(
            f"the plan keeps tensors that this model does not have, such as '{min(names)}'; give a plan of this model"
        )
    kept = set(problem.operators[step.boundary].reads)
    for index in range(step.boundary):
        node = step.nodes[index]
        assert node is not None, "forward precedes the boundary"
        operation = problem.operators[index]
        is_kept = origin_of(node) is None or not operation.may_repeat
        kept.update(operation.writes if is_kept else by_products(problem, index))
    for origin, result in last.items():
        if names.intersection(origin.outputs):
            kept.update(step.storages[result])
    return kept


def by_products(problem: OperatorProblem, index: int) -> Iterator[int]:
    """Storages that are much smaller than an operator's largest one, such as batch statistics."""
    writes = problem.operators[index].writes
    largest = max((problem.sizes[storage] for storage in writes), default=0)
    return (storage for storage in writes if problem.sizes[storage] * _BY_PRODUCT_RATIO <= largest)


def results_by_origin(step: JointStep) -> dict[Any, fx.Node]:
    """The last traced operator of each ONNX node in forward: the one with the node's result.

    Operators that only backward needs, such as the transposition of a weight, do not count.
    """
    forward: set[fx.Node] = set()
    waiting = [node for node in step.forward_outputs if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in forward:
            forward.add(node)
            waiting.extend(node.all_input_nodes)
    last: dict[Any, fx.Node] = {}
    for node in step.storages:
        origin = origin_of(node) if node in forward else None
        if origin is not None and node.target is not operator.getitem:
            last[origin] = node
    return last


def origin_of(node: fx.Node) -> Any:
    """The ONNX node that a traced operator belongs to, or None."""
    copied: Mapping[str, Any] = node.meta.get(_COPIED) or {}
    return copied.get(ORIGIN)


def _first_segment_read(step: JointStep, kept: set[int]) -> set[int]:
    """The storages of the segment that backward reads first: discarding them would not lower the peak."""
    problem = step.problem
    discarded = {storage for index in range(step.boundary) for storage in problem.operators[index].writes} - kept
    backward = problem.operators[step.boundary + 1 :]
    first = next((storage for each in backward for storage in each.reads if storage in discarded), None)
    if first is None:
        return set()
    segment, waiting = {first}, [first]
    while waiting:
        storage = waiting.pop()
        maker = problem.operators[problem.producer[storage]]
        adjacent = {*maker.reads, *maker.writes}
        for reader in problem.readers[storage]:
            if reader < step.boundary:
                adjacent.update(problem.operators[reader].writes)
        waiting.extend((adjacent & discarded) - segment)
        segment |= adjacent & discarded
    return segment


def sequence_keeping(step: JointStep, kept: set[int]) -> tuple[int, ...]:
    """Forward, then backward with each operator after the recomputation of discarded inputs."""
    problem = step.problem
    live = set(kept)
    sequence = list(range(step.boundary + 1))
    for index in range(step.boundary + 1, len(problem)):
        recomputed: set[int] = set()
        missing = list(problem.operators[index].reads)
        while missing:
            storage = missing.pop()
            maker = problem.producer[storage]
            if maker < step.boundary and storage not in live and maker not in recomputed:
                recomputed.add(maker)
                missing.extend(problem.operators[maker].reads)
        for maker in sorted(recomputed):
            live.update(problem.operators[maker].writes)
        sequence.extend(sorted(recomputed))
        sequence.append(index)
    return tuple(sequence)
