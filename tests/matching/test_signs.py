from collections.abc import Mapping

import pytest

from onnxgc.matching.normal_form.signs import is_never_negative
from onnxgc.matching.operators.registry import structure_of
from onnxgc.model.read import read_model
from tests.matching.networks import BATCH, CHANNELS, SEQUENCE, Expr, Part, start

_NEVER: Mapping[str, Part] = {
    "Relu": lambda x: x.Relu(),
    "Clip": lambda x: x.Clip(0.5, 6),
    "Softmax": lambda x: x.Softmax(),
    "square": lambda x: x * x,
    "sum": lambda x: x.Relu() + x.Sigmoid(),
    "concatenation": lambda x: x.Relu().Concat(x.Sigmoid(), axis=1),
    "pool": lambda x: x.Relu().AveragePool(kernel_shape=[3]),
    "plus a number": lambda x: x.Exp() + 1,
}
_MAYBE: Mapping[str, Part] = {
    "Clip": lambda x: x.Clip(-1, 6),
    "difference": lambda x: x.Relu() - x.Sigmoid(),
    "negation": lambda x: x.Relu().Neg(),
    "concatenation": lambda x: x.Relu().Concat(x.Cos(), axis=1),
    "pool": lambda x: x.Cos().MaxPool(kernel_shape=[3]),
    "negative limits": lambda x: x.Relu().Clip(-6, -3),
    "less a number": lambda x: x.Exp() - 1,
}


def _is_never_negative(part: Part) -> bool:
    x = start()
    y = part(x @ x.weight(CHANNELS, CHANNELS))
    pooled = y.ReduceMean([1, 2], keepdims=0)
    structure = structure_of(read_model(y.net.model(pooled.name, SEQUENCE, (BATCH,))))
    return is_never_negative(structure, structure.views[y.name])


@pytest.mark.parametrize("name", _NEVER)
def test_a_value_is_never_negative(name: str):
    assert _is_never_negative(_NEVER[name])


@pytest.mark.parametrize("name", _MAYBE)
def test_a_value_may_be_negative(name: str):
    assert not _is_never_negative(_MAYBE[name])


def test_a_proof_may_be_long():
    def part(x: Expr) -> Expr:
        x = x.Relu()
        for _ in range(1000):
            x = x * x.Sigmoid()
        return x

    assert _is_never_negative(part)
