"""Gradients of convolution and transposed convolution.

x: [N, C, spatial...], w: [K, C / groups, kernel...], y, dy: [N, K, output...].
"""

from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import channel_sums
from onnxgc.gradients.weight_gradient import Convolution, weight_gradient
from onnxgc.gradients.windows import transposed_windows_of, windows_of


def conv(g: GradientContext) -> None:
    """y = x * w + b."""
    shape_w = g.input_shape(1)
    batch, channels_in = g.input_shape(0)[:2]
    convolution = Convolution(windows_of(g, shape_w[2:]), batch, channels_in, shape_w[0], int(g.attribute("group", 1)))
    if g.wants(2):
        g.give(2, channel_sums(g, g.dy, g.output_shape()))
    # The weight's gradient comes before x's: it is the last reader of x, which can then be released.
    if g.wants(1):
        g.give(1, weight_gradient(g, convolution, g.x(0), g.dy))
    if g.wants(0):
        g.give(0, _input_gradient(g, convolution))


def conv_transpose(g: GradientContext) -> None:
    """y = transposed convolution of x by w, plus b.

    dx is the convolution of dy by w. dw is the weight gradient of that convolution, with dy as its input and
    x as the gradient of its output. x: [N, C, spatial...], w: [C, K / groups, kernel...].
    """
    shape_w = g.input_shape(1)
    batch, channels = g.output_shape()[:2]
    windows = transposed_windows_of(g, shape_w[2:])
    convolution = Convolution(windows, batch, channels, shape_w[0], int(g.attribute("group", 1)))
    if g.wants(2):
        g.give(2, channel_sums(g, g.dy, g.output_shape()))
    if g.wants(1):
        g.give(1, weight_gradient(g, convolution, g.dy, g.x(0)))
    if g.wants(0):
        g.give(0, _convolved_dy(g, convolution))


def _convolved_dy(g: GradientContext, c: Convolution) -> str:
    """The convolution of dy by w: the input gradient of a transposed convolution."""
    return g.emit(
        "Conv",
        g.dy,
        g.x(1),
        kernel_shape=list(c.windows.kernel),
        strides=list(c.windows.strides),
        dilations=list(c.windows.dilations),
        pads=c.windows.pads,
        group=c.groups,
    )


def _input_gradient(g: GradientContext, c: Convolution) -> str:
    """dx by a transposed convolution; for kernels of 1 on a CPU, by one with the transposed weight."""
    if c.is_pointwise and not c.is_strided and g.provider == "cpu":
        transposed = g.emit("Transpose", g.x(1), perm=[1, 0, *range(2, 2 + c.windows.rank)])
        return g.emit("Conv", g.dy, transposed, kernel_shape=list(c.windows.kernel))
    return g.emit("ConvTranspose", g.dy, g.x(1), group=c.groups, **c.windows.transposed())
