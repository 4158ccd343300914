"""Facts about reductions and positions of extremes."""

from __future__ import annotations

from collections.abc import Mapping

from onnxgc.model.core.ir import Node
from onnxgc.model.core.node_rewrites import ValueOf
from onnxgc.model.operators.facts import OperatorFacts, Place, all_but_named_axis


def reduced_axes(node: Node, rank: int, value_of: ValueOf) -> frozenset[int]:
    """The axes that a reduction goes over."""
    axes = node.attribute("axes")
    if axes is None and len(node.inputs) > 1 and node.inputs[1]:
        value = value_of(node.inputs[1])
        axes = None if value is None else value.reshape(-1).tolist()
    if not axes:
        return frozenset() if node.attribute("noop_with_empty_axes", 0) else frozenset(range(rank))
    return frozenset(int(axis) % max(rank, 1) for axis in axes)


def _independent_reduction(place: Place) -> bool:
    """A mean of everything is the same in any order."""
    axes = reduced_axes(place.node, place.rank, place.value_of)
    return place.axis not in axes or (place.node.op == "ReduceMean" and len(axes) == place.rank)


FACTS: Mapping[str, OperatorFacts] = {
    "ArgMax": OperatorFacts(independent=all_but_named_axis(0, 0), has_gradient=False),
    "ArgMin": OperatorFacts(independent=all_but_named_axis(0, 0), has_gradient=False),
    "ReduceL1": OperatorFacts(independent=_independent_reduction),
    "ReduceL2": OperatorFacts(flops=2, independent=_independent_reduction),
    "ReduceLogSum": OperatorFacts(independent=_independent_reduction),
    "ReduceLogSumExp": OperatorFacts(flops=6, independent=_independent_reduction),
    "ReduceMax": OperatorFacts(independent=_independent_reduction),
    "ReduceMean": OperatorFacts(independent=_independent_reduction),
    "ReduceMin": OperatorFacts(independent=_independent_reduction),
    "ReduceProd": OperatorFacts(independent=_independent_reduction),
    "ReduceSum": OperatorFacts(independent=_independent_reduction),
    "ReduceSumSquare": OperatorFacts(flops=2, independent=_independent_reduction),
    "TopK": OperatorFacts(independent=all_but_named_axis(-1, 0)),
}

REDUCTIONS = frozenset(op for op in FACTS if op.startswith("Reduce"))
SUMS = REDUCTIONS - {"ReduceMax", "ReduceMean", "ReduceMin"}
"""Reductions whose result grows with the number of elements."""
