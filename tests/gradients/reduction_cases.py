"""Cases of reductions and of softmax at any axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onnxgc.model.core.ir import Array
from tests.gradients.gradient_case import Case, Draw, case, normal, positive


@dataclass(frozen=True, slots=True)
class Given(Draw):
    """An operand of given values, such as ties and zeros."""

    values: tuple[float, ...] = ()

    def value(self, *key: str) -> Array:
        return np.asarray(self.values, self.dtype).reshape(self.shape)


def given(shape: tuple[int, ...], *values: float) -> Given:
    return Given(shape, values=values)


_DRAWN = {"ReduceLogSum": positive, "ReduceProd": positive}
_KINDS = (
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceSumSquare",
)


def _reduced(rule: str, name: str, shape: tuple[int, ...], call: str, **settings: Any) -> Case:
    return case(rule, name, f"y = {rule}{call}", x=_DRAWN.get(rule, normal)(*shape), **settings)


def _settings(rule: str) -> tuple[Case, ...]:
    """All forms of axes and keepdims; a scalar result is multiplied by a vector to be an output."""
    spread = f"s = {rule}<keepdims=0>(x) y = Mul(s, w)"
    return (
        _reduced(rule, "one axis", (2, 3, 4), "(x, axes)", axes=[1]),
        _reduced(rule, "one axis, dropped", (2, 3, 4), "<keepdims=0>(x, axes)", axes=[1]),
        _reduced(rule, "last axis, negative", (2, 3, 4), "<keepdims=0>(x, axes)", axes=[-1]),
        _reduced(rule, "two axes in disorder", (2, 3, 4, 2), "(x, axes)", axes=[-1, 1]),
        _reduced(rule, "two axes, dropped", (2, 3, 4, 2), "<keepdims=0>(x, axes)", axes=[0, 2]),
        _reduced(rule, "all axes", (2, 3), "(x)"),
        _reduced(rule, "all axes by an empty list", (2, 3), "(x, axes)", axes=[]),
        _reduced(rule, "axis of one", (2, 1, 3), "(x, axes)", axes=[1]),
        _reduced(rule, "axis of one, dropped", (2, 1, 3), "<keepdims=0>(x, axes)", axes=[1]),
        _reduced(rule, "vector", (5,), "(x, axes)", axes=[0]),
        _reduced(rule, "five axes", (2, 2, 3, 2, 2), "(x, axes)", axes=[1, 3]),
        case(rule, "all axes, dropped", spread, x=_DRAWN.get(rule, normal)(2, 3), w=normal(2), frozen=("w",)),
        _reduced(rule, "opset 13", (2, 3, 4), "<axes=[-2], keepdims=0>(x)", opset=13),
        _reduced(rule, "opset 11", (2, 3, 4), "<axes=[0, 2]>(x)", opset=11),
        case(
            rule,
            "no axes",
            f"y = {rule}<noop_with_empty_axes=1>(x)",
            x=_DRAWN.get(rule, normal)(2, 3),
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
    """The reduction of given values, plus drawn ones."""
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


def _softmax_formula(function: Any, axis: int) -> Any:
    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        result: Tensor = function(operands["x"], axis)
        return result

    return formula


def _softmax(rule: str) -> tuple[Case, ...]:
    function = torch.softmax if rule == "Softmax" else torch.log_softmax
    many = tuple(
        case(
            rule,
            f"axis {axis} of five",
            f"u = {rule}<axis={axis}>(x) y = Mul(u, w)",
            x=normal(2, 3, 2, 4, 2),
            w=normal(2, 3, 2, 4, 2),
        )
        for axis in (0, 1, -2, 4)
    )
    return (
        *many,
        case(rule, "weighed vector", f"u = {rule}(x) y = Mul(u, w)", x=normal(5), w=normal(5)),
        case(
            rule,
            "large scores",
            f"s = Mul(x, big) u = {rule}(s) y = Mul(u, w)",
            x=normal(3, 5),
            w=normal(3, 5),
            big=np.float32(60.0),
            formula=lambda o: function(o["x"] * 60.0, -1) * o["w"],
        ),
        *(
            case(
                rule,
                f"opset {opset}, axis {axis}",
                f"u = {rule}<axis={axis}>(x) y = Mul(u, w)",
                x=normal(2, 3, 4),
                w=normal(2, 3, 4),
                opset=opset,
            )
            for opset in (9, 11, 12)
            for axis in (0, 1, 2)
        ),
        case(
            rule,
            "opset 11, default axis",
            f"u = {rule}(x) y = Mul(u, w)",
            x=normal(2, 3, 4),
            w=normal(2, 3, 4),
            opset=11,
        ),
    )


# The last row of logits is masked entirely.
_MASKED = np.where(np.arange(12).reshape(3, 4) < 8, 0, -np.inf).astype(np.float32)


def _zeros_for_nan(operands: Mapping[str, Tensor]) -> Tensor:
    rows = torch.softmax(operands["x"][:2], -1)
    return torch.cat([rows, torch.zeros_like(operands["x"][2:])]) * operands["w"]


_CUBE = (2, 3, 4)


def _on_cube(rule: str, name: str, attributes: str = "", inputs: str = "x", **settings: Any) -> Case:
    """One operator on x [2, 3, 4]."""
    operator = f"{rule}<{attributes}>" if attributes else rule
    return case(rule, name, f"y = {operator}({inputs})", **{"x": normal(*_CUBE), **settings})


def _reductions(rule: str) -> tuple[Case, ...]:
    def to_scalar(name: str, inputs: str, attributes: str = "keepdims=0", **settings: Any) -> Case:
        """A scalar result times two elements: the reference needs a target with at least one axis."""
        body = f"s = {rule}<{attributes}>({inputs}) y = Mul(s, spread)"
        return case(rule, name, body, **{"x": normal(*_CUBE), "spread": normal(2), **settings})

    return (
        _on_cube(rule, "no axes"),
        to_scalar("no axes, keepdims 0", "x"),
        _on_cube(rule, "one axis", "", "x, axes", axes=[1]),
        _on_cube(rule, "one axis, keepdims 0", "keepdims=0", "x, axes", axes=[1]),
        _on_cube(rule, "negative axis", "keepdims=0", "x, axes", axes=[-1]),
        _on_cube(rule, "several axes out of order", "keepdims=0", "x, axes", axes=[-1, 0]),
        _on_cube(rule, "several axes kept", "keepdims=1", "x, axes", axes=[2, 1]),
        to_scalar("all axes", "x, axes", axes=[0, 1, 2]),
        to_scalar("empty axes reduce all", "x, axes", axes=[]),
        _on_cube(rule, "empty axes reduce nothing", "noop_with_empty_axes=1", "x, axes", axes=[]),
        _on_cube(rule, "absent axes reduce nothing", "noop_with_empty_axes=1, keepdims=0"),
        _on_cube(rule, "an axis of one", "keepdims=0", "x, axes", x=normal(2, 1, 4), axes=[1]),
        to_scalar("vector", "x", x=normal(5)),
        _on_cube(rule, "axes as attribute, opset 11", "axes=[-2], keepdims=0", opset=11),
        to_scalar("no axes, opset 11", "x", opset=11),
    )


def _softmaxes(rule: str) -> tuple[Case, ...]:
    return (
        _on_cube(rule, "axis by default"),
        *(_on_cube(rule, f"axis {axis}", f"axis={axis}") for axis in (0, 1, 2, -2, -3)),
        _on_cube(rule, "vector", x=normal(5)),
        _on_cube(rule, "four axes", "axis=1", x=normal(2, 5, 2, 3)),
        # Up to opset 12, all axes from `axis` on count as one.
        _on_cube(rule, "axis by default, opset 11", opset=11),
        _on_cube(rule, "axis 0, opset 11", "axis=0", opset=11),
        _on_cube(rule, "axis 2, opset 11", "axis=2", opset=11),
        _on_cube(rule, "axis -1, opset 12", "axis=-1", opset=12),
        _on_cube(rule, "axis 1, opset 9", "axis=1", opset=9),
        _on_cube(rule, "matrix, opset 9", x=normal(3, 4), opset=9),
    )


REDUCTION_CASES = (
    case(
        "Softmax.masked",
        "a row without any logit",
        "m = Add(x, mask) s = Softmax(m) n = IsNaN(s) z = Where(n, zero, s) y = Mul(z, w)",
        x=normal(3, 4),
        w=normal(3, 4),
        mask=_MASKED,
        zero=np.float32(0),
        formula=_zeros_for_nan,
    ),
    case(
        "Softmax.masked",
        "replaced by a condition of its own, behind casts",
        """m = Add(x, mask) s = Softmax(m) d = Cast<to=11>(s)
        z = Where(rows, nothing, d) f = Cast<to=1>(z) y = Mul(f, w)""",
        x=normal(3, 4),
        w=normal(3, 4),
        mask=_MASKED,
        rows=np.asarray([[False], [False], [True]]),
        nothing=np.zeros((), np.float64),
        formula=_zeros_for_nan,
    ),
    case(
        "Softmax.masked",
        "first axis",
        "s = Softmax<axis=0>(x) n = IsNaN(s) z = Where(n, zero, s) y = Mul(z, w)",
        x=normal(3, 4),
        w=normal(3, 4),
        zero=np.float32(0),
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
    _reduced("ReduceLogSumExp", "large numbers", (3, 4), "(x, axes)", axes=[1]),
    case(
        "ReduceLogSumExp",
        "numbers whose exponentials overflow",
        "s = Mul(x, big) y = ReduceLogSumExp(s, axes)",
        x=normal(3, 4),
        big=np.float32(200.0),
        axes=[1],
        formula=lambda o: torch.logsumexp(200.0 * o["x"], 1, keepdim=True),
    ),
    *_softmax("Softmax"),
    *_softmax("LogSoftmax"),
    *_reductions("ReduceSum"),
    *_reductions("ReduceMean"),
    *_softmaxes("Softmax"),
    *_softmaxes("LogSoftmax"),
    case(
        "ReduceSum",
        "over an empty axis",
        "s = ReduceSum<keepdims=0>(a, axes) y = Add(x, s)",
        x=normal(2, 3),
        a=normal(2, 0, 3),
        axes=[1],
    ),
)
