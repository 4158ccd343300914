from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onnxgc.model.core.ir import Array
from tests.gradients.gradient_case import Case, Draw, call, case, normal, operator, positive


@dataclass(frozen=True, slots=True)
class Given(Draw):
    """An operand of given values, such as ties and zeros."""

    values: tuple[float, ...] = ()

    def value(self, *key: str) -> Array:
        return np.asarray(self.values, self.dtype).reshape(self.shape)


def given(shape: tuple[int, ...], *values: float) -> Given:
    return Given(shape, values=values)


_CUBE = (2, 3, 4)
_KINDS = (
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"),
    *("ReduceSum", "ReduceSumSquare"),
)


def _drawn(rule: str, *shape: int) -> Draw:
    return positive(*shape) if rule in ("ReduceLogSum", "ReduceProd") else normal(*shape)


def _reduced(rule: str, name: str, attributes: str, *shape: int, **settings: Any) -> Case:
    return call(rule, name, attributes, x=_drawn(rule, *(shape or _CUBE)), **settings)


def _settings(rule: str) -> tuple[Case, ...]:
    """All forms of axes and keepdims; a scalar result is multiplied by a vector to be an output."""
    return (
        _reduced(rule, "one axis", "", axes=[1]),
        _reduced(rule, "one axis, dropped", "keepdims=0", axes=[1]),
        _reduced(rule, "last axis, negative", "keepdims=0", axes=[-1]),
        _reduced(rule, "two axes in disorder", "", 2, 3, 4, 2, axes=[-1, 1]),
        _reduced(rule, "two axes, dropped", "keepdims=0", 2, 3, 4, 2, axes=[0, 2]),
        _reduced(rule, "all axes by an empty list", "", 2, 3, axes=[]),
        _reduced(rule, "axis of one, dropped", "keepdims=0", 2, 1, 3, axes=[1]),
        case(
            rule,
            "all axes, dropped",
            f"s = {rule}<keepdims=0>(x) y = Mul(s, w)",
            x=_drawn(rule, 2, 3),
            w=(2,),
            frozen=("w",),
        ),
        _reduced(rule, "axes as attribute, opset 11", "axes=[-2], keepdims=0", opset=11),
        case(
            rule,
            "no axes",
            f"y = {rule}<noop_with_empty_axes=1>(x)",
            x=_drawn(rule, 2, 3),
            formula=lambda o: _ELEMENTWISE.get(rule, lambda x: x)(o["x"]),
        ),
    )


_ELEMENTWISE = {
    "ReduceL1": torch.abs,
    "ReduceL2": torch.abs,
    "ReduceLogSum": torch.log,
    "ReduceSumSquare": torch.square,
}


def _with_given(rule: str, name: str, values: Given, axes: list[int], *, smooth: bool = False) -> Case:
    return case(
        rule,
        name,
        f"r = {rule}<keepdims=0>(p, axes) y = Add(x, r)",
        x=normal(2, *(size for axis, size in enumerate(values.shape) if axis not in axes)),
        p=values,
        axes=axes,
        smooth=smooth,
    )


_TIED = given((2, 4), 3.0, 1.0, 3.0, 3.0, -1.0, -2.0, -2.0, -1.0)
_ALL_EQUAL = given((2, 3), 1.5, 1.5, 1.5, 0.0, 0.0, 0.0)
_ONE_ZERO = given((3, 2), 2.0, -1.5, 0.0, 3.0, 0.5, 2.0)
_NEGATIVE = given((2, 3), -2.0, 3.0, -1.5, -1.0, -1.0, -0.5)
_ZEROS = given((4, 3), 2.0, -3.0, 0.5, 2.0, 0.0, 4.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0)


def _softmaxes(rule: str) -> tuple[Case, ...]:
    function = torch.softmax if rule == "Softmax" else torch.log_softmax

    def weighted(name: str, attributes: str, *shape: int, opset: int = 18) -> Case:
        body = f"u = {operator(rule, attributes)}(x) y = Mul(u, w)"
        return case(rule, name, body, x=shape, w=shape, opset=opset)

    return (
        call(rule, "plain", x=_CUBE),
        *(weighted(f"axis {axis} of five", f"axis={axis}", 2, 3, 2, 4, 2) for axis in (0, 1, -2, 4)),
        weighted("weighed vector", "", 5),
        case(
            rule,
            "large scores",
            f"s = Mul(x, big) u = {rule}(s) y = Mul(u, w)",
            x=(3, 5),
            w=(3, 5),
            big=60.0,
            formula=lambda o: function(o["x"] * 60.0, -1) * o["w"],
        ),
        # Up to opset 12, all axes from `axis` on count as one.
        *(
            weighted(f"opset {opset}, axis {axis}", f"axis={axis}", *_CUBE, opset=opset)
            for opset, axis in ((9, 1), (11, 0), (11, 2), (12, -1))
        ),
        weighted("opset 11, default axis", "", *_CUBE, opset=11),
    )


# The last row of logits is masked entirely.
_MASKED = np.where(np.arange(12).reshape(3, 4) < 8, 0, -np.inf).astype(np.float32)


def _zeros_for_nan(operands: Mapping[str, Tensor]) -> Tensor:
    rows = torch.softmax(operands["x"][:2], -1)
    return torch.cat([rows, torch.zeros_like(operands["x"][2:])]) * operands["w"]


REDUCTION_CASES = (
    case(
        "Softmax.masked",
        "a row without any logit",
        "m = Add(x, mask) s = Softmax(m) n = IsNaN(s) z = Where(n, zero, s) y = Mul(z, w)",
        x=(3, 4),
        w=(3, 4),
        mask=_MASKED,
        zero=0.0,
        formula=_zeros_for_nan,
    ),
    case(
        "Softmax.masked",
        "replaced by a condition of its own, behind casts",
        """m = Add(x, mask) s = Softmax(m) d = Cast<to=11>(s)
        z = Where(rows, nothing, d) f = Cast<to=1>(z) y = Mul(f, w)""",
        x=(3, 4),
        w=(3, 4),
        mask=_MASKED,
        rows=np.asarray([[False], [False], [True]]),
        nothing=np.zeros((), np.float64),
        formula=_zeros_for_nan,
    ),
    case(
        "Softmax.masked",
        "first axis",
        "s = Softmax<axis=0>(x) n = IsNaN(s) z = Where(n, zero, s) y = Mul(z, w)",
        x=(3, 4),
        w=(3, 4),
        zero=0.0,
        formula=lambda o: torch.softmax(o["x"], 0) * o["w"],
    ),
    *(entry for rule in _KINDS for entry in _settings(rule)),
    *(
        _with_given(rule, name, values, [1])
        for rule in ("ReduceMax", "ReduceMin")
        for name, values in (("ties", _TIED), ("all equal", _ALL_EQUAL))
    ),
    _with_given("ReduceMax", "ties over all axes", _TIED, [0, 1]),
    _with_given("ReduceL1", "zeros", _ZEROS, [1]),
    _with_given("ReduceL2", "a zero vector", _ZEROS, [1]),
    _with_given("ReduceSumSquare", "zeros", _ZEROS, [1], smooth=True),
    _with_given("ReduceProd", "none, one, two and only zeros", _ZEROS, [1], smooth=True),
    _with_given("ReduceProd", "one zero along the first axis", _ONE_ZERO, [0], smooth=True),
    _with_given("ReduceProd", "one zero in all", given((2, 2), 2.0, -3.0, 0.0, 5.0), [0, 1], smooth=True),
    _with_given("ReduceProd", "negative numbers", _NEGATIVE, [1], smooth=True),
    case(
        "ReduceLogSumExp",
        "numbers whose exponentials overflow",
        "s = Mul(x, big) y = ReduceLogSumExp(s, axes)",
        x=(3, 4),
        big=200.0,
        axes=[1],
        formula=lambda o: torch.logsumexp(200.0 * o["x"], 1, keepdim=True),
    ),
    *_softmaxes("Softmax"),
    *_softmaxes("LogSoftmax"),
    _reduced("ReduceSum", "empty axes reduce nothing", "noop_with_empty_axes=1", axes=[]),
    case(
        "ReduceSum",
        "over an empty axis",
        "s = ReduceSum<keepdims=0>(a, axes) y = Add(x, s)",
        x=(2, 3),
        a=(2, 0, 3),
        axes=[1],
    ),
)
