"""ONNX Runtime's fused operators as the standard operators that they were made of.

A runtime's optimiser writes them into a file when a model is saved after optimisation. The forms here
hold at every opset, but for layer normalization, which takes its place at the target opset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import helper

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.core.draft import Draft, NameSource
from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.model.files.contrib_domain import LAYER_NORMALIZATION_OPSET, RUNTIME_DOMAIN

_SETTINGS_ARE_INPUTS = 13
_REDUCED_AXES_ARE_INPUTS = 18
_CLIP_LIMITS_ARE_INPUTS = 11


def with_layer_normalization(draft: Draft) -> Draft:
    """The draft, at the target opset, with ONNX's LayerNormalization in place of the runtime's own."""
    return draft.with_changes(
        nodes=tuple(
            node.with_changes(domain="", rule=node.op)
            if node.domain == RUNTIME_DOMAIN and node.op == "LayerNormalization"
            else node
            for node in draft.nodes
        )
    )


class RewriteWalk(Protocol):
    """What lowering needs of the walk that finds static shapes."""

    def type_of(self, name: str) -> TensorType | None: ...

    def add_fresh_constant(self, wanted: str, value: Array) -> str: ...

    def visit(self, node: Node) -> None: ...


def is_fused(node: Node) -> bool:
    """Whether there is a form of standard operators for the node."""
    return node.domain == RUNTIME_DOMAIN and node.op in _FORMS


class FusedOperators:
    """Replaces fused operators while a walk finds static shapes."""

    def __init__(self, walk: RewriteWalk, draft: Draft) -> None:
        self._walk = walk
        self._opset = draft.opset
        self._names = NameSource((*draft.tensor_names(), *(node.name for node in draft.nodes)))

    def lower(self, node: Node) -> bool:
        """Whether the node is a fused operator, and what it is made of has been visited instead.

        Raises:
            UnsupportedOperatorError: it is one in a setting that has no standard form here.
        """
        if not is_fused(node):
            return False
        _FORMS[node.op](_Form(self._walk, self._opset, self._names, node))
        return True


class _Form:
    """One fused operator, and the nodes that take its place."""

    def __init__(self, walk: RewriteWalk, opset: int, names: NameSource, node: Node) -> None:
        self._walk = walk
        self._names = names
        self.opset = opset
        self.node = node

    def has(self, index: int) -> bool:
        return index < len(self.node.inputs) and bool(self.node.inputs[index])

    def x(self, index: int) -> str:
        return self.node.inputs[index]

    def gives(self, index: int) -> bool:
        """Whether the node's output `index` exists."""
        return index < len(self.node.outputs) and bool(self.node.outputs[index])

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.node.attribute(name, default)

    def type_of(self, tensor: str) -> TensorType:
        kind = self._walk.type_of(tensor)
        if kind is None:
            raise self.refused(f"its input '{tensor}' has no static shape")
        return kind

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self.type_of(tensor).shape

    def emit(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        output = self._names.fresh(f"{self.node.name}/{op}")
        self._visit(op, inputs, (output,), attributes, domain)
        return output

    def split(self, tensor: str, sizes: Sequence[int], axis: int) -> tuple[str, ...]:
        outputs = tuple(self._names.fresh(f"{self.node.name}/part{index}") for index in range(len(sizes)))
        if self.opset >= _SETTINGS_ARE_INPUTS:
            self._visit("Split", (tensor, self.ints(*sizes)), outputs, {"axis": axis})
        else:
            self._visit("Split", (tensor,), outputs, {"axis": axis, "split": list(sizes)})
        return outputs

    def give(self, tensor: str, index: int = 0) -> None:
        """Names `tensor` as the node's output `index`."""
        self._visit("Identity", (tensor,), (self.node.outputs[index],), {})

    def constant(self, value: Array) -> str:
        return self._walk.add_fresh_constant(self._names.fresh(f"{self.node.name}/constant"), value)

    def number(self, value: float) -> str:
        dtype = helper.tensor_dtype_to_np_dtype(self.type_of(self.node.inputs[0]).dtype)
        return self.constant(np.asarray(value, dtype))

    def ints(self, *values: int) -> str:
        return self.constant(np.asarray(values, np.int64))

    def refused(self, reason: str) -> UnsupportedOperatorError:
        return UnsupportedOperatorError(
            f"{RUNTIME_DOMAIN}::{self.node.op} {self.node.named} cannot be written in standard operators: "
            f"{reason}; export the model without ONNX Runtime's optimisation"
        )

    def refuse_inputs(self, *indices: int) -> None:
        for index in indices:
            if self.has(index):
                raise self.refused(f"it has the optional input {index} ('{self.x(index)}')")

    def refuse_outputs(self, *indices: int) -> None:
        for index in indices:
            if self.gives(index):
                raise self.refused(f"its output '{self.node.outputs[index]}' is of use to that operator only")

    def _visit(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Any, domain: str = ""
    ) -> None:
        name = self._names.fresh(f"{self.node.name}/{op}_node")
        rule = f"{domain}::{op}" if domain else op
        self._walk.visit(
            Node(
                op,
                tuple(inputs),
                tuple(outputs),
                attributes,
                name=name,
                origin=self.node.origin,
                module=self.node.module,
                rule=rule,
                domain=domain,
            )
        )


# -- activations ------------------------------------------------------------------------------


def _gelu_of(f: _Form, x: str) -> str:
    """x (1 + erf(x / sqrt 2)) / 2."""
    erf = f.emit("Erf", f.emit("Mul", x, f.number(math.sqrt(0.5))))
    return f.emit("Mul", f.emit("Mul", x, f.number(0.5)), f.emit("Add", erf, f.number(1.0)))


def _fast_gelu_of(f: _Form, x: str) -> str:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    root = math.sqrt(2 / math.pi)
    square = f.emit("Mul", f.emit("Mul", x, x), f.number(0.044715 * root))
    tanh = f.emit("Tanh", f.emit("Mul", x, f.emit("Add", square, f.number(root))))
    return f.emit("Mul", f.emit("Mul", x, f.number(0.5)), f.emit("Add", tanh, f.number(1.0)))


def _gelu(f: _Form) -> None:
    f.give(_gelu_of(f, f.x(0)))


def _bias_gelu(f: _Form) -> None:
    f.give(_gelu_of(f, f.emit("Add", f.x(0), f.x(1))))


def _fast_gelu(f: _Form) -> None:
    f.give(_fast_gelu_of(f, f.emit("Add", f.x(0), f.x(1)) if f.has(1) else f.x(0)))


def _quick_gelu(f: _Form) -> None:
    """x sigmoid(alpha x)."""
    alpha = float(f.attribute("alpha", 1.702))
    scaled = f.x(0) if alpha == 1.0 else f.emit("Mul", f.x(0), f.number(alpha))
    f.give(f.emit("Mul", f.x(0), f.emit("Sigmoid", scaled)))


def _bias_add(f: _Form) -> None:
    f.give(f.emit("Add", f.emit("Add", f.x(0), f.x(1)), f.x(2)))


def _activated(f: _Form, x: str, settings: Sequence[float]) -> str:
    name = f.attribute("activation", "")
    if not name:
        return x
    if name in ("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign"):
        return f.emit(name, x)
    if name == "Clip" and len(settings) == 2:
        if f.opset < _CLIP_LIMITS_ARE_INPUTS:
            return f.emit("Clip", x, min=settings[0], max=settings[1])
        return f.emit("Clip", x, f.number(settings[0]), f.number(settings[1]))
    if name in ("LeakyRelu", "Elu", "ThresholdedRelu") and settings:
        return f.emit(name, x, alpha=settings[0])
    if name == "HardSigmoid" and len(settings) == 2:
        return f.emit(name, x, alpha=settings[0], beta=settings[1])
    raise f.refused(f"its activation is '{name}' with the settings {list(settings)}")


# -- products and convolution -----------------------------------------------------------------


def _fused_matmul(f: _Form) -> None:
    """alpha A' B', where ' is transposition if asked for."""
    left = _turned(f, f.x(0), int(f.attribute("transA", 0)), int(f.attribute("transBatchA", 0)))
    right = _turned(f, f.x(1), int(f.attribute("transB", 0)), int(f.attribute("transBatchB", 0)))
    product = f.emit("MatMul", left, right)
    alpha = float(f.attribute("alpha", 1.0))
    f.give(product if alpha == 1.0 else f.emit("Mul", product, f.number(alpha)))


def _turned(f: _Form, tensor: str, is_turned: int, is_batch_turned: int) -> str:
    """The operand with rows before the batch put behind it, then rows and columns exchanged."""
    rank = len(f.shape(tensor))
    axes = list(range(rank))
    if is_batch_turned and rank > 2:
        axes = [*range(1, rank - 1), 0, rank - 1]
    if is_turned and rank > 1:
        axes[-2], axes[-1] = axes[-1], axes[-2]
    return tensor if axes == list(range(rank)) else f.emit("Transpose", tensor, perm=axes)


def _fused_gemm(f: _Form) -> None:
    kept = {
        key: f.attribute(key) for key in ("alpha", "beta", "transA", "transB") if f.attribute(key) is not None
    }
    inputs = [name for name in f.node.inputs if name]
    settings = [f.attribute(f"activation_{key}") for key in ("alpha", "beta")]
    f.give(_activated(f, f.emit("Gemm", *inputs, **kept), [value for value in settings if value is not None]))


_CONV_SETTINGS = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def _conv_of(f: _Form, x: str) -> str:
    kept = {key: f.attribute(key) for key in _CONV_SETTINGS if f.attribute(key) is not None}
    return f.emit("Conv", x, *(name for name in f.node.inputs[1:3] if name), **kept)


def _fused_conv(f: _Form) -> None:
    y = _conv_of(f, f.x(0))
    if f.has(3):
        y = f.emit("Add", y, f.x(3))
    f.give(_activated(f, y, f.attribute("activation_params") or ()))


def _nhwc_conv(f: _Form) -> None:
    """Convolution with channels last."""
    rank = len(f.shape(f.x(0)))
    first = [0, rank - 1, *range(1, rank - 1)]
    y = _conv_of(f, f.emit("Transpose", f.x(0), perm=first))
    f.refuse_inputs(3)
    f.give(
        _activated(
            f, f.emit("Transpose", y, perm=[0, *range(2, rank), 1]), f.attribute("activation_params") or ()
        )
    )


# -- normalization ----------------------------------------------------------------------------


def _normalized(f: _Form, x: str, scale: str, bias: str, epsilon: float) -> str:
    inputs = (x, scale, bias) if bias else (x, scale)
    domain = "" if f.opset >= LAYER_NORMALIZATION_OPSET else RUNTIME_DOMAIN
    return f.emit("LayerNormalization", *inputs, domain=domain, axis=-1, epsilon=epsilon)


def _simplified_normalized(f: _Form, x: str, scale: str, axis: int, epsilon: float) -> str:
    """scale x / sqrt(mean(x^2) + epsilon), the mean over `axis` and those behind it."""
    rank = len(f.shape(x))
    axes = list(range(axis % rank, rank))
    square = f.emit("Mul", x, x)
    if f.opset >= _REDUCED_AXES_ARE_INPUTS:
        mean = f.emit("ReduceMean", square, f.ints(*axes), keepdims=1)
    else:
        mean = f.emit("ReduceMean", square, axes=axes, keepdims=1)
    root = f.emit("Sqrt", f.emit("Add", mean, f.number(epsilon)))
    return f.emit("Mul", f.emit("Div", x, root), scale)


def _skipped(f: _Form, bias: int) -> str:
    """input + skip + bias."""
    total = f.emit("Add", f.x(0), f.x(1))
    if f.has(bias):
        total = f.emit("Add", total, f.x(bias))
    if f.gives(3):
        f.give(total, 3)
    f.refuse_outputs(1, 2)
    return total


def _skip_layer_normalization(f: _Form) -> None:
    bias = f.x(3) if f.has(3) else ""
    f.give(_normalized(f, _skipped(f, 4), f.x(2), bias, float(f.attribute("epsilon", 1e-12))))


def _skip_simplified_layer_normalization(f: _Form) -> None:
    epsilon = float(f.attribute("epsilon", 1e-12))
    f.give(_simplified_normalized(f, _skipped(f, 3), f.x(2), -1, epsilon))


def _simplified_layer_normalization(f: _Form) -> None:
    f.refuse_outputs(1)
    axis, epsilon = int(f.attribute("axis", -1)), float(f.attribute("epsilon", 1e-5))
    f.give(_simplified_normalized(f, f.x(0), f.x(1), axis, epsilon))


def _embed_layer_normalization(f: _Form) -> None:
    """Layer normalization of the sum of word, position and segment embeddings.

    Words, segments and mask: [N, S].
    """
    words = f.x(0)
    positions = f.x(8) if f.has(8) else f.ints(*range(f.shape(words)[1]))
    total = f.emit("Add", f.emit("Gather", f.x(2), words), f.emit("Gather", f.x(3), positions))
    if f.has(1) and f.has(4):
        total = f.emit("Add", total, f.emit("Gather", f.x(4), f.x(1)))
    epsilon = float(f.attribute("epsilon", 1e-12))
    f.give(_normalized(f, total, f.x(5), f.x(6), epsilon))
    if f.gives(1):
        if not f.has(7):
            raise f.refused(f"its output '{f.node.outputs[1]}' has no mask to count")
        if f.opset >= _SETTINGS_ARE_INPUTS:
            f.give(f.emit("ReduceSum", f.x(7), f.ints(1), keepdims=0), 1)
        else:
            f.give(f.emit("ReduceSum", f.x(7), axes=[1], keepdims=0), 1)
    if f.gives(2):
        f.give(total, 2)


# -- attention --------------------------------------------------------------------------------


def _attention(f: _Form) -> None:
    """softmax(Q K^T scale + mask) V of one product with all weights. Input: [N, S, D]."""
    f.refuse_inputs(4, 6)
    f.refuse_outputs(1)
    if f.attribute("do_rotary", 0):
        raise f.refused("it rotates its queries and keys")
    width = f.shape(f.x(1))[1]
    sizes = list(f.attribute("qkv_hidden_sizes") or [width // 3] * 3)
    projected = f.emit("MatMul", f.x(0), f.x(1))
    if f.has(2):
        projected = f.emit("Add", projected, f.x(2))
    parts = f.split(projected, sizes, 2)
    _attend(f, *parts, mask=f.x(3) if f.has(3) else "", bias=f.x(5) if f.has(5) else "")


def _multi_head_attention(f: _Form) -> None:
    """softmax(Q K^T scale + mask) V. Query: [N, S, D], key and value: [N, T, D]."""
    f.refuse_inputs(6, 7, 8, 9)
    f.refuse_outputs(1, 2, 3)
    if not (f.has(1) and f.has(2)) or any(len(f.shape(f.x(index))) != 3 for index in range(3)):
        raise f.refused("its query, key and value are not three tensors [batch, sequence, width]")
    query, key, value = (f.x(index) for index in range(3))
    if f.has(3):
        widths = [f.shape(name)[2] for name in (query, key, value)]
        parts = f.split(f.x(3), widths, 0)
        query, key, value = (
            f.emit("Add", name, part) for name, part in zip((query, key, value), parts, strict=True)
        )
    _attend(f, query, key, value, mask=f.x(4) if f.has(4) else "", bias=f.x(5) if f.has(5) else "")


def _attend(f: _Form, query: str, key: str, value: str, *, mask: str, bias: str) -> None:
    heads = int(f.attribute("num_heads"))
    batch, rows, width = f.shape(query)
    columns = f.shape(key)[1]
    scale = float(f.attribute("scale", 0.0)) or 1 / math.sqrt(width // heads)

    def by_head(tensor: str, perm: list[int]) -> str:
        length, size = f.shape(tensor)[1:]
        apart = f.emit("Reshape", tensor, f.ints(batch, length, heads, size // heads))
        return f.emit("Transpose", apart, perm=perm)

    scaled = f.emit("Mul", query, f.number(scale))
    scores = f.emit("MatMul", by_head(scaled, [0, 2, 1, 3]), by_head(key, [0, 2, 3, 1]))
    if bias:
        scores = f.emit("Add", scores, bias)
    low = float(f.attribute("mask_filter_value", -10000.0))
    if mask:
        scores = f.emit("Add", scores, _mask_bias(f, mask, batch, rows, columns, low))
    if f.attribute("unidirectional", 0):
        later = np.triu(np.full((rows, columns), low), 1 + columns - rows)
        dtype = helper.tensor_dtype_to_np_dtype(f.type_of(f.x(0)).dtype)
        scores = f.emit("Add", scores, f.constant(later.astype(dtype)))
    result = f.emit("MatMul", f.emit("Softmax", scores, axis=3), by_head(value, [0, 2, 1, 3]))
    result = f.emit("Transpose", result, perm=[0, 2, 1, 3])
    f.give(f.emit("Reshape", result, f.ints(batch, rows, f.shape(value)[2])))


def _mask_bias(f: _Form, mask: str, batch: int, rows: int, columns: int, low: float) -> str:
    """What is added to the scores: 0 where the mask holds and `low` elsewhere."""
    shape = f.shape(mask)
    dtype = f.type_of(f.x(0)).dtype
    if shape == (batch,):
        # The number of valid keys of each sample.
        lengths = f.emit("Reshape", mask, f.ints(batch, 1, 1, 1))
        numbers = np.arange(columns, dtype=helper.tensor_dtype_to_np_dtype(f.type_of(mask).dtype))
        holds = f.emit("Cast", f.emit("Less", f.constant(numbers), lengths), to=dtype)
    elif shape in ((batch, columns), (batch, rows, columns)):
        wide = (batch, 1, 1, columns) if len(shape) == 2 else (batch, 1, rows, columns)
        whole = f.emit("Cast", f.emit("Cast", mask, to=onnx.TensorProto.BOOL), to=dtype)
        holds = f.emit("Reshape", whole, f.ints(*wide))
    else:
        raise f.refused(f"its mask '{mask}' has the shape {list(shape)}")
    return f.emit("Mul", f.emit("Sub", f.number(1.0), holds), f.number(low))


_FORMS: Mapping[str, Callable[[_Form], None]] = {
    "Attention": _attention,
    "BiasAdd": _bias_add,
    "BiasGelu": _bias_gelu,
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
