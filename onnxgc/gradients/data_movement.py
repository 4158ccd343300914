"""Gradients of operators that rearrange, join or repeat elements."""

import math

import numpy as np

from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import reduce_sum, reshape, unbroadcast, zeros


def view(g: GradientContext) -> None:
    """Reshape, Flatten, Squeeze, Unsqueeze: dx = dy in x's shape."""
    g.give(0, reshape(g, g.dy, g.input_shape(0)))


def transpose(g: GradientContext) -> None:
    """y = x with axes permuted: dx = dy with the inverse permutation."""
    rank = len(g.input_shape(0))
    if not rank:
        g.give(0, g.dy)
        return
    permutation = g.attribute("perm") or list(reversed(range(rank)))
    g.give(0, g.emit("Transpose", g.dy, perm=[int(axis) for axis in np.argsort(permutation)]))


def concat(g: GradientContext) -> None:
    """y = inputs joined along an axis: each gets its slice of dy."""
    rank = len(g.output_shape())
    axis = int(g.attribute("axis")) % rank
    start = 0
    for index in range(len(g.node.inputs)):
        size = g.input_shape(index)[axis]
        if g.wants(index):
            span = (g.ints(start), g.ints(start + size), g.ints(axis))
            g.give(index, g.emit("Slice", g.dy, *span))
        start += size


def split(g: GradientContext) -> None:
    """y_0, y_1, ... = pieces of x: dx = their gradients joined, zeros for a piece without one."""
    axis = int(g.attribute("axis", 0))
    pieces = [
        g.incoming[index] if index in g.incoming else zeros(g, g.output_shape(index))
        for index in range(len(g.node.outputs))
    ]
    g.give(0, pieces[0] if len(pieces) == 1 else g.emit("Concat", *pieces, axis=axis))


def depth_to_space(g: GradientContext) -> None:
    """y = x [N, C b^2, H, W] as [N, C, H b, W b]: dx = dy with each block moved back to its channels.

    Channels of x are numbered by (row in block, column, C) in mode DCR, by (C, row, column) in CRD.
    """
    batch, channels, height, width = g.output_shape()
    block = int(g.attribute("blocksize"))
    order = [0, 1, 3, 5, 2, 4] if g.attribute("mode", "DCR") == "CRD" else [0, 3, 5, 1, 2, 4]
    blocks = reshape(g, g.dy, (batch, channels, height // block, block, width // block, block))
    g.give(0, reshape(g, g.emit("Transpose", blocks, perm=order), g.input_shape(0)))


def space_to_depth(g: GradientContext) -> None:
    """y = x [N, C, H b, W b] as [N, b^2 C, H, W]: dx = dy with the channels moved back to their block."""
    batch, channels, height, width = g.input_shape(0)
    block = int(g.attribute("blocksize"))
    parts = reshape(g, g.dy, (batch, block, block, channels, height // block, width // block))
    g.give(0, reshape(g, g.emit("Transpose", parts, perm=[0, 3, 4, 1, 5, 2]), g.input_shape(0)))


def col2im(g: GradientContext) -> None:
    """y = blocks [N, C k, L] added up at their windows: dx = the windows of dy, one block per window.

    A convolution whose filters pick one element each extracts the windows.
    """
    batch, channels, *image = g.output_shape()
    block = list(g.constant_integers(2, "block shape"))
    count = math.prod(block)
    picks = g.tensor(np.eye(count).reshape(count, 1, *block))
    settings = {name: g.attribute(name) for name in ("dilations", "pads", "strides") if g.attribute(name)}
    images = reshape(g, g.dy, (batch * channels, 1, *image))
    windows = g.emit("Conv", images, picks, kernel_shape=block, **settings)
    g.give(0, reshape(g, windows, g.input_shape(0)))


def reverse_sequence(g: GradientContext) -> None:
    """y = x with the first elements of each sequence reversed: dx = dy reversed likewise."""
    axes = {name: g.node.attributes[name] for name in ("batch_axis", "time_axis") if name in g.node.attributes}
    g.give(0, g.emit("ReverseSequence", g.dy, g.x(1), **axes))


def expand(g: GradientContext) -> None:
    """y = x broadcast: dx = dy summed over the broadcast axes."""
    g.give(0, unbroadcast(g, g.dy, g.output_shape(), g.input_shape(0)))


def tile(g: GradientContext) -> None:
    """y = copies of x: dx = dy summed over the copies."""
    shape, tiled = g.input_shape(0), g.output_shape()
    if 0 in tiled:
        g.give(0, zeros(g, shape))
        return
    sizes: list[int] = []
    copy_axes: list[int] = []
    for size, total in zip(shape, tiled, strict=True):
        if total != size:
            copy_axes.append(len(sizes))
            sizes.append(total // size)
        sizes.append(size)
    gradient = g.dy
    if copy_axes:
        gradient = reduce_sum(g, reshape(g, gradient, tuple(sizes)), tuple(copy_axes))
        if len(sizes) - len(copy_axes) != len(shape):
            gradient = reshape(g, gradient, shape)
    g.give(0, gradient)
