"""Cases of pooling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from onnxgc.gradients.pooling import BY_WINDOWS, by_windows
from onnxgc.model.core.ir import TrainableModel
from tests.gradients.gradient_case import Case, Formula, case, normal
from tests.gradients.reduction_cases import given

_FEW = (2, 3, 8, 7)


def _max(name: str, shape: tuple[int, ...], attributes: str, **settings: Any) -> Case:
    return case("MaxPool", name, f"y = MaxPool<{attributes}>(x)", x=normal(*shape), **settings)


def _mean(name: str, shape: tuple[int, ...], attributes: str, **settings: Any) -> Case:
    return case("AveragePool", name, f"y = AveragePool<{attributes}>(x)", x=normal(*shape), **settings)


def _global(name: str, shape: tuple[int, ...]) -> Case:
    return case("GlobalAveragePool", name, "y = GlobalAveragePool(x)", x=normal(*shape))


def _times_places(x: Tensor) -> Tensor:
    """MaxPool 2x2 times a hundredth of the indices, which in ONNX count all elements of the batch."""
    pooled, places = F.max_pool2d(x, 2, return_indices=True)
    images = torch.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], 1, 1)
    return pooled * (places + images * math.prod(x.shape[2:])) * 0.01


def _dilated_mean(kernel: Sequence[int], dilations: Sequence[int], pads: int, *, counts_pads: bool) -> Formula:
    """AveragePool-19 with dilations and equal pads: a sum over taps by a convolution with ones."""

    def mean(operands: Mapping[str, Tensor]) -> Tensor:
        x = operands["x"]
        ones = torch.ones((1, 1, *kernel), dtype=x.dtype)
        flat = x.reshape(-1, 1, *x.shape[2:])
        total = F.conv2d(F.pad(flat, (pads,) * 4), ones, dilation=list(dilations))
        here = F.pad(torch.ones_like(flat), (pads,) * 4, value=float(counts_pads))
        mean = total / F.conv2d(here, ones, dilation=list(dilations))
        return mean.reshape(*x.shape[:2], *mean.shape[2:])

    return mean


def _at_opset_19(model: TrainableModel) -> TrainableModel:
    """AveragePool with dilations, which it has from opset 19 on; reading lowers such a model to 18."""
    return replace(model, opset=19)


def _lp_formula(
    p: int,
    kernel: Sequence[int],
    strides: Sequence[int] = (1, 1),
    pads: Sequence[int] = (0, 0, 0, 0),
    dilations: Sequence[int] = (1, 1),
    cuts: Sequence[int] = (0, 0),
) -> Formula:
    """LpPool over two spatial axes, by a convolution with ones; `pads` in the order of ONNX."""

    def pooled(operands: Mapping[str, Tensor]) -> Tensor:
        x = operands["x"][:, :, cuts[0] :, cuts[1] :]
        flat = F.pad(x.reshape(-1, 1, *x.shape[2:]).abs() ** p, (pads[1], pads[3], pads[0], pads[2]))
        ones = torch.ones((1, 1, *kernel), dtype=x.dtype)
        total = F.conv2d(flat, ones, stride=list(strides), dilation=list(dilations))
        result: Tensor = (total ** (1 / p)).reshape(*x.shape[:2], *total.shape[2:])
        return result

    return pooled


def _lp(name: str, attributes: str, formula: Formula, shape: tuple[int, ...] = _FEW, **settings: Any) -> Case:
    body = f"y = LpPool<{attributes}>(x)"
    return case("LpPool", name, body, x=normal(*shape), formula=formula, **settings)


def _lp_over_one_axis(operands: Mapping[str, Tensor]) -> Tensor:
    return F.lp_pool1d(F.pad(operands["x"].abs(), (1, 0)), 2.0, 3, 2)


def _lp_over_three_axes(operands: Mapping[str, Tensor]) -> Tensor:
    squares = operands["x"].square().reshape(-1, 1, *operands["x"].shape[2:])
    total = F.conv3d(squares, torch.ones((1, 1, 2, 3, 2), dtype=squares.dtype), stride=(2, 1, 1))
    return total.sqrt().reshape(*operands["x"].shape[:2], *total.shape[2:])


def _lp_beside_zeros(operands: Mapping[str, Tensor]) -> Tensor:
    first = operands["v"][:, :, :2].norm(dim=2, keepdim=True)
    return operands["x"] + torch.cat([first, torch.zeros_like(first)], dim=2)


def _whole(rule: str, name: str, shape: tuple[int, ...], attributes: str = "", **settings: Any) -> Case:
    operator = f"{rule}<{attributes}>" if attributes else rule
    return case(rule, name, f"y = {operator}(x)", x=normal(*shape), **settings)


def _norm_of_all(p: int) -> Formula:
    def norm(operands: Mapping[str, Tensor]) -> Tensor:
        x = operands["x"]
        return x.flatten(2).norm(p, dim=2).reshape(*x.shape[:2], *(1,) * (x.ndim - 2))

    return norm


def _unpooled(operands: Mapping[str, Tensor]) -> Tensor:
    pooled, places = F.max_pool2d(operands["x"], 2, return_indices=True)
    return F.max_unpool2d(pooled, places, [2, 2])


def _unpooled_at(places: Sequence[int], size: tuple[int, ...]) -> Formula:
    def unpooled(operands: Mapping[str, Tensor]) -> Tensor:
        x = operands["x"]
        flat = torch.zeros(math.prod(size), dtype=x.dtype).scatter(0, torch.tensor(places), x.reshape(-1))
        return flat.reshape(size)

    return unpooled


_PLACES = np.asarray([0, 3, 9, 10, 16, 31, 20, 24], np.int64)

_MAX_CASES = (
    _max("2x2 stride 2", _FEW, "kernel_shape=[2,2], strides=[2,2]"),
    _max("overlapping", _FEW, "kernel_shape=[3,3]"),
    _max("overlapping, stride 2, pads", _FEW, "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]"),
    _max("kernel not square", _FEW, "kernel_shape=[2,3], strides=[2,1], pads=[0,1,1,2]"),
    _max("stride larger than the kernel", _FEW, "kernel_shape=[2,2], strides=[3,4]"),
    _max("ceil_mode", _FEW, "kernel_shape=[3,3], strides=[2,2], ceil_mode=1"),
    _max("ceil_mode and pads", (2, 3, 8, 6), "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], ceil_mode=1"),
    _max("dilations", (2, 3, 9, 8), "kernel_shape=[3,2], dilations=[2,3], pads=[1,0,1,1]"),
    _max("SAME_UPPER", _FEW, 'kernel_shape=[3,2], strides=[2,2], auto_pad="SAME_UPPER"'),
    _max("SAME_LOWER", _FEW, 'kernel_shape=[2,2], auto_pad="SAME_LOWER"'),
    _max("SAME_UPPER, far", _FEW, 'kernel_shape=[1,2], strides=[4,5], auto_pad="SAME_UPPER"'),
    _max("SAME_LOWER, far", _FEW, 'kernel_shape=[2,1], strides=[4,4], auto_pad="SAME_LOWER"'),
    _max("VALID", _FEW, 'kernel_shape=[3,2], strides=[2,2], auto_pad="VALID"'),
    _max("1D", (2, 3, 9), "kernel_shape=[3], strides=[2], pads=[1,0]"),
    _max("3D", (2, 2, 5, 6, 4), "kernel_shape=[2,3,2], strides=[2,1,1], pads=[1,0,1,0,1,0]"),
    _max("column-major indices", _FEW, "kernel_shape=[3,3], strides=[2,2], storage_order=1"),
    _max("column-major indices 3D", (2, 2, 5, 6, 4), "kernel_shape=[2,3,2], storage_order=1"),
    _max("one window", (2, 3, 4, 4), "kernel_shape=[4,4]"),
    _max("opset 8", _FEW, "kernel_shape=[3,3], strides=[2,2]", opset=8),
)

POOLING_CASES = (
    case(
        "MaxPool",
        "indices read by the model",
        "p, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) c = Cast<to=1>(i) s = Mul(c, small) y = Mul(p, s)",
        x=normal(2, 3, 4, 6),
        small=np.float32(0.01),
        formula=lambda o: _times_places(o["x"]),
    ),
    _lp("2x2 stride 2", "kernel_shape=[2,2], strides=[2,2]", _lp_formula(2, (2, 2), (2, 2))),
    _lp("overlapping", "kernel_shape=[3,2]", _lp_formula(2, (3, 2))),
    _lp("p 1", "kernel_shape=[3,2], p=1", _lp_formula(1, (3, 2))),
    _lp("p 3", "kernel_shape=[3,2], p=3, strides=[2,1]", _lp_formula(3, (3, 2), (2, 1))),
    _lp("p 4", "kernel_shape=[3,2], p=4, strides=[2,2]", _lp_formula(4, (3, 2), (2, 2))),
    _lp("pads", "kernel_shape=[3,3], pads=[1,1,1,1]", _lp_formula(2, (3, 3), pads=(1, 1, 1, 1))),
    _lp(
        "pads differ, stride 2",
        "kernel_shape=[3,3], pads=[0,1,2,1], strides=[2,2], p=3",
        _lp_formula(3, (3, 3), (2, 2), (0, 1, 2, 1)),
    ),
    _lp(
        "SAME_UPPER",
        'kernel_shape=[3,2], strides=[2,2], auto_pad="SAME_UPPER"',
        _lp_formula(2, (3, 2), (2, 2), (0, 0, 1, 1)),
    ),
    _lp(
        "SAME_LOWER",
        'kernel_shape=[3,2], strides=[2,2], auto_pad="SAME_LOWER"',
        _lp_formula(2, (3, 2), (2, 2), (1, 1, 0, 0)),
    ),
    _lp(
        "SAME_UPPER, stride beyond the kernel",
        'kernel_shape=[2,1], strides=[4,4], auto_pad="SAME_UPPER"',
        _lp_formula(2, (2, 1), (4, 4), cuts=(1, 1)),
    ),
    _lp(
        "SAME_LOWER, stride beyond the kernel",
        'kernel_shape=[1,1], strides=[4,4], p=3, auto_pad="SAME_LOWER"',
        _lp_formula(3, (1, 1), (4, 4), cuts=(1, 0)),
    ),
    _lp("VALID", 'kernel_shape=[3,2], auto_pad="VALID"', _lp_formula(2, (3, 2))),
    _lp(
        "dilations",
        "kernel_shape=[3,2], dilations=[2,3], pads=[1,0,1,1]",
        _lp_formula(2, (3, 2), pads=(1, 0, 1, 1), dilations=(2, 3)),
    ),
    _lp("ceil_mode", "kernel_shape=[3,3], strides=[2,2], ceil_mode=1", _lp_formula(2, (3, 3), (2, 2), (0, 0, 1, 0))),
    _lp("1D", "kernel_shape=[3], strides=[2], pads=[1,0]", _lp_over_one_axis, (2, 3, 9)),
    _lp("3D", "kernel_shape=[2,3,2], strides=[2,1,1]", _lp_over_three_axes, (2, 2, 4, 5, 3)),
    _lp("opset 9", "kernel_shape=[2,2], strides=[2,2]", _lp_formula(2, (2, 2), (2, 2)), opset=9),
    _lp("opset 11", "kernel_shape=[2,2], strides=[2,2], p=3", _lp_formula(3, (2, 2), (2, 2)), opset=11),
    case(
        "LpPool",
        "a window of zeros",
        "r = LpPool<kernel_shape=[2], strides=[2]>(v) y = Add(x, r)",
        x=normal(1, 2, 2),
        v=given((1, 2, 4), 1.0, -2.0, 0.0, 0.0, 0.5, 0.7, 0.0, 0.0),
        formula=_lp_beside_zeros,
        smooth=False,
    ),
    *(_whole("GlobalLpPool", f"p {p}", (2, 3, 4, 5), f"p={p}", formula=_norm_of_all(p)) for p in (1, 2, 3, 4)),
    _whole("GlobalLpPool", "1D", (2, 3, 5), formula=_norm_of_all(2)),
    _whole("GlobalLpPool", "3D", (2, 3, 2, 3, 2), "p=3", formula=_norm_of_all(3)),
    _whole("GlobalLpPool", "opset 9", (2, 3, 4, 5), formula=_norm_of_all(2), opset=9),
    case(
        "GlobalLpPool",
        "a channel of zeros",
        "r = GlobalLpPool(v) y = Add(x, r)",
        x=normal(1, 2, 1),
        v=given((1, 2, 3), 1.0, -2.0, 0.5, 0.0, 0.0, 0.0),
        formula=lambda o: o["x"] + F.pad(o["v"][:, :1].norm(dim=2, keepdim=True), (0, 0, 0, 1)),
        smooth=False,
    ),
    _whole("GlobalMaxPool", "1D", (2, 3, 5)),
    _whole("GlobalMaxPool", "2D", (2, 3, 5, 4)),
    _whole("GlobalMaxPool", "3D", (2, 3, 2, 5, 4)),
    _whole("GlobalMaxPool", "one position", (2, 3, 1, 1)),
    _whole("GlobalMaxPool", "opset 9", (2, 3, 5, 4), opset=9),
    case(
        "GlobalMaxPool",
        "several maxima",
        "m = GlobalMaxPool(v) y = Add(x, m)",
        x=normal(1, 2, 1),
        v=given((1, 2, 3), 1.0, 2.0, 2.0, -1.0, -1.0, -1.0),
        formula=lambda o: o["x"] + F.adaptive_max_pool1d(o["v"], 1),
        smooth=False,
    ),
    case(
        "MaxUnpool",
        "what MaxPool took",
        "p, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) "
        "u = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(p, i) y = Mul(u, w)",
        x=normal(2, 3, 4, 6),
        w=normal(2, 3, 4, 6),
        frozen=("w",),
        formula=lambda o: _unpooled(o) * o["w"],
    ),
    case(
        "MaxUnpool",
        "given places",
        "y = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(x, places)",
        x=normal(1, 2, 2, 2),
        places=_PLACES.reshape(1, 2, 2, 2),
        formula=_unpooled_at(_PLACES.tolist(), (1, 2, 4, 4)),
    ),
    case(
        "MaxUnpool",
        "pads",
        "y = MaxUnpool<kernel_shape=[3], strides=[2], pads=[1,0]>(x, places)",
        x=normal(1, 2, 3),
        places=np.asarray([[[0, 1, 3], [4, 5, 10]]]),
        formula=_unpooled_at((0, 1, 3, 4, 5, 10), (1, 2, 6)),
    ),
    *_MAX_CASES,
    *(replace(entry, rule=BY_WINDOWS, change=by_windows) for entry in _MAX_CASES),
    _mean("2x2 stride 2", _FEW, "kernel_shape=[2,2], strides=[2,2]"),
    _mean("stride 1", _FEW, "kernel_shape=[3,2]"),
    _mean("stride 1, pads", _FEW, "kernel_shape=[3,3], pads=[1,1,1,1]"),
    _mean("stride 1, pads counted", _FEW, "kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1"),
    _mean("stride 1, pads differ", _FEW, "kernel_shape=[3,4], pads=[0,1,2,3]"),
    _mean("stride 1, pads differ, counted", _FEW, "kernel_shape=[3,4], pads=[0,1,2,3], count_include_pad=1"),
    _mean("stride 2, pads", _FEW, "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]"),
    _mean("stride 2, pads counted", _FEW, "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], count_include_pad=1"),
    _mean("rows left unused", (2, 3, 8, 9), "kernel_shape=[3,2], strides=[3,4]"),
    _mean("stride 3, one pad", (2, 3, 11, 10), "kernel_shape=[3,2], strides=[3,3], pads=[1,0,0,1]"),
    _mean("ceil_mode", _FEW, "kernel_shape=[3,3], strides=[2,2], ceil_mode=1"),
    _mean("ceil_mode, stride 1", _FEW, "kernel_shape=[3,3], ceil_mode=1"),
    _mean("ceil_mode and pads", _FEW, "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], ceil_mode=1"),
    _mean(
        "ceil_mode and pads counted",
        _FEW,
        "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], ceil_mode=1, count_include_pad=1",
    ),
    _mean("ceil_mode at opset 19", _FEW, "kernel_shape=[3,2], strides=[2,3], ceil_mode=1", opset=19),
    _mean("SAME_UPPER", _FEW, 'kernel_shape=[3,2], strides=[2,2], auto_pad="SAME_UPPER"'),
    _mean("SAME_LOWER", _FEW, 'kernel_shape=[2,2], auto_pad="SAME_LOWER"'),
    _mean("SAME_UPPER, counted", _FEW, 'kernel_shape=[2,4], auto_pad="SAME_UPPER", count_include_pad=1'),
    _mean("SAME_UPPER, far", _FEW, 'kernel_shape=[1,2], strides=[4,5], auto_pad="SAME_UPPER"'),
    _mean("SAME_LOWER, far", _FEW, 'kernel_shape=[2,1], strides=[4,4], auto_pad="SAME_LOWER"'),
    _mean("VALID", _FEW, 'kernel_shape=[3,2], strides=[2,2], auto_pad="VALID"'),
    _mean("1D", (2, 3, 9), "kernel_shape=[3], strides=[2], pads=[1,0]"),
    _mean("1D, stride 1", (2, 3, 9), "kernel_shape=[3], pads=[1,1]"),
    _mean("3D", (2, 2, 5, 6, 4), "kernel_shape=[2,3,2], strides=[2,1,1], pads=[1,0,1,0,1,0]"),
    _mean("3D, stride 1", (2, 2, 5, 6, 4), "kernel_shape=[2,3,2], pads=[1,1,1,0,1,0]"),
    _mean("one window", (2, 3, 4, 4), "kernel_shape=[4,4]"),
    _mean("opset 7", _FEW, "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]", opset=7),
    _mean(
        "dilations",
        _FEW,
        "kernel_shape=[3,2], dilations=[2,3]",
        opset=19,
        change=_at_opset_19,
        formula=_dilated_mean((3, 2), (2, 3), 0, counts_pads=False),
    ),
    _mean(
        "dilations and pads",
        _FEW,
        "kernel_shape=[3,3], dilations=[2,2], pads=[1,1,1,1]",
        opset=19,
        change=_at_opset_19,
        formula=_dilated_mean((3, 3), (2, 2), 1, counts_pads=False),
    ),
    _mean(
        "dilations and pads counted",
        _FEW,
        "kernel_shape=[3,3], dilations=[2,2], pads=[1,1,1,1], count_include_pad=1",
        opset=19,
        change=_at_opset_19,
        formula=_dilated_mean((3, 3), (2, 2), 1, counts_pads=True),
    ),
    _global("1D", (2, 3, 5)),
    _global("2D", (2, 3, 5, 4)),
    _global("3D", (2, 3, 2, 5, 4)),
    _global("one position", (2, 3, 1, 1)),
)
