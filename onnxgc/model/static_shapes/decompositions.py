"""Decomposes operators that lack a CUDA kernel or a gradient, once shapes are known."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.model.rebatch.shape_pair import ShapeWalk


class _Decomposition:
    """One node, whose first input has the type `kind`, and the nodes that replace it."""

    def __init__(self, node: Node, kind: TensorType, walk: ShapeWalk) -> None:
        self.node = node
        self.kind = kind
        self.walk = walk
        self.nodes: list[Node] = []

    def emit(self, op: str, inputs: Sequence[str], part: str = "", **attributes: Any) -> str:
        """Adds the operator that computes a part, or without a name the node's output."""
        node = self.node.as_operator(op, inputs, **attributes)
        if part:
            node = node.with_changes(outputs=(f"{node.outputs[0]}/{part}",), name=f"{node.name}/{part}")
        self.nodes.append(node)
        return node.outputs[0]

    def number(self, part: str, value: npt.ArrayLike) -> str:
        return self._constant(part, np.asarray(value, helper.tensor_dtype_to_np_dtype(self.kind.dtype)))

    def ints(self, part: str, values: npt.ArrayLike) -> str:
        return self._constant(part, np.asarray(values, np.int64))

    def _constant(self, part: str, value: Array) -> str:
        return self.walk.add_fresh_constant(f"{self.node.outputs[0]}/{part}", value)


def decompose(node: Node, walk: ShapeWalk) -> list[Node]:
    """The nodes that replace this one; empty if it is not decomposed."""
    kind = walk.type_of(node.inputs[0]) if node.inputs else None
    if node.domain or node.op not in DECOMPOSITIONS or kind is None:
        return []
    parts = _Decomposition(node, kind, walk)
    DECOMPOSITIONS[node.op](parts)
    return parts.nodes


def _mean(f: _Decomposition) -> None:
    """The sum times the reciprocal of the number of operands: Mean has no kernel on CUDA."""
    inputs = f.node.inputs
    if len(inputs) == 1:
        f.emit("Identity", inputs)
    else:
        f.emit("Mul", (f.emit("Sum", inputs, "sum"), f.number("share", 1 / len(inputs))))


def _compress(f: _Decomposition) -> None:
    """A Gather, if the condition is constant."""
    source, condition, axis = f.node.inputs[0], f.walk.value(f.node.inputs[1]), f.node.attribute("axis")
    if condition is None:
        return
    extent = f.kind.element_count if axis is None else f.kind.shape[axis]
    indices = f.ints("chosen", np.flatnonzero(condition[:extent]))
    if axis is None:
        source = f.emit("Reshape", (source, f.ints("extent", [-1])), "flat")
    f.emit("Gather", (source, indices), axis=axis or 0)


def _group_normalization(f: _Decomposition) -> None:
    """InstanceNormalization with each group as one channel, then scale and bias.

    ONNX's function body computes the variance as E[x^2] - E[x]^2, which suffers cancellation. Before
    opset 21 scale and bias have one number for each group. x: [N, C, spatial...].
    """
    (x, *affine), shape = f.node.inputs[:3], f.kind.shape
    scale_kind = f.walk.type_of(affine[0])
    if scale_kind is None or 0 in shape:
        return
    groups, channels = int(f.node.attribute("num_groups")), shape[1]
    if scale_kind.shape != (channels,):
        group_of_channel = f.ints("group_of", np.repeat(np.arange(groups), channels // groups))
        affine = [
            f.emit("Gather", (source, group_of_channel), part)
            for source, part in zip(affine, ("scale_of_each", "bias_of_each"), strict=True)
        ]
    grouped_shape = f.ints("shape", (shape[0], groups, math.prod(shape[1:]) // groups))
    grouped = f.emit("Reshape", (x, grouped_shape), "groups")
    unit = f.number("ones", np.ones(groups)), f.number("zeros", np.zeros(groups))
    epsilon = float(f.node.attribute("epsilon", 1e-5))
    normal = f.emit("InstanceNormalization", (grouped, *unit), "normal", epsilon=epsilon)
    y = f.emit("Reshape", (normal, f.ints("shape", shape)), "whole")
    broadcast_shape = (channels, *(1,) * (len(shape) - 2))
    scale = f.emit("Reshape", (affine[0], f.ints("shape", broadcast_shape)), "scale")
    y = f.emit("Mul", (y, scale), "scaled")
    bias = f.emit("Reshape", (affine[1], f.ints("shape", broadcast_shape)), "bias")
    f.emit("Add", (y, bias))


def _affine_grid(f: _Decomposition) -> None:
    """A constant grid of points times theta^T, if the size is known. theta: [N, d, d + 1].

    ONNX's function body loses the axis of a batch of one. With align_corners the only point of an axis with
    one element is its middle, as in PyTorch.
    """
    size = f.walk.value(f.node.inputs[1])
    if size is None:
        return
    batch, _, *extents = (int(extent) for extent in size)
    axes = [_points(extent, bool(f.node.attribute("align_corners", 0))) for extent in extents]
    coordinates = [axis.reshape(-1) for axis in np.meshgrid(*axes, indexing="ij")]
    # The last axis of the image is the first coordinate of a point.
    points = np.stack([*reversed(coordinates), np.ones(math.prod(extents))], axis=1)
    base = f.number("points", points)
    transposed = f.emit("Transpose", f.node.inputs[:1], "turned", perm=[0, 2, 1])
    transformed = f.emit("MatMul", (base, transposed), "moved")
    f.emit("Reshape", (transformed, f.ints("shape", [batch, *extents, len(axes)])))


def _points(size: int, align_corners: bool) -> Array:
    """Coordinates of the elements of an axis: from -1 to 1, or the centres of equal parts of that range."""
    if align_corners:
        return np.linspace(-1, 1, size) if size > 1 else np.zeros(1)
    return (2 * np.arange(size) + 1) / size - 1


def _celu(f: _Decomposition) -> None:
    """alpha Elu(x / alpha) with a scalar alpha; ONNX's function body uses shape [1], wrong for a scalar x."""
    alpha = float(f.node.attribute("alpha", 1.0))
    if alpha == 1:
        f.emit("Elu", f.node.inputs)
    elif alpha > 0:
        scale = f.number("alpha", alpha)
        scaled = f.emit("Div", (f.node.inputs[0], scale), "scaled")
        f.emit("Mul", (f.emit("Elu", (scaled,), "bent"), scale))


def _softplus(f: _Decomposition) -> None:
    """Computed in float32 for 16-bit types, for which runtimes compute log(1 + e^x), which overflows."""
    if f.kind.dtype in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        wide = f.emit("Cast", f.node.inputs, "wide", to=int(TensorProto.FLOAT))
        f.emit("Cast", (f.emit("Softplus", (wide,), "softplus"),), to=f.kind.dtype)


DECOMPOSITIONS: Mapping[str, Callable[[_Decomposition], None]] = {
    "AffineGrid": _affine_grid,
    "Celu": _celu,
    "Compress": _compress,
    "GroupNormalization": _group_normalization,
    "Mean": _mean,
    "Softplus": _softplus,
}
