"""Gradients of pooling. x: [N, C, spatial...]."""

from __future__ import annotations

import itertools
import math

import numpy as np
import onnx

from onnxgc.gradients.engine import GradientContext
from onnxgc.gradients.shaping import reshape
from onnxgc.gradients.windows import Windows, windows_of
from onnxgc.model.ir import Array, Node, TensorType, TrainableModel


def indices_output(node: Node, model: TrainableModel) -> tuple[str, TensorType]:
    """MaxPool's second output, which its gradient reads; int64, so twice the bytes of y."""
    shape = model.types[node.outputs[0]].shape
    name = node.outputs[1] if len(node.outputs) > 1 and node.outputs[1] else f"{node.outputs[0]}__indices"
    return name, TensorType(onnx.TensorProto.INT64, shape)


def max_pool(g: GradientContext) -> None:
    """y = maximum of each window: dy goes back to where the maximum was.

    The indices count through the whole of x, so x is flattened; windows may overlap, so the
    contributions are added. With column-major indices the first spatial axis is the fastest.
    """
    shape = g.input_shape(0)
    is_column_major = bool(g.attribute("storage_order", 0))
    counted = (*shape[:2], *reversed(shape[2:])) if is_column_major else shape
    count = math.prod(shape)
    zeros = g.emit("Expand", g.scalar(0.0), g.ints(count))
    places = reshape(g, g.y(1), (math.prod(g.output_shape()),))
    values = reshape(g, g.dy, (math.prod(g.output_shape()),))
    scattered = g.emit("ScatterElements", zeros, places, values, axis=0, reduction="add")
    gradient = reshape(g, scattered, counted)
    if is_column_major:
        gradient = g.emit("Transpose", gradient, perm=[0, 1, *reversed(range(2, len(shape)))])
    g.give(0, gradient)


def average_pool(g: GradientContext) -> None:
    """y = mean of each window: every element of a window gets dy / count."""
    windows = windows_of(g, tuple(g.attribute("kernel_shape")))
    size = math.prod(windows.kernel)
    counts = _window_counts(windows, bool(g.attribute("count_include_pad", 0)))
    uniform = int(counts.flat[0]) if (counts == counts.flat[0]).all() else None
    backward_pads = _stride_one_pads(windows)
    if backward_pads is not None:
        # With stride 1 the windows that hold a position are a window themselves.
        weight = size / counts.astype(np.float64)
        scaled = _scaled(g, size / uniform if uniform else weight, uniform is not None)
        g.give(
            0,
            g.emit(
                "AveragePool",
                scaled,
                kernel_shape=list(windows.kernel),
                pads=backward_pads,
                count_include_pad=1,
            ),
        )
        return
    channels = g.input_shape(0)[1]
    scaled = g.dy if uniform else _scaled(g, 1.0 / counts.astype(np.float64), False)
    ones = np.full((channels, 1, *windows.kernel), 1.0 / uniform if uniform else 1.0)
    g.give(0, g.emit("ConvTranspose", scaled, g.tensor(ones), group=channels, **windows.transposed()))


def _scaled(g: GradientContext, factor: float | Array, is_uniform: bool) -> str:
    if is_uniform:
        return g.dy if factor == 1.0 else g.emit("Mul", g.dy, g.scalar(float(factor)))
    return g.emit("Mul", g.dy, g.tensor(np.asarray(factor)))


def _stride_one_pads(windows: Windows) -> list[int] | None:
    """Pads of the AveragePool that undoes one of stride 1, or None where that form is not possible."""
    if any(stride > 1 for stride in windows.strides) or any(dilation > 1 for dilation in windows.dilations):
        return None
    begin = [size - 1 - pad for size, pad in zip(windows.kernel, windows.pads_begin, strict=True)]
    end = [
        extent - out - begin_pad + size - 1
        for extent, out, begin_pad, size in zip(
            windows.input_size, windows.output_size, begin, windows.kernel, strict=True
        )
    ]
    usable = all(0 <= pad < size for pad, size in zip((*begin, *end), windows.kernel * 2, strict=True))
    return [*begin, *end] if usable else None


def _window_counts(windows: Windows, include_pad: bool) -> Array:
    """How many elements each window's mean divides by, per output position.

    Source: ONNX AveragePool-19: padding counts if asked for; what lies past the padded input,
    under ceil_mode, never does.
    """
    per_axis = []
    for axis in range(windows.rank):
        extent, begin, end = windows.input_size[axis], windows.pads_begin[axis], windows.pads_end[axis]
        low, high = (-begin, extent + end) if include_pad else (0, extent)
        starts = np.arange(windows.output_size[axis]) * windows.strides[axis] - begin
        taps = starts[:, None] + np.arange(windows.kernel[axis]) * windows.dilations[axis]
        per_axis.append(((taps >= low) & (taps < high)).sum(axis=1))
    counts = per_axis[0]
    for more in itertools.islice(per_axis, 1, None):
        counts = counts[..., None] * more
    return np.asarray(counts)


def global_average_pool(g: GradientContext) -> None:
    """y = mean over all positions: dx = dy / count everywhere."""
    shape = g.input_shape(0)
    share = g.emit("Mul", g.dy, g.scalar(1.0 / math.prod(shape[2:])))
    g.give(0, g.emit("Expand", share, g.ints(*shape)))
