"""Operators on numbers and on rows of numbers in float64."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from onnxgc.model.core.ir import Array, Node

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _softplus(x: Array) -> Array:
    return np.asarray(np.logaddexp(0.0, x))


def _elu(x: Array, alpha: float, gamma: float = 1.0) -> Array:
    return np.asarray(np.where(x > 0, gamma * x, gamma * alpha * (np.exp(np.minimum(x, 0.0)) - 1)))


def _gelu(x: Array, approximate: str) -> Array:
    if approximate == "tanh":
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))))


Operand = Array | float
Rule = Callable[[Node, Sequence[Operand]], Array]


def _plain(function: Callable[..., Any]) -> Rule:
    return lambda node, x: np.asarray(function(*x))


def _folded(function: Callable[[Any, Any], Any]) -> Rule:
    return lambda node, x: np.asarray(reduce(function, x))


def _with(function: Callable[..., Any], **defaults: float) -> Rule:
    return lambda node, x: np.asarray(
        function(x[0], *(float(node.attribute(key, default)) for key, default in defaults.items()))
    )


OF_NUMBERS: Mapping[str, Rule] = {
    "Identity": _plain(lambda x: x),
    "Relu": _plain(lambda x: np.maximum(x, 0.0)),
    "Sigmoid": _plain(_sigmoid),
    "Tanh": _plain(np.tanh),
    "Erf": _plain(_erf),
    "Exp": _plain(np.exp),
    "Log": _plain(np.log),
    "Sqrt": _plain(np.sqrt),
    "Reciprocal": _plain(lambda x: 1 / np.asarray(x)),
    "Neg": _plain(np.negative),
    "Abs": _plain(np.abs),
    "Sign": _plain(np.sign),
    "Softplus": _plain(_softplus),
    "Softsign": _plain(lambda x: x / (1 + np.abs(x))),
    "Mish": _plain(lambda x: x * np.tanh(_softplus(x))),
    "Elu": _with(_elu, alpha=1.0),
    "Selu": _with(_elu, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875),
    "Celu": _with(lambda x, alpha: _elu(x / alpha, 1.0) * alpha, alpha=1.0),
    "LeakyRelu": _with(lambda x, alpha: np.where(x < 0, alpha * x, x), alpha=0.01),
    "ThresholdedRelu": _with(lambda x, alpha: np.where(x > alpha, x, 0.0), alpha=1.0),
    "HardSigmoid": _with(lambda x, a, b: np.clip(a * x + b, 0.0, 1.0), alpha=0.2, beta=0.5),
    "HardSwish": _plain(lambda x: x * np.clip(x / 6 + 0.5, 0.0, 1.0)),
    "Swish": _with(lambda x, alpha: x * _sigmoid(alpha * x), alpha=1.0),
    "Gelu": lambda node, x: _gelu(np.asarray(x[0]), node.attribute("approximate", "none")),
    "Clip": _plain(lambda x, low=-math.inf, high=math.inf: np.clip(x, low, high)),
    "Add": _folded(np.add),
    "Sum": _folded(np.add),
    "Sub": _folded(np.subtract),
    "Mul": _folded(np.multiply),
    "Div": _folded(np.divide),
    "Pow": _folded(np.power),
    "Max": _folded(np.maximum),
    "Min": _folded(np.minimum),
    "Where": _plain(np.where),
    "Greater": _plain(np.greater),
    "GreaterOrEqual": _plain(np.greater_equal),
    "Less": _plain(np.less),
    "LessOrEqual": _plain(np.less_equal),
    "And": _plain(np.logical_and),
    "Or": _plain(np.logical_or),
    "Not": _plain(np.logical_not),
}
"""Elementwise operators; operands are numbers, or arrays of one shape."""


def _logsumexp(x: Array) -> Array:
    largest = np.max(x, axis=1, keepdims=True)
    return np.asarray(np.log(np.sum(np.exp(x - largest), axis=1, keepdims=True)) + largest)


def _centred(x: Array) -> Array:
    return np.asarray(x - np.mean(x, axis=1, keepdims=True))


def _lp_normalized(node: Node, x: Array) -> Array:
    order = int(node.attribute("p", 2))
    return np.asarray(x / np.linalg.norm(x, ord=order, axis=1, keepdims=True))


RowRule = Callable[[Node, Array], Array]


def _along(function: Callable[..., Any]) -> RowRule:
    return lambda node, x: np.asarray(function(x, axis=1, keepdims=True))


REDUCTIONS: Mapping[str, RowRule] = {
    "ReduceMean": _along(np.mean),
    "ReduceSum": _along(np.sum),
    "ReduceMax": _along(np.max),
    "ReduceMin": _along(np.min),
    "ReduceProd": _along(np.prod),
    "ReduceSumSquare": lambda node, x: np.sum(np.square(x), axis=1, keepdims=True),
    "ReduceL1": lambda node, x: np.sum(np.abs(x), axis=1, keepdims=True),
    "ReduceL2": lambda node, x: np.sqrt(np.sum(np.square(x), axis=1, keepdims=True)),
    "ReduceLogSum": lambda node, x: np.log(np.sum(x, axis=1, keepdims=True)),
    "ReduceLogSumExp": lambda node, x: _logsumexp(x),
}
"""Operators that reduce [rows, length] to [rows, 1]."""

OF_ROWS: Mapping[str, RowRule] = {
    "Softmax": lambda node, x: np.exp(x - _logsumexp(x)),
    "LogSoftmax": lambda node, x: x - _logsumexp(x),
    "LpNormalization": _lp_normalized,
    "MeanVarianceNormalization": lambda node, x: _centred(x) / (np.std(x, axis=1, keepdims=True) + 1e-9),
}
"""Operators on [rows, length] that keep the shape."""
