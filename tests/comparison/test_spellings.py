"""What exporters write differently is the same, and what only looks alike is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import pytest

from onnxgc.comparison.matching import Matching, match
from onnxgc.model.read import read_model
from tests.comparison.networks import BATCH, CHANNELS, EXTENT, TOKENS, Network
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
}
_DIFFERENT: Mapping[str, tuple[Part, Part]] = {
    "gelu and its approximation": (_gelu, _gelu_by_tanh),
    "swish of another factor": (_swish(1.0), _swish(1.702)),
    "relu and relu6": (_times_eight(_relu), _times_eight(_relu6)),
    "swish and gelu": (_swish(1.702), _gelu),
    "another epsilon": (_layer_norm(2), _layer_norm(2, 1e-3)),
    "normalised along more axes": (_layer_norm(2), _layer_norm(1)),
    "softmax along another axis": (_softmax(2), _softmax(1)),
    "softmax along another axis, by its logarithm": (_softmax(1), _softmax_by_its_logarithm(2)),
    "length 1 with a least length": (_of_length_one, _of_length_one_clipped(1e-4)),
    "shares along another axis": (_relative(1), _relative_of_limited),
    "softmax of queries": (_attention, _attention_over_queries),
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


def test_shuffled_channels_are_other_channels() -> None:
    assert not _compared(_model(_shuffled, _IMAGE), _model(_not_shuffled, _IMAGE)).is_same_network


def _check_values(
    first: onnx.ModelProto, second: onnx.ModelProto, x: np.ndarray, y: np.ndarray, found: Matching
) -> None:
    """Matched tensors hold the same elements."""
    made = [{name for node in model.graph.node for name in node.output} for model in (first, second)]
    for pair in found.pairs:
        if pair.a not in made[0] or pair.b not in made[1]:
            continue
        here, there = (
            np.sort(run(_with_output(model, name), {"x": value}, name)[0], axis=None)
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
