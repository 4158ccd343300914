from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from onnxgc.matching.match import match
from onnxgc.matching.normal_form.terms import leaves
from onnxgc.matching.operators.registry import structure_of
from onnxgc.model.read import read_model
from tests.matching.networks import BATCH, CHANNELS, EXTENT, IMAGE, SEQUENCE, TOKENS, Expr, Part, apply, linear, start
from tests.matching.spelling_checks import assert_different, assert_equal_parts, assert_same, compared, network_of

# pads and pools


def _pooled(op: str, pads: int = 0) -> Part:
    return lambda x: apply(x.net, op, x, kernel_shape=[3], pads=[pads, pads])


def _padded_before(op: str, number: float) -> Part:
    return lambda x: apply(x.net, op, x.Pad([0, 0, 1, 0, 0, 1], number), kernel_shape=[3])


def _after(before: str, part: Part) -> Part:
    return lambda x: part(apply(x.net, before, x - 0.5))


def _along_tokens(part: Part) -> Part:
    return lambda x: part(x.Transpose(perm=[0, 2, 1])).Transpose(perm=[0, 2, 1])


def _rounded(*, is_up: bool) -> Part:
    settings = {"pads": [1, 0], "count_include_pad": 1, "ceil_mode": int(is_up)}
    return _along_tokens(lambda x: x.AveragePool(kernel_shape=[3], strides=[2], **settings))


def _transposed_conv(*, pad: int, crop: int) -> Part:
    def part(x: Expr) -> Expr:
        padded = x.Pad([0, 0, pad, 0, 0, pad])
        return padded.ConvTranspose(x.weight(CHANNELS, CHANNELS, 3), pads=[crop, crop])

    return _along_tokens(part)


def _conv_plus(bias: str) -> Part:
    return lambda x: x.Conv(x.weight(TOKENS, TOKENS, 1), apply(x.net, bias, x, [0, 2], keepdims=0))


def _pool_of_one(op: str) -> Part:
    return lambda x: apply(x.net, op, x, kernel_shape=[1])


# sums and numbers


def _three(add: Callable[[Expr, Expr, Expr], Expr]) -> Part:
    return lambda x: add(x.Cos(), x.Tanh(), x.Relu())


def _with_positions(*, is_first: bool) -> Part:
    """The sum of two values, positions, and a bias."""

    def part(x: Expr) -> Expr:
        one, other = x.Cos(), x.Tanh()
        positions, bias = x.weight(TOKENS, CHANNELS), x.weight(CHANNELS)
        total = (one + positions) + (other + bias) if is_first else (positions + bias) + (one + other)
        return total.LayerNormalization(x.weight(CHANNELS), axis=-1)

    return part


def _with_weight(factor: float, *shape: int) -> Part:
    return lambda x: x * factor + x.weight(*shape)


def _before_relu(part: Part) -> Part:
    return lambda x: part(x).Relu()


# selections


def _entries_of(indices: Part) -> Part:
    """The entries of a table of 8 at the sums of channels."""

    def part(x: Expr) -> Expr:
        sums = x.ReduceSum([2], keepdims=0)
        chosen = indices(sums.Cast(to=TensorProto.INT64))
        return x.weight(8, CHANNELS).Gather(chosen)

    return part


def _from_the_end(count: int) -> Part:
    return lambda x: x.Less([0]).Where(x.Add([count]), x)


def _resized(factor: float = 0.0, tokens: int = 0, **attributes: int) -> Part:
    if tokens:
        return lambda x: x.Resize("", "", [BATCH, tokens, CHANNELS], mode="linear", **attributes)
    return lambda x: x.Resize("", np.asarray([1, factor, 1], np.float32), mode="linear", **attributes)


def _after_tokens_of(number: float) -> Part:
    def part(x: Expr) -> Expr:
        tokens = apply(x.net, "Expand", number, [BATCH, 1, CHANNELS])
        return tokens.Concat(x, axis=1).Softmax(axis=1)

    return part


_SAME: Mapping[str, tuple[Part, Part]] = {
    "zeros before a maximum of nonnegative numbers": (
        _after("Relu", _pooled("MaxPool", 1)),
        _after("Relu", _padded_before("MaxPool", 0)),
    ),
    "lowest numbers before a maximum": (
        _after("Tanh", _pooled("MaxPool", 1)),
        _after("Tanh", _padded_before("MaxPool", float(np.finfo(np.float32).min))),
    ),
    "pools of single elements": (_pool_of_one("MaxPool"), _pool_of_one("AveragePool")),
    "sum of three": (_three(lambda a, b, c: a + b + c), _three(lambda a, b, c: a - (b.Neg() - c))),
    "sum with positions": (_with_positions(is_first=True), _with_positions(is_first=False)),
    "resize by a factor and by sizes": (_resized(1.6), _resized(tokens=8)),
}
_DIFFERENT: Mapping[str, tuple[Part, Part]] = {
    "lowest numbers before a mean": (_padded_before("AveragePool", 0), _padded_before("AveragePool", -1e31)),
    "pools rounded up": (_rounded(is_up=False), _rounded(is_up=True)),
    "pads before and after a transposed convolution": (
        _transposed_conv(pad=1, crop=0),
        _transposed_conv(pad=0, crop=1),
    ),
    "computed biases of a convolution": (_conv_plus("ReduceMean"), _conv_plus("ReduceMax")),
    "differences in another order": (_three(lambda a, b, c: a - b - c), _three(lambda a, b, c: a - (b - c))),
    "scale before positions": (_with_weight(1, TOKENS, CHANNELS), _with_weight(2, TOKENS, CHANNELS)),
    "negation before a bias": (_before_relu(_with_weight(1, CHANNELS)), _before_relu(_with_weight(-1, CHANNELS))),
    "entries from the end of fewer": (_entries_of(_from_the_end(8)), _entries_of(_from_the_end(5))),
    "resize with antialiasing": (_resized(0.6), _resized(0.6, antialias=1)),
    "resize by another factor": (_resized(1.9), _resized(tokens=9)),
    "other numbers in front": (_after_tokens_of(0), _after_tokens_of(1)),
}


@pytest.mark.parametrize("parts", _SAME.values(), ids=_SAME)
def test_spellings_of_one_computation_are_the_same_network(parts: tuple[Part, Part]):
    assert_equal_parts(*parts)


@pytest.mark.parametrize("parts", _DIFFERENT.values(), ids=_DIFFERENT)
def test_similar_computations_are_different_networks(parts: tuple[Part, Part]):
    assert_different(*map(network_of, parts))


def test_the_operand_subtracted_is_identified_by_its_axis():
    def differences_of_pairs(over: int) -> Part:
        def part(x: Expr) -> Expr:
            h = linear(x)
            return (h.Unsqueeze([1]) - h.Unsqueeze([2])).Relu().ReduceMean([over], keepdims=0)

        return part

    first, second = (network_of(differences_of_pairs(over)) for over in (1, 2))
    assert not compared(first, second).is_same_network


def test_a_long_sum_has_a_linear_number_of_references():
    count = 200

    def summed(*, is_reversed: bool) -> Part:
        def part(x: Expr) -> Expr:
            terms = [(x * (i / 8)).Sin() for i in range(1, count)]
            for term in terms[::-1] if is_reversed else terms:
                x = x + term
            return x

        return part

    first, second = (read_model(network_of(summed(is_reversed=is_reversed))) for is_reversed in (False, True))
    assert match(first, second).is_same_network
    entities = structure_of(first).entities
    assert sum(1 for entity in entities for _ in leaves(entity.term)) < 20 * count


@pytest.mark.parametrize("factor, weights", [(1, 1), (2, 0)])
def test_a_concatenation_has_the_weights_of_the_parts_that_it_absorbs(factor: float, weights: int):
    x = start()
    inner = x.Concat(x.weight(BATCH, 1, CHANNELS), axis=1)
    outer = (inner * factor).Concat(x, axis=1)
    head = outer.ReduceMean([1], keepdims=0)
    structure = structure_of(read_model(x.net.model(head.name, SEQUENCE, (BATCH, CHANNELS))))
    assert len(structure.entities[structure.views[outer.name].value].weights) == weights


def test_a_factor_after_a_layer_is_absorbed_by_its_weights():
    def with_factor(x: Expr) -> Expr:
        return x @ x.weight(CHANNELS, CHANNELS) * 2 + x.weight(CHANNELS)

    assert compared(network_of(linear), network_of(with_factor)).is_same_network


# convolutions


def _conv(x: Expr, pads: tuple[int, ...] = (0, 0, 1, 1)) -> Expr:
    weight, bias = x.weight(CHANNELS, CHANNELS, 3, 3), x.weight(CHANNELS)
    return x.Conv(weight, bias, pads=pads, strides=[2, 2])


def _image(part: Part) -> Any:
    return network_of(part, IMAGE)


def test_a_convolution_absorbs_pads_and_biases():
    def padded_before(x: Expr) -> Expr:
        weight, bias = x.weight(CHANNELS, CHANNELS, 3, 3), x.weight(CHANNELS)
        y = x.Pad([0, 0, 0, 0, 0, 0, 1, 1]).Conv(weight, strides=[2, 2])
        return y + bias.Reshape([CHANNELS, 1, 1])

    assert_same(_image(_conv), _image(padded_before))
    assert not compared(_image(_conv), _image(lambda x: _conv(x, (1, 1, 0, 0)))).is_same_network


def test_channels_last_is_the_same_network():
    def between_transposes(x: Expr) -> Expr:
        return _conv(x.Transpose(perm=[0, 3, 1, 2])).Transpose(perm=[0, 2, 3, 1])

    channels_last = network_of(between_transposes, IMAGE, is_channels_last=True)
    assert not assert_same(_image(_conv), channels_last).unmatched_a


def test_a_convolution_of_separate_windows_is_a_matrix_times_each():
    kernel = 2
    count, inside = EXTENT // kernel, CHANNELS * kernel * kernel

    def convolution(x: Expr) -> Expr:
        return x.Conv(x.stored(CHANNELS, CHANNELS, kernel, kernel), strides=[kernel, kernel])

    def matrix(x: Expr) -> Expr:
        split = x.Reshape([BATCH, CHANNELS, count, kernel, count, kernel])
        rows = split.Transpose(perm=[0, 2, 4, 1, 3, 5]).Reshape([BATCH * count * count, inside])
        product = rows.Gemm(x.stored(CHANNELS, inside), transB=1)
        return product.Reshape([BATCH, count, count, CHANNELS]).Transpose(perm=[0, 3, 1, 2])

    assert_same(_image(convolution), _image(matrix))


def test_channels_of_groups_are_not_channels_of_dense_layers():
    def halves(first: Expr, second: Expr) -> Expr:
        return first.Relu().Concat(second.Tanh(), axis=1)

    def grouped(x: Expr) -> Expr:
        y = x.Conv(x.weight(CHANNELS, CHANNELS // 2, 3, 3), group=2, pads=[1] * 4)
        return halves(y.Gather([0, 1], axis=1), y.Gather([2, 3], axis=1))

    def separate(x: Expr) -> Expr:
        weights = [x.weight(CHANNELS // 2, CHANNELS // 2, 3, 3) for _ in range(2)]
        return halves(*(x.Conv(weight, group=2, pads=[1] * 4) for weight in weights))

    assert not compared(_image(grouped), _image(separate)).is_same_network


def _shuffled(x: Expr) -> Expr:
    parts = x.Reshape([BATCH, 2, CHANNELS // 2, EXTENT, EXTENT])
    return parts.Transpose(perm=[0, 2, 1, 3, 4]).Reshape(IMAGE)


@pytest.mark.parametrize("groups", [2, CHANNELS])
def test_shuffled_channels_are_different_channels(groups: int):
    def grouped(x: Expr, is_shuffled: bool) -> Expr:
        weight = x.weight(CHANNELS, CHANNELS // groups, 3, 3)
        return (_shuffled(x) if is_shuffled else x).Conv(weight, group=groups, pads=[1] * 4) + x

    shuffled, plain = (_image(lambda x, how=how: grouped(x, how)) for how in (True, False))  # type: ignore[misc]
    assert not compared(shuffled, plain).is_same_network


def test_pads_of_a_transposed_convolution_crop_its_result():
    def transposed(**pads: Any) -> Part:
        return lambda x: x.ConvTranspose(x.weight(CHANNELS, CHANNELS, 3, 3), strides=[2, 2], **pads)

    automatic = _image(transposed(auto_pad="SAME_UPPER"))
    assert_same(automatic, _image(transposed(pads=[0, 0, 1, 1])))
    assert not compared(automatic, _image(transposed(auto_pad="SAME_LOWER"))).is_same_network
