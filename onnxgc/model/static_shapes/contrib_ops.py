"""ONNX Runtime's contrib operators, lowered to the standard operators that they fuse.

ONNX Runtime's optimiser writes them into a model that is saved after optimisation. The standard forms are
valid at every opset, except for layer normalization, which waits for the target opset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from onnxgc.model.core.draft import Draft, NameSource
from onnxgc.model.core.ir import Node
from onnxgc.model.files.contrib_domain import LAYER_NORMALIZATION_OPSET, RUNTIME_DOMAIN
from onnxgc.model.static_shapes.contrib_attention import attention, multi_head_attention
from onnxgc.model.static_shapes.contrib_builder import ContribBuilder, LoweringWalk
from onnxgc.model.static_shapes.opset_changes import (
    CLIP_LIMITS_AS_INPUTS,
    REDUCED_AXES_AS_INPUTS,
    SETTINGS_AS_INPUTS,
)


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


class ContribOperators:
    """Lowers contrib operators during a shape walk."""

    def __init__(self, walk: LoweringWalk, draft: Draft) -> None:
        self._walk = walk
        self._opset = draft.opset
        self._names = NameSource((*draft.tensor_names(), *(node.name for node in draft.nodes)))

    def lower(self, node: Node) -> bool:
        """Whether the node is a contrib operator; visits its standard operators in that case.

        Raises:
            UnsupportedOperatorError: the node's settings have no standard form here.
        """
        if not is_contrib(node):
            return False
        _FORMS[node.op](ContribBuilder(self._walk, self._opset, self._names, node))
        return True


# -- activations ------------------------------------------------------------------------------


def _gelu_of(f: ContribBuilder, x: str) -> str:
    """x (1 + erf(x / sqrt 2)) / 2."""
    erf = f.emit("Erf", f.emit("Mul", x, f.number(math.sqrt(0.5))))
    return f.emit("Mul", f.emit("Mul", x, f.number(0.5)), f.emit("Add", erf, f.number(1.0)))


def _fast_gelu_of(f: ContribBuilder, x: str) -> str:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    root = math.sqrt(2 / math.pi)
    square = f.emit("Mul", f.emit("Mul", x, x), f.number(0.044715 * root))
    tanh = f.emit("Tanh", f.emit("Mul", x, f.emit("Add", square, f.number(root))))
    return f.emit("Mul", f.emit("Mul", x, f.number(0.5)), f.emit("Add", tanh, f.number(1.0)))


def _gelu(f: ContribBuilder) -> None:
    f.set_output(_gelu_of(f, f.input(0)))


def _bias_gelu(f: ContribBuilder) -> None:
    f.set_output(_gelu_of(f, f.emit("Add", f.input(0), f.input(1))))


def _fast_gelu(f: ContribBuilder) -> None:
    x = f.emit("Add", f.input(0), f.input(1)) if f.has_input(1) else f.input(0)
    f.set_output(_fast_gelu_of(f, x))


def _quick_gelu(f: ContribBuilder) -> None:
    """x sigmoid(alpha x)."""
    alpha = float(f.attribute("alpha", 1.702))
    scaled = f.input(0) if alpha == 1.0 else f.emit("Mul", f.input(0), f.number(alpha))
    f.set_output(f.emit("Mul", f.input(0), f.emit("Sigmoid", scaled)))


def _bias_add(f: ContribBuilder) -> None:
    f.set_output(f.emit("Add", f.emit("Add", f.input(0), f.input(1)), f.input(2)))


def _activate(f: ContribBuilder, x: str, settings: Sequence[float]) -> str:
    name = f.attribute("activation", "")
    if not name:
        return x
    if name in ("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign"):
        return f.emit(name, x)
    if name == "Clip" and len(settings) == 2:
        if f.opset < CLIP_LIMITS_AS_INPUTS:
            return f.emit("Clip", x, min=settings[0], max=settings[1])
        return f.emit("Clip", x, f.number(settings[0]), f.number(settings[1]))
    if name in ("LeakyRelu", "Elu", "ThresholdedRelu") and settings:
        return f.emit(name, x, alpha=settings[0])
    if name == "HardSigmoid" and len(settings) == 2:
        return f.emit(name, x, alpha=settings[0], beta=settings[1])
    raise f.unsupported(f"its activation is '{name}' with the settings {list(settings)}")


# -- products and convolution -----------------------------------------------------------------


def _fused_matmul(f: ContribBuilder) -> None:
    """alpha A' B', where the attributes choose whether ' transposes."""
    left = _transposed(f, f.input(0), int(f.attribute("transA", 0)), int(f.attribute("transBatchA", 0)))
    right = _transposed(f, f.input(1), int(f.attribute("transB", 0)), int(f.attribute("transBatchB", 0)))
    product = f.emit("MatMul", left, right)
    alpha = float(f.attribute("alpha", 1.0))
    f.set_output(product if alpha == 1.0 else f.emit("Mul", product, f.number(alpha)))


def _transposed(f: ContribBuilder, tensor: str, is_transposed: int, moves_batch: int) -> str:
    """The operand [rows, batch..., columns] as [batch..., rows, columns], then its matrices transposed."""
    rank = len(f.shape(tensor))
    axes = list(range(rank))
    if moves_batch and rank > 2:
        axes = [*range(1, rank - 1), 0, rank - 1]
    if is_transposed and rank > 1:
        axes[-2], axes[-1] = axes[-1], axes[-2]
    return tensor if axes == list(range(rank)) else f.emit("Transpose", tensor, perm=axes)


def _fused_gemm(f: ContribBuilder) -> None:
    inputs = [name for name in f.node.inputs if name]
    product = f.emit("Gemm", *inputs, **f.attributes("alpha", "beta", "transA", "transB"))
    f.set_output(_activate(f, product, [*f.attributes("activation_alpha", "activation_beta").values()]))


_CONV_SETTINGS = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def _conv_of(f: ContribBuilder, x: str) -> str:
    return f.emit("Conv", x, *filter(None, f.node.inputs[1:3]), **f.attributes(*_CONV_SETTINGS))


def _fused_conv(f: ContribBuilder) -> None:
    y = _conv_of(f, f.input(0))
    if f.has_input(3):
        y = f.emit("Add", y, f.input(3))
    f.set_output(_activate(f, y, f.attribute("activation_params") or ()))


def _nhwc_conv(f: ContribBuilder) -> None:
    """Convolution with channels last."""
    rank = len(f.shape(f.input(0)))
    first = [0, rank - 1, *range(1, rank - 1)]
    f.reject_inputs(3)
    y = _conv_of(f, f.emit("Transpose", f.input(0), perm=first))
    y = f.emit("Transpose", y, perm=[0, *range(2, rank), 1])
    f.set_output(_activate(f, y, f.attribute("activation_params") or ()))


# -- normalization ----------------------------------------------------------------------------


def _layer_normalize(f: ContribBuilder, x: str, scale: str, bias: str, epsilon: float) -> str:
    inputs = (x, scale, bias) if bias else (x, scale)
    domain = "" if f.opset >= LAYER_NORMALIZATION_OPSET else RUNTIME_DOMAIN
    return f.emit("LayerNormalization", *inputs, domain=domain, axis=-1, epsilon=epsilon)


def _rms_normalize(f: ContribBuilder, x: str, scale: str, axis: int, epsilon: float) -> str:
    """scale x / sqrt(mean(x^2) + epsilon), the mean over `axis` and all later axes."""
    rank = len(f.shape(x))
    axes = list(range(axis % rank, rank))
    square = f.emit("Mul", x, x)
    if f.opset >= REDUCED_AXES_AS_INPUTS:
        mean = f.emit("ReduceMean", square, f.ints(*axes), keepdims=1)
    else:
        mean = f.emit("ReduceMean", square, axes=axes, keepdims=1)
    root = f.emit("Sqrt", f.emit("Add", mean, f.number(epsilon)))
    return f.emit("Mul", f.emit("Div", x, root), scale)


def _sum_with_skip(f: ContribBuilder, bias: int) -> str:
    """input + skip + bias."""
    total = f.emit("Add", f.input(0), f.input(1))
    if f.has_input(bias):
        total = f.emit("Add", total, f.input(bias))
    if f.has_output(3):
        f.set_output(total, 3)
    f.reject_outputs(1, 2)
    return total


def _skip_layer_normalization(f: ContribBuilder) -> None:
    epsilon = float(f.attribute("epsilon", 1e-12))
    f.set_output(_layer_normalize(f, _sum_with_skip(f, 4), f.input(2), f.input_or_empty(3), epsilon))


def _skip_simplified_layer_normalization(f: ContribBuilder) -> None:
    epsilon = float(f.attribute("epsilon", 1e-12))
    f.set_output(_rms_normalize(f, _sum_with_skip(f, 3), f.input(2), -1, epsilon))


def _simplified_layer_normalization(f: ContribBuilder) -> None:
    f.reject_outputs(1)
    axis, epsilon = int(f.attribute("axis", -1)), float(f.attribute("epsilon", 1e-5))
    f.set_output(_rms_normalize(f, f.input(0), f.input(1), axis, epsilon))


def _embed_layer_normalization(f: ContribBuilder) -> None:
    """Layer normalization of the sum of word, position and segment embeddings.

    Words, segments and mask: [N, S].
    """
    words = f.input(0)
    positions = f.input(8) if f.has_input(8) else f.ints(*range(f.shape(words)[1]))
    total = f.emit("Add", f.emit("Gather", f.input(2), words), f.emit("Gather", f.input(3), positions))
    if f.has_input(1) and f.has_input(4):
        total = f.emit("Add", total, f.emit("Gather", f.input(4), f.input(1)))
    epsilon = float(f.attribute("epsilon", 1e-12))
    f.set_output(_layer_normalize(f, total, f.input(5), f.input(6), epsilon))
    if f.has_output(1):
        if not f.has_input(7):
            raise f.unsupported(f"its output '{f.node.outputs[1]}' has no mask to count")
        if f.opset >= SETTINGS_AS_INPUTS:
            f.set_output(f.emit("ReduceSum", f.input(7), f.ints(1), keepdims=0), 1)
        else:
            f.set_output(f.emit("ReduceSum", f.input(7), axes=[1], keepdims=0), 1)
    if f.has_output(2):
        f.set_output(total, 2)


_FORMS: Mapping[str, Callable[[ContribBuilder], None]] = {
    "Attention": attention,
    "BiasAdd": _bias_add,
    "BiasGelu": _bias_gelu,
    "EmbedLayerNormalization": _embed_layer_normalization,
    "FastGelu": _fast_gelu,
    "FusedConv": _fused_conv,
    "FusedGemm": _fused_gemm,
    "FusedMatMul": _fused_matmul,
    "Gelu": _gelu,
    "MultiHeadAttention": multi_head_attention,
    "NhwcConv": _nhwc_conv,
    "NhwcFusedConv": _nhwc_conv,
    "QuickGelu": _quick_gelu,
    "SimplifiedLayerNormalization": _simplified_layer_normalization,
    "SkipLayerNormalization": _skip_layer_normalization,
    "SkipSimplifiedLayerNormalization": _skip_simplified_layer_normalization,
    "TransposeMatMul": _fused_matmul,
}
