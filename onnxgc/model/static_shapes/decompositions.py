"""Decomposes operators that lack a CUDA kernel or a gradient, once shapes are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from onnx import TensorProto, helper

from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.model.core.node_rewrites import TypeOf, ValueOf

AddConstant = Callable[[str, Array], str]
Decomposition = Callable[[Node, TypeOf, ValueOf, AddConstant], list[Node] | None]


def decompose(node: Node, type_of: TypeOf, value_of: ValueOf, add_constant: AddConstant) -> list[Node] | None:
    """The nodes that replace this one, or None where it is not decomposed."""
    rule = None if node.domain else DECOMPOSITIONS.get(node.op)
    return None if rule is None else rule(node, type_of, value_of, add_constant)


def _mean(node: Node, type_of: TypeOf, value_of: ValueOf, add_constant: AddConstant) -> list[Node] | None:
    """The sum times the reciprocal of the number of operands: Mean has no kernel on CUDA."""
    kind = type_of(node.inputs[0])
    if kind is None:
        return None
    if len(node.inputs) == 1:
        return [_plain(node, "Identity", node.inputs, node.outputs)]
    total = f"{node.outputs[0]}/sum"
    reciprocal = add_constant(f"{node.outputs[0]}/share", _number(1 / len(node.inputs), kind))
    return [
        _plain(node, "Sum", node.inputs, (total,), "sum"),
        _plain(node, "Mul", (total, reciprocal), node.outputs),
    ]


def _compress(node: Node, type_of: TypeOf, value_of: ValueOf, add_constant: AddConstant) -> list[Node] | None:
    """A Gather, where the condition is constant."""
    condition, kind = value_of(node.inputs[1]), type_of(node.inputs[0])
    if condition is None or kind is None:
        return None
    axis = node.attribute("axis")
    output = node.outputs[0]
    extent = kind.element_count if axis is None else kind.shape[axis]
    indices = add_constant(f"{output}/chosen", np.flatnonzero(condition[:extent]).astype(np.int64))
    if axis is not None:
        return [_plain(node, "Gather", (node.inputs[0], indices), node.outputs, axis=axis)]
    flat = f"{output}/flat"
    return [
        _plain(
            node,
            "Reshape",
            (node.inputs[0], add_constant(f"{output}/extent", np.asarray([-1], np.int64))),
            (flat,),
            "flat",
        ),
        _plain(node, "Gather", (flat, indices), node.outputs, axis=0),
    ]


def _group_normalization(
    node: Node, type_of: TypeOf, value_of: ValueOf, add_constant: AddConstant
) -> list[Node] | None:
    """InstanceNormalization with each group as one channel, then scale and bias.

    ONNX's function body computes the variance as E[x^2] - E[x]^2, which suffers cancellation. Before
    opset 21 scale and bias have one number for each group. x: [N, C, spatial...].
    """
    kind, scale_kind = type_of(node.inputs[0]), type_of(node.inputs[1])
    if kind is None or scale_kind is None or 0 in kind.shape:
        return None
    groups, channels = int(node.attribute("num_groups")), kind.shape[1]
    output = node.outputs[0]

    def shape(*sizes: int) -> str:
        return add_constant(f"{output}/shape", np.asarray(sizes, np.int64))

    names = {part: f"{output}/{part}" for part in ("groups", "normal", "whole", "scale", "bias", "scaled")}
    broadcast_shape = (channels, *(1,) * (len(kind.shape) - 2))
    if scale_kind.shape == (channels,):
        expanded, per_channel = [], node.inputs[1:3]
    else:
        per_channel = (f"{output}/scale_of_each", f"{output}/bias_of_each")
        group_of_channel = add_constant(
            f"{output}/group_of", np.repeat(np.arange(groups), channels // groups)
        )
        expanded = [
            _plain(node, "Gather", (source, group_of_channel), (target,), target.rpartition("/")[2])
            for source, target in zip(node.inputs[1:3], per_channel, strict=True)
        ]
    return [
        *expanded,
        _plain(
            node,
            "Reshape",
            (node.inputs[0], shape(kind.shape[0], groups, math.prod(kind.shape[1:]) // groups)),
            (names["groups"],),
            "groups",
        ),
        _plain(
            node,
            "InstanceNormalization",
            (
                names["groups"],
                add_constant(f"{output}/ones", np.ones(groups, _number(0, kind).dtype)),
                add_constant(f"{output}/zeros", np.zeros(groups, _number(0, kind).dtype)),
            ),
            (names["normal"],),
            "normal",
            epsilon=float(node.attribute("epsilon", 1e-5)),
        ),
        _plain(node, "Reshape", (names["normal"], shape(*kind.shape)), (names["whole"],), "whole"),
        _plain(node, "Reshape", (per_channel[0], shape(*broadcast_shape)), (names["scale"],), "scale"),
        _plain(node, "Mul", (names["whole"], names["scale"]), (names["scaled"],), "scaled"),
        _plain(node, "Reshape", (per_channel[1], shape(*broadcast_shape)), (names["bias"],), "bias"),
        _plain(node, "Add", (names["scaled"], names["bias"]), node.outputs),
    ]


def _affine_grid(
    node: Node, type_of: TypeOf, value_of: ValueOf, add_constant: AddConstant
) -> list[Node] | None:
    """A constant grid of points times theta^T, where the size is known. theta: [N, d, d + 1].

    ONNX's function body loses the axis of a batch of one. With align_corners the only point of an axis with
    one element is its middle, as in PyTorch.
    """
    kind, size = type_of(node.inputs[0]), value_of(node.inputs[1])
    if kind is None or size is None:
        return None
    output, shape = node.outputs[0], [int(extent) for extent in size]
    axes = [_points(extent, bool(node.attribute("align_corners", 0))) for extent in shape[2:]]
    coordinates = [axis.reshape(-1) for axis in np.meshgrid(*axes, indexing="ij")]
    # The last axis of the image is the first coordinate of a point.
    points = np.stack([*reversed(coordinates), np.ones(math.prod(shape[2:]))], axis=1)
    base = add_constant(f"{output}/points", points.astype(_number(0, kind).dtype))
    target = np.asarray([shape[0], *shape[2:], len(axes)], np.int64)
    transposed, transformed = f"{output}/turned", f"{output}/moved"
    return [
        _plain(node, "Transpose", node.inputs[:1], (transposed,), "turned", perm=[0, 2, 1]),
        _plain(node, "MatMul", (base, transposed), (transformed,), "moved"),
        _plain(node, "Reshape", (transformed, add_constant(f"{output}/shape", target)), node.outputs),
    ]


def _points(size: int, align_corners: bool) -> Array:
    """Coordinates of the elements of an axis: from -1 to 1, or the centres of equal parts of that range."""
    if align_corners:
        return np.linspace(-1, 1, size) if size > 1 else np.zeros(1)
    return (2 * np.arange(size) + 1) / size - 1


def _celu(node: Node, type_of: TypeOf, value_of: ValueOf, add_constant: AddConstant) -> list[Node] | None:
    """alpha Elu(x / alpha) with a scalar alpha; ONNX's function body uses shape [1], wrong for a scalar x."""
    kind, alpha = type_of(node.inputs[0]), float(node.attribute("alpha", 1.0))
    if kind is None or alpha <= 0:
        return None
    if alpha == 1:
        return [_plain(node, "Elu", node.inputs, node.outputs)]
    scaled, activated = f"{node.outputs[0]}/scaled", f"{node.outputs[0]}/bent"
    scale = add_constant(f"{node.outputs[0]}/alpha", _number(alpha, kind))
    return [
        _plain(node, "Div", (node.inputs[0], scale), (scaled,), "scaled"),
        _plain(node, "Elu", (scaled,), (activated,), "bent"),
        _plain(node, "Mul", (activated, scale), node.outputs),
    ]


def _softplus(node: Node, type_of: TypeOf, value_of: ValueOf, add_constant: AddConstant) -> list[Node] | None:
    """Computed in float32 for 16-bit types, for which runtimes compute log(1 + e^x), which overflows."""
    kind = type_of(node.inputs[0])
    if kind is None or kind.dtype not in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        return None
    wide, activated = f"{node.outputs[0]}/wide", f"{node.outputs[0]}/softplus"
    return [
        _plain(node, "Cast", node.inputs, (wide,), "wide", to=int(TensorProto.FLOAT)),
        _plain(node, "Softplus", (wide,), (activated,), "softplus"),
        _plain(node, "Cast", (activated,), node.outputs, to=kind.dtype),
    ]


def _plain(
    node: Node,
    op: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    part: str = "",
    **attributes: object,
) -> Node:
    name = f"{node.name}/{part}" if part else node.name
    return Node(
        op,
        tuple(inputs),
        tuple(outputs),
        attributes,
        name=name,
        origin=node.origin,
        module=node.module,
        rule=op,
    )


def _number(value: float, kind: TensorType) -> Array:
    return np.asarray(value, helper.tensor_dtype_to_np_dtype(kind.dtype))


DECOMPOSITIONS: Mapping[str, Decomposition] = {
    "AffineGrid": _affine_grid,
    "Celu": _celu,
    "Compress": _compress,
    "GroupNormalization": _group_normalization,
    "Mean": _mean,
    "Softplus": _softplus,
}
