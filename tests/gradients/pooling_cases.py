"""Cases of pooling and of normalisations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from onnxgc.model.ir import TrainableModel
from tests.gradients.gradient_case import Case, Formula, case, normal, positive

_FEW = (2, 3, 8, 7)


def _max(name: str, shape: tuple[int, ...], attributes: str, **settings: Any) -> Case:
    return case("MaxPool", name, f"y = MaxPool<{attributes}>(x)", x=normal(*shape), **settings)


def _mean(name: str, shape: tuple[int, ...], attributes: str, **settings: Any) -> Case:
    return case("AveragePool", name, f"y = AveragePool<{attributes}>(x)", x=normal(*shape), **settings)


def _global(name: str, shape: tuple[int, ...]) -> Case:
    return case("GlobalAveragePool", name, "y = GlobalAveragePool(x)", x=normal(*shape))


def _dilated_mean(
    kernel: Sequence[int], dilations: Sequence[int], pads: int, *, counts_pads: bool
) -> Formula:
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
    """AveragePool has dilations from opset 19 on; reading brings such a model to 18."""
    return replace(model, opset=19)


POOLING_CASES = (
    _max("2x2 stride 2", _FEW, "kernel_shape=[2,2], strides=[2,2]"),
    _max("overlapping", _FEW, "kernel_shape=[3,3]"),
    _max("overlapping, stride 2, pads", _FEW, "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]"),
    _max("kernel not square", _FEW, "kernel_shape=[2,3], strides=[2,1], pads=[0,1,1,2]"),
    _max("stride larger than the kernel", _FEW, "kernel_shape=[2,2], strides=[3,4]"),
    _max("ceil_mode", _FEW, "kernel_shape=[3,3], strides=[2,2], ceil_mode=1"),
    _max(
        "ceil_mode and pads", (2, 3, 8, 6), "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], ceil_mode=1"
    ),
    _max("dilations", (2, 3, 9, 8), "kernel_shape=[3,2], dilations=[2,3], pads=[1,0,1,1]"),
    _max("SAME_UPPER", _FEW, 'kernel_shape=[3,2], strides=[2,2], auto_pad="SAME_UPPER"'),
    _max("SAME_LOWER", _FEW, 'kernel_shape=[2,2], auto_pad="SAME_LOWER"'),
    _max("VALID", _FEW, 'kernel_shape=[3,2], strides=[2,2], auto_pad="VALID"'),
    _max("1D", (2, 3, 9), "kernel_shape=[3], strides=[2], pads=[1,0]"),
    _max("3D", (2, 2, 5, 6, 4), "kernel_shape=[2,3,2], strides=[2,1,1], pads=[1,0,1,0,1,0]"),
    _max("column-major indices", _FEW, "kernel_shape=[3,3], strides=[2,2], storage_order=1"),
    _max("column-major indices 3D", (2, 2, 5, 6, 4), "kernel_shape=[2,3,2], storage_order=1"),
    _max("one window", (2, 3, 4, 4), "kernel_shape=[4,4]"),
    _max("opset 8", _FEW, "kernel_shape=[3,3], strides=[2,2]", opset=8),
    _mean("2x2 stride 2", _FEW, "kernel_shape=[2,2], strides=[2,2]"),
    _mean("stride 1", _FEW, "kernel_shape=[3,2]"),
    _mean("stride 1, pads", _FEW, "kernel_shape=[3,3], pads=[1,1,1,1]"),
    _mean("stride 1, pads counted", _FEW, "kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1"),
    _mean("stride 1, pads differ", _FEW, "kernel_shape=[3,4], pads=[0,1,2,3]"),
    _mean("stride 1, pads differ, counted", _FEW, "kernel_shape=[3,4], pads=[0,1,2,3], count_include_pad=1"),
    _mean("stride 2, pads", _FEW, "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]"),
    _mean(
        "stride 2, pads counted",
        _FEW,
        "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1], count_include_pad=1",
    ),
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


def _lrn(name: str, shape: tuple[int, ...], attributes: str) -> Case:
    # The large alpha makes the second term of the gradient as large as the first.
    return case("LRN", name, f"y = LRN<{attributes}>(x)", x=normal(*shape))


def _given_statistics(model: TrainableModel) -> TrainableModel:
    """BatchNormalization as in inference, with running statistics and no batch ones."""
    running = {"scale": ("mean", "variance")}
    nodes = tuple(
        replace(node, inputs=(*node.inputs[:3], *running[node.inputs[1]]), rule="BatchNormalization")
        if node.op == "BatchNormalization"
        else node
        for node in model.nodes
        if not node.once
    )
    return replace(model, nodes=nodes, statistics=())


def _inference_norm(operands: Mapping[str, Tensor]) -> Tensor:
    mean, variance = (_statistic(name, operands["scale"].shape[0]) for name in ("mean", "variance"))
    return F.batch_norm(operands["x"], mean, variance, operands["scale"], operands["bias"], False, 0.0, 1e-3)


def _statistic(name: str, channels: int) -> Tensor:
    draw = positive(channels) if name == "variance" else normal(channels)
    return torch.from_numpy(draw.value("statistic", name)).double()


def _batch_norm(rule: str, name: str, shape: tuple[int, ...], attributes: str = "", **settings: Any) -> Case:
    operator = f"BatchNormalization<{attributes}>" if attributes else "BatchNormalization"
    settings.setdefault("x", normal(*shape))
    return case(
        rule,
        name,
        f"y = {operator}(x, scale, bias, mean, variance)",
        scale=positive(shape[1]),
        bias=normal(shape[1]),
        mean=_statistic("mean", shape[1]).float().numpy(),
        variance=_statistic("variance", shape[1]).float().numpy(),
        **settings,
    )


def _of_batch(name: str, shape: tuple[int, ...], attributes: str = "", **settings: Any) -> Case:
    return _batch_norm("BatchNormalization.batch", name, shape, attributes, **settings)


def _given(name: str, shape: tuple[int, ...]) -> Case:
    return _batch_norm(
        "BatchNormalization",
        name,
        shape,
        "epsilon=0.001",
        change=_given_statistics,
        formula=_inference_norm,
    )


NORMALIZATION_CASES = (
    _lrn("size 3", (2, 6, 4, 5), "size=3, alpha=0.9, beta=0.6, bias=1.5"),
    _lrn("size 5 beyond the channels", (2, 4, 3, 3), "size=5, alpha=0.9"),
    _lrn("size 1", (2, 4, 3, 3), "size=1, alpha=0.7, beta=1.2"),
    _lrn("defaults", (2, 6, 3, 3), "size=5"),
    _of_batch("[N, C]", (6, 3)),
    _of_batch("[N, C, L]", (4, 3, 5)),
    _of_batch("[N, C, H, W]", (3, 4, 5, 6), "epsilon=0.01, momentum=0.8"),
    _of_batch("[N, C, D, H, W]", (2, 3, 2, 3, 4)),
    _of_batch("one image", (1, 3, 5, 5)),
    _of_batch("one channel", (3, 1, 4, 4)),
    _of_batch("mean 30 times the deviation", (4, 3, 6, 5), x=normal(4, 3, 6, 5, mean=30.0)),
    _of_batch("opset 7", (3, 4, 5, 6), opset=7),
    _of_batch("opset 9", (3, 4, 5, 6), "epsilon=0.001", opset=9),
    _of_batch("opset 14, training", (3, 4, 5, 6), "training_mode=1", opset=14),
    _given("[N, C]", (6, 3)),
    _given("[N, C, L]", (4, 3, 5)),
    _given("[N, C, H, W]", (3, 4, 5, 6)),
)
