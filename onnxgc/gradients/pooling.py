"""Gradients of pooling. x: [N, C, spatial...]."""

import itertools
import math
from dataclasses import replace

import numpy as np
import onnx

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import reciprocal_or_zero, reshape, scatter_to_zeros
from onnxgc.gradients.windows import Windows, windows_of
from onnxgc.model.core.ir import Array, Node, TensorType, TrainableModel

BY_WINDOWS = "MaxPool.windows"
"""The rule of MaxPool without indices."""
_COMPARED_TYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)


def indices_output(node: Node, model: TrainableModel) -> tuple[tuple[str, TensorType]]:
    """MaxPool's second output, which its gradient reads; int64, so twice the bytes of a float32 y."""
    shape = model.types[node.outputs[0]].shape
    name = node.outputs[1] if len(node.outputs) > 1 and node.outputs[1] else f"{node.outputs[0]}__indices"
    return ((name, TensorType(onnx.TensorProto.INT64, shape)),)


def max_pool(g: GradientContext) -> None:
    """y = maximum of each window: dx = dy at the position of the maximum.

    The indices count all elements of x, so x is flattened. Where windows overlap, contributions are added.
    With column-major indices the first spatial axis varies fastest.
    """
    shape = g.input_shape(0)
    is_column_major = bool(g.attribute("storage_order", 0))
    indexed_shape = (*shape[:2], *reversed(shape[2:])) if is_column_major else shape
    count = math.prod(g.output_shape())
    places, values = reshape(g, g.y(1), (count,)), reshape(g, g.dy, (count,))
    may_overlap = windows_of(g, tuple(g.attribute("kernel_shape"))).may_overlap
    scattered = scatter_to_zeros(g, (math.prod(shape),), places, values, 0, may_repeat=may_overlap)
    gradient = reshape(g, scattered, indexed_shape)
    if is_column_major:
        gradient = g.emit("Transpose", gradient, perm=[0, 1, *reversed(range(2, len(shape)))])
    g.give(0, gradient)


def max_pool_by_windows(g: GradientContext) -> None:
    """As `max_pool`, without indices: the first element of a window that equals y is found again in backward.

    Windows are compared one element at a time, the last first, so that of equal elements the first one is
    chosen, as by ONNX Runtime. Places count the elements of one image, and so do not depend on the batch.
    """
    windows, shape = windows_of(g, tuple(g.attribute("kernel_shape"))), g.input_shape(0)
    rows, extent = math.prod(shape[:2]), shape[2:]
    strides = [math.prod(extent[axis + 1 :]) for axis in range(windows.rank)]
    starts = [
        np.arange(count) * step - pad
        for count, step, pad in zip(windows.output_size, windows.strides, windows.pads_begin, strict=True)
    ]

    def places(tap: tuple[int, ...]) -> Array:
        """The place of an element of each window; the nearest of the image for one in the padding."""
        along = [
            np.clip(start + offset, 0, size - 1) * stride
            for start, offset, size, stride in zip(starts, tap, extent, strides, strict=True)
        ]
        return np.asarray(sum(np.ix_(*along)), np.int32)[None, None]

    axes = g.ints(*range(2, len(shape)))
    padded = _padded(g, windows)
    taps = list(
        itertools.product(*(range(0, k * d, d) for k, d in zip(windows.kernel, windows.dilations, strict=True)))
    )
    place = g.constants.add(places(taps[-1]))
    for tap in reversed(taps):
        ends = [
            offset + (count - 1) * step + 1
            for offset, count, step in zip(tap, windows.output_size, windows.strides, strict=True)
        ]
        element = g.emit("Slice", padded, g.ints(*tap), g.ints(*ends), axes, g.ints(*windows.strides))
        place = g.emit("Where", g.emit("Equal", element, g.y()), g.constants.add(places(tap)), place)
    places_of, values = (reshape(g, t, (rows, math.prod(windows.output_size))) for t in (place, g.dy))
    scattered = scatter_to_zeros(g, (rows, math.prod(extent)), places_of, values, 1, may_repeat=windows.may_overlap)
    g.give(0, reshape(g, scattered, shape))


def _padded(g: GradientContext, windows: Windows) -> str:
    """x with the padding that windows reach; no maximum is in it."""
    if not any(windows.pads_begin) and not any(windows.end_pads_used):
        return g.x(0)
    pads = g.ints(0, 0, *windows.pads_begin, 0, 0, *windows.end_pads_used)
    return g.emit("Pad", g.x(0), pads, g.scalar(-math.inf))


def by_windows(model: TrainableModel) -> TrainableModel:
    """The model with MaxPool's gradients by windows, where they need no indices.

    Indices remain where the model itself reads them, and for types whose comparison ONNX Runtime lacks.
    """
    read = {name for node in model.nodes for name in node.inputs} | set(model.outputs)
    nodes = tuple(
        node.with_changes(rule=BY_WINDOWS, outputs=node.outputs[:1])
        if node.rule == "MaxPool"
        and read.isdisjoint(node.outputs[1:])
        and model.types[node.outputs[0]].dtype in _COMPARED_TYPES
        else node
        for node in model.nodes
    )
    return replace(model, nodes=nodes)


def average_pool(g: GradientContext) -> None:
    """y = mean of each window: every element of a window gets dy / count."""
    windows = windows_of(g, tuple(g.attribute("kernel_shape")))
    counts = _window_counts(windows, bool(g.attribute("count_include_pad", 0)))
    g.give(0, _spread(g, windows, g.dy, 1.0 / counts.astype(np.float64)))


def _spread(g: GradientContext, windows: Windows, tensor: str, weights: Array) -> str:
    """At each position of x, the sum of `tensor` times `weights` over the windows with that position."""
    uniform = float(weights.flat[0]) if (weights == weights.flat[0]).all() else None
    size = math.prod(windows.kernel)
    backward_pads = _stride_one_pads(windows)
    if backward_pads is not None:
        # With stride 1, the windows with a given position form a window themselves.
        scaled = _scaled(g, tensor, size * (weights if uniform is None else uniform), uniform is not None)
        return g.emit("AveragePool", scaled, kernel_shape=list(windows.kernel), pads=backward_pads, count_include_pad=1)
    channels = g.input_shape(0)[1]
    scaled = tensor if uniform is not None else _scaled(g, tensor, weights, False)
    ones = np.full((channels, 1, *windows.kernel), 1.0 if uniform is None else uniform)
    return g.emit("ConvTranspose", scaled, g.tensor(ones), group=channels, **windows.transposed())


def _scaled(g: GradientContext, tensor: str, factor: float | Array, is_uniform: bool) -> str:
    if is_uniform:
        return tensor if factor == 1.0 else g.emit("Mul", tensor, g.scalar(float(factor)))
    return g.emit("Mul", tensor, g.tensor(np.asarray(factor)))


def _stride_one_pads(windows: Windows) -> list[int] | None:
    """Pads of the AveragePool that is the backward of one with stride 1, or None if no pads fit."""
    if any(stride > 1 for stride in windows.strides) or any(dilation > 1 for dilation in windows.dilations):
        return None
    begin = [size - 1 - pad for size, pad in zip(windows.kernel, windows.pads_begin, strict=True)]
    end = [
        extent - out - begin_pad + size - 1
        for extent, out, begin_pad, size in zip(
            windows.input_size, windows.output_size, begin, windows.kernel, strict=True
        )
    ]
    is_valid = all(0 <= pad < size for pad, size in zip((*begin, *end), windows.kernel * 2, strict=True))
    return [*begin, *end] if is_valid else None


def _window_counts(windows: Windows, include_pad: bool) -> Array:
    """The number of elements by which each window's mean divides, per output position.

    Source: ONNX AveragePool-19: padding counts with count_include_pad; positions past the padded input,
    under ceil_mode, never count.
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


def global_max_pool(g: GradientContext) -> None:
    """y = maximum over all positions: dx = dy at the first position of the maximum, as with MaxPool."""
    shape = g.input_shape(0)
    rows, positions = math.prod(shape[:2]), math.prod(shape[2:])
    place = g.emit("ArgMax", reshape(g, g.x(0), (rows, positions)), axis=1)
    values = reshape(g, g.dy, (rows, 1))
    g.give(0, reshape(g, scatter_to_zeros(g, (rows, positions), place, values, 1, may_repeat=False), shape))


def lp_pool(g: GradientContext) -> None:
    """y = (sum of |x|^p over a window)^(1/p): dx = sign(x) |x|^(p-1) times the sum of dy y^(1-p).

    The sum is over the windows that contain x. A window of zeros has a gradient of zero.
    """
    windows = windows_of(g, tuple(g.attribute("kernel_shape")))
    p = int(g.attribute("p", 2))
    total = _spread(g, windows, _dy_by_norm(g, p), np.ones(windows.output_size))
    g.give(0, g.emit("Mul", _slope_of_power(g, p), total))


def global_lp_pool(g: GradientContext) -> None:
    """y = (sum of |x|^p over all positions)^(1/p): dx = sign(x) |x|^(p-1) dy y^(1-p)."""
    p = int(g.attribute("p", 2))
    g.give(0, g.emit("Mul", _slope_of_power(g, p), _dy_by_norm(g, p)))


def _dy_by_norm(g: GradientContext, p: int) -> str:
    """dy y^(1-p), or 0 where y is 0."""
    if p == 1:
        return g.dy
    inverse = reciprocal_or_zero(g, g.y())
    return g.emit("Mul", g.dy, inverse if p == 2 else g.emit("Pow", inverse, g.scalar(p - 1)))


def _slope_of_power(g: GradientContext, p: int) -> str:
    """sign(x) |x|^(p-1)."""
    if p == 1:
        return g.emit("Sign", g.x(0))
    if p == 2:
        return g.x(0)
    power = g.emit("Pow", g.x(0), g.scalar(p - 1))
    return power if p % 2 == 0 else g.emit("Mul", power, g.emit("Sign", g.x(0)))


def max_unpool(g: GradientContext) -> None:
    """y = x at given indices amid zeros: dx = dy at these indices.

    Indices count all elements of y. The specification does not define which element y has where an index
    repeats.

    Raises:
        UnsupportedOperatorError: `output_shape` differs from the extent that follows from the windows.
    """
    extents = _unpooled_extents(g)
    if g.output_shape()[2:] != extents:
        raise UnsupportedOperatorError(
            f"{g.node.location} has an output_shape other than {list(extents)}, the extent of its windows, "
            "to which its indices refer; remove output_shape and Pad the result"
        )
    count = math.prod(g.input_shape(0))
    flat = reshape(g, g.dy, (math.prod(g.output_shape()),))
    found = g.emit("GatherElements", flat, reshape(g, g.x(1), (count,)), axis=0)
    g.give(0, reshape(g, found, g.input_shape(0)))


def _unpooled_extents(g: GradientContext) -> tuple[int, ...]:
    """The spatial extent of MaxUnpool's result without `output_shape`. Source: ONNX MaxUnpool-11."""
    kernel = g.attribute("kernel_shape")
    rank = len(kernel)
    strides = g.attribute("strides") or (1,) * rank
    pads = g.attribute("pads") or (0,) * (2 * rank)
    return tuple(
        (size - 1) * strides[axis] + kernel[axis] - pads[axis] - pads[rank + axis]
        for axis, size in enumerate(g.input_shape(0)[2:])
    )
