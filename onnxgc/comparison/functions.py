"""Elementwise functions of one tensor, known by their values where two files spell them apart.

Normal forms know how most exporters write an activation. What they do not know is a function of one number
all the same, whose values say which: two that agree on all samples are one, whatever they are made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxgc.comparison.structure import OfAxis, OfValue, Structure, leaves, rendered
from onnxgc.comparison.translation import number_of
from onnxgc.model.ir import Array, Node, TrainableModel

_INNER = np.linspace(-16.0, 16.0, 641)
# Where one of two spellings may already overflow.
_OUTER = np.concatenate([sign * np.logspace(1.5, 6, 10) for sign in (-1, 1)])
_SAMPLES = np.concatenate([_INNER, _OUTER])
# Exporters round constants to float32; the nearest approximations in use are 30 times as far apart.
_TOLERANCE = 1e-6
_MOST_DEPTH = 64
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _softplus(x: Array) -> Array:
    return np.asarray(np.logaddexp(0.0, x))


def _elu(x: Array, alpha: float, gamma: float = 1.0) -> Array:
    return np.asarray(np.where(x > 0, gamma * x, gamma * alpha * (np.exp(np.minimum(x, 0.0)) - 1)))


def _gelu(x: Array, approximate: Any) -> Array:
    if approximate in ("tanh", b"tanh"):
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))))


Operand = Array | float
_Rule = Callable[[Node, Sequence[Operand]], Array]


def _plain(function: Callable[..., Any]) -> _Rule:
    return lambda node, x: np.asarray(function(*x))


def _folded(function: Callable[[Any, Any], Any]) -> _Rule:
    def rule(node: Node, x: Sequence[Operand]) -> Array:
        result: Any = x[0]
        for operand in x[1:]:
            result = function(result, operand)
        return np.asarray(result)

    return rule


def _with(function: Callable[..., Any], **defaults: float) -> _Rule:
    """A function with attributes behind its operand."""
    return lambda node, x: np.asarray(
        function(x[0], *(float(node.attribute(key, default)) for key, default in defaults.items()))
    )


def _clip(node: Node, x: Sequence[Operand]) -> Array:
    low, high = (*x[1:], -math.inf, math.inf)[:2] if len(x) > 1 else (None, None)
    low = node.attribute("min", -math.inf) if low is None else low
    high = node.attribute("max", math.inf) if high is None or len(x) == 2 else high
    return np.asarray(np.clip(x[0], low, high))


_VALUES: Mapping[str, _Rule] = {
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
    "Clip": _clip,
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


@dataclass(frozen=True, slots=True)
class Function:
    """What a tensor is elementwise of another one, the first of which it is: its values on all samples."""

    of: str
    values: Array


def functions_of(model: TrainableModel) -> dict[str, Function]:
    """The tensors that are a function of one other tensor and of numbers, element by element."""
    found: dict[str, Function] = {}
    with np.errstate(all="ignore"):
        for node in model.nodes:
            function = _function(model, node, found)
            if function is not None:
                found[node.outputs[0]] = function
    return found


def _function(model: TrainableModel, node: Node, known: Mapping[str, Function]) -> Function | None:
    rule = _VALUES.get(node.op)
    if node.op == "Cast" and node.attribute("to") in _FLOATS:
        rule = _plain(lambda x: x)
    if rule is None or node.domain or node.once or not all(node.inputs):
        return None
    operands: list[Operand] = []
    sources: set[str] = set()
    for name in node.inputs:
        number = number_of(model, name)
        if number is not None:
            operands.append(number)
            continue
        if name in model.weights or model.types[name].shape != model.types[node.outputs[0]].shape:
            return None
        if name not in known and not model.types[name].is_floating:
            return None
        function = known.get(name) or Function(name, _SAMPLES)
        operands.append(function.values)
        sources.add(function.of)
    if len(sources) != 1:
        return None
    return Function(sources.pop(), np.asarray(rule(node, operands), np.float64))


def spelled_apart(
    a: tuple[TrainableModel, Structure], b: tuple[TrainableModel, Structure]
) -> tuple[dict[str, tuple[str, int]], dict[str, tuple[str, int]]]:
    """The functions that both models have in different normal forms.

    For each side: the tensors that are one of them, with what they are a function of and a number for the
    function, the same on both sides.
    """
    kinds: list[Array] = []
    sides: list[dict[str, tuple[str, int]]] = []
    forms: list[dict[int, set[Any]]] = []
    for model, structure in (a, b):
        found: dict[str, tuple[str, int]] = {}
        of_kind: dict[int, set[Any]] = {}
        for name, function in functions_of(model).items():
            is_known = {name, function.of} <= structure.views.keys()
            if not is_known or _is_affine(function.values):
                continue
            kind = next((k for k, known in enumerate(kinds) if _agree(known, function.values)), len(kinds))
            if kind == len(kinds):
                kinds.append(function.values)
            found[name] = (function.of, kind)
            of_kind.setdefault(kind, set()).add(_form(structure, name, function.of))
        sides.append(found)
        forms.append(of_kind)
    apart = {kind for kind in forms[0].keys() & forms[1].keys() if forms[0][kind] != forms[1][kind]}
    first, second = ({n: of for n, of in side.items() if of[1] in apart} for side in sides)
    return first, second


def _is_affine(values: Array) -> bool:
    """Whether it is a line, or hardly defined: what scales and shifts is known without values."""
    inner = values[: len(_INNER)]
    if not np.isfinite(inner).all():
        # Roots and logarithms have half of the line.
        return 2 * int(np.isfinite(inner).sum()) < len(inner) - 1
    return bool(np.abs(np.diff(inner, 2)).max() <= 1e-9 * (np.abs(inner).max() or 1.0))


def _agree(one: Array, other: Array) -> bool:
    inner = len(_INNER)
    is_finite, is_other_finite = np.isfinite(one), np.isfinite(other)
    if (is_finite != is_other_finite)[:inner].any():
        return False
    both = is_finite & is_other_finite
    here, there = np.where(both, one, 0.0), np.where(both, other, 0.0)
    return bool((np.abs(here - there) <= _TOLERANCE * (np.abs(here) + np.abs(here[:inner]).max())).all())


def _form(structure: Structure, tensor: str, of: str) -> Any:
    """The normal form of one tensor as of another; what is none of its parts shows as such."""
    start, end = structure.views[of], structure.views[tensor]

    def form(value: int, depth: int) -> Any:
        if value == start.value:
            return "x"
        if value < start.value or depth > _MOST_DEPTH:
            return "other"
        entity = structure.entities[value]
        parts = [leaf for _, leaf in leaves(entity.term)]
        known: dict[int, Any] = {p.axis: "axis" for p in parts if isinstance(p, OfAxis)}
        known |= {p.value: form(p.value, depth + 1) for p in parts if isinstance(p, OfValue)}
        return repr((entity.op, rendered(entity.term, known)))

    return (form(end.value, 0), f"{end.scale:.5g}", f"{start.scale:.5g}")
