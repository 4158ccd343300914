"""What exporters write differently is the same, and what only looks alike is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onnxgc.matching.match import Matching, match
from onnxgc.matching.normal_form.structure import leaves
from onnxgc.matching.operators.rules import structure_of
from onnxgc.model.read import read_model
from tests.matching.networks import BATCH, CHANNELS, EXTENT, TOKENS, Network
from tests.model.model_helpers import normal, run

Part = Callable[[Network, str], str]
_IMAGE, _SEQUENCE = (BATCH, CHANNELS, EXTENT, EXTENT), (BATCH, TOKENS, CHANNELS)


def _model(part: Part, shape: tuple[int, ...], is_last: bool = False) -> onnx.ModelProto:
    """The part between an activation and a linear layer, of channels last or behind the batch."""
    net = Network()
    x = net.node("Sigmoid", "x")
    if is_last:
        x = net.node("Transpose", x, perm=[0, 2, 3, 1])
    y = net.node("Tanh", part(net, x))
    axes = (1,) if len(shape) == 3 else (1, 2) if is_last else (2, 3)
    pooled = net.node("ReduceMean", y, net.ints(*axes), keepdims=0)
    weight = np.random.default_rng(7).standard_normal((CHANNELS, 3)).astype(np.float32)
    net.weights.append(onnx.numpy_helper.from_array(weight, "head"))
    return net.model(net.node("MatMul", pooled, "head"), shape, (BATCH, 3))


def _compared(first: onnx.ModelProto, second: onnx.ModelProto) -> Matching:
    return match(read_model(first), read_model(second))


# -- activations -----------------------------------------------------------------------------------


def _gelu(net: Network, x: str) -> str:
    erf = net.node("Erf", net.node("Div", x, net.constant(math.sqrt(2))))
    return net.node("Mul", net.node("Mul", x, net.node("Add", erf, net.constant(1))), net.constant(0.5))


def _gelu_halved_first(net: Network, x: str) -> str:
    erf = net.node("Erf", net.node("Mul", x, net.constant(math.sqrt(0.5))))
    gate = net.node("Add", net.node("Mul", erf, net.constant(0.5)), net.constant(0.5))
    return net.node("Mul", gate, x)


def _gelu_of_complement(net: Network, x: str) -> str:
    """As x / 2 (1 - erf(-x / sqrt 2))."""
    erf = net.node("Erf", net.node("Neg", net.node("Mul", x, net.constant(math.sqrt(0.5)))))
    gate = net.node("Sub", net.constant(1), erf)
    return net.node("Mul", net.node("Mul", x, net.constant(0.5)), gate)


def _gelu_by_tanh(net: Network, x: str) -> str:
    cube = net.node("Mul", net.node("Pow", x, net.constant(3)), net.constant(0.044715))
    inner = net.node("Mul", net.node("Add", x, cube), net.constant(math.sqrt(2 / math.pi)))
    gate = net.node("Add", net.node("Tanh", inner), net.constant(1))
    return net.node("Mul", net.node("Mul", x, net.constant(0.5)), gate)


def _gelu_by_tanh_of_product(net: Network, x: str) -> str:
    root = math.sqrt(2 / math.pi)
    square = net.node("Mul", net.node("Mul", x, x), net.constant(0.044715 * root))
    tanh = net.node("Tanh", net.node("Mul", x, net.node("Add", square, net.constant(root))))
    gate = net.node("Mul", net.node("Add", net.constant(1), tanh), net.constant(0.5))
    return net.node("Mul", gate, x)


def _swish(factor: float) -> Part:
    def part(net: Network, x: str) -> str:
        return net.node("Mul", x, net.node("Sigmoid", net.node("Mul", x, net.constant(factor))))

    return part


def _hard_swish_written_out(net: Network, x: str) -> str:
    shifted = net.node("Add", x, net.constant(3))
    gate = net.node("Clip", shifted, net.constant(0), net.constant(6))
    return net.node("Div", net.node("Mul", x, gate), net.constant(6))


def _relu6(net: Network, x: str) -> str:
    return net.node("Clip", x, net.constant(0), net.constant(6))


def _relu6_by_two(net: Network, x: str) -> str:
    return net.node("Min", net.node("Relu", x), net.constant(6))


def _times_eight(part: Part) -> Part:
    """Of what reaches up to 8, so that limits matter."""
    return lambda net, x: part(net, net.node("Mul", x, net.constant(8)))


def _relu(net: Network, x: str) -> str:
    return net.node("Relu", x)


def _tanh(net: Network, x: str) -> str:
    return net.node("Tanh", x)


def _tanh_of_sigmoid(net: Network, x: str) -> str:
    gate = net.node("Sigmoid", net.node("Mul", x, net.constant(2)))
    return net.node("Sub", net.node("Mul", gate, net.constant(2)), net.constant(1))


def _swish_by_tanh(net: Network, x: str) -> str:
    half = net.node("Mul", x, net.constant(0.5))
    return net.node("Add", half, net.node("Mul", half, net.node("Tanh", half)))


def _mish(net: Network, x: str) -> str:
    return net.node("Mul", x, net.node("Tanh", net.node("Softplus", x)))


def _mish_as_quotient(net: Network, x: str) -> str:
    """x (e (e + 2)) / (e (e + 2) + 2), with e the exponential."""
    e = net.node("Exp", x)
    n = net.node("Mul", e, net.node("Add", e, net.constant(2)))
    return net.node("Mul", x, net.node("Div", n, net.node("Add", n, net.constant(2))))


# -- normalisations and softmax --------------------------------------------------------------------


def _layer_norm(axis: int, epsilon: float = 1e-5) -> Part:
    def part(net: Network, x: str) -> str:
        size = _SEQUENCE[axis:]
        return net.node(
            "LayerNormalization", x, net.weight(*size), net.weight(*size), axis=axis, epsilon=epsilon
        )

    return part


def _layer_norm_written_out(net: Network, x: str) -> str:
    scale, bias = net.weight(CHANNELS), net.weight(CHANNELS)
    centred = net.node("Sub", x, net.node("ReduceMean", x, net.ints(-1)))
    variance = net.node("ReduceMean", net.node("Pow", centred, net.constant(2)), net.ints(-1))
    deviation = net.node("Sqrt", net.node("Add", variance, net.constant(1e-5)))
    return net.node("Add", net.node("Mul", net.node("Div", centred, deviation), scale), bias)


def _layer_norm_by_squares(net: Network, x: str) -> str:
    """With the variance as the mean of squares less the squared mean, and scale beside the deviation."""
    scale, bias = net.weight(CHANNELS), net.weight(CHANNELS)
    mean = net.node("ReduceMean", x, net.ints(-1))
    squares = net.node("ReduceMean", net.node("Mul", x, x), net.ints(-1))
    variance = net.node("Max", net.node("Sub", squares, net.node("Mul", mean, mean)), net.constant(0))
    inverse = net.node("Reciprocal", net.node("Sqrt", net.node("Add", variance, net.constant(1e-5))))
    factor = net.node("Mul", inverse, scale)
    return net.node("Add", net.node("Mul", net.node("Sub", x, mean), factor), bias)


def _layer_norm_as_affine(net: Network, x: str) -> str:
    """As x s + (b - m s)."""
    scale, bias = net.weight(CHANNELS), net.weight(CHANNELS)
    mean = net.node("ReduceMean", x, net.ints(-1))
    centred = net.node("Sub", x, mean)
    variance = net.node("ReduceMean", net.node("Mul", centred, centred), net.ints(-1))
    inverse = net.node("Pow", net.node("Add", variance, net.constant(1e-5)), net.constant(-0.5))
    factor = net.node("Mul", inverse, scale)
    shift = net.node("Sub", bias, net.node("Mul", mean, factor))
    return net.node("Add", net.node("Mul", x, factor), shift)


def _normalized_without_weights(net: Network, x: str) -> str:
    """As x s - m s with s = 1 / deviation."""
    mean = net.node("ReduceMean", x, net.ints(-1))
    centred = net.node("Sub", x, mean)
    variance = net.node("ReduceMean", net.node("Mul", centred, centred), net.ints(-1))
    factor = net.node("Reciprocal", net.node("Sqrt", net.node("Add", variance, net.constant(1e-5))))
    return net.node("Add", net.node("Mul", x, factor), net.node("Neg", net.node("Mul", mean, factor)))


def _normalized_of_ones(net: Network, x: str) -> str:
    ones, zeros = net.constant(1), net.constant(0)
    sizes = net.ints(CHANNELS)
    scale, bias = net.node("Expand", ones, sizes), net.node("Expand", zeros, sizes)
    return net.node("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-5)


def _softmax(axis: int) -> Part:
    return lambda net, x: net.node("Softmax", x, axis=axis)


def _softmax_written_out(net: Network, x: str) -> str:
    top = net.node("Exp", net.node("Sub", x, net.node("ReduceMax", x, net.ints(-1))))
    return net.node("Div", top, net.node("ReduceSum", top, net.ints(-1)))


def _softmax_of_turned(net: Network, x: str) -> str:
    turned = net.node("Softmax", net.node("Transpose", x, perm=[0, 2, 1]), axis=1)
    return net.node("Transpose", turned, perm=[0, 2, 1])


# -- products --------------------------------------------------------------------------------------


def _softmax_by_its_logarithm(axis: int) -> Part:
    return lambda net, x: net.node("Exp", net.node("LogSoftmax", x, axis=axis))


def _softmax_not_shifted(net: Network, x: str) -> str:
    e = net.node("Exp", x)
    inverse = net.node("Reciprocal", net.node("ReduceSum", e, net.ints(2), keepdims=0))
    shape = net.ints(BATCH, TOKENS, CHANNELS)
    return net.node("Mul", e, net.node("Expand", net.node("Unsqueeze", inverse, net.ints(2)), shape))


def _log_softmax(net: Network, x: str) -> str:
    return net.node("LogSoftmax", x)


def _log_softmax_written_out(net: Network, x: str) -> str:
    return net.node("Sub", x, net.node("ReduceLogSumExp", x, net.ints(2), keepdims=1))


def _of_length_one(net: Network, x: str) -> str:
    return net.node("LpNormalization", x, axis=-1, p=2)


def _of_length_one_clipped(least: float) -> Part:
    def part(net: Network, x: str) -> str:
        squares = net.node("ReduceSum", net.node("Mul", x, x), net.ints(2), keepdims=1)
        length = net.node("Sqrt", net.node("Max", squares, net.constant(least)))
        return net.node("Mul", x, net.node("Reciprocal", length))

    return part


def _threshold(least: float) -> Part:
    return lambda net, x: net.node("ThresholdedRelu", net.node("Add", x, net.constant(-0.5)), alpha=least)


def _relative(over: int) -> Part:
    """Shares of a sum of activations, as in linear attention."""

    def part(net: Network, x: str) -> str:
        active = net.node("Relu", net.node("Sub", x, net.constant(0.5)))
        total = net.node("Add", net.node("ReduceL1", active, net.ints(over), keepdims=1), net.constant(0.01))
        return net.node("Div", active, total)

    return part


def _relative_of_limited(net: Network, x: str) -> str:
    active = net.node("Max", net.node("Add", x, net.constant(-0.5)), net.constant(0))
    total = net.node("Add", net.constant(0.01), net.node("ReduceSum", active, net.ints(2), keepdims=1))
    return net.node("Exp", net.node("Sub", net.node("Log", active), net.node("Log", total)))


def _linear(net: Network, x: str) -> str:
    return net.node("Add", net.node("MatMul", x, net.weight(CHANNELS, CHANNELS)), net.weight(CHANNELS))


def _linear_by_gemm(net: Network, x: str) -> str:
    weight, bias = net.weight(CHANNELS, CHANNELS), net.weight(CHANNELS)
    rows = net.node("Reshape", x, net.ints(BATCH * TOKENS, CHANNELS))
    product = net.node("Gemm", rows, weight, bias)
    return net.node("Reshape", product, net.ints(*_SEQUENCE))


def _attention(net: Network, x: str) -> str:
    query, key, value = (net.node("MatMul", x, net.weight(CHANNELS, CHANNELS)) for _ in range(3))
    scaled = net.node("Mul", query, net.constant(0.5))
    scores = net.node("MatMul", scaled, net.node("Transpose", key, perm=[0, 2, 1]))
    return net.node("MatMul", net.node("Softmax", scores), value)


def _attention_turned(net: Network, x: str) -> str:
    """With keys times queries, and the scale behind."""
    query, key, value = (net.node("MatMul", x, net.weight(CHANNELS, CHANNELS)) for _ in range(3))
    scores = net.node("MatMul", key, net.node("Transpose", query, perm=[0, 2, 1]))
    weights = net.node("Softmax", net.node("Mul", scores, net.constant(0.5)), axis=1)
    return net.node("MatMul", net.node("Transpose", weights, perm=[0, 2, 1]), value)


def _attention_over_queries(net: Network, x: str) -> str:
    query, key, value = (net.node("MatMul", x, net.weight(CHANNELS, CHANNELS)) for _ in range(3))
    scores = net.node("MatMul", query, net.node("Transpose", key, perm=[0, 2, 1]))
    weights = net.node("Softmax", net.node("Mul", scores, net.constant(0.5)), axis=1)
    return net.node("MatMul", weights, value)


def _stored(net: Network, *shape: int, seed: int = 0) -> str:
    """A weight whose numbers are those of others of that seed and as many elements."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    net.weights.append(onnx.numpy_helper.from_array(values, f"w{len(net.weights)}"))
    return net.weights[-1].name


def _attended(net: Network, query: str, key: str, value: str) -> str:
    scores = net.node("MatMul", query, net.node("Transpose", key, perm=[0, 2, 1]))
    return net.node("MatMul", net.node("Softmax", scores), value)


def _projections(net: Network, x: str) -> str:
    parts = []
    for place in range(3):
        rows = np.random.default_rng(0).standard_normal((CHANNELS, 3, CHANNELS))[:, place]
        bias = np.random.default_rng(1).standard_normal((3, CHANNELS))[place]
        for name, values in ((f"rows{place}", rows), (f"bias{place}", bias)):
            net.weights.append(onnx.numpy_helper.from_array(values.astype(np.float32), name))
        parts.append(net.node("Add", net.node("MatMul", x, f"rows{place}"), f"bias{place}"))
    return _attended(net, *parts)


def _packed(net: Network, x: str) -> str:
    product = net.node("MatMul", x, _stored(net, CHANNELS, 3 * CHANNELS))
    return net.node("Add", product, _stored(net, 3 * CHANNELS, seed=1))


def _projections_cut(*starts: int) -> Part:
    """Packed into one, from which each is sliced."""

    def part(net: Network, x: str) -> str:
        packed = _packed(net, x)
        return _attended(
            net,
            *(
                net.node("Slice", packed, net.ints(start), net.ints(start + CHANNELS), net.ints(2))
                for start in starts
            ),
        )

    return part


def _projections_chosen(*starts: int) -> Part:
    """Packed into one, from which each is gathered."""

    def part(net: Network, x: str) -> str:
        packed = _packed(net, x)
        places = [net.ints(*range(start, start + CHANNELS)) for start in starts]
        return _attended(net, *(net.node("Gather", packed, chosen, axis=2) for chosen in places))

    return part


def _projections_indexed(net: Network, x: str) -> str:
    rows = net.node("Reshape", _packed(net, x), net.ints(BATCH, TOKENS, 3, CHANNELS))
    turned = net.node("Transpose", rows, perm=[2, 0, 1, 3])
    parts = [net.node("Gather", turned, net.ints(place), axis=0) for place in range(3)]
    return _attended(net, *(net.node("Squeeze", part, net.ints(0)) for part in parts))


def _projections_cut_twice(second: int) -> Part:
    """Queries, and keys with values, which are cut apart once they have a bias."""

    def part(net: Network, x: str) -> str:
        product = net.node("MatMul", x, _stored(net, CHANNELS, 3 * CHANNELS))
        biases = np.random.default_rng(1).standard_normal(3 * CHANNELS).astype(np.float32)
        biased = []
        for start, size in ((0, CHANNELS), (second, 2 * CHANNELS)):
            cut = net.node("Slice", product, net.ints(start), net.ints(start + size), net.ints(2))
            bias = onnx.numpy_helper.from_array(biases[start : start + size], f"bias{start}")
            net.weights.append(bias)
            biased.append(net.node("Add", cut, bias.name))
        ranges = (net.ints(*range(CHANNELS)), net.ints(*range(CHANNELS, 2 * CHANNELS)))
        return _attended(net, biased[0], *(net.node("Gather", biased[1], r, axis=2) for r in ranges))

    return part


def _projections_and_all(is_packed: bool) -> Part:
    """The packed product is read as a whole too, or another one of that size."""

    def part(net: Network, x: str) -> str:
        mixed = (_projections_cut(0, CHANNELS, 2 * CHANNELS) if is_packed else _projections)(net, x)
        every = net.nodes[1].output[0] if is_packed else _packed(net, x)
        return net.node("Add", mixed, net.node("ReduceMean", net.node("Relu", every), net.ints(2)))

    return part


def _attention_of_heads(net: Network, x: str) -> str:
    def heads(seed: int, order: list[int]) -> str:
        product = net.node("MatMul", x, _stored(net, CHANNELS, CHANNELS, seed=seed))
        split = net.node("Reshape", product, net.ints(BATCH, TOKENS, 2, CHANNELS // 2))
        return net.node("Transpose", split, perm=order)

    scores = net.node("MatMul", heads(0, [0, 2, 1, 3]), heads(1, [0, 2, 3, 1]))
    mixed = net.node("MatMul", net.node("Softmax", scores), heads(2, [0, 2, 1, 3]))
    rows = net.node("Reshape", net.node("Transpose", mixed, perm=[0, 2, 1, 3]), net.ints(*_SEQUENCE))
    return net.node("MatMul", rows, _stored(net, CHANNELS, CHANNELS, seed=3))


def _attention_by_einsum(mixing: str = "bhqk,bkhd->bqhd") -> Part:
    def part(net: Network, x: str) -> str:
        query, key, value = (
            net.node(
                "Einsum", x, _stored(net, CHANNELS, 2, CHANNELS // 2, seed=seed), equation="btc,chd->bthd"
            )
            for seed in range(3)
        )
        scores = net.node("Softmax", net.node("Einsum", key, query, equation="bkhd,bqhd->bhqk"))
        mixed = net.node("Einsum", scores, value, equation=mixing)
        weight = _stored(net, 2, CHANNELS // 2, CHANNELS, seed=3)
        return net.node("Einsum", mixed, weight, equation="...hd, hdc")

    return part


def _scores_of(equation: str) -> Part:
    """Attention with scores of features in two dimensions."""

    def part(net: Network, x: str) -> str:
        query, key, value = (
            net.node("MatMul", x, _stored(net, CHANNELS, CHANNELS, seed=seed)) for seed in range(3)
        )
        shape = net.ints(BATCH, TOKENS, 2, CHANNELS // 2)
        parts = (net.node("Reshape", query, shape), net.node("Reshape", key, shape))
        return net.node("MatMul", net.node("Softmax", net.node("Einsum", *parts, equation=equation)), value)

    return part


def _by_sum(net: Network, x: str) -> str:
    total = net.node("ReduceSum", x, net.ints(2))
    return net.node("Softmax", net.node("Mul", net.node("Mul", x, total), _stored(net, CHANNELS)), axis=1)


def _by_sum_of_einsum(net: Network, x: str) -> str:
    total = net.node("Einsum", x, equation="btc->tb")
    scaled = net.node("Einsum", total, x, equation="tb,btc->btc")
    turned = net.node("Einsum", _stored(net, CHANNELS), scaled, equation="c,btc->cbt")
    return net.node("Einsum", net.node("Softmax", turned, axis=2), equation="cbt->btc")


def _two_uses(*transposed: int) -> Part:
    """One matrix, as it is or transposed."""

    def part(net: Network, x: str) -> str:
        rows, weight = net.node("Reshape", x, net.ints(-1, CHANNELS)), _stored(net, CHANNELS, CHANNELS)
        first, second = (net.node("Gemm", rows, weight, transB=turned) for turned in transposed)
        total = net.node("Add", net.node("Relu", first), net.node("Tanh", second))
        return net.node("Reshape", total, net.ints(*_SEQUENCE))

    return part


# -- constants that are no weights -----------------------------------------------------------------

_CAUSAL = np.tril(np.ones((TOKENS, TOKENS), bool))
_WINDOW = _CAUSAL & ~np.tril(_CAUSAL, -2)


def _table(net: Network, values: np.ndarray) -> str:
    return net.node("Constant", value=onnx.numpy_helper.from_array(values))


def _masked_attention(masked: Part, factor: float = 0.5) -> Part:
    def part(net: Network, x: str) -> str:
        query, key, value = (net.node("MatMul", x, net.weight(CHANNELS, CHANNELS)) for _ in range(3))
        scores = net.node("MatMul", query, net.node("Transpose", key, perm=[0, 2, 1]))
        weights = net.node("Softmax", masked(net, net.node("Mul", scores, net.constant(factor))))
        return net.node("MatMul", weights, value)

    return part


def _added(seen: np.ndarray, lowest: float = -1e9) -> Part:
    mask = np.where(seen, 0, lowest).astype(np.float32)
    return lambda net, scores: net.node("Add", scores, _table(net, mask))


def _chosen(net: Network, scores: str) -> str:
    return net.node("Where", _table(net, _CAUSAL), scores, net.constant(float(np.finfo(np.float32).min)))


def _filled(net: Network, scores: str) -> str:
    return net.node("Where", _table(net, ~_CAUSAL), net.constant(-math.inf), scores)


def _learned(net: Network, scores: str) -> str:
    return net.node("Add", scores, net.weight(TOKENS, TOKENS))


def _flagged(flags: list[float]) -> Part:
    """Without some tokens."""
    return lambda net, x: _linear(
        net, net.node("Mul", x, _table(net, np.asarray(flags, np.float32)[:, np.newaxis]))
    )


def _guarded_softmax(net: Network, x: str) -> str:
    y = net.node("Softmax", x)
    return net.node("Where", net.node("IsNaN", y), net.constant(0), y)


# -- pads and pools --------------------------------------------------------------------------------


def _pooled(op: str, pads: int = 0) -> Part:
    return lambda net, x: net.node(op, x, kernel_shape=[3], pads=[pads, pads])


def _padded_before(op: str, number: float) -> Part:
    def part(net: Network, x: str) -> str:
        padded = net.node("Pad", x, net.ints(0, 0, 1, 0, 0, 1), net.constant(number))
        return net.node(op, padded, kernel_shape=[3])

    return part


def _behind(before: str, part: Part) -> Part:
    return lambda net, x: part(net, net.node(before, net.node("Sub", x, net.constant(0.5))))


def _not_pooled(op: str) -> Part:
    return lambda net, x: net.node(op, x, kernel_shape=[1])


# -- sums ------------------------------------------------------------------------------------------


def _three(add: Callable[[Network, str, str, str], str]) -> Part:
    return lambda net, x: add(net, net.node("Cos", x), net.node("Tanh", x), net.node("Relu", x))


def _with_positions(is_first: bool) -> Part:
    """Two values, positions, and what is the same of all of these."""

    def part(net: Network, x: str) -> str:
        one, other = net.node("Cos", x), net.node("Tanh", x)
        positions, shared = net.weight(TOKENS, CHANNELS), net.weight(CHANNELS)
        if is_first:
            total = net.node("Add", net.node("Add", one, positions), net.node("Add", other, shared))
        else:
            total = net.node("Add", net.node("Add", positions, shared), net.node("Add", one, other))
        return net.node("LayerNormalization", total, net.weight(CHANNELS), axis=-1)

    return part


def _of_length_one_expanded(net: Network, x: str) -> str:
    length = net.node("Clip", net.node("ReduceL2", x, net.ints(2)), net.constant(1e-12))
    return net.node("Div", _linear(net, x), net.node("Expand", length, net.ints(*_SEQUENCE)))


def _of_length_one_broadcast(net: Network, x: str) -> str:
    squares = net.node("ReduceSum", net.node("Mul", x, x), net.ints(2))
    length = net.node("Max", net.node("Sqrt", squares), net.constant(1e-12))
    return net.node("Div", _linear(net, x), length)


def _conv(net: Network, x: str) -> str:
    weight, bias = net.weight(CHANNELS, CHANNELS, 3, 3), net.weight(CHANNELS)
    return net.node("Conv", x, weight, bias, pads=[0, 0, 1, 1], strides=[2, 2])


def _conv_padded_before(net: Network, x: str) -> str:
    weight, bias = net.weight(CHANNELS, CHANNELS, 3, 3), net.weight(CHANNELS)
    padded = net.node("Pad", x, net.ints(0, 0, 0, 0, 0, 0, 1, 1))
    y = net.node("Conv", padded, weight, strides=[2, 2])
    return net.node("Add", y, net.node("Reshape", bias, net.ints(CHANNELS, 1, 1)))


def _conv_padded_otherwise(net: Network, x: str) -> str:
    weight, bias = net.weight(CHANNELS, CHANNELS, 3, 3), net.weight(CHANNELS)
    return net.node("Conv", x, weight, bias, pads=[1, 1, 0, 0], strides=[2, 2])


def _conv_between_turns(net: Network, x: str) -> str:
    first = net.node("Transpose", x, perm=[0, 3, 1, 2])
    return net.node("Transpose", _conv(net, first), perm=[0, 2, 3, 1])


def _shuffled(net: Network, x: str) -> str:
    parts = net.node("Reshape", x, net.ints(BATCH, 2, CHANNELS // 2, EXTENT, EXTENT))
    turned = net.node("Transpose", parts, perm=[0, 2, 1, 3, 4])
    shuffled = net.node("Reshape", turned, net.ints(*_IMAGE))
    return net.node("Conv", shuffled, net.weight(CHANNELS, 2, 3, 3), group=2, pads=[1, 1, 1, 1])


def _not_shuffled(net: Network, x: str) -> str:
    return net.node("Conv", x, net.weight(CHANNELS, 2, 3, 3), group=2, pads=[1, 1, 1, 1])


def _shuffled_by_channel(net: Network, x: str) -> str:
    parts = net.node("Reshape", x, net.ints(BATCH, 2, CHANNELS // 2, EXTENT, EXTENT))
    shuffled = net.node("Reshape", net.node("Transpose", parts, perm=[0, 2, 1, 3, 4]), net.ints(*_IMAGE))
    return _by_channel(net, shuffled, x)


def _not_shuffled_by_channel(net: Network, x: str) -> str:
    return _by_channel(net, x, x)


def _by_channel(net: Network, x: str, beside: str) -> str:
    y = net.node("Conv", x, net.weight(CHANNELS, 1, 3, 3), group=CHANNELS, pads=[1, 1, 1, 1])
    return net.node("Add", y, beside)


def _filled_up(**pads: Any) -> Part:
    return lambda net, x: net.node(
        "ConvTranspose", x, net.weight(CHANNELS, CHANNELS, 3, 3), strides=[2, 2], **pads
    )


# -- numbers, types and indices that count ---------------------------------------------------------


def _between_layers(*parts: Part) -> Part:
    """Of any numbers, and read by what is no function of one number."""

    def part(net: Network, x: str) -> str:
        x = net.node("MatMul", x, _stored(net, CHANNELS, CHANNELS))
        for inner in parts:
            x = inner(net, x)
        return net.node("MatMul", x, _stored(net, CHANNELS, CHANNELS, seed=1))

    return part


def _softplus_of(number: float) -> Part:
    return lambda net, x: net.node("Log", net.node("Add", net.node("Exp", x), net.constant(number)))


def _logistic_of(number: float) -> Part:
    def part(net: Network, x: str) -> str:
        below = net.node("Add", net.node("Exp", net.node("Neg", x)), net.constant(number))
        return net.node("Div", net.constant(1), below)

    return part


def _tanh_of_exponential(number: float) -> Part:
    return lambda net, x: net.node("Tanh", net.node("Sub", net.node("Exp", x), net.constant(number)))


def _sign_of(least: float) -> Part:
    def part(net: Network, x: str) -> str:
        square = net.node("Add", net.node("Mul", x, x), net.constant(least))
        return net.node("Div", x, net.node("Sqrt", square))

    return part


def _inverse_of(least: float) -> Part:
    return lambda net, x: net.node("Reciprocal", net.node("Add", net.node("Relu", x), net.constant(least)))


def _log_softmax_above(least: float) -> Part:
    def part(net: Network, x: str) -> str:
        scores = net.node("Mul", x, net.constant(40))
        shares = net.node("Add", net.node("Softmax", scores), net.constant(least))
        return _linear(net, net.node("Log", shares))

    return part


def _power_of_two(net: Network, x: str) -> str:
    return net.node("Pow", net.constant(2), net.node("Mul", x, net.constant(1 / math.log(2))))


def _cast(net: Network, x: str, *types: int) -> str:
    for kind in types:
        x = net.node("Cast", x, to=kind)
    return x


def _tripled_cast(*types: int) -> Part:
    return lambda net, x: _cast(net, net.node("Mul", x, net.constant(3)), *types, TensorProto.FLOAT)


def _flags_cast(*types: int) -> Part:
    return lambda net, x: _cast(net, net.node("Greater", x, net.constant(0.5)), *types, TensorProto.FLOAT)


def _entries_of(indices: Part) -> Part:
    """Of a table of 8 entries, those at the sums of channels."""

    def part(net: Network, x: str) -> str:
        sums = net.node("ReduceSum", x, net.ints(2), keepdims=0)
        chosen = indices(net, net.node("Cast", sums, to=TensorProto.INT64))
        return net.node("Gather", net.weight(8, CHANNELS), chosen)

    return part


def _from_the_end(count: int) -> Part:
    def part(net: Network, x: str) -> str:
        is_negative = net.node("Less", x, net.ints(0))
        return net.node("Where", is_negative, net.node("Add", x, net.ints(count)), x)

    return part


def _moved_where_negative(net: Network, x: str) -> str:
    is_negative = net.node("Less", x, net.constant(0))
    return net.node("Where", is_negative, net.node("Add", x, net.constant(3)), x)


def _resized(factor: float = 0.0, tokens: int = 0, **attributes: int) -> Part:
    def part(net: Network, x: str) -> str:
        if tokens:
            return net.node(
                "Resize", x, "", "", net.ints(BATCH, tokens, CHANNELS), mode="linear", **attributes
            )
        factors = _table(net, np.asarray([1, factor, 1], np.float32))
        return net.node("Resize", x, "", factors, mode="linear", **attributes)

    return part


def _limited(*limits: tuple[float, float]) -> Part:
    def part(net: Network, x: str) -> str:
        for low, high in limits:
            x = net.node("Clip", x, net.constant(low), net.constant(high))
        return x

    return part


def _behind_tokens_of(number: float) -> Part:
    def part(net: Network, x: str) -> str:
        tokens = net.node("Expand", net.constant(number), net.ints(BATCH, 1, CHANNELS))
        return net.node("Softmax", net.node("Concat", tokens, x, axis=1), axis=1)

    return part


def _guarded_attention(is_turned: bool) -> Part:
    def part(net: Network, x: str) -> str:
        scores = net.node("MatMul", x, net.node("Transpose", x, perm=[0, 2, 1]))
        weights = net.node("Softmax", scores)
        is_guarded = net.node("IsNaN", weights)
        if is_turned:
            is_guarded = net.node("Transpose", is_guarded, perm=[0, 2, 1])
        return net.node("MatMul", net.node("Where", is_guarded, net.constant(0), weights), x)

    return part


# -- what lies on what -----------------------------------------------------------------------------


def _of_scores(part: Callable[[Network, str, Callable[[str], str]], str], is_turned: bool) -> Part:
    """Of a square matrix, with what its rows are reduced to on these or, misplaced, on its columns."""

    def whole(net: Network, x: str) -> str:
        scores = net.node("MatMul", x, net.node("Transpose", x, perm=[0, 2, 1]))

        def laid(reduced: str) -> str:
            return net.node("Transpose", reduced, perm=[0, 2, 1]) if is_turned else reduced

        return net.node("MatMul", part(net, scores, laid), x)

    return whole


def _by_its_sum(net: Network, x: str, laid: Callable[[str], str]) -> str:
    e = net.node("Exp", net.node("Sub", x, net.node("ReduceMax", x, net.ints(2))))
    return net.node("Div", e, laid(net.node("ReduceSum", e, net.ints(2))))


def _by_its_deviation(net: Network, x: str, laid: Callable[[str], str]) -> str:
    centred = net.node("Sub", x, net.node("ReduceMean", x, net.ints(2)))
    variance = net.node("ReduceMean", net.node("Mul", centred, centred), net.ints(2))
    return net.node("Div", centred, laid(net.node("Sqrt", net.node("Add", variance, net.constant(1e-5)))))


def _differences_of_pairs(over: int) -> Part:
    def part(net: Network, x: str) -> str:
        h = _linear(net, x)
        pairs = net.node("Sub", net.node("Unsqueeze", h, net.ints(1)), net.node("Unsqueeze", h, net.ints(2)))
        return net.node("ReduceMean", net.node("Relu", pairs), net.ints(over), keepdims=0)

    return part


def _with_transposed(axis: int) -> Part:
    def part(net: Network, x: str) -> str:
        scores = net.node("MatMul", x, net.node("Transpose", _linear(net, x), perm=[0, 2, 1]))
        turned = net.node("Transpose", net.node("Tanh", scores), perm=[0, 2, 1])
        return net.node("MatMul", net.node("Softmax", net.node("Add", scores, turned), axis=axis), x)

    return part


def _by_flags_of_pairs(is_turned: bool) -> Part:
    def part(net: Network, x: str) -> str:
        scores = net.node("MatMul", x, net.node("Transpose", _linear(net, x), perm=[0, 2, 1]))
        flags = net.node("ReduceMax", x, net.ints(2), keepdims=0)
        rows, columns = (net.node("Unsqueeze", flags, net.ints(axis)) for axis in (2, 1))
        pairs = net.node("Mul", columns, rows) if is_turned else net.node("Mul", rows, columns)
        return net.node("MatMul", net.node("Mul", net.node("Softmax", scores), pairs), x)

    return part


# -- numbers beside weights ------------------------------------------------------------------------


def _with_weight(factor: float, *shape: int) -> Part:
    return lambda net, x: net.node("Add", net.node("Mul", x, net.constant(factor)), net.weight(*shape))


def _before_relu(part: Part) -> Part:
    return lambda net, x: net.node("Relu", part(net, x))


def _linear_with_factor(net: Network, x: str) -> str:
    product = net.node("MatMul", x, net.weight(CHANNELS, CHANNELS))
    return net.node("Add", net.node("Mul", product, net.constant(2)), net.weight(CHANNELS))


def _with_number_spread(op: str, number: float) -> Part:
    def part(net: Network, x: str) -> str:
        mean = net.node("ReduceMean", x, net.ints(2))
        return net.node(op, mean, net.node("Expand", net.constant(number), net.ints(*_SEQUENCE)))

    return part


_SAME: Mapping[str, tuple[Part, Part]] = {
    "gelu, halved first": (_gelu, _gelu_halved_first),
    "gelu, by the complement": (_gelu, _gelu_of_complement),
    "gelu by tanh, of a product": (_gelu_by_tanh, _gelu_by_tanh_of_product),
    "hard swish": (lambda net, x: net.node("HardSwish", x), _hard_swish_written_out),
    "relu6": (_relu6, _relu6_by_two),
    "tanh, by its values": (_tanh, _tanh_of_sigmoid),
    "swish, by its values": (_swish(1.0), _swish_by_tanh),
    "mish, by its values": (_mish, _mish_as_quotient),
    "layer normalisation, written out": (_layer_norm(2), _layer_norm_written_out),
    "layer normalisation, by squares": (_layer_norm(2), _layer_norm_by_squares),
    "layer normalisation, as affine": (_layer_norm(2), _layer_norm_as_affine),
    "normalisation without weights": (_normalized_of_ones, _normalized_without_weights),
    "softmax, written out": (_softmax(2), _softmax_written_out),
    "softmax, of another layout": (_softmax(2), _softmax_of_turned),
    "softmax, by its logarithm": (_softmax(2), _softmax_by_its_logarithm(2)),
    "softmax, not shifted": (_softmax(2), _softmax_not_shifted),
    "logarithm of softmax": (_log_softmax, _log_softmax_written_out),
    "length 1, by its values": (_of_length_one, _of_length_one_clipped(1e-24)),
    "shares, by their values": (_relative(2), _relative_of_limited),
    "linear, by Gemm": (_linear, _linear_by_gemm),
    "attention, turned": (_attention, _attention_turned),
    "projections, packed and cut": (_projections, _projections_cut(0, CHANNELS, 2 * CHANNELS)),
    "projections, packed and indexed": (_projections_cut(0, CHANNELS, 2 * CHANNELS), _projections_indexed),
    "projections, cut twice": (_projections_indexed, _projections_cut_twice(CHANNELS)),
    "parts that overlap": (_projections_cut(0, 2, 8), _projections_chosen(0, 2, 8)),
    "attention by einsum": (_attention_of_heads, _attention_by_einsum()),
    "sum by einsum": (_by_sum, _by_sum_of_einsum),
    "mask of infinity": (
        _masked_attention(_added(_CAUSAL)),
        _masked_attention(_added(_CAUSAL, -math.inf)),
    ),
    "mask for each sample": (
        _masked_attention(_added(_CAUSAL)),
        _masked_attention(_added(np.stack([_CAUSAL] * BATCH))),
    ),
    "mask by a choice": (_masked_attention(_added(_CAUSAL)), _masked_attention(_chosen)),
    "mask by filling": (_masked_attention(_added(_CAUSAL)), _masked_attention(_filled)),
    "softmax, guarded": (_softmax(2), _guarded_softmax),
    "zeros before a maximum of what is not negative": (
        _behind("Relu", _pooled("MaxPool", 1)),
        _behind("Relu", _padded_before("MaxPool", 0)),
    ),
    "lowest numbers before a maximum": (
        _behind("Tanh", _pooled("MaxPool", 1)),
        _behind("Tanh", _padded_before("MaxPool", float(np.finfo(np.float32).min))),
    ),
    "pooling of single elements": (_not_pooled("MaxPool"), _not_pooled("AveragePool")),
    "sum of three": (
        _three(lambda net, a, b, c: net.node("Add", net.node("Add", a, b), c)),
        _three(lambda net, a, b, c: net.node("Sub", a, net.node("Sub", net.node("Neg", b), c))),
    ),
    "sum of three at once": (
        _three(lambda net, a, b, c: net.node("Sum", a, b, c)),
        _three(lambda net, a, b, c: net.node("Add", a, net.node("Add", b, c))),
    ),
    "sum with positions": (_with_positions(True), _with_positions(False)),
    "divided by what is expanded": (_of_length_one_expanded, _of_length_one_broadcast),
    "flags of pairs, in either order": (_by_flags_of_pairs(False), _by_flags_of_pairs(True)),
    "exponential, as a power of two": (
        _between_layers(lambda net, x: net.node("Exp", x)),
        _between_layers(_power_of_two),
    ),
    "flags, cast there and back": (_flags_cast(), _flags_cast(TensorProto.INT64, TensorProto.BOOL)),
    "resized by a factor and by sizes": (_resized(1.6), _resized(tokens=8)),
    "limits apart": (_limited((0, 0.2), (0.5, 0.7)), _limited((0.5, 0.5))),
}
_DIFFERENT: Mapping[str, tuple[Part, Part]] = {
    "softmax, by misplaced sums": (_of_scores(_by_its_sum, False), _of_scores(_by_its_sum, True)),
    "normalised by misplaced deviations": (
        _of_scores(_by_its_deviation, False),
        _of_scores(_by_its_deviation, True),
    ),
    "with itself transposed, over rows and columns": (_with_transposed(1), _with_transposed(2)),
    "scaled before positions": (_with_weight(1, TOKENS, CHANNELS), _with_weight(2, TOKENS, CHANNELS)),
    "negated before a bias": (
        _before_relu(_with_weight(1, CHANNELS)),
        _before_relu(_with_weight(-1, CHANNELS)),
    ),
    "other numbers, spread": (_with_number_spread("Add", 1), _with_number_spread("Add", 2)),
    "other factors, spread": (_with_number_spread("Mul", 1), _with_number_spread("Mul", 2)),
    "a number that is spread, added or not": (_with_number_spread("Add", 1), _with_number_spread("Sub", 1)),
    "gelu and its approximation": (_gelu, _gelu_by_tanh),
    "swish of another factor": (_swish(1.0), _swish(1.702)),
    "relu and relu6": (_times_eight(_relu), _times_eight(_relu6)),
    "swish and gelu": (_swish(1.702), _gelu),
    "another epsilon": (_layer_norm(2), _layer_norm(2, 1e-3)),
    "normalised along more axes": (_layer_norm(2), _layer_norm(1)),
    "softmax along another axis": (_softmax(2), _softmax(1)),
    "softmax along another axis, by its logarithm": (_softmax(1), _softmax_by_its_logarithm(2)),
    "length 1 with a least length": (_of_length_one, _of_length_one_clipped(1e-4)),
    "length 1 with a small least length": (
        lambda net, x: _of_length_one(net, _linear(net, x)),
        lambda net, x: _of_length_one_clipped(1e-6)(net, _linear(net, x)),
    ),
    "thresholds that lie close": (_threshold(0.012), _threshold(0.02)),
    "shares along another axis": (_relative(1), _relative_of_limited),
    "softmax of queries": (_attention, _attention_over_queries),
    "projections that overlap": (_projections, _projections_cut(0, 2, 8)),
    "projections that overlap otherwise": (_projections_cut(0, 2, 8), _projections_cut(0, 1, 8)),
    "projections that overlap, cut twice": (_projections, _projections_cut_twice(2)),
    "projections, read as a whole too": (_projections_and_all(True), _projections_and_all(False)),
    "values of queries, by einsum": (_attention_of_heads, _attention_by_einsum("bhqk,bqhd->bkhd")),
    "features that meet others": (_scores_of("bqhd,bkhd->bqk"), _scores_of("bqhd,bkdh->bqk")),
    "a matrix that is transposed the second time": (_two_uses(0, 0), _two_uses(0, 1)),
    "causal mask and window": (
        _masked_attention(_added(_CAUSAL)),
        _masked_attention(_added(_WINDOW)),
    ),
    "mask of the past and of the future": (
        _masked_attention(_added(_CAUSAL)),
        _masked_attention(_added(_CAUSAL.T)),
    ),
    "mask and learned biases": (_masked_attention(_added(_CAUSAL)), _masked_attention(_learned)),
    "scores of another factor, masked": (
        _masked_attention(_added(_CAUSAL), 0.5),
        _masked_attention(_added(_CAUSAL), 1.0),
    ),
    "other tokens left out": (_flagged([1, 0, 1, 0, 1]), _flagged([0, 1, 0, 1, 0])),
    "other factors": (_flagged([1, 2, 3, 4, 5]), _flagged([5, 4, 3, 2, 1])),
    "zeros before a maximum of what may be negative": (
        _behind("Tanh", _pooled("MaxPool", 1)),
        _behind("Tanh", _padded_before("MaxPool", 0)),
    ),
    "lowest numbers before a mean": (_padded_before("AveragePool", 0), _padded_before("AveragePool", -1e31)),
    "differences in another order": (
        _three(lambda net, a, b, c: net.node("Sub", net.node("Sub", a, b), c)),
        _three(lambda net, a, b, c: net.node("Sub", a, net.node("Sub", b, c))),
    ),
    "logarithms of other sums": (_between_layers(_softplus_of(1)), _between_layers(_softplus_of(3))),
    "quotients by other sums": (_between_layers(_logistic_of(2)), _between_layers(_logistic_of(3))),
    "tanh of exponentials": (
        _between_layers(_tanh_of_exponential(1)),
        _between_layers(_tanh_of_exponential(0)),
    ),
    "small numbers below a root": (_between_layers(_sign_of(1e-8)), _between_layers(_sign_of(1e-4))),
    "small numbers in a quotient": (_between_layers(_inverse_of(1e-7)), _between_layers(_inverse_of(1e-5))),
    "what agrees, inside of what does not": (_log_softmax_above(1e-7), _log_softmax_above(3e-7)),
    "whole numbers and flags": (_tripled_cast(TensorProto.INT64), _tripled_cast(TensorProto.BOOL)),
    "flags of whole numbers": (
        _tripled_cast(TensorProto.INT64),
        _tripled_cast(TensorProto.INT64, TensorProto.BOOL),
    ),
    "every other entry": (
        _entries_of(lambda net, i: i),
        _entries_of(lambda net, i: net.node("Mul", i, net.ints(2))),
    ),
    "entries from the end of fewer": (_entries_of(_from_the_end(8)), _entries_of(_from_the_end(5))),
    "negative numbers moved": (_between_layers(_tanh), _between_layers(_moved_where_negative, _tanh)),
    "resized with all elements": (_resized(0.6), _resized(0.6, antialias=1)),
    "resized by another factor": (_resized(1.9), _resized(tokens=9)),
    "limits in another order": (_limited((0, 1), (2, 3)), _limited((2, 3), (0, 1))),
    "other numbers in front": (_behind_tokens_of(0), _behind_tokens_of(1)),
    "a guard, turned": (_guarded_attention(False), _guarded_attention(True)),
}


@pytest.mark.parametrize("name", _SAME)
def test_spellings_of_one_network_are_the_same(name: str) -> None:
    first, second = (_model(part, _SEQUENCE) for part in _SAME[name])
    x = normal(*_SEQUENCE)
    np.testing.assert_allclose(run(first, {"x": x})[0], run(second, {"x": x})[0], rtol=1e-4, atol=1e-5)
    found = _compared(first, second)
    assert found.is_same_network
    assert all(pair.is_same_function for pair in found.pairs)
    _check_values(first, second, x, x, found)


@pytest.mark.parametrize("name", _DIFFERENT)
def test_what_only_looks_alike_is_not(name: str) -> None:
    first, second = (_model(part, _SEQUENCE) for part in _DIFFERENT[name])
    found = _compared(first, second)
    assert not found.is_same_network
    assert found.last_from_inputs
    assert found.last_from_outputs


def test_a_long_chain_of_activations_takes_no_time() -> None:
    def gated(op: str) -> Part:
        def part(net: Network, x: str) -> str:
            for _ in range(30):
                x = net.node("Mul", x, net.node("Sigmoid", x))
            return net.node(op, x)

        return part

    first, second = (_model(gated(op), _SEQUENCE) for op in ("Softplus", "Softsign"))
    assert not _compared(first, second).is_same_network


def test_pads_of_their_own_and_biases_belong_to_the_convolution() -> None:
    first, second = _model(_conv, _IMAGE), _model(_conv_padded_before, _IMAGE)
    x = normal(*_IMAGE)
    found = _compared(first, second)
    assert found.is_same_network
    _check_values(first, second, x, x, found)
    assert not _compared(first, _model(_conv_padded_otherwise, _IMAGE)).is_same_network


def test_channels_last_is_the_same_network() -> None:
    first, second = _model(_conv, _IMAGE), _model(_conv_between_turns, _IMAGE, is_last=True)
    x = normal(*_IMAGE)
    found = _compared(first, second)
    assert found.is_same_network
    assert {item.tensor for item in found.unmatched_a} == set()
    _check_values(first, second, x, x, found)


@pytest.mark.parametrize("kernel", [EXTENT, 2])
def test_a_convolution_of_windows_apart_is_a_matrix_times_each(kernel: int) -> None:
    count, inside = EXTENT // kernel, CHANNELS * kernel * kernel

    def convolution(net: Network, x: str) -> str:
        weight = _stored(net, CHANNELS, CHANNELS, kernel, kernel)
        return net.node("Conv", x, weight, strides=[kernel, kernel])

    def matrix(net: Network, x: str) -> str:
        cut = net.node("Reshape", x, net.ints(BATCH, CHANNELS, count, kernel, count, kernel))
        windows = net.node("Transpose", cut, perm=[0, 2, 4, 1, 3, 5])
        rows = net.node("Reshape", windows, net.ints(BATCH * count * count, inside))
        product = net.node("Gemm", rows, _stored(net, CHANNELS, inside), transB=1)
        lying = net.node("Reshape", product, net.ints(BATCH, count, count, CHANNELS))
        return net.node("Transpose", lying, perm=[0, 3, 1, 2])

    first, second = _model(convolution, _IMAGE), _model(matrix, _IMAGE)
    x = normal(*_IMAGE)
    found = _compared(first, second)
    assert found.is_same_network
    _check_values(first, second, x, x, found)


def test_parts_of_groups_are_no_layers_of_all_channels() -> None:
    def halves(net: Network, *parts: str) -> str:
        return net.node("Concat", net.node("Relu", parts[0]), net.node("Tanh", parts[1]), axis=1)

    def grouped(net: Network, x: str) -> str:
        y = net.node("Conv", x, net.weight(CHANNELS, CHANNELS // 2, 3, 3), group=2, pads=[1] * 4)
        ranges = (net.ints(0, 1), net.ints(2, 3))
        return halves(net, *(net.node("Gather", y, chosen, axis=1) for chosen in ranges))

    def apart(net: Network, x: str) -> str:
        weights = [net.weight(CHANNELS // 2, CHANNELS // 2, 3, 3) for _ in range(2)]
        return halves(net, *(net.node("Conv", x, weight, group=2, pads=[1] * 4) for weight in weights))

    assert not _compared(_model(grouped, _IMAGE), _model(apart, _IMAGE)).is_same_network


def test_shuffled_channels_are_other_channels() -> None:
    assert not _compared(_model(_shuffled, _IMAGE), _model(_not_shuffled, _IMAGE)).is_same_network


def test_what_is_subtracted_is_known_by_its_axis() -> None:
    first, second = (_model(_differences_of_pairs(over), _SEQUENCE) for over in (1, 2))
    assert not _compared(first, second).is_same_network


def test_channels_shuffled_before_filters_of_each_are_other_channels() -> None:
    shuffled, not_shuffled = (_model(p, _IMAGE) for p in (_shuffled_by_channel, _not_shuffled_by_channel))
    assert not _compared(shuffled, not_shuffled).is_same_network


def test_pads_of_a_transposed_convolution_are_those_of_its_result() -> None:
    automatic = _model(_filled_up(auto_pad="SAME_UPPER"), _IMAGE)
    behind = _model(_filled_up(pads=[0, 0, 1, 1]), _IMAGE)
    x = normal(*_IMAGE)
    found = _compared(automatic, behind)
    assert found.is_same_network
    _check_values(automatic, behind, x, x, found)
    assert not _compared(automatic, _model(_filled_up(auto_pad="SAME_LOWER"), _IMAGE)).is_same_network


def test_a_long_sum_is_no_square_of_its_terms() -> None:
    count = 200

    def summed(is_reversed: bool) -> Part:
        def part(net: Network, x: str) -> str:
            terms = [net.node("Sin", net.node("Mul", x, net.constant(i / 8))) for i in range(1, count)]
            terms = terms[::-1] if is_reversed else terms
            for term in terms:
                x = net.node("Add", x, term)
            return x

        return part

    first, second = (read_model(_model(summed(is_reversed), _SEQUENCE)) for is_reversed in (False, True))
    assert match(first, second).is_same_network
    entities = structure_of(first).entities
    assert sum(1 for entity in entities for _ in leaves(entity.term)) < 20 * count


def test_a_factor_behind_a_layer_is_a_part_of_its_weights() -> None:
    assert _compared(_model(_linear, _SEQUENCE), _model(_linear_with_factor, _SEQUENCE)).is_same_network


def _check_values(
    first: onnx.ModelProto, second: onnx.ModelProto, x: np.ndarray, y: np.ndarray, found: Matching
) -> None:
    """Matched tensors hold the same elements."""
    made = [{name for node in model.graph.node for name in node.output} for model in (first, second)]
    for pair in found.pairs:
        if pair.a not in made[0] or pair.b not in made[1]:
            continue
        here, there = (
            np.sort(np.maximum(run(_with_output(model, name), {"x": value}, name)[0], -1e4), axis=None)
            for model, name, value in ((first, pair.a, x), (second, pair.b, y))
        )
        there = np.sort(there / pair.factor)
        np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-5, err_msg=str(pair))


def _with_output(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if name not in {value.name for value in copy.graph.output}:
        copy.graph.output.append(onnx.ValueInfoProto(name=name))
    return copy
