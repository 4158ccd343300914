"""A plan made for an ONNX model, followed in PyTorch: what it keeps is kept, segments are computed again."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from onnxgc.budget.operator_problem import OperatorProblem
from onnxgc.errors import PlanError
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.torch.checkpointing import TorchPlan, described
from onnxgc.torch.joint import JointStep

ORIGIN = "onnx"
"""The key under which nodes carry the ONNX node that they belong to, in what tracing copies."""
_CARRIED = "custom"
_SMALL_SHARE = 16
"""By-products so much smaller than the result, such as batch statistics, are kept whatever the plan says."""


def carry(node: fx.Node, origin: Any) -> None:
    """Have what is traced from a node know its origin."""
    node.meta[_CARRIED] = {ORIGIN: origin}


@dataclass(frozen=True, slots=True)
class Follow:
    """Gives the sequence of a plan that was made before."""

    plan: CheckpointPlan

    def __call__(self, step: JointStep) -> tuple[tuple[int, ...], TorchPlan]:
        sequence = sequence_of_plan(step, self.plan)
        return sequence, described(step, sequence)


def sequence_of_plan(step: JointStep, plan: CheckpointPlan) -> tuple[int, ...]:
    """The joint graph's operations under a plan: those of a segment again before backward reads them.

    Raises:
        PlanError: none of the plan's tensors is one of the model's.
    """
    kept = _kept(step, frozenset(map(str, plan.checkpoints)))
    if plan.keeps_last_segment and not plan.sequence:
        kept |= _read_first(step, kept)
    return computed_again(step, kept)


def _kept(step: JointStep, names: frozenset[str]) -> set[int]:
    problem = step.problem
    last = results_by_origin(step)
    known = {name for origin in last for name in origin.outputs}
    if names and not names & known:
        raise PlanError(
            f"the plan keeps '{min(names)}' and the like, none of which is a tensor of this model"
        )
    kept = set(problem.operations[step.turn].reads)
    for index in range(step.turn):
        made = step.nodes[index]
        assert made is not None, "the turn comes behind forward"
        writes = problem.operations[index].writes
        origin = origin_of(made)
        if origin is None or not problem.operations[index].may_repeat:
            kept.update(writes)
            continue
        kept.update(by_products(problem, index))
    for origin, result in last.items():
        if names.intersection(origin.outputs):
            kept.update(step.storages[result])
    return kept


def by_products(problem: OperatorProblem, index: int) -> Iterator[int]:
    """What an operation makes that is much smaller than its result, such as batch statistics."""
    writes = problem.operations[index].writes
    largest = max((problem.sizes[storage] for storage in writes), default=0)
    return (storage for storage in writes if problem.sizes[storage] * _SMALL_SHARE <= largest)


def results_by_origin(step: JointStep) -> dict[Any, fx.Node]:
    """By ONNX node, what of it comes last: its result, where it is one of several operators.

    What backward makes of tensors of forward alone, such as a transposed one, is none.
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
    carried: Mapping[str, Any] = node.meta.get(_CARRIED) or {}
    return carried.get(ORIGIN)


def _read_first(step: JointStep, kept: set[int]) -> set[int]:
    """The storages of the segment that backward reaches first: there is nothing to gain without them."""
    problem = step.problem
    dropped = {storage for index in range(step.turn) for storage in problem.operations[index].writes} - kept
    first = next((storage for storage in _read_in_backward(step) if storage in dropped), None)
    if first is None:
        return set()
    found, waiting = {first}, [first]
    while waiting:
        storage = waiting.pop()
        maker = problem.operations[problem.producer[storage]]
        beside = {*maker.reads, *maker.writes}
        for reader in problem.readers[storage]:
            if reader < step.turn:
                beside.update(problem.operations[reader].writes)
        waiting.extend((beside & dropped) - found)
        found |= beside & dropped
    return found


def _read_in_backward(step: JointStep) -> Iterator[int]:
    for operation in step.problem.operations[step.turn + 1 :]:
        yield from operation.reads


def computed_again(step: JointStep, kept: set[int]) -> tuple[int, ...]:
    """Each operation once, and before one of backward whatever it needs and is not there."""
    problem = step.problem
    there = set(kept)
    sequence = list(range(step.turn + 1))
    for index in range(step.turn + 1, len(problem)):
        again: set[int] = set()
        missing = list(problem.operations[index].reads)
        while missing:
            storage = missing.pop()
            maker = problem.producer[storage]
            if maker < step.turn and storage not in there and maker not in again:
                again.add(maker)
                missing.extend(problem.operations[maker].reads)
        for maker in sorted(again):
            there.update(problem.operations[maker].writes)
        sequence.extend(sorted(again))
        sequence.append(index)
    return tuple(sequence)
