"""ONNX Runtime's contrib operators, lowered to the standard operators that they fuse.

ONNX Runtime's optimiser writes them into a model that is saved after optimisation. The standard forms are
valid at every opset, except for layer normalization, which waits for the target opset.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from onnxgc.model.core.draft import Draft, NameSource
from onnxgc.model.core.ir import Node
from onnxgc.model.files.contrib_domain import LAYER_NORMALIZATION_OPSET, RUNTIME_DOMAIN
from onnxgc.model.rebatch.shape_pair import ShapeWalk
from onnxgc.model.static_shapes.contrib_builder import ContribBuilder
from onnxgc.model.static_shapes.opset_changes import CLIP_LIMITS_AS_INPUTS


def with_layer_normalization(draft: Draft) -> Draft:
    """The draft, at the target opset, with ONNX's LayerNormalization for ONNX Runtime's own."""
    return draft.with_changes(
        nodes=tuple(
            node.with_changes(domain="", rule=node.op)
            if node.domain == RUNTIME_DOMAIN and node.op == "LayerNormalization"
            else node
            for node in draft.nodes
        )
    )


def is_contrib(node: Node) -> bool:
    """Whether the node is a contrib operator with a standard form."""
    return node.domain == RUNTIME_DOMAIN and node.op in _FORMS


def lower_contrib(node: Node, walk: ShapeWalk, opset: int, names: NameSource) -> bool:
    """Whether the node is a contrib operator; visits its standard operators in that case.

    Raises:
        UnsupportedOperatorError: the node's settings have no standard form here.
    """
    if not is_contrib(node):
        return False
    _FORMS[node.op](ContribBuilder(walk, opset, names, node))
    return True


# -- activations --


def _gelu(f: ContribBuilder) -> None:
    """x (1 + erf(x / sqrt 2)) / 2 of x + bias."""
    x = f.total(*f.inputs[:2])
    erf = f.emit("Erf", f.emit("Mul", x, f.number(math.sqrt(0.5))))
    f.set_output(f.emit("Mul", f.emit("Mul", x, f.number(0.5)), f.emit("Add", erf, f.number(1.0))))


def _fast_gelu(f: ContribBuilder) -> None:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 of x + bias."""
    x, root = f.total(*f.inputs[:2]), math.sqrt(2 / math.pi)
    square = f.emit("Mul", f.emit("Mul", x, x), f.number(0.044715 * root))
    tanh = f.emit("Tanh", f.emit("Mul", x, f.emit("Add", square, f.number(root))))
    f.set_output(f.emit("Mul", f.emit("Mul", x, f.number(0.5)), f.emit("Add", tanh, f.number(1.0))))


def _quick_gelu(f: ContribBuilder) -> None:
    """x sigmoid(alpha x)."""
    alpha, x = float(f.attribute("alpha", 1.702)), f.inputs[0]
    scaled = x if alpha == 1.0 else f.emit("Mul", x, f.number(alpha))
    f.set_output(f.emit("Mul", x, f.emit("Sigmoid", scaled)))


def _bias_add(f: ContribBuilder) -> None:
    f.set_output(f.total(*f.inputs[:3]))


_ACTIVATION_SETTINGS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"), ()),
    **dict.fromkeys(("Elu", "LeakyRelu", "ThresholdedRelu"), ("alpha",)),
    "Clip": ("min", "max"),
    "HardSigmoid": ("alpha", "beta"),
}


def _activate(f: ContribBuilder, x: str, settings: Sequence[float]) -> str:
    name = f.attribute("activation", "")
    if not name:
        return x
    keys = _ACTIVATION_SETTINGS.get(name)
    if keys is None or len(settings) < len(keys):
        raise f.unsupported(f"its activation is '{name}' with the settings {list(settings)}")
    if name == "Clip" and f.opset >= CLIP_LIMITS_AS_INPUTS:
        return f.emit(name, x, *map(f.number, settings))
    attributes: dict[str, Any] = dict(zip(keys, settings, strict=False))
    return f.emit(name, x, **attributes)


# -- products and convolution --


def _fused_matmul(f: ContribBuilder) -> None:
    """alpha A' B', where the attributes choose whether ' transposes."""
    left, right = (
        _transposed(f, tensor, bool(f.attribute(f"trans{side}", 0)), bool(f.attribute(f"transBatch{side}", 0)))
        for tensor, side in zip(f.inputs, "AB", strict=False)
    )
    product = f.emit("MatMul", left, right)
    alpha = float(f.attribute("alpha", 1.0))
    f.set_output(product if alpha == 1.0 else f.emit("Mul", product, f.number(alpha)))


def _transposed(f: ContribBuilder, tensor: str, is_transposed: bool, moves_batch: bool) -> str:
    """The operand [rows, batch..., columns] as [batch..., rows, columns], then its matrices transposed."""
    rank = len(f.shape(tensor))
    axes = list(range(rank))
    if moves_batch and rank > 2:
        axes = [*range(1, rank - 1), 0, rank - 1]
    if is_transposed and rank > 1:
        axes[-2], axes[-1] = axes[-1], axes[-2]
    return tensor if axes == list(range(rank)) else f.emit("Transpose", tensor, perm=axes)


def _fused_gemm(f: ContribBuilder) -> None:
    inputs = filter(None, f.inputs)
    product = f.emit("Gemm", *inputs, **f.attributes("alpha", "beta", "transA", "transB"))
    f.set_output(_activate(f, product, [*f.attributes("activation_alpha", "activation_beta").values()]))


_CONV_SETTINGS = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def _conv_of(f: ContribBuilder, x: str) -> str:
    return f.emit("Conv", x, *filter(None, f.inputs[1:3]), **f.attributes(*_CONV_SETTINGS))


def _fused_conv(f: ContribBuilder) -> None:
    y = f.total(_conv_of(f, f.inputs[0]), f.inputs[3])
    f.set_output(_activate(f, y, f.attribute("activation_params") or ()))


def _nhwc_conv(f: ContribBuilder) -> None:
    """Convolution with channels last."""
    rank = len(f.shape(f.inputs[0]))
    f.reject_inputs(3)
    y = _conv_of(f, f.emit("Transpose", f.inputs[0], perm=[0, rank - 1, *range(1, rank - 1)]))
    y = f.emit("Transpose", y, perm=[0, *range(2, rank), 1])
    f.set_output(_activate(f, y, f.attribute("activation_params") or ()))


# -- normalization --


def _layer_normalize(f: ContribBuilder, x: str, scale: str, bias: str) -> str:
    domain = "" if f.opset >= LAYER_NORMALIZATION_OPSET else RUNTIME_DOMAIN
    epsilon = float(f.attribute("epsilon", 1e-12))
    return f.emit("LayerNormalization", *filter(None, (x, scale, bias)), domain=domain, axis=-1, epsilon=epsilon)


def _rms_normalize(f: ContribBuilder, x: str, scale: str, axis: int, epsilon: float) -> str:
    """scale x / sqrt(mean(x^2) + epsilon), the mean over `axis` and all later axes."""
    rank = len(f.shape(x))
    mean = f.reduce("ReduceMean", f.emit("Mul", x, x), range(axis % rank, rank), keepdims=1)
    root = f.emit("Sqrt", f.emit("Add", mean, f.number(epsilon)))
    return f.emit("Mul", f.emit("Div", x, root), scale)


def _sum_with_skip(f: ContribBuilder, bias: int) -> str:
    """input + skip + bias."""
    total = f.total(*f.inputs[:2], f.inputs[bias])
    if f.outputs[3]:
        f.set_output(total, 3)
    f.reject_outputs(1, 2)
    return total


def _skip_layer_normalization(f: ContribBuilder) -> None:
    f.set_output(_layer_normalize(f, _sum_with_skip(f, 4), *f.inputs[2:4]))


def _skip_simplified_layer_normalization(f: ContribBuilder) -> None:
    epsilon = float(f.attribute("epsilon", 1e-12))
    f.set_output(_rms_normalize(f, _sum_with_skip(f, 3), f.inputs[2], -1, epsilon))


def _simplified_layer_normalization(f: ContribBuilder) -> None:
    f.reject_outputs(1)
    axis, epsilon = int(f.attribute("axis", -1)), float(f.attribute("epsilon", 1e-5))
    f.set_output(_rms_normalize(f, f.inputs[0], f.inputs[1], axis, epsilon))


def _embed_layer_normalization(f: ContribBuilder) -> None:
    """Layer normalization of the sum of word, position and segment embeddings.

    Words, segments and mask: [N, S].
    """
    words, segments, word_table, position_table, segment_table, scale, bias, mask, positions, *_ = f.inputs
    positions = positions or f.ints(*range(f.shape(words)[1]))
    total = f.emit("Add", f.emit("Gather", word_table, words), f.emit("Gather", position_table, positions))
    if segments and segment_table:
        total = f.emit("Add", total, f.emit("Gather", segment_table, segments))
    f.set_output(_layer_normalize(f, total, scale, bias))
    if f.outputs[1]:
        if not mask:
            raise f.unsupported(f"its output '{f.outputs[1]}' has no mask to count")
        f.set_output(f.reduce("ReduceSum", mask, [1], keepdims=0), 1)
    if f.outputs[2]:
        f.set_output(total, 2)


# -- attention --


def _attention(f: ContribBuilder) -> None:
    """softmax(Q K^T scale + mask) V, where one product computes Q, K and V. Input: [N, S, D]."""
    f.reject_inputs(4, 6)
    f.reject_outputs(1)
    if f.attribute("do_rotary", 0):
        raise f.unsupported("it rotates its queries and keys")
    width = f.shape(f.inputs[1])[1]
    sizes = list(f.attribute("qkv_hidden_sizes") or [width // 3] * 3)
    projected = f.total(f.emit("MatMul", *f.inputs[:2]), f.inputs[2])
    _attend(f, *f.split(projected, sizes, 2), mask=f.inputs[3], bias=f.inputs[5])


def _multi_head_attention(f: ContribBuilder) -> None:
    """softmax(Q K^T scale + mask) V. Query: [N, S, D], key and value: [N, T, D]."""
    f.reject_inputs(6, 7, 8, 9)
    f.reject_outputs(1, 2, 3)
    operands = f.inputs[:3]
    if not all(operands) or any(len(f.shape(name)) != 3 for name in operands):
        raise f.unsupported("its query, key and value are not three tensors [batch, sequence, width]")
    if f.inputs[3]:
        parts = f.split(f.inputs[3], [f.shape(name)[2] for name in operands], 0)
        operands = tuple(f.emit("Add", *pair) for pair in zip(operands, parts, strict=True))
    _attend(f, *operands, mask=f.inputs[4], bias=f.inputs[5])


def _attend(f: ContribBuilder, query: str, key: str, value: str, *, mask: str, bias: str) -> None:
    heads = int(f.attribute("num_heads"))
    batch, rows, width = f.shape(query)
    columns = f.shape(key)[1]
    scale = float(f.attribute("scale", 0.0)) or 1 / math.sqrt(width // heads)

    def by_head(tensor: str, perm: list[int]) -> str:
        length, size = f.shape(tensor)[1:]
        heads_apart = f.emit("Reshape", tensor, f.ints(batch, length, heads, size // heads))
        return f.emit("Transpose", heads_apart, perm=perm)

    scaled = f.emit("Mul", query, f.number(scale))
    scores = f.emit("MatMul", by_head(scaled, [0, 2, 1, 3]), by_head(key, [0, 2, 3, 1]))
    scores = f.total(scores, bias)
    masked_score = float(f.attribute("mask_filter_value", -10000.0))
    if mask:
        scores = f.emit("Add", scores, _additive_mask(f, mask, batch, rows, columns, masked_score))
    if f.attribute("unidirectional", 0):
        later = np.triu(np.full((rows, columns), masked_score), 1 + columns - rows)
        scores = f.emit("Add", scores, f.number(later))
    result = f.emit("MatMul", f.emit("Softmax", scores, axis=3), by_head(value, [0, 2, 1, 3]))
    result = f.emit("Transpose", result, perm=[0, 2, 1, 3])
    f.set_output(f.emit("Reshape", result, f.ints(batch, rows, f.shape(value)[2])))


def _additive_mask(f: ContribBuilder, mask: str, batch: int, rows: int, columns: int, masked_score: float) -> str:
    """0 for valid positions and `masked_score` elsewhere; broadcasts to the scores [N, heads, S, T]."""
    shape = f.shape(mask)
    dtype = f.type_of(f.inputs[0]).dtype
    if shape == (batch,):
        # The number of valid keys of each sample.
        lengths = f.emit("Reshape", mask, f.ints(batch, 1, 1, 1))
        positions = np.arange(columns, dtype=helper.tensor_dtype_to_np_dtype(f.type_of(mask).dtype))
        valid = f.emit("Cast", f.emit("Less", f.constant(positions), lengths), to=dtype)
    elif shape in ((batch, columns), (batch, rows, columns)):
        wide = (batch, 1, 1, columns) if len(shape) == 2 else (batch, 1, rows, columns)
        binary = f.emit("Cast", f.emit("Cast", mask, to=onnx.TensorProto.BOOL), to=dtype)
        valid = f.emit("Reshape", binary, f.ints(*wide))
    else:
        raise f.unsupported(f"its mask '{mask}' has the shape {list(shape)}")
    return f.emit("Mul", f.emit("Sub", f.number(1.0), valid), f.number(masked_score))


_FORMS: Mapping[str, Callable[[ContribBuilder], None]] = {
    "Attention": _attention,
    "BiasAdd": _bias_add,
    "BiasGelu": _gelu,
    "EmbedLayerNormalization": _embed_layer_normalization,
    "FastGelu": _fast_gelu,
    "FusedConv": _fused_conv,
    "FusedGemm": _fused_gemm,
    "FusedMatMul": _fused_matmul,
    "Gelu": _gelu,
    "MultiHeadAttention": _multi_head_attention,
    "NhwcConv": _nhwc_conv,
    "NhwcFusedConv": _nhwc_conv,
    "QuickGelu": _quick_gelu,
    "SimplifiedLayerNormalization": _simplified_layer_normalization,
    "SkipLayerNormalization": _skip_layer_normalization,
    "SkipSimplifiedLayerNormalization": _skip_simplified_layer_normalization,
    "TransposeMatMul": _fused_matmul,
}
