import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from onnxgc.gradients.pooling import BY_WINDOWS, by_windows
from onnxgc.model.core.ir import TrainableModel
from tests.gradients.gradient_case import Case, Formula, as_runtime, call, case, linear_case
from tests.gradients.reduction_cases import given

_FEW = (2, 3, 8, 7)


def _max(name: str, shape: tuple[int, ...], attributes: str, **settings: Any) -> Case:
    return _whole("MaxPool", name, shape, attributes, **settings)


def _mean(name: str, shape: tuple[int, ...], attributes: str, **settings: Any) -> Case:
    return _whole("AveragePool", name, shape, attributes, **settings)


def _times_places(x: Tensor) -> Tensor:
    """MaxPool 2x2 times a hundredth of the indices, which in ONNX count all elements of the batch."""
    pooled, places = F.max_pool2d(x, 2, return_indices=True)
    images = torch.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], 1, 1)
    return pooled * (places + images * math.prod(x.shape[2:])) * 0.01


def _at_opset_19(model: TrainableModel) -> TrainableModel:
    """AveragePool with dilations, which it has from opset 19 on; reading lowers such a model to 18."""
    return replace(model, opset=19)


def _lp(name: str, attributes: str, p: int = 2, shape: tuple[int, ...] = _FEW, opset: int = 18) -> Case:
    """The runtime's LpPool of p 1, which is linear on numbers that are not negative, sums the powers."""
    summed = as_runtime(f"LpPool<{attributes}, p=1>(x)", {}, shape, opset)
    given_p = attributes if p == 2 else f"{attributes}, p={p}"
    return _whole(
        "LpPool", name, shape, given_p, formula=lambda o: summed({"x": o["x"].abs() ** p}) ** (1 / p), opset=opset
    )


def _lp_beside_zeros(operands: Mapping[str, Tensor]) -> Tensor:
    first = operands["v"][:, :, :2].norm(dim=2, keepdim=True)
    return operands["x"] + torch.cat([first, torch.zeros_like(first)], dim=2)


def _whole(rule: str, name: str, shape: tuple[int, ...], attributes: str = "", **settings: Any) -> Case:
    return call(rule, name, attributes, x=shape, **settings)


def _norm_of_all(p: int) -> Formula:
    def norm(operands: Mapping[str, Tensor]) -> Tensor:
        x = operands["x"]
        return x.flatten(2).norm(p, dim=2).reshape(*x.shape[:2], *(1,) * (x.ndim - 2))

    return norm


def _unpooled(operands: Mapping[str, Tensor]) -> Tensor:
    pooled, places = F.max_pool2d(operands["x"], 2, return_indices=True)
    return F.max_unpool2d(pooled, places, [2, 2])


_DILATED_MEAN = "AveragePool<kernel_shape=[3,3], dilations=[2,2], pads=[1,1,1,1], count_include_pad={}>(x)"
_MAX_CASES = (
    _max("2x2 stride 2", _FEW, "kernel_shape=[2,2], strides=[2,2]"),
    _max("overlapping, stride 2, pads", _FEW, "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]"),
    _max("stride larger than the kernel", _FEW, "kernel_shape=[2,2], strides=[3,4]"),
    _max("ceil_mode and pads", (2, 3, 8, 6), "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], ceil_mode=1"),
    _max("dilations", (2, 3, 9, 8), "kernel_shape=[3,2], dilations=[2,3], pads=[1,0,1,1]"),
    _max("SAME_UPPER, far", _FEW, 'kernel_shape=[1,2], strides=[4,5], auto_pad="SAME_UPPER"'),
    _max("SAME_LOWER, far", _FEW, 'kernel_shape=[2,1], strides=[4,4], auto_pad="SAME_LOWER"'),
    _max("1D", (2, 3, 9), "kernel_shape=[3], strides=[2], pads=[1,0]"),
    _max("3D", (2, 2, 5, 6, 4), "kernel_shape=[2,3,2], strides=[2,1,1], pads=[1,0,1,0,1,0]"),
    _max("column-major indices", _FEW, "kernel_shape=[3,3], strides=[2,2], storage_order=1"),
    _max("column-major indices 3D", (2, 2, 5, 6, 4), "kernel_shape=[2,3,2], storage_order=1"),
)

POOLING_CASES = (
    case(
        "MaxPool",
        "indices read by the model",
        "p, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) c = Cast<to=1>(i) s = Mul(c, small) y = Mul(p, s)",
        x=(2, 3, 4, 6),
        small=0.01,
        formula=lambda o: _times_places(o["x"]),
    ),
    _lp("p 1", "kernel_shape=[3,2]", 1),
    _lp("p 3", "kernel_shape=[3,2], strides=[2,1]", 3),
    _lp("pads differ, stride 2", "kernel_shape=[3,3], pads=[0,1,2,1], strides=[2,2]", 3),
    _lp("SAME_LOWER", 'kernel_shape=[3,2], strides=[2,2], auto_pad="SAME_LOWER"'),
    _lp("SAME_UPPER, far", 'kernel_shape=[2,1], strides=[4,4], auto_pad="SAME_UPPER"'),
    _lp("SAME_LOWER, far", 'kernel_shape=[1,1], strides=[4,4], auto_pad="SAME_LOWER"', 3),
    _lp("dilations", "kernel_shape=[3,2], dilations=[2,3], pads=[1,0,1,1]"),
    _lp("ceil_mode", "kernel_shape=[3,3], strides=[2,2], ceil_mode=1"),
    _lp("1D", "kernel_shape=[3], strides=[2], pads=[1,0]", shape=(2, 3, 9)),
    _lp("3D", "kernel_shape=[2,3,2], strides=[2,1,1]", shape=(2, 2, 4, 5, 3)),
    _lp("opset 9", "kernel_shape=[2,2], strides=[2,2]", opset=9),
    case(
        "LpPool",
        "a window of zeros",
        "r = LpPool<kernel_shape=[2], strides=[2]>(v) y = Add(x, r)",
        x=(1, 2, 2),
        v=given((1, 2, 4), 1.0, -2.0, 0.0, 0.0, 0.5, 0.7, 0.0, 0.0),
        formula=_lp_beside_zeros,
        smooth=False,
    ),
    *(_whole("GlobalLpPool", f"p {p}", (2, 3, 4, 5), f"p={p}", formula=_norm_of_all(p)) for p in (1, 4)),
    _whole("GlobalLpPool", "1D", (2, 3, 5), formula=_norm_of_all(2)),
    _whole("GlobalLpPool", "3D", (2, 3, 2, 3, 2), "p=3", formula=_norm_of_all(3)),
    case(
        "GlobalLpPool",
        "a channel of zeros",
        "r = GlobalLpPool(v) y = Add(x, r)",
        x=(1, 2, 1),
        v=given((1, 2, 3), 1.0, -2.0, 0.5, 0.0, 0.0, 0.0),
        formula=lambda o: o["x"] + F.pad(o["v"][:, :1].norm(dim=2, keepdim=True), (0, 0, 0, 1)),
        smooth=False,
    ),
    *(
        _whole(f"Global{kind}Pool", f"{len(shape) - 2}D", shape)
        for kind in ("Max", "Average")
        for shape in ((2, 3, 5), (2, 3, 2, 5))
    ),
    case(
        "GlobalMaxPool",
        "several maxima",
        "m = GlobalMaxPool(v) y = Add(x, m)",
        x=(1, 2, 1),
        v=given((1, 2, 3), 1.0, 2.0, 2.0, -1.0, -1.0, -1.0),
        formula=lambda o: o["x"] + F.adaptive_max_pool1d(o["v"], 1),
        smooth=False,
    ),
    case(
        "MaxUnpool",
        "what MaxPool took",
        "p, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) "
        "u = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(p, i) y = Mul(u, w)",
        x=(2, 3, 4, 6),
        w=(2, 3, 4, 6),
        frozen=("w",),
        formula=lambda o: _unpooled(o) * o["w"],
    ),
    linear_case(
        "MaxUnpool",
        "pads",
        "MaxUnpool<kernel_shape=[3], strides=[2], pads=[1,0]>(x, places)",
        (1, 2, 3),
        places=[[[0, 1, 3], [4, 5, 10]]],
    ),
    *_MAX_CASES,
    *(replace(entry, rule=BY_WINDOWS, change=by_windows) for entry in _MAX_CASES),
    _mean("stride 1, pads differ, counted", _FEW, "kernel_shape=[3,4], pads=[0,1,2,3], count_include_pad=1"),
    _mean("stride 2, pads counted", _FEW, "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], count_include_pad=1"),
    _mean(
        "ceil_mode and pads counted",
        _FEW,
        "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], ceil_mode=1, count_include_pad=1",
    ),
    _mean("ceil_mode at opset 19", _FEW, "kernel_shape=[3,2], strides=[2,3], ceil_mode=1", opset=19),
    _mean("SAME_UPPER, counted", _FEW, 'kernel_shape=[2,4], auto_pad="SAME_UPPER", count_include_pad=1'),
    _mean("SAME_UPPER, far", _FEW, 'kernel_shape=[1,2], strides=[4,5], auto_pad="SAME_UPPER"'),
    _mean("SAME_LOWER, far", _FEW, 'kernel_shape=[2,1], strides=[4,4], auto_pad="SAME_LOWER"'),
    _mean("1D, stride 1", (2, 3, 9), "kernel_shape=[3], pads=[1,1]"),
    _mean("3D, stride 1", (2, 2, 5, 6, 4), "kernel_shape=[2,3,2], pads=[1,1,1,0,1,0]"),
    *(
        replace(
            linear_case("AveragePool", f"dilations, counts pads {counts}", _DILATED_MEAN.format(counts), _FEW, 19),
            change=_at_opset_19,
        )
        for counts in (0, 1)
    ),
)
