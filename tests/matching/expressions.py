"""Networks as Python expressions: `x * (x + 3).Clip(0, 6) / 6`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import numpy_helper

from tests.matching.networks import Network


@dataclass(frozen=True, slots=True, eq=False)
class Expr:
    """A tensor of a network. Its methods are the operators of ONNX, which add nodes.

    Operands are tensors, numbers (float32), sequences (int64), arrays (by a Constant node), or names.
    """

    net: Network
    name: str

    def __getattr__(self, op: str) -> Callable[..., Expr]:
        if not op[0].isupper():
            raise AttributeError(op)
        return lambda *operands, **attributes: apply(self.net, op, self, *operands, **attributes)

    def __add__(self, other: Operand) -> Expr:
        return self.Add(other)

    def __radd__(self, other: Operand) -> Expr:
        return apply(self.net, "Add", other, self)

    def __sub__(self, other: Operand) -> Expr:
        return self.Sub(other)

    def __rsub__(self, other: Operand) -> Expr:
        return apply(self.net, "Sub", other, self)

    def __mul__(self, other: Operand) -> Expr:
        return self.Mul(other)

    def __truediv__(self, other: Operand) -> Expr:
        return self.Div(other)

    def __rtruediv__(self, other: Operand) -> Expr:
        return apply(self.net, "Div", other, self)

    def __matmul__(self, other: Operand) -> Expr:
        return self.MatMul(other)

    def weight(self, *shape: int) -> Expr:
        """A new parameter of the network."""
        return Expr(self.net, self.net.weight(*shape))

    def stored(self, *shape: int, seed: int = 0) -> Expr:
        """A new parameter. All parameters of one seed and size have the same elements."""
        return self.parameter(np.random.default_rng(seed).standard_normal(shape))

    def parameter(self, values: np.ndarray) -> Expr:
        """A new parameter with these elements."""
        name = f"w{len(self.net.weights)}"
        self.net.weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return Expr(self.net, name)


Operand = Expr | float | Sequence[int] | np.ndarray | str
Part = Callable[[Expr], Expr]


def apply(net: Network, op: str, *operands: Operand, **attributes: Any) -> Expr:
    return Expr(net, net.node(op, *(_name(net, operand) for operand in operands), **attributes))


def _name(net: Network, operand: Operand) -> str:
    match operand:
        case Expr():
            return operand.name
        case str():
            return operand
        case np.ndarray():
            return net.node("Constant", value=numpy_helper.from_array(operand))
        case int() | float():
            return net.constant(operand)
    return net.ints(*operand)
