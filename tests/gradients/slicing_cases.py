from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.gradients.gradient_case import Case, case, linear_case, normal, operator

_CUBE = (2, 3, 4)
_LAST = np.iinfo(np.int64).max
_FIRST = np.iinfo(np.int64).min


def _slice(name: str, starts: list[int], ends: list[int], *further: list[int], **settings: Any) -> Case:
    """y = x[starts:ends], with optional axes and steps, on x [4, 5, 6]."""
    inputs = dict(zip(("starts", "ends", "axes", "steps"), (starts, ends, *further), strict=False))
    body = f"y = Slice(x, {', '.join(inputs)})"
    return case("Slice", name, body, **{"x": normal(4, 5, 6), **inputs, **settings})


def _pad(name: str, pads: list[int], inputs: str = "x, pads", **settings: Any) -> Case:
    return case("Pad", name, f"y = Pad({inputs})", **{"x": normal(*_CUBE), "pads": pads, **settings})


def _pad_by_axes(operands: Mapping[str, Tensor]) -> Tensor:
    """Axis 0 between one and two rows, axis 2 without its first two columns."""
    return torch.nn.functional.pad(operands["x"], (-2, 0, 0, 0, 1, 2), value=0.5)


def _pad_mode(mode: str, name: str, pads: list[int], shape: tuple[int, ...] = (4, 3, 4), **settings: Any) -> Case:
    return linear_case("Pad", f"{mode}, {name}", f'Pad<mode="{mode}">(x, pads)', shape, pads=pads, **settings)


def _constant_pad(x: Tensor, value: Tensor) -> Tensor:
    """x [2, 3, 4] with pads [0, 1, -1, 2, 0, 3]."""
    inside = torch.nn.functional.pad(torch.ones_like(x[:, :, 1:]), (0, 3, 1, 0, 0, 2))
    return torch.nn.functional.pad(x[:, :, 1:], (0, 3, 1, 0, 0, 2)) + (1 - inside) * value


def _crop(name: str, shape: tuple[int, ...], to: list[int], attributes: str = "") -> Case:
    return linear_case("CenterCropPad", name, f"{operator('CenterCropPad', attributes)}(x, to)", shape, to=to)


SLICING_CASES = (
    _slice("one axis in the middle", [1], [4], [1]),
    _slice("everything", [0, 0], [_LAST, 6], [0, 2]),
    _slice("no axes, fewer than the rank", [1, 2], [3, 4]),
    _slice("negative axes out of order", [1, 2], [4, 4], [-1, -3]),
    _slice("step 2, even length", [0], [_LAST], [2], [2]),
    _slice("step 2, odd length", [0], [_LAST], [1], [2]),
    _slice("step 3, cut on both sides", [2], [_LAST], [0], [3], x=(13, 2)),
    _slice("step longer than the axis", [3], [_LAST], [1], [7]),
    _slice("step -1, whole axis", [-1], [_FIRST], [2], [-1]),
    _slice("step -1, from behind the axis", [99], [-99], [1], [-1]),
    _slice("step -1, part", [4], [1], [2], [-1]),
    _slice("step -2", [-1], [_FIRST], [2], [-2]),
    _slice("step -3, part", [-3], [1], [0], [-3], x=(14, 2)),
    # ONNX starts at the first element; in Python the slice is empty.
    _slice(
        "step -1, start in front of the axis", [-99], [_FIRST], [0], [-1], formula=lambda operands: operands["x"][:1]
    ),
    case(
        "Slice",
        "steps without axes",
        "y = Slice(x, starts, ends, , steps)",
        x=(4, 5),
        starts=[0, 1],
        ends=[_LAST, _LAST],
        steps=[2, 3],
    ),
    case(
        "Slice",
        "in int32",
        "y = Slice(x, starts, ends, axes, steps)",
        x=(4, 5),
        starts=np.asarray([-1], np.int32),
        ends=np.asarray([1], np.int32),
        axes=np.asarray([1], np.int32),
        steps=np.asarray([-2], np.int32),
    ),
    case(
        "Slice",
        "an empty result",
        "v = Slice(x, all, none, axes) u = Slice(x, all, two, axes) y = Concat<axis=1>(u, v)",
        x=(3, 4),
        all=[0],
        none=[0],
        two=[2],
        axes=[1],
    ),
    case("Slice", "attributes, opset 9", "y = Slice<starts=[1,-3], ends=[3,99], axes=[0,2]>(x)", x=(4, 5, 6), opset=9),
    _pad("zeros around", [0, 1, 2, 0, 3, 1]),
    _pad("negative", [0, -1, -1, 0, 0, -2]),
    _pad("negative and positive", [1, -1, 2, 0, 2, -3]),
    case(
        "Pad",
        "all of one axis cut",
        "u = Pad(x, over) v = Pad(x, one) y = Add(u, v)",
        x=(3, 4),
        over=[0, 3, 0, -5],
        one=[0, 0, 0, -2],
        formula=lambda operands: operands["x"][:, :2],
    ),
    _pad("axes", [1, -2, 2, 0], "x, pads, value, axes", value=0.5, axes=[0, -1], formula=_pad_by_axes),
    _pad_mode("reflect", "as far as it goes", [1, 0, 3, 1, 2, 0]),
    _pad_mode("reflect", "in front only", [0, 2, 0, 0, 0, 0]),
    _pad_mode("reflect", "image", [0, 0, 2, 1, 0, 0, 1, 3], (1, 2, 4, 5)),
    _pad_mode("reflect", "and cut", [0, -1, 2, 0, 1, -1]),
    _pad_mode("edge", "and cut", [2, -1, -1, 0, 4, 2]),
    _pad_mode("wrap", "more than once", [3, 1, 9, 0, 5, 1], opset=19),
    linear_case(
        "Pad", "reflect along axes", 'Pad<mode="reflect">(x, pads, , axes)', _CUBE, pads=[2, 1, -1, 0], axes=[-1, 0]
    ),
    case(
        "Pad",
        "by a trained constant",
        "s = ReduceSum<keepdims=0>(a) v = Pad(x, pads, s) y = Exp(v)",
        x=_CUBE,
        a=(2,),
        pads=[0, 1, -1, 2, 0, 3],
        formula=lambda operands: torch.exp(_constant_pad(operands["x"], operands["a"].sum())),
    ),
    case("Pad", "attributes, opset 9", "y = Pad<pads=[0,1,2,0,0,1], value=0.5>(x)", x=_CUBE, opset=9),
    _crop("crop", (5, 7), [2, 4]),
    _crop("pad", (4, 3), [7, 4]),
    _crop("crop and pad", (5, 3), [2, 6]),
    _crop("axes", (2, 5, 3), [8, 4], "axes=[-1, 1]"),
)
