import math
from collections.abc import Callable, Mapping

import pytest
from onnx import TensorProto

from tests.matching.networks import BATCH, CHANNELS, SEQUENCE, TOKENS, Expr, Part, apply, linear
from tests.matching.spelling_checks import assert_different, assert_equal_parts, compared, network_of

# activations


def _gelu(x: Expr) -> Expr:
    return x * ((x / math.sqrt(2)).Erf() + 1) * 0.5


def _gelu_of_complement(x: Expr) -> Expr:
    """x / 2 (1 - erf(-x / sqrt 2))."""
    return x * 0.5 * (1 - (x * math.sqrt(0.5)).Neg().Erf())


def _gelu_by_tanh(x: Expr) -> Expr:
    inner = (x + x.Pow(3) * 0.044715) * math.sqrt(2 / math.pi)
    return x * 0.5 * (inner.Tanh() + 1)


def _gelu_by_tanh_of_product(x: Expr) -> Expr:
    root = math.sqrt(2 / math.pi)
    tanh = (x * (x * x * (0.044715 * root) + root)).Tanh()
    return (1 + tanh) * 0.5 * x


def _swish(factor: float) -> Part:
    return lambda x: x * (x * factor).Sigmoid()


def _swish_by_tanh(x: Expr) -> Expr:
    half = x * 0.5
    return half + half * half.Tanh()


def _mish_as_quotient(x: Expr) -> Expr:
    """x (e (e + 2)) / (e (e + 2) + 2), with e = exp(x)."""
    e = x.Exp()
    n = e * (e + 2)
    return x * (n / (n + 2))


def _limited(*limits: tuple[float, float]) -> Part:
    def part(x: Expr) -> Expr:
        for low, high in limits:
            x = x.Clip(low, high)
        return x

    return part


def _times_eight(part: Part) -> Part:
    """Of numbers up to 8, which exceed the limits of relu6."""
    return lambda x: part(x * 8)


def _threshold(least: float) -> Part:
    return lambda x: (x + -0.5).ThresholdedRelu(alpha=least)


# normalisations


def _mean(x: Expr) -> Expr:
    return x.ReduceMean([-1])


def _layer_norm(axis: int, epsilon: float = 1e-5) -> Part:
    def part(x: Expr) -> Expr:
        size = SEQUENCE[axis:]
        return x.LayerNormalization(x.weight(*size), x.weight(*size), axis=axis, epsilon=epsilon)

    return part


def _layer_norm_by(scale: str) -> Part:
    return lambda x: x.LayerNormalization(apply(x.net, scale, x, [0, 1], keepdims=0), axis=-1)


def _layer_norm_decomposed(x: Expr) -> Expr:
    scale, bias = x.weight(CHANNELS), x.weight(CHANNELS)
    centred = x - _mean(x)
    deviation = (_mean(centred.Pow(2)) + 1e-5).Sqrt()
    return centred / deviation * scale + bias


def _layer_norm_by_squares(x: Expr) -> Expr:
    """The variance is the mean of squares less the squared mean. The scale multiplies the inverse."""
    scale, bias = x.weight(CHANNELS), x.weight(CHANNELS)
    mean = _mean(x)
    variance = (_mean(x * x) - mean * mean).Max(0)
    inverse = (variance + 1e-5).Sqrt().Reciprocal()
    return (x - mean) * (inverse * scale) + bias


def _layer_norm_as_affine(x: Expr) -> Expr:
    """x s + (b - mean(x) s)."""
    scale, bias = x.weight(CHANNELS), x.weight(CHANNELS)
    mean = _mean(x)
    centred = x - mean
    factor = (_mean(centred * centred) + 1e-5).Pow(-0.5) * scale
    return x * factor + (bias - mean * factor)


def _normalized_without_weights(x: Expr) -> Expr:
    """x s - mean(x) s with s = 1 / deviation(x)."""
    mean = _mean(x)
    centred = x - mean
    factor = (_mean(centred * centred) + 1e-5).Sqrt().Reciprocal()
    return x * factor + (mean * factor).Neg()


def _normalized_with_ones(x: Expr) -> Expr:
    scale, bias = (apply(x.net, "Expand", number, [CHANNELS]) for number in (1, 0))
    return x.LayerNormalization(scale, bias, axis=-1, epsilon=1e-5)


def _unit_length(x: Expr) -> Expr:
    return x.LpNormalization(axis=-1, p=2)


def _unit_length_clipped(least: float) -> Part:
    return lambda x: x * (x * x).ReduceSum([2], keepdims=1).Max(least).Sqrt().Reciprocal()


def _unit_length_expanded(x: Expr) -> Expr:
    length = x.ReduceL2([2]).Clip(1e-12)
    return linear(x) / length.Expand(SEQUENCE)


def _unit_length_broadcast(x: Expr) -> Expr:
    length = (x * x).ReduceSum([2]).Sqrt().Max(1e-12)
    return linear(x) / length


# softmax and shares


def _softmax(axis: int) -> Part:
    return lambda x: x.Softmax(axis=axis)


def _softmax_decomposed(factor: float = 1) -> Part:
    def part(x: Expr) -> Expr:
        top = (x - x.ReduceMax([-1])).Exp()
        return top * factor / top.ReduceSum([-1])

    return part


def _softmax_of_transposed(x: Expr) -> Expr:
    return x.Transpose(perm=[0, 2, 1]).Softmax(axis=1).Transpose(perm=[0, 2, 1])


def _softmax_by_its_logarithm(axis: int) -> Part:
    return lambda x: x.LogSoftmax(axis=axis).Exp()


def _softmax_without_maximum(x: Expr) -> Expr:
    e = x.Exp()
    inverse = e.ReduceSum([2], keepdims=0).Reciprocal()
    return e * inverse.Unsqueeze([2]).Expand([BATCH, TOKENS, CHANNELS])


def _softmax_guarded(x: Expr) -> Expr:
    y = x.Softmax()
    return y.IsNaN().Where(0, y)


def _shares(over: int) -> Part:
    def part(x: Expr) -> Expr:
        active = (x - 0.5).Relu()
        return active / (active.ReduceL1([over], keepdims=1) + 0.01)

    return part


def _shares_by_logarithms(x: Expr) -> Expr:
    active = (x + -0.5).Max(0)
    total = 0.01 + active.ReduceSum([2], keepdims=1)
    return (active.Log() - total.Log()).Exp()


# numbers that decide


def _between_layers(*parts: Part) -> Part:
    """The parts on arbitrary numbers; a function of one number ends there."""

    def part(x: Expr) -> Expr:
        x = x @ x.stored(CHANNELS, CHANNELS)
        for inner in parts:
            x = inner(x)
        return x @ x.stored(CHANNELS, CHANNELS, seed=1)

    return part


def _softplus_of(number: float) -> Part:
    return _between_layers(lambda x: (x.Exp() + number).Log())


def _tanh_of_exponential(number: float) -> Part:
    return _between_layers(lambda x: (x.Exp() - number).Tanh())


def _sign_of(least: float) -> Part:
    return _between_layers(lambda x: x / (x * x + least).Sqrt())


def _log_softmax_above(least: float) -> Part:
    return lambda x: linear(((x * 40).Softmax() + least).Log())


def _moved_where_negative(x: Expr) -> Expr:
    return x.Less(0).Where(x + 3, x)


def _with_expanded_number(op: str, number: float) -> Part:
    return lambda x: apply(x.net, op, x.ReduceMean([2]), apply(x.net, "Expand", number, SEQUENCE))


def _cast(*types: int) -> Part:
    def part(x: Expr) -> Expr:
        for kind in (*types, TensorProto.FLOAT):
            x = x.Cast(to=kind)
        return x

    return part


def _flags_cast(*types: int) -> Part:
    return lambda x: _cast(*types)(x.Greater(0.5))


def _tripled_cast(*types: int) -> Part:
    return lambda x: _cast(*types)(x * 3)


# misplaced reductions


def _of_scores(part: Callable[[Expr, Part], Expr], *, is_transposed: bool) -> Part:
    """A square matrix with reductions of its rows, aligned with the rows or, misplaced, with columns."""

    def whole(x: Expr) -> Expr:
        scores = x @ x.Transpose(perm=[0, 2, 1])

        def placed(reduced: Expr) -> Expr:
            return reduced.Transpose(perm=[0, 2, 1]) if is_transposed else reduced

        return part(scores, placed) @ x

    return whole


def _by_its_sum(x: Expr, placed: Part) -> Expr:
    e = (x - x.ReduceMax([2])).Exp()
    return e / placed(e.ReduceSum([2]))


def _by_its_deviation(x: Expr, placed: Part) -> Expr:
    centred = x - x.ReduceMean([2])
    variance = (centred * centred).ReduceMean([2])
    return centred / placed((variance + 1e-5).Sqrt())


_SAME: Mapping[str, tuple[Part, Part]] = {
    "gelu, by the complement": (_gelu, _gelu_of_complement),
    "gelu by tanh, of a product": (_gelu_by_tanh, _gelu_by_tanh_of_product),
    "hard swish": (lambda x: x.HardSwish(), lambda x: x * (x + 3).Clip(0, 6) / 6),
    "relu6": (lambda x: x.Clip(0, 6), lambda x: x.Relu().Min(6)),
    "swish, by its values": (_swish(1.0), _swish_by_tanh),
    "mish, by its values": (lambda x: x * x.Softplus().Tanh(), _mish_as_quotient),
    "exponential, as a power of two": (
        _between_layers(lambda x: x.Exp()),
        _between_layers(lambda x: apply(x.net, "Pow", 2, x * (1 / math.log(2)))),
    ),
    "layer normalisation, decomposed": (_layer_norm(2), _layer_norm_decomposed),
    "layer normalisation, by squares": (_layer_norm(2), _layer_norm_by_squares),
    "layer normalisation, as affine": (_layer_norm(2), _layer_norm_as_affine),
    "normalisation without weights": (_normalized_with_ones, _normalized_without_weights),
    "unit length, by its values": (_unit_length, _unit_length_clipped(1e-24)),
    "division by an expanded length": (_unit_length_expanded, _unit_length_broadcast),
    "softmax, decomposed": (_softmax(2), _softmax_decomposed()),
    "multiple of softmax": (lambda x: x.Softmax() * 3, _softmax_decomposed(3)),
    "softmax, transposed": (_softmax(2), _softmax_of_transposed),
    "softmax, without a maximum": (_softmax(2), _softmax_without_maximum),
    "softmax, guarded": (_softmax(2), _softmax_guarded),
    "logarithm of softmax": (lambda x: x.LogSoftmax(), lambda x: x - x.ReduceLogSumExp([2], keepdims=1)),
    "shares, by their values": (_shares(2), _shares_by_logarithms),
    "flags, cast there and back": (_flags_cast(), _flags_cast(TensorProto.INT64, TensorProto.BOOL)),
}
_DIFFERENT: Mapping[str, tuple[Part, Part]] = {
    "gelu and its approximation": (_gelu, _gelu_by_tanh),
    "swish of another factor": (_swish(1.0), _swish(1.702)),
    "relu and relu6": (_times_eight(lambda x: x.Relu()), _times_eight(lambda x: x.Clip(0, 6))),
    "limits in another order": (_limited((0, 1), (2, 3)), _limited((2, 3), (0, 1))),
    "thresholds close to each other": (_threshold(0.012), _threshold(0.02)),
    "another epsilon": (_layer_norm(2), _layer_norm(2, 1e-3)),
    "normalisation over more axes": (_layer_norm(2), _layer_norm(1)),
    "normalisation with computed scales": (_layer_norm_by("ReduceMean"), _layer_norm_by("ReduceMax")),
    "deviations, misplaced": (
        _of_scores(_by_its_deviation, is_transposed=False),
        _of_scores(_by_its_deviation, is_transposed=True),
    ),
    "unit length with a small minimum": (
        lambda x: _unit_length(linear(x)),
        lambda x: _unit_length_clipped(1e-6)(linear(x)),
    ),
    "softmax and its double": (_softmax(2), _softmax_decomposed(2)),
    "softmax over another axis, by its logarithm": (_softmax(1), _softmax_by_its_logarithm(2)),
    "sums of softmax, misplaced": (
        _of_scores(_by_its_sum, is_transposed=False),
        _of_scores(_by_its_sum, is_transposed=True),
    ),
    "shares over another axis": (_shares(1), _shares_by_logarithms),
    "logarithms of other sums": (_softplus_of(1), _softplus_of(3)),
    "tanh of exponentials": (_tanh_of_exponential(1), _tanh_of_exponential(0)),
    "small numbers below a root": (_sign_of(1e-8), _sign_of(1e-4)),
    "an equal function inside a different one": (_log_softmax_above(1e-7), _log_softmax_above(3e-7)),
    "negative numbers moved": (
        _between_layers(lambda x: x.Tanh()),
        _between_layers(_moved_where_negative, lambda x: x.Tanh()),
    ),
    "other expanded numbers": (_with_expanded_number("Add", 1), _with_expanded_number("Add", 2)),
    "an expanded number, added or subtracted": (_with_expanded_number("Add", 1), _with_expanded_number("Sub", 1)),
    "flags of whole numbers": (_tripled_cast(TensorProto.INT64), _tripled_cast(TensorProto.INT64, TensorProto.BOOL)),
}


@pytest.mark.parametrize("parts", _SAME.values(), ids=_SAME)
def test_spellings_of_one_function_are_the_same_network(parts: tuple[Part, Part]):
    assert_equal_parts(*parts)


@pytest.mark.parametrize("parts", _DIFFERENT.values(), ids=_DIFFERENT)
def test_similar_functions_are_different_networks(parts: tuple[Part, Part]):
    assert_different(*map(network_of, parts))


def test_long_chains_of_activations_are_compared():
    def gated(op: str) -> Part:
        def part(x: Expr) -> Expr:
            for _ in range(30):
                x = x * x.Sigmoid()
            return apply(x.net, op, x)

        return part

    assert not compared(network_of(gated("Softplus")), network_of(gated("Softsign"))).is_same_network
