"""Facts about arithmetic, comparisons, logic and elementary functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np

from onnxgc.model.core.ir import Node
from onnxgc.model.operators.facts import OperatorFacts, Place, Settings, Types, itemsize, pointwise


def _sum_workspace(node: Node, types: Types) -> int:
    """Each partial sum is live until the next is computed; the last is the output."""
    y = types[node.outputs[0]]
    shapes = itertools.accumulate((types[name].shape for name in node.inputs), np.broadcast_shapes)
    sizes = [math.prod(shape) * itemsize(y) for shape in shapes][1:]
    return max(map(sum, itertools.pairwise(sizes)), default=y.size_bytes) - y.size_bytes


def _where_workspace(node: Node, types: Types) -> int:
    """Two temporaries: each operand masked by the condition, in their broadcast shape."""
    condition, *operands = (types[name] for name in node.inputs)
    shapes = (np.broadcast_shapes(condition.shape, operand.shape) for operand in operands)
    return sum(math.prod(shape) for shape in shapes) * itemsize(types[node.outputs[0]])


def _independent_cumulative(place: Place) -> bool:
    axis = place.value_of(place.node.inputs[1])
    return place.index == 0 and axis is not None and place.axis != int(axis.reshape(-1)[0]) % place.rank


FACTS: Mapping[str, OperatorFacts] = {
    "Abs": pointwise(passes_weights=True),
    "Acos": pointwise(4),
    "Acosh": pointwise(8),
    "Add": pointwise(operands=(0, 1)),
    "And": pointwise(),
    "Asin": pointwise(4),
    "Asinh": pointwise(8),
    "Atan": pointwise(4),
    "Atanh": pointwise(6),
    "BitShift": pointwise(),
    "BitwiseAnd": pointwise(),
    "BitwiseNot": pointwise(),
    "BitwiseOr": pointwise(),
    "BitwiseXor": pointwise(),
    "Cast": pointwise(0, passes_weights=True),
    "CastLike": pointwise(0, settings=Settings((1,), "determines only the type"), passes_weights=True),
    "Ceil": pointwise(has_gradient=False),
    "Clip": pointwise(runs_in_place=True, settings=Settings((1, 2), "limit")),
    "Cos": pointwise(4),
    "Cosh": pointwise(6),
    "CumSum": OperatorFacts(independent=_independent_cumulative),
    "Div": pointwise(operands=(0, 1)),
    "Equal": pointwise(has_gradient=False),
    "Erf": pointwise(8),
    "Exp": pointwise(4, passes_weights=True),
    "Floor": pointwise(has_gradient=False),
    "Greater": pointwise(has_gradient=False),
    "GreaterOrEqual": pointwise(has_gradient=False),
    "IsInf": pointwise(has_gradient=False),
    "IsNaN": pointwise(has_gradient=False),
    "Less": pointwise(has_gradient=False),
    "LessOrEqual": pointwise(has_gradient=False),
    "Log": pointwise(4, passes_weights=True),
    "Max": pointwise(workspace=_sum_workspace, workspace_first=True, operands=tuple(range(64))),
    "Mean": pointwise(operands=tuple(range(64))),
    "Min": pointwise(workspace=_sum_workspace, workspace_first=True, operands=tuple(range(64))),
    "Mod": pointwise(3, settings=Settings((1,), "divisor")),
    "Mul": pointwise(operands=(0, 1)),
    "Neg": pointwise(passes_weights=True),
    "Not": pointwise(),
    "Or": pointwise(),
    "Pow": pointwise(4, operands=(0, 1)),
    "Reciprocal": pointwise(passes_weights=True),
    "Round": pointwise(has_gradient=False),
    "Sign": pointwise(has_gradient=False),
    "Sin": pointwise(4),
    "Sinh": pointwise(6),
    "Sqrt": pointwise(2, passes_weights=True),
    "Sub": pointwise(operands=(0, 1)),
    "Sum": pointwise(workspace=_sum_workspace, workspace_first=True, operands=tuple(range(64))),
    "Tan": pointwise(4),
    "Where": pointwise(workspace=_where_workspace, workspace_first=True, operands=(1, 2)),
    "Xor": pointwise(),
}
