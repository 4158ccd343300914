"""Differences between models of one network, and positions at which networks diverge."""

import numpy as np
import onnx
import pytest

from onnxgc.matching.divergence import BATCH_NORMALISATIONS, SHARED_WEIGHTS
from onnxgc.matching.match import Matching, Reason
from tests.matching.networks import CHANNELS, IMAGE, SEQUENCE, Expr, Part, batch_norm, conv, ended, start
from tests.matching.spelling_checks import compared


def _tokens(part: Part) -> onnx.ModelProto:
    return ended(part(start()), SEQUENCE)


def _image(part: Part, batch: int = 2) -> onnx.ModelProto:
    return ended(part(start()), (batch, *IMAGE[1:]))


def _differences(found: Matching) -> list[tuple[str, str, str]]:
    return [(other.what, other.a, other.b) for other in found.differences]


def _two_uses(is_shared: bool, is_transposed: bool = False) -> onnx.ModelProto:
    """Two products, which may share a weight; the second may read it transposed twice."""

    def part(x: Expr) -> Expr:
        first = x.weight(CHANNELS, CHANNELS)
        y = (x @ first).Relu()
        second = first if is_shared else x.weight(CHANNELS, CHANNELS)
        return (y @ (second.Transpose().Transpose() if is_transposed else second)).Tanh()

    return _tokens(part)


def test_shared_weights_are_reported():
    """A layer that is applied twice trains differently from two layers; the function is the same."""
    found = compared(_two_uses(is_shared=True), _two_uses(is_shared=False))
    assert found.is_same_network
    assert _differences(found) == [(SHARED_WEIGHTS, "2", "3")]
    assert not _differences(compared(_two_uses(is_shared=True), _two_uses(is_shared=True, is_transposed=True)))


def test_one_layer_in_place_of_two_is_reported():
    def part(x: Expr, is_shared: bool) -> Expr:
        ones = x @ x.weight(CHANNELS, CHANNELS)
        others = ones if is_shared else x @ x.weight(CHANNELS, CHANNELS)
        return ones.Relu() @ x.weight(CHANNELS, CHANNELS) + others.Tanh() @ x.weight(CHANNELS, CHANNELS)

    found = compared(*(_tokens(lambda x, shared=shared: part(x, shared)) for shared in (True, False)))  # type: ignore[misc]
    assert found.is_same_network
    assert _differences(found) == [(SHARED_WEIGHTS, "4", "5")]


def _normalized(epsilon: float | None) -> onnx.ModelProto:
    y = conv(start(), has_bias=True)
    return ended((y if epsilon is None else batch_norm(y, epsilon=epsilon)).Relu())


def _decomposed(epsilon: float) -> onnx.ModelProto:
    y = conv(start())
    centred = y - y.ReduceMean([0, 2, 3])
    deviation = ((centred * centred).ReduceMean([0, 2, 3]) + epsilon).Sqrt()
    return ended((centred / deviation * y.weight(CHANNELS, 1, 1) + y.weight(CHANNELS, 1, 1)).Relu())


def test_normalisations_by_batch_statistics_are_reported():
    first, folded, other = (_normalized(epsilon) for epsilon in (1e-5, None, 1e-3))
    found = compared(first, folded)
    assert found.is_same_network
    assert not found.has_same_biases
    assert _differences(found) == [(BATCH_NORMALISATIONS, "1", "0")]
    assert _differences(compared(first, other)) == [(f"epsilon of {BATCH_NORMALISATIONS}", "1e-05", "0.001")]
    frozen = compared(first, folded, freeze_bn=True)
    assert not frozen.differences
    assert frozen.has_same_biases


@pytest.mark.parametrize(
    "other, expected",
    [
        (_normalized(1e-5), []),
        (_normalized(None), [(BATCH_NORMALISATIONS, "1", "0")]),
        (_decomposed(0.125), [(f"epsilon of {BATCH_NORMALISATIONS}", "1e-05", "0.125")]),
    ],
    ids=["whole", "folded", "another epsilon"],
)
def test_decomposed_normalisations_are_reported(other: onnx.ModelProto, expected: list[tuple[str, str, str]]):
    found = compared(_decomposed(1e-5), other)
    assert found.is_same_network
    assert _differences(found) == expected


def test_inputs_of_different_sizes_are_reported():
    found = compared(*(ended(conv(start()), (2, CHANNELS, extent, extent)) for extent in (4, 6)))
    assert not found.is_same_network
    assert _differences(found) == [("inputs", "'x' 2x4x4x4", "'x' 2x4x6x6")]


def test_a_tensor_inside_an_operator_of_the_other_model_is_not_ambiguous():
    def decomposed(x: Expr) -> Expr:
        y = conv(x)
        return y * ((y + 3).Clip(0, 6) / 6)

    found = compared(_image(decomposed), _image(lambda x: conv(x).HardSwish()))
    assert found.is_same_network
    assert {unmatched.reason for unmatched in found.unmatched_a} == {Reason.ONE_SIDE}


@pytest.mark.parametrize("stride", [1, 2])
def test_a_different_layer_is_reported_with_its_sizes(stride: int):
    def part(stride: int, kernel: int) -> onnx.ModelProto:
        y = conv(start()).Relu()
        weight = y.weight(CHANNELS, CHANNELS // 2, kernel, kernel)
        return ended(y.Conv(weight, strides=[stride] * 2, pads=[kernel // 2] * 4, group=2))

    found = compared(part(1, 3), part(stride, 5))
    words = "" if stride == 1 else " stride 2"
    assert found.operators_behind == (
        (("Conv 3x3 4 to 4 in 2 groups pads 1",), (f"Conv 5x5 4 to 4 in 2 groups{words} pads 2",)),
    )


def test_networks_do_not_diverge_at_an_added_loss():
    pooled = [conv(start()).Relu().ReduceMean([2, 3], keepdims=0) for _ in range(2)]
    first, second = (x @ x.weight(CHANNELS, 3) for x in pooled)
    found = compared(*(x.net.model(x.name, IMAGE, (2, 3)) for x in (first, second.Tanh())))
    assert not found.is_same_network
    assert found.operators_behind == (((), ("Tanh",)),)
    assert not found.last_from_outputs


def test_a_packed_projection_without_counterpart_is_read_in_parts():
    def gated(value: Expr, gate: Expr) -> Expr:
        return value * gate.Sigmoid()

    def packed(x: Expr) -> Expr:
        both = x @ x.weight(CHANNELS, 2 * CHANNELS)
        return gated(*(both.Slice([first], [first + CHANNELS], [2]) for first in (0, CHANNELS)))

    def sliced_weight(x: Expr) -> Expr:
        weight = x.weight(CHANNELS, 2 * CHANNELS)
        return gated(*(x @ weight.Slice([first], [first + CHANNELS], [1]) for first in (0, CHANNELS)))

    found = compared(_tokens(packed), _tokens(sliced_weight))
    assert found.is_same_network
    assert not found.differences
    (whole,) = found.unmatched_a
    assert whole.detail.startswith("read in parts")


def _by_groups(groups: int, epsilon: float) -> onnx.ModelProto:
    def part(x: Expr) -> Expr:
        parts = conv(x).Reshape([1, groups, -1])
        whole = parts.InstanceNormalization(x.parameter(np.ones(groups)), x.weight(groups), epsilon=epsilon)
        return whole.Reshape([1, *IMAGE[1:]]).Relu()

    return _image(part, batch=1)


def test_normalisations_of_samples_are_distinguished_from_biases_and_from_each_other():
    biased = _image(lambda x: conv(x, has_bias=True).Relu(), batch=1)
    each = _by_groups(CHANNELS, 1e-5)
    for other in (_by_groups(2, 1e-5), _by_groups(1, 1e-5), _by_groups(CHANNELS, 0.1), biased):
        assert not compared(each, other).is_same_network
    assert compared(each, _by_groups(CHANNELS, 1e-5)).is_same_network
