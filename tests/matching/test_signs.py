"""What has no negative element, and what may have one."""

from __future__ import annotations

import pytest

from onnxgc.matching.normal_form.signs import is_never_negative
from onnxgc.matching.operators.rules import structure_of
from onnxgc.model.read import read_model
from tests.matching.networks import BATCH, CHANNELS, TOKENS, Network
from tests.matching.test_spellings import Part


def _of(op: str, *before: str, **attributes: object) -> Part:
    """An operator of the results of others."""

    def part(net: Network, x: str) -> str:
        return net.node(op, *(net.node(name, x) for name in before), **attributes)

    return part


_NEVER = {
    "Relu": lambda net, x: net.node("Relu", x),
    "Clip": lambda net, x: net.node("Clip", x, net.constant(0.5), net.constant(6)),
    "Softmax": lambda net, x: net.node("Softmax", x),
    "square": lambda net, x: net.node("Mul", x, x),
    "sum": _of("Add", "Relu", "Sigmoid"),
    "product": _of("Mul", "Relu", "Sigmoid"),
    "together": _of("Concat", "Relu", "Sigmoid", axis=1),
    "pooled": _of("AveragePool", "Relu", kernel_shape=[3]),
    "more": lambda net, x: net.node("Add", net.node("Exp", x), net.constant(1)),
}
_MAYBE = {
    "itself": lambda net, x: x,
    "Tanh": lambda net, x: net.node("Tanh", x),
    "Clip": lambda net, x: net.node("Clip", x, net.constant(-1), net.constant(6)),
    "difference": _of("Sub", "Relu", "Sigmoid"),
    "negative": _of("Neg", "Relu"),
    "product": _of("Mul", "Relu", "Cos"),
    "together": _of("Concat", "Relu", "Cos", axis=1),
    "pooled": _of("MaxPool", "Cos", kernel_shape=[3]),
    "limited": lambda net, x: net.node("Clip", net.node("Relu", x), net.constant(-6), net.constant(-3)),
    "less": lambda net, x: net.node("Sub", net.node("Exp", x), net.constant(1)),
}


def _is_never_negative(part: Part) -> bool:
    net = Network()
    name = part(net, net.node("MatMul", "x", net.weight(CHANNELS, CHANNELS)))
    pooled = net.node("ReduceMean", name, net.ints(1, 2), keepdims=0)
    structure = structure_of(read_model(net.model(pooled, (BATCH, TOKENS, CHANNELS), (BATCH,))))
    return is_never_negative(structure, structure.views[name])


@pytest.mark.parametrize("name", _NEVER)
def test_what_is_never_negative_is_known(name: str) -> None:
    assert _is_never_negative(_NEVER[name])


@pytest.mark.parametrize("name", _MAYBE)
def test_what_may_be_negative_is_not_taken_for_it(name: str) -> None:
    assert not _is_never_negative(_MAYBE[name])


def test_a_long_way_back_is_gone() -> None:
    def part(net: Network, x: str) -> str:
        x = net.node("Relu", x)
        for _ in range(1000):
            x = net.node("Mul", x, net.node("Sigmoid", x))
        return x

    assert _is_never_negative(part)
