"""Gradients of normalisations. x: [N, C, spatial...]."""

from __future__ import annotations

import math

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients.engine import GradientContext
from onnxgc.gradients.shaping import per_channel, reduce_sum, reshape


def batch_normalization(g: GradientContext) -> None:
    """y = (x - mean) / sqrt(var + eps) scale + bias, with mean and variance given from elsewhere.

    Raises:
        UnsupportedOperatorError: the node takes the statistics of the batch itself.
    """
    if g.attribute("training_mode", 0):
        raise UnsupportedOperatorError(
            f"BatchNormalization '{g.node.origin or g.node.name}' is in training mode and its statistics are "
            "read, which has no gradient rule; export the model without these outputs"
        )
    rank = len(g.input_shape(0))
    axes = (0, *range(2, rank))
    inverse = _inverse_deviation(g)
    if g.wants(2):
        g.give(2, reduce_sum(g, g.dy, axes))
    if g.wants(1):
        centred = g.emit("Sub", g.x(0), per_channel(g, g.x(3), rank))
        total = reduce_sum(g, g.emit("Mul", g.dy, centred), axes)
        g.give(1, g.emit("Mul", total, inverse))
    if g.wants(0):
        slope = per_channel(g, g.emit("Mul", g.x(1), inverse), rank)
        g.give(0, g.emit("Mul", g.dy, slope))


def batch_normalization_of_batch(g: GradientContext) -> None:
    """The same where mean and variance are x's own.

    dx = A (dy + R (x - mean) + Q) per channel, with A = scale / std, R = -mean(dy (x - mean)) / var,
    Q = -mean(dy). In this form no more than three tensors of x's size live at once. Source: Ioffe
    & Szegedy 2015, section 3.
    """
    shape = g.input_shape(0)
    rank, count = len(shape), math.prod(shape) // shape[1]
    axes = (0, *range(2, rank))
    inverse = _inverse_deviation(g)
    centred = g.emit("Sub", g.x(0), per_channel(g, g.x(3), rank))
    total = reduce_sum(g, g.emit("Mul", g.dy, centred), axes)
    d_scale = g.emit("Mul", total, inverse)
    d_bias = reduce_sum(g, g.dy, axes)
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


def _inverse_deviation(g: GradientContext) -> str:
    """1 / sqrt(var + eps), per channel."""
    epsilon = g.scalar(float(g.attribute("epsilon", 1e-5)))
    return g.emit("Reciprocal", g.emit("Sqrt", g.emit("Add", g.x(4), epsilon)))


def lrn(g: GradientContext) -> None:
    """y = x s^-beta, s = bias + alpha / size * (sum of x^2 over a window of channels).

    dx = dy s^-beta - 2 alpha beta / size * x * (sum over the mirrored window of dy x s^(-beta-1)).
    Window sums are averages with the padding counted, taken along the channels as an image axis.
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
    averaged = g.emit(
        "AveragePool", image, kernel_shape=[size, 1], pads=[before, 0, after, 0], count_include_pad=1
    )
    return reshape(g, averaged, shape)
