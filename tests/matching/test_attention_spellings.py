import math
from collections.abc import Mapping

import numpy as np
import pytest

from tests.matching.networks import BATCH, CHANNELS, SEQUENCE, TOKENS, Expr, Part, apply, attended, linear
from tests.matching.spelling_checks import assert_different, assert_equal_parts, network_of

_HEAD = CHANNELS // 2


def _transposed(x: Expr) -> Expr:
    return x.Transpose(perm=[0, 2, 1])


def _projections_of(x: Expr) -> tuple[Expr, Expr, Expr]:
    query, key, value = (x @ x.weight(CHANNELS, CHANNELS) for _ in range(3))
    return query, key, value


# scores


def _attention(x: Expr) -> Expr:
    query, key, value = _projections_of(x)
    return attended(query * 0.5, key, value)


def _attention_transposed(x: Expr) -> Expr:
    """Keys times queries, and the scale afterwards."""
    query, key, value = _projections_of(x)
    weights = (key @ _transposed(query) * 0.5).Softmax(axis=1)
    return _transposed(weights) @ value


def _attention_over_queries(x: Expr) -> Expr:
    query, key, value = _projections_of(x)
    return (query @ _transposed(key) * 0.5).Softmax(axis=1) @ value


def _guarded_attention(*, is_transposed: bool) -> Part:
    def part(x: Expr) -> Expr:
        weights = (x @ _transposed(x)).Softmax()
        guard = weights.IsNaN()
        return (_transposed(guard) if is_transposed else guard).Where(0, weights) @ x

    return part


def _with_transposed_scores(axis: int) -> Part:
    def part(x: Expr) -> Expr:
        scores = x @ _transposed(linear(x))
        return (scores + _transposed(scores.Tanh())).Softmax(axis=axis) @ x

    return part


def _by_flags_of_pairs(*, is_reversed: bool) -> Part:
    def part(x: Expr) -> Expr:
        scores = x @ _transposed(linear(x))
        flags = x.ReduceMax([2], keepdims=0)
        rows, columns = flags.Unsqueeze([2]), flags.Unsqueeze([1])
        return (scores.Softmax() * (columns * rows if is_reversed else rows * columns)) @ x

    return part


# packed projections


def _projections(x: Expr) -> Expr:
    weights = np.random.default_rng(0).standard_normal((CHANNELS, 3, CHANNELS))
    biases = np.random.default_rng(1).standard_normal((3, CHANNELS))
    parts = (x @ x.parameter(weights[:, index]) + x.parameter(biases[index]) for index in range(3))
    return attended(*parts)


def _packed(x: Expr) -> Expr:
    return x @ x.stored(CHANNELS, 3 * CHANNELS) + x.stored(3 * CHANNELS, seed=1)


def _sliced(packed: Expr, *starts: int) -> Expr:
    return attended(*(packed.Slice([start], [start + CHANNELS], [2]) for start in starts))


def _projections_sliced(*starts: int) -> Part:
    return lambda x: _sliced(_packed(x), *starts)


def _projections_gathered(*starts: int) -> Part:
    def part(x: Expr) -> Expr:
        packed = _packed(x)
        return attended(*(packed.Gather(range(start, start + CHANNELS), axis=2) for start in starts))

    return part


def _projections_indexed(x: Expr) -> Expr:
    rows = _packed(x).Reshape([BATCH, TOKENS, 3, CHANNELS]).Transpose(perm=[2, 0, 1, 3])
    return attended(*(rows.Gather([index], axis=0).Squeeze([0]) for index in range(3)))


def _projections_split_twice(second: int) -> Part:
    """Queries, and keys with values, which are split after a bias is added."""

    def part(x: Expr) -> Expr:
        product = x @ x.stored(CHANNELS, 3 * CHANNELS)
        biases = np.random.default_rng(1).standard_normal(3 * CHANNELS)
        query, rest = (
            product.Slice([start], [start + size], [2]) + x.parameter(biases[start : start + size])
            for start, size in ((0, CHANNELS), (second, 2 * CHANNELS))
        )
        ranges = (range(CHANNELS), range(CHANNELS, 2 * CHANNELS))
        return attended(query, *(rest.Gather(chosen, axis=2) for chosen in ranges))

    return part


def _projections_and_all(*, is_packed: bool) -> Part:
    """The packed product is also read as a whole; or another product of its size is."""

    def part(x: Expr) -> Expr:
        if is_packed:
            every = _packed(x)
            mixed = _sliced(every, 0, CHANNELS, 2 * CHANNELS)
        else:
            mixed, every = _projections(x), _packed(x)
        return mixed + every.Relu().ReduceMean([2])

    return part


def _two_uses(*transposed: int) -> Part:
    """Two products with one matrix, which each may read transposed."""

    def part(x: Expr) -> Expr:
        rows, weight = x.Reshape([-1, CHANNELS]), x.stored(CHANNELS, CHANNELS)
        first, second = (rows.Gemm(weight, transB=transB) for transB in transposed)
        return (first.Relu() + second.Tanh()).Reshape(SEQUENCE)

    return part


# -- Einstein sums ---------------------------------------------------------------------------------


def _attention_of_heads(x: Expr) -> Expr:
    def heads(seed: int, order: list[int]) -> Expr:
        product = x @ x.stored(CHANNELS, CHANNELS, seed=seed)
        return product.Reshape([BATCH, TOKENS, 2, _HEAD]).Transpose(perm=order)

    scores = heads(0, [0, 2, 1, 3]) @ heads(1, [0, 2, 3, 1])
    mixed = scores.Softmax() @ heads(2, [0, 2, 1, 3])
    rows = mixed.Transpose(perm=[0, 2, 1, 3]).Reshape(SEQUENCE)
    return rows @ x.stored(CHANNELS, CHANNELS, seed=3)


def _attention_by_einsum(mixing: str = "bhqk,bkhd->bqhd") -> Part:
    def part(x: Expr) -> Expr:
        query, key, value = (
            x.Einsum(x.stored(CHANNELS, 2, _HEAD, seed=seed), equation="btc,chd->bthd") for seed in range(3)
        )
        scores = key.Einsum(query, equation="bkhd,bqhd->bhqk").Softmax()
        mixed = scores.Einsum(value, equation=mixing)
        return mixed.Einsum(x.stored(2, _HEAD, CHANNELS, seed=3), equation="...hd, hdc")

    return part


def _scores_of(equation: str) -> Part:
    """Attention whose scores are sums over features in two dimensions."""

    def part(x: Expr) -> Expr:
        query, key, value = (x @ x.stored(CHANNELS, CHANNELS, seed=seed) for seed in range(3))
        shape = [BATCH, TOKENS, 2, _HEAD]
        return query.Reshape(shape).Einsum(key.Reshape(shape), equation=equation).Softmax() @ value

    return part


def _by_sum(x: Expr) -> Expr:
    return (x * x.ReduceSum([2]) * x.stored(CHANNELS)).Softmax(axis=1)


def _by_sum_of_einsum(x: Expr) -> Expr:
    total = x.Einsum(equation="btc->tb")
    scaled = total.Einsum(x, equation="tb,btc->btc")
    weighted = x.stored(CHANNELS).Einsum(scaled, equation="c,btc->cbt")
    return weighted.Softmax(axis=2).Einsum(equation="cbt->btc")


# masks


_CAUSAL = np.tril(np.ones((TOKENS, TOKENS), bool))


def _masked(mask: Part) -> Part:
    def part(x: Expr) -> Expr:
        query, key, value = _projections_of(x)
        return mask(query @ _transposed(key) * 0.5).Softmax() @ value

    return part


def _added(seen: np.ndarray) -> Part:
    return lambda scores: scores + np.where(seen, 0, -1e9).astype(np.float32)


def _where_seen(scores: Expr) -> Expr:
    return apply(scores.net, "Where", _CAUSAL, scores, float(np.finfo(np.float32).min))


def _where_hidden(scores: Expr) -> Expr:
    return apply(scores.net, "Where", ~_CAUSAL, -math.inf, scores)


def _learned(scores: Expr) -> Expr:
    return scores + scores.weight(TOKENS, TOKENS)


def _flagged(*flags: float) -> Part:
    return lambda x: linear(x * np.asarray(flags, np.float32)[:, np.newaxis])


_SAME: Mapping[str, tuple[Part, Part]] = {
    "attention, transposed": (_attention, _attention_transposed),
    "flags of pairs, in either order": (_by_flags_of_pairs(is_reversed=False), _by_flags_of_pairs(is_reversed=True)),
    "projections, packed and sliced": (_projections, _projections_sliced(0, CHANNELS, 2 * CHANNELS)),
    "projections, packed and indexed": (_projections_sliced(0, CHANNELS, 2 * CHANNELS), _projections_indexed),
    "projections, split twice": (_projections_indexed, _projections_split_twice(CHANNELS)),
    "overlapping projections": (_projections_sliced(0, 2, 8), _projections_gathered(0, 2, 8)),
    "attention by einsum": (_attention_of_heads, _attention_by_einsum()),
    "sum by einsum": (_by_sum, _by_sum_of_einsum),
    "mask for each sample": (_masked(_added(_CAUSAL)), _masked(_added(np.stack([_CAUSAL] * BATCH)))),
    "mask by choice": (_masked(_added(_CAUSAL)), _masked(_where_seen)),
    "mask by filling": (_masked(_added(_CAUSAL)), _masked(_where_hidden)),
}
_DIFFERENT: Mapping[str, tuple[Part, Part]] = {
    "softmax over queries": (_attention, _attention_over_queries),
    "a transposed guard": (_guarded_attention(is_transposed=False), _guarded_attention(is_transposed=True)),
    "scores plus their transpose, over rows and columns": (_with_transposed_scores(1), _with_transposed_scores(2)),
    "projections with different overlaps": (_projections_sliced(0, 2, 8), _projections_sliced(0, 1, 8)),
    "overlapping projections, split twice": (_projections, _projections_split_twice(2)),
    "projections also read as a whole": (_projections_and_all(is_packed=True), _projections_and_all(is_packed=False)),
    "values of queries, by einsum": (_attention_of_heads, _attention_by_einsum("bhqk,bqhd->bkhd")),
    "features paired with others": (_scores_of("bqhd,bkhd->bqk"), _scores_of("bqhd,bkdh->bqk")),
    "a matrix transposed in its second use": (_two_uses(0, 0), _two_uses(0, 1)),
    "mask of the past and of the future": (_masked(_added(_CAUSAL)), _masked(_added(_CAUSAL.T))),
    "mask and learned biases": (_masked(_added(_CAUSAL)), _masked(_learned)),
    "other masked tokens": (_flagged(1, 0, 1, 0, 1), _flagged(0, 1, 0, 1, 0)),
    "other factors of tokens": (_flagged(1, 2, 3, 4, 5), _flagged(5, 4, 3, 2, 1)),
}


@pytest.mark.parametrize("parts", _SAME.values(), ids=_SAME)
def test_spellings_of_attention_are_the_same_network(parts: tuple[Part, Part]):
    assert_equal_parts(*parts)


@pytest.mark.parametrize("parts", _DIFFERENT.values(), ids=_DIFFERENT)
def test_similar_attention_is_a_different_network(parts: tuple[Part, Part]):
    assert_different(*map(network_of, parts))
