"""Cases of reductions, of softmax and of operators that move elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.gradients.gradient_case import Case, Formula, case, normal

_CUBE = (2, 3, 4)


def _on_cube(rule: str, name: str, attributes: str = "", inputs: str = "x", **settings: Any) -> Case:
    """One operator on x [2, 3, 4]."""
    operator = f"{rule}<{attributes}>" if attributes else rule
    return case(rule, name, f"y = {operator}({inputs})", **{"x": normal(*_CUBE), **settings})


def _reductions(rule: str) -> tuple[Case, ...]:
    def to_scalar(name: str, inputs: str, attributes: str = "keepdims=0", **settings: Any) -> Case:
        """The result, spread over two elements: the reference compares with a target of at least one axis."""
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
        # Up to opset 12 all axes from `axis` on count as one.
        _on_cube(rule, "axis by default, opset 11", opset=11),
        _on_cube(rule, "axis 0, opset 11", "axis=0", opset=11),
        _on_cube(rule, "axis 2, opset 11", "axis=2", opset=11),
        _on_cube(rule, "axis -1, opset 12", "axis=-1", opset=12),
        _on_cube(rule, "axis 1, opset 9", "axis=1", opset=9),
        _on_cube(rule, "matrix, opset 9", x=normal(3, 4), opset=9),
    )


def _scaled(rule: str, name: str, operator: str, shape: tuple[int, ...], **settings: Any) -> Case:
    """A view, read by an Exp: mse of a bare view would not notice where elements go."""
    return case(rule, name, f"v = {operator} y = Exp(v)", x=normal(*shape), **settings)


def gathered(indices: list[Any], axis: int) -> Formula:
    def gather(operands: Mapping[str, Tensor]) -> Tensor:
        x = operands["x"]
        places = torch.tensor(indices)
        return torch.gather(x, axis, torch.where(places < 0, places + x.shape[axis], places))

    return gather


def _gather_elements(name: str, shape: tuple[int, ...], indices: list[Any], axis: int) -> Case:
    return case(
        "GatherElements",
        name,
        f"y = GatherElements<axis={axis}>(x, indices)",
        x=normal(*shape),
        indices=indices,
        formula=gathered(indices, axis),
    )


SHAPE_CASES = (
    *_reductions("ReduceSum"),
    *_reductions("ReduceMean"),
    *_softmaxes("Softmax"),
    *_softmaxes("LogSoftmax"),
    _scaled("Reshape", "plain", "Reshape(x, to)", _CUBE, to=[4, 6]),
    _scaled("Reshape", "0 and -1", "Reshape(x, to)", _CUBE, to=[0, -1]),
    _scaled("Reshape", "-1 first", "Reshape(x, to)", _CUBE, to=[-1, 2]),
    _scaled("Reshape", "axes of one", "Reshape(x, to)", _CUBE, to=[1, 2, 1, 12, 1]),
    case(
        "Reshape",
        "to a scalar",
        "s = Reshape(x, to) y = Mul(s, spread)",
        x=normal(1, 1),
        to=[],
        spread=normal(2),
    ),
    _scaled("Reshape", "of a scalar", "Reshape(x, to)", (), to=[1, 1]),
    _scaled("Reshape", "opset 13", "Reshape(x, to)", _CUBE, to=[3, -1], opset=13),
    case(
        "Reshape",
        "empty",
        "v = Reshape<allowzero=1>(a, empty) z = Concat<axis=0>(x, v) y = Reshape(z, flat)",
        x=normal(3, 2),
        a=normal(0, 3),
        empty=[0, 2],
        flat=[6],
    ),
    _scaled("Flatten", "axis by default", "Flatten(x)", _CUBE),
    _scaled("Flatten", "axis 0", "Flatten<axis=0>(x)", _CUBE),
    _scaled("Flatten", "axis 2", "Flatten<axis=2>(x)", _CUBE),
    _scaled("Flatten", "axis 3", "Flatten<axis=3>(x)", _CUBE),
    _scaled("Flatten", "axis -1", "Flatten<axis=-1>(x)", _CUBE),
    _scaled("Flatten", "vector", "Flatten<axis=0>(x)", (5,)),
    _scaled("Flatten", "opset 9", "Flatten<axis=2>(x)", _CUBE, opset=9),
    _scaled("Squeeze", "no axes", "Squeeze(x)", (1, 3, 1, 4)),
    _scaled("Squeeze", "one axis", "Squeeze(x, axes)", (1, 3, 1, 4), axes=[0]),
    _scaled("Squeeze", "negative axes", "Squeeze(x, axes)", (1, 3, 1, 4), axes=[-2, 0]),
    case("Squeeze", "to a scalar", "s = Squeeze(x) y = Mul(s, spread)", x=normal(1, 1), spread=normal(2)),
    _scaled("Squeeze", "axes as attribute, opset 11", "Squeeze<axes=[0, -2]>(x)", (1, 3, 1, 4), opset=11),
    _scaled("Squeeze", "no axes, opset 9", "Squeeze(x)", (1, 3, 1, 4), opset=9),
    _scaled("Unsqueeze", "one axis", "Unsqueeze(x, axes)", (3, 4), axes=[1]),
    _scaled("Unsqueeze", "several axes out of order", "Unsqueeze(x, axes)", (3, 4), axes=[-1, 0]),
    _scaled("Unsqueeze", "scalar", "Unsqueeze(x, axes)", (), axes=[0]),
    _scaled("Unsqueeze", "axes as attribute, opset 9", "Unsqueeze<axes=[0, 3]>(x)", (3, 4), opset=9),
    _scaled("Transpose", "perm by default", "Transpose(x)", _CUBE),
    _scaled("Transpose", "rotation", "Transpose<perm=[1,2,0]>(x)", _CUBE),
    _scaled("Transpose", "its inverse", "Transpose<perm=[2,0,1]>(x)", _CUBE),
    _scaled("Transpose", "four axes", "Transpose<perm=[2,0,3,1]>(x)", (2, 3, 4, 5)),
    _scaled("Transpose", "identity", "Transpose<perm=[0,1,2]>(x)", _CUBE),
    _scaled("Transpose", "vector", "Transpose(x)", (5,)),
    case(
        "Concat",
        "negative axis, unequal sizes",
        "y = Concat<axis=-2>(x, a, b)",
        x=normal(2, 3, 2),
        a=normal(2, 1, 2),
        b=normal(2, 4, 2),
    ),
    case("Concat", "first axis", "y = Concat<axis=0>(x, a)", x=normal(2, 3), a=normal(1, 3)),
    case("Concat", "one input", "y = Concat<axis=1>(x)", x=normal(2, 3)),
    case("Concat", "with itself", "z = Concat<axis=1>(x, x) y = Mul(z, w)", x=normal(2, 3), w=normal(2, 6)),
    case(
        "Concat",
        "frozen in the middle",
        "y = Concat<axis=1>(x, a, b)",
        x=normal(2, 3),
        a=normal(2, 2),
        b=normal(2, 4),
        frozen=("a",),
    ),
    case(
        "Concat",
        "frozen first",
        "z = Concat<axis=1>(a, x) y = Exp(z)",
        x=normal(2, 3),
        a=normal(2, 2),
        frozen=("a",),
    ),
    case("Concat", "an empty input", "y = Concat<axis=0>(a, x)", x=normal(2, 3), a=normal(0, 3)),
    case(
        "ReduceSum",
        "over an empty axis",
        "s = ReduceSum<keepdims=0>(a, axes) y = Add(x, s)",
        x=normal(2, 3),
        a=normal(2, 0, 3),
        axes=[1],
    ),
    _gather_elements("each once", (3, 4), [[1, 3], [0, 2], [2, 1]], 1),
    _gather_elements("duplicates", (3, 4), [[1, 1, 1, 3], [0, 0, 2, 2], [3, 3, 3, 3]], 1),
    _gather_elements("negative indices", (3, 4), [[-1, 3, 0], [-4, 0, -2], [1, -3, 1]], 1),
    _gather_elements(
        "first axis, duplicates", (4, 3), [[0, 2, -1], [0, 2, 3], [1, 2, 0], [0, 1, 1], [2, 2, 2]], 0
    ),
    _gather_elements("negative axis", (2, 3, 4), [[[0, 0], [3, -1], [2, 2]], [[1, 1], [1, 0], [-2, 2]]], -1),
    _gather_elements("fewer rows than the data", (4, 3), [[2, 0], [2, 1]], 0),
)
