"""Differences between models of one network, and positions at which networks diverge."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from onnxgc.matching.divergence import BATCH_NORMALISATIONS, SHARED_WEIGHTS
from onnxgc.matching.match import Matching, Reason
from tests.matching.networks import BATCH, CHANNELS, EXTENT, TOKENS, Network
from tests.matching.spelling_checks import compared

_IMAGE, _SEQUENCE = (BATCH, CHANNELS, EXTENT, EXTENT), (BATCH, TOKENS, CHANNELS)


def _tokens(part: Callable[[Network], str], width: int = CHANNELS) -> onnx.ModelProto:
    net = Network()
    pooled = net.node("ReduceMean", part(net), net.ints(1), keepdims=0)
    return net.model(pooled, _SEQUENCE, (BATCH, width))


def _image(part: Callable[[Network], str], *, has_end: bool = False, batch: int = BATCH) -> onnx.ModelProto:
    net = Network()
    pooled = net.node("ReduceMean", part(net), net.ints(2, 3), keepdims=0)
    output = net.node("MatMul", pooled, net.weight(CHANNELS, 3))
    return net.model(net.node("Tanh", output) if has_end else output, (batch, *_IMAGE[1:]), (batch, 3))


def _differences(found: Matching) -> list[tuple[str, str, str]]:
    return [(other.what, other.a, other.b) for other in found.differences]


def _two_uses(is_shared: bool, is_transposed: bool = False) -> onnx.ModelProto:
    """Two products, which may share a weight; the second may read it transposed twice."""

    def part(net: Network) -> str:
        first = net.weight(CHANNELS, CHANNELS)
        second = first if is_shared else net.weight(CHANNELS, CHANNELS)
        y = net.node("Relu", net.node("MatMul", "x", first))
        if is_transposed:
            second = net.node("Transpose", net.node("Transpose", second))
        return net.node("Tanh", net.node("MatMul", y, second))

    return _tokens(part)


def test_shared_weights_are_reported() -> None:
    """A layer that is applied twice trains differently from two layers; the function is the same."""
    found = compared(_two_uses(is_shared=True), _two_uses(is_shared=False))
    assert found.is_same_network
    assert _differences(found) == [(SHARED_WEIGHTS, "1", "2")]
    assert not _differences(compared(_two_uses(is_shared=True), _two_uses(is_shared=True, is_transposed=True)))


def test_one_layer_in_place_of_two_is_reported() -> None:
    def part(is_shared: bool) -> Callable[[Network], str]:
        def built(net: Network) -> str:
            ones = net.node("MatMul", "x", net.weight(CHANNELS, CHANNELS))
            others = ones if is_shared else net.node("MatMul", "x", net.weight(CHANNELS, CHANNELS))
            ends = (net.node("Relu", ones), net.node("Tanh", others))
            return net.node("Add", *(net.node("MatMul", end, net.weight(CHANNELS, 2)) for end in ends))

        return built

    found = compared(_tokens(part(True), 2), _tokens(part(False), 2))
    assert found.is_same_network
    assert _differences(found) == [(SHARED_WEIGHTS, "3", "4")]


def _normalized(epsilon: float | None) -> onnx.ModelProto:
    def part(net: Network) -> str:
        y = net.node("Conv", "x", net.weight(CHANNELS, CHANNELS, 1, 1), net.weight(CHANNELS))
        if epsilon is not None:
            y = net.node("BatchNormalization", y, *(net.weight(CHANNELS) for _ in range(4)), epsilon=epsilon)
        return net.node("Relu", y)

    return _image(part)


def test_normalisations_by_batch_statistics_are_reported() -> None:
    first, folded, other = (_normalized(epsilon) for epsilon in (1e-5, None, 1e-3))
    found = compared(first, folded)
    assert found.is_same_network
    assert not found.has_same_biases
    assert _differences(found) == [(BATCH_NORMALISATIONS, "1", "0")]
    assert _differences(compared(first, other)) == [(f"epsilon of {BATCH_NORMALISATIONS}", "1e-05", "0.001")]
    frozen = compared(first, folded, freeze_bn=True)
    assert not frozen.differences
    assert frozen.has_same_biases


def test_inputs_of_different_sizes_are_reported() -> None:
    small, large = (
        Network().model("x", (BATCH, CHANNELS, extent, extent), (BATCH, CHANNELS, extent, extent)) for extent in (4, 6)
    )
    for model in (small, large):
        weight = onnx.numpy_helper.from_array(np.ones((1, 4, 1, 1), np.float32), "w")
        model.graph.initializer.append(weight)
        model.graph.node.append(onnx.helper.make_node("Conv", ["x", "w"], ["y"]))
        model.graph.node.append(onnx.helper.make_node("ReduceMean", ["y"], ["z"], keepdims=0))
        del model.graph.output[:]
        model.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ()))
    found = compared(small, large)
    assert not found.is_same_network
    assert _differences(found) == [("inputs", "'x' 2x4x4x4", "'x' 2x4x6x6")]


def test_a_tensor_inside_an_operator_of_the_other_model_is_not_ambiguous() -> None:
    def decomposed(net: Network) -> str:
        y = net.node("Conv", "x", net.weight(CHANNELS, CHANNELS, 1, 1))
        limited = net.node("Clip", net.node("Add", y, net.constant(3)), net.constant(0), net.constant(6))
        return net.node("Mul", y, net.node("Div", limited, net.constant(6)))

    def whole(net: Network) -> str:
        return net.node("HardSwish", net.node("Conv", "x", net.weight(CHANNELS, CHANNELS, 1, 1)))

    found = compared(_image(decomposed), _image(whole))
    assert found.is_same_network
    assert {unmatched.reason for unmatched in found.unmatched_a} == {Reason.ONE_SIDE}


@pytest.mark.parametrize("stride", [1, 2])
def test_a_different_layer_is_reported_with_its_sizes(stride: int) -> None:
    def part(strides: list[int], kernel: int) -> Callable[[Network], str]:
        def built(net: Network) -> str:
            y = net.node("Relu", net.node("Conv", "x", net.weight(CHANNELS, CHANNELS, 1, 1)))
            pads = [kernel // 2] * 4
            weight = net.weight(CHANNELS, CHANNELS // 2, kernel, kernel)
            return net.node("Conv", y, weight, strides=strides, pads=pads, group=2)

        return built

    found = compared(_image(part([1, 1], 3)), _image(part([stride, stride], 5)))
    words = "" if stride == 1 else " stride 2"
    assert found.operators_behind == (
        (("Conv 3x3 4 to 4 in 2 groups pads 1",), (f"Conv 5x5 4 to 4 in 2 groups{words} pads 2",)),
    )


def test_networks_do_not_diverge_at_an_added_loss() -> None:
    def part(net: Network) -> str:
        return net.node("Relu", net.node("Conv", "x", net.weight(CHANNELS, CHANNELS, 1, 1)))

    found = compared(_image(part), _image(part, has_end=True))
    assert not found.is_same_network
    assert found.operators_behind == (((), ("Tanh",)),)
    assert not found.last_from_outputs


def test_a_packed_projection_without_counterpart_is_read_in_parts() -> None:
    def packed(net: Network) -> str:
        both = net.node("MatMul", "x", net.weight(CHANNELS, 2 * CHANNELS))
        value, gate = (
            net.node("Slice", both, net.ints(start), net.ints(start + CHANNELS), net.ints(2)) for start in (0, CHANNELS)
        )
        return net.node("Mul", value, net.node("Sigmoid", gate))

    def sliced_weight(net: Network) -> str:
        weight = net.weight(CHANNELS, 2 * CHANNELS)
        value, gate = (
            net.node("MatMul", "x", net.node("Slice", weight, net.ints(start), net.ints(end), net.ints(1)))
            for start, end in ((0, CHANNELS), (CHANNELS, 2 * CHANNELS))
        )
        return net.node("Mul", value, net.node("Sigmoid", gate))

    found = compared(_tokens(packed), _tokens(sliced_weight))
    assert found.is_same_network
    assert not found.differences
    (whole,) = found.unmatched_a
    assert whole.detail.startswith("read in parts")


def _by_groups(groups: int, epsilon: float) -> onnx.ModelProto:
    """A convolution and a group normalisation of one sample."""

    def part(net: Network) -> str:
        y = net.node("Conv", "x", net.weight(CHANNELS, CHANNELS, 1, 1))
        parts = net.node("Reshape", y, net.ints(1, groups, -1))
        ends = net.ones(groups), net.weight(groups)
        whole = net.node("InstanceNormalization", parts, *ends, epsilon=epsilon)
        return net.node("Relu", net.node("Reshape", whole, net.ints(1, CHANNELS, EXTENT, EXTENT)))

    return _image(part, batch=1)


def test_normalisations_of_samples_are_distinguished_from_biases_and_from_each_other() -> None:
    def biased(net: Network) -> str:
        return net.node("Relu", net.node("Conv", "x", net.weight(CHANNELS, CHANNELS, 1, 1), net.weight(CHANNELS)))

    each = _by_groups(CHANNELS, 1e-5)
    for other in (_by_groups(2, 1e-5), _by_groups(1, 1e-5), _by_groups(CHANNELS, 0.1), _image(biased, batch=1)):
        assert not compared(each, other).is_same_network
    assert compared(each, _by_groups(CHANNELS, 1e-5)).is_same_network


def test_decomposed_normalisations_by_batch_statistics_are_reported() -> None:
    def decomposed(epsilon: float) -> onnx.ModelProto:
        def part(net: Network) -> str:
            y = net.node("Conv", "x", net.weight(CHANNELS, CHANNELS, 1, 1))
            centred = net.node("Sub", y, net.node("ReduceMean", y, net.ints(0, 2, 3)))
            variance = net.node("ReduceMean", net.node("Mul", centred, centred), net.ints(0, 2, 3))
            deviation = net.node("Sqrt", net.node("Add", variance, net.constant(epsilon)))
            scaled = net.node("Mul", net.node("Div", centred, deviation), net.weight(CHANNELS, 1, 1))
            return net.node("Relu", net.node("Add", scaled, net.weight(CHANNELS, 1, 1)))

        return _image(part)

    for other, expected in (
        (_normalized(1e-5), []),
        (_normalized(None), [(BATCH_NORMALISATIONS, "1", "0")]),
        (decomposed(0.125), [(f"epsilon of {BATCH_NORMALISATIONS}", "1e-05", "0.125")]),
    ):
        found = compared(decomposed(1e-5), other)
        assert found.is_same_network
        assert _differences(found) == expected
