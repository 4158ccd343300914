"""Gradients of normalisations. x: [N, C, spatial...]."""

import math

import numpy as np
import onnx

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import (
    channel_sums,
    is_narrow,
    mean_over_last,
    per_channel,
    reciprocal_or_zero,
    reduce_sum,
    reshape,
    unbroadcast,
    zeros,
)
from onnxgc.model.core.ir import Node, TensorType, TrainableModel


def batch_normalization(g: GradientContext) -> None:
    """y = (x - mean) / sqrt(var + eps) scale + bias, with mean and variance as inputs.

    Raises:
        UnsupportedOperatorError: the node normalises with the statistics of its batch.
    """
    if g.attribute("training_mode", 0):
        raise UnsupportedOperatorError(
            f"{g.node.location} is in training mode and the graph reads its statistics, which has no "
            "gradient rule; export the model without these outputs"
        )
    rank = len(g.input_shape(0))
    inverse = _inverse_deviation(g)
    if g.wants(2):
        g.give(2, channel_sums(g, g.dy, g.input_shape(0)))
    if g.wants(1):
        centred = g.emit("Sub", g.x(0), per_channel(g, g.x(3), rank))
        total = channel_sums(g, g.emit("Mul", g.dy, centred), g.input_shape(0))
        g.give(1, g.emit("Mul", total, inverse))
    if g.wants(0):
        slope = per_channel(g, g.emit("Mul", g.x(1), inverse), rank)
        g.give(0, g.emit("Mul", g.dy, slope))


def batch_normalization_of_batch(g: GradientContext) -> None:
    """Batch normalisation with the mean and variance of the batch.

    dx = A (dy + R (x - mean) + Q) per channel, with A = scale / std, R = -mean(dy (x - mean)) / var,
    Q = -mean(dy). In this form at most three tensors of x's size are live at once.
    Source: Ioffe & Szegedy 2015, section 3.
    """
    shape = g.input_shape(0)
    rank, count = len(shape), math.prod(shape) // shape[1]
    inverse = _inverse_deviation(g)
    centred = g.emit("Sub", g.x(0), per_channel(g, g.x(3), rank))
    total = channel_sums(g, g.emit("Mul", g.dy, centred), shape)
    d_scale = g.emit("Mul", total, inverse)
    d_bias = channel_sums(g, g.dy, shape)
    if g.wants(1):
        g.give(1, d_scale)
    if g.wants(2):
        g.give(2, d_bias)
    if g.wants(0):
        share = g.scalar(-1.0 / count)
        slope = g.emit("Mul", g.x(1), inverse)
        through_deviation = g.emit("Mul", g.emit("Mul", d_scale, inverse), share)
        through_mean = g.emit("Mul", d_bias, share)
        inner = g.emit("Mul", centred, per_channel(g, through_deviation, rank))
        inner = g.emit("Add", g.dy, inner)
        inner = g.emit("Add", inner, per_channel(g, through_mean, rank))
        g.give(0, g.emit("Mul", inner, per_channel(g, slope, rank)))


def batch_normalization_of_batch_on_cuda(g: GradientContext) -> None:
    """As `batch_normalization_of_batch`, in 12 passes over tensors of x's size, not 16, and fewer nodes.

    With s = std and M elements in a channel, dscale = (sum(dy x) - mean sum(dy)) / s and
    dx = scale (dy - (x - mean) / s dscale / M - sum(dy) / M) / s. Each quotient is a BatchNormalization in
    inference form. The rounding error of dscale grows with |mean| / s. Two-byte types keep the other form.
    """
    if is_narrow(g):
        batch_normalization_of_batch(g)
        return
    shape = g.input_shape(0)
    channels, share = shape[1], g.scalar(shape[1] / math.prod(shape))
    no_bias, ones = g.tensor(np.zeros(channels)), g.tensor(np.ones(channels))
    epsilon = float(g.attribute("epsilon", 1e-5))

    def normalized(tensor: str, scale: str, mean: str) -> str:
        """(tensor - mean) scale / s, per channel."""
        return g.emit("BatchNormalization", tensor, scale, no_bias, mean, g.x(4), epsilon=epsilon)

    d_bias = channel_sums(g, g.dy, shape)
    product = channel_sums(g, g.emit("Mul", g.dy, g.x(0)), shape, keepdims=True)
    row = normalized(product, ones, g.emit("Mul", g.x(3), d_bias))
    d_scale = reshape(g, row, (channels,))
    if g.wants(1):
        g.give(1, d_scale)
    if g.wants(2):
        g.give(2, d_bias)
    if g.wants(0):
        through_deviation = normalized(g.x(0), g.emit("Mul", d_scale, share), g.x(3))
        inner = g.emit("Sub", g.dy, through_deviation)
        g.give(0, normalized(inner, g.x(1), g.emit("Mul", d_bias, share)))


def _inverse_deviation(g: GradientContext) -> str:
    """1 / sqrt(var + eps), per channel."""
    epsilon = g.scalar(float(g.attribute("epsilon", 1e-5)))
    return g.emit("Reciprocal", g.emit("Sqrt", g.emit("Add", g.x(4), epsilon)))


def statistics_outputs(node: Node, model: TrainableModel) -> tuple[tuple[str, TensorType], ...]:
    """LayerNormalization's mean and inverse deviation, one number per row, which its gradient reads."""
    shape = model.types[node.inputs[0]].shape
    axis = int(node.attribute("axis", -1)) % len(shape)
    kind = TensorType(
        int(node.attribute("stash_type", onnx.TensorProto.FLOAT)), (*shape[:axis], *(1,) * (len(shape) - axis))
    )
    named = dict(enumerate(node.outputs))
    return tuple(
        (named.get(index) or f"{node.outputs[0]}__{what}", kind)
        for index, what in ((1, "mean"), (2, "inverse_deviation"))
    )


def layer_normalization(g: GradientContext) -> None:
    """y = (x - mean) r scale + bias, r = 1 / sqrt(var + eps), for each row over the normalised axes.

    dx = r (dy scale - (x - mean) S1 - S2) with S1 = r^2 mean(dy scale (x - mean)) and S2 = mean(dy scale),
    one number per row each; dscale = sum over rows of r dy (x - mean). Gradients of the outputs mean and r,
    if the model reads these, add to S2 and S1. Source: Ba, Kiros & Hinton 2016.
    """
    mean, inverse = _in_type_of_x(g, g.y(1)), _in_type_of_x(g, g.y(2))
    rows = _Rows(g, int(g.attribute("axis", -1)))
    dy = g.dy if 0 in g.incoming else zeros(g, rows.shape)
    if g.wants(2):
        g.give(2, unbroadcast(g, dy, rows.shape, g.input_shape(2)))
    if not (g.wants(0) or g.wants(1)):
        return
    centred = g.emit("Sub", g.x(0), mean)
    product = g.emit("Mul", dy, centred)
    if g.wants(1):
        g.give(1, rows.scale_gradient(product, inverse))
    if not g.wants(0):
        return
    share = g.scalar(1.0 / rows.width)
    through_deviation = rows.mean_with_scale(product)
    through_mean = rows.mean_with_scale(dy)
    if 2 in g.incoming:
        extra = g.emit("Mul", _in_type_of_x(g, g.incoming[2]), share)
        through_deviation = g.emit("Add", through_deviation, extra)
    if 1 in g.incoming:
        extra = g.emit("Div", g.emit("Mul", _in_type_of_x(g, g.incoming[1]), share), inverse)
        through_mean = g.emit("Sub", through_mean, extra)
    slope = g.emit("Mul", through_deviation, g.emit("Mul", inverse, inverse))
    # The subtrahend comes first, so that `centred` can be released before dy times the scale is allocated.
    subtracted = g.emit("Mul", centred, slope)
    inner = g.emit("Sub", g.emit("Mul", dy, g.x(1)), subtracted)
    g.give(0, g.emit("Mul", g.emit("Sub", inner, through_mean), inverse))


def rms_normalization(g: GradientContext) -> None:
    """y = x r scale per row, r = 1 / sqrt(mean(x^2) + eps).

    dx = r (dy scale - x r^2 mean(dy scale x)); dscale = sum over rows of r dy x.
    Source: Zhang & Sennrich 2019.
    """
    rows = _Rows(g, int(g.attribute("axis", -1)))
    square = g.emit("Mul", g.x(0), g.x(0))
    mean = mean_over_last(g, square, rows.axes, rows.width)
    shifted = g.emit("Add", mean, g.scalar(float(g.attribute("epsilon", 1e-5))))
    inverse = g.emit("Reciprocal", g.emit("Sqrt", shifted))
    product = g.emit("Mul", g.dy, g.x(0))
    if g.wants(1):
        g.give(1, rows.scale_gradient(product, inverse))
    if g.wants(0):
        slope = g.emit("Mul", rows.mean_with_scale(product), g.emit("Mul", inverse, inverse))
        subtracted = g.emit("Mul", g.x(0), slope)
        inner = g.emit("Sub", g.emit("Mul", g.dy, g.x(1)), subtracted)
        g.give(0, g.emit("Mul", inner, inverse))


class _Rows:
    """x as rows, normalised independently, and the scale (input 1) that broadcasts over them.

    If the scale has the shape of a row, both sums are matrix products on a CPU and need no temporary. On CUDA
    products are rounded to 10 bits by default (TF32).
    """

    def __init__(self, g: GradientContext, axis: int) -> None:
        self._g = g
        self.shape = g.input_shape(0)
        axis %= len(self.shape)
        self.axes = tuple(range(axis, len(self.shape)))
        self._outer, self._row = self.shape[:axis], self.shape[axis:]
        self.width = math.prod(self._row)
        self._count = math.prod(self._outer)
        scale = g.input_shape(1)
        self._by_product = (
            g.provider == "cpu"
            and scale[max(len(scale) - len(self._row), 0) :] == self._row
            and (math.prod(scale) == self.width)
        )

    def _flat(self, tensor: str) -> str:
        return reshape(self._g, tensor, (self._count, self.width))

    def scale_gradient(self, product: str, inverse: str) -> str:
        """Sum over rows of `product` (of x's shape) times `inverse` (one number per row)."""
        g, target = self._g, self._g.input_shape(1)
        if not self._by_product:
            return unbroadcast(g, g.emit("Mul", product, inverse), self.shape, target)
        column = reshape(g, inverse, (self._count, 1))
        return reshape(g, g.emit("Gemm", column, self._flat(product), transA=1), target)

    def mean_with_scale(self, tensor: str) -> str:
        """Mean along each row of `tensor` times the scale."""
        g = self._g
        if not self._by_product:
            scaled = g.emit("Mul", tensor, g.x(1))
            return mean_over_last(g, scaled, self.axes, self.width)
        scale = reshape(g, g.x(1), (self.width, 1))
        means = g.emit("Gemm", self._flat(tensor), scale, alpha=1.0 / self.width)
        return reshape(g, means, (*self._outer, *(1,) * len(self._row)))


def _in_type_of_x(g: GradientContext, statistic: str) -> str:
    """A statistic in x's type; the runtime keeps statistics in the type `stash_type`."""
    stash_type = int(g.attribute("stash_type", onnx.TensorProto.FLOAT))
    wanted = g.input_type(0).dtype
    return statistic if stash_type == wanted else g.emit("Cast", statistic, to=wanted)


def instance_normalization(g: GradientContext) -> None:
    """y = (x - mean) r scale + bias with the statistics of each image and channel.

    dx = scale r (dy - (x - mean) r^2 mean(dy (x - mean)) - mean(dy)) over the spatial axes.
    Source: Ulyanov, Vedaldi & Lempitsky 2016.
    """
    batch, channels, *spatial = g.input_shape(0)
    positions = math.prod(spatial)
    flat = (batch, channels, positions)
    x, dy = reshape(g, g.x(0), flat), reshape(g, g.dy, flat)
    d_bias = reduce_sum(g, dy, (2,), keepdims=True)
    if g.wants(2):
        g.give(2, channel_sums(g, reshape(g, d_bias, flat[:2]), flat[:2]))
    if not (g.wants(0) or g.wants(1)):
        return
    centred = g.emit("Sub", x, mean_over_last(g, x, (2,), positions))
    variance = mean_over_last(g, g.emit("Mul", centred, centred), (2,), positions)
    shifted = g.emit("Add", variance, g.scalar(float(g.attribute("epsilon", 1e-5))))
    inverse = g.emit("Reciprocal", g.emit("Sqrt", shifted))
    total = reduce_sum(g, g.emit("Mul", dy, centred), (2,), keepdims=True)
    d_scale = g.emit("Mul", total, inverse)
    if g.wants(1):
        g.give(1, channel_sums(g, reshape(g, d_scale, flat[:2]), flat[:2]))
    if g.wants(0):
        share = g.scalar(1.0 / positions)
        slope = g.emit("Mul", per_channel(g, g.x(1), 3), inverse)
        through_deviation = g.emit("Mul", g.emit("Mul", d_scale, inverse), share)
        through_mean = g.emit("Mul", d_bias, share)
        inner = g.emit("Sub", dy, g.emit("Mul", centred, through_deviation))
        inner = g.emit("Mul", g.emit("Sub", inner, through_mean), slope)
        g.give(0, reshape(g, inner, g.input_shape(0)))


def lp_normalization(g: GradientContext) -> None:
    """y = x / n, n the norm along an axis: dx = (dy - d sum(dy y)) / n, d = y for p = 2, else sign(x).

    A row of zeros stays zero and has a gradient of zero.
    """
    axis = int(g.attribute("axis", -1)) % len(g.input_shape(0))
    p = int(g.attribute("p", 2))
    norm = g.emit("ReduceL1" if p == 1 else "ReduceL2", g.x(0), g.ints(axis), keepdims=1)
    inverse = reciprocal_or_zero(g, norm)
    total = reduce_sum(g, g.emit("Mul", g.dy, g.y()), (axis,), keepdims=True)
    direction = g.emit("Sign", g.x(0)) if p == 1 else g.y()
    g.give(0, g.emit("Mul", g.emit("Sub", g.dy, g.emit("Mul", direction, total)), inverse))


def lrn(g: GradientContext) -> None:
    """y = x s^-beta, s = bias + alpha / size * (sum of x^2 over a window of channels).

    dx = dy s^-beta - 2 alpha beta / size * x * (sum over the mirrored window of dy x s^(-beta-1)).
    Window sums are average pools that count the padding, along the channels as an image axis.
    """
    size = int(g.attribute("size"))
    alpha, beta = float(g.attribute("alpha", 1e-4)), float(g.attribute("beta", 0.75))
    bias = float(g.attribute("bias", 1.0))
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    shape = g.input_shape(0)
    squares = g.emit("Mul", g.x(0), g.x(0))
    mean = _channel_average(g, squares, shape, size, before, after)
    base = g.emit("Add", g.emit("Mul", mean, g.scalar(alpha)), g.scalar(bias))
    factor = g.emit("Pow", base, g.scalar(-beta))
    direct = g.emit("Mul", g.dy, factor)
    inner = g.emit("Div", g.emit("Mul", direct, g.x(0)), base)
    spread = _channel_average(g, inner, shape, size, after, before)
    correction = g.emit("Mul", g.emit("Mul", g.x(0), g.scalar(2.0 * alpha * beta)), spread)
    g.give(0, g.emit("Sub", direct, correction))


def _channel_average(
    g: GradientContext, tensor: str, shape: tuple[int, ...], size: int, before: int, after: int
) -> str:
    """Sum over a window of channels, divided by the window's size."""
    image = reshape(g, tensor, (shape[0], 1, shape[1], math.prod(shape[2:])))
    averaged = g.emit("AveragePool", image, kernel_shape=[size, 1], pads=[before, 0, after, 0], count_include_pad=1)
    return reshape(g, averaged, shape)
