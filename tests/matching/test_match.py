import time
from collections.abc import Sequence

import onnx
import pytest

from onnxgc.errors import ShapeError
from onnxgc.matching.match import Extra, Matching, Reason, match
from onnxgc.model.read import read_model
from tests.matching.networks import (
    BATCH,
    CHANNELS,
    EXTENT,
    IMAGE,
    SEQUENCE,
    Expr,
    Part,
    apply,
    attended,
    batch_norm,
    conv,
    ended,
    network,
    start,
)
from tests.matching.spelling_checks import compared
from tests.model.model_helpers import model_of


def _details(found: Matching) -> dict[str, tuple[Reason, str]]:
    return {item.tensor: (item.reason, item.detail) for item in (*found.unmatched_a, *found.unmatched_b)}


def _reasons(found: Matching) -> set[Reason]:
    return {item.reason for item in found.unmatched_a}


def test_equal_branches_are_ambiguous_and_their_sum_is_not():
    model, ends = network(["twins"])
    found = compared(model, model)
    assert found.is_same_network
    assert _reasons(found) == {Reason.AMBIGUOUS}
    assert len(found.unmatched_a) == 4
    assert found.of_a[ends[0][1]] == ends[0][1]


@pytest.mark.parametrize("blocks", [["ordered twins"], ["attention"], ["shuffled channels", "concatenated"]])
def test_order_and_later_use_distinguish_branches(blocks: list[str]):
    model, _ = network(blocks)
    found = compared(model, model)
    assert found.unmatched_a == ()
    assert all(pair.a == pair.b for pair in found.pairs)


def test_the_tensor_before_a_normalisation_has_no_counterpart_where_that_is_folded():
    y, z = conv(start(), has_bias=True), conv(start())
    normal = batch_norm(z)
    found = compared(ended(y.Relu()), ended(normal.Relu()), freeze_bn=True)
    assert found.is_same_network
    assert found.of_b[normal.name] == y.name
    assert _details(found) == {z.name: (Reason.ONE_SIDE, "inside a layer: a bias or a normalisation follows")}
    size = 4 * BATCH * CHANNELS * EXTENT * EXTENT
    assert found.extras == (Extra("inside layers", 0, 1, 0, size),)


def test_a_bias_in_one_model_only_is_reported():
    y, z = conv(start()), conv(start(), has_bias=True)
    found = compared(ended(y.Relu()), ended(z.Relu()))
    assert found.is_same_network
    assert not found.has_same_biases
    assert found.of_a[y.name] == z.name
    elu = compared(ended(y.Elu()), ended(z.Relu()))
    assert not elu.is_same_network
    assert y.name not in elu.of_a


def test_networks_diverge_at_a_different_operator():
    before = [conv(start()) for _ in range(2)]
    after = [conv(apply(x.net, op, x), 3) for x, op in zip(before, ("Relu", "Elu"), strict=True)]
    found = compared(*(ended(x.Sigmoid()) for x in after))
    assert not found.is_same_network
    assert [(p.a, p.b) for p in found.last_from_inputs] == [(before[0].name, before[1].name)]
    assert found.operators_behind == ((("Relu",), ("Elu",)),)
    assert [(p.a, p.b) for p in found.last_from_outputs] == [(after[0].name, after[1].name)]
    of_function = {pair.a: pair.is_same_function for pair in found.pairs}
    assert of_function[before[0].name]
    assert not of_function[after[0].name]
    assert _reasons(found) == {Reason.PARTED}


def _blocks(activation: Part, count: int) -> tuple[onnx.ModelProto, list[str]]:
    """Residual blocks of two convolutions with an activation between them, and tensors of each block."""
    x, ends = start(), []
    for _ in range(count):
        y = conv(x)
        active = activation(y)
        x = x + conv(active, 3)
        ends += [y.name, active.name, x.name]
    return ended(x), ends


def _tanh_of_sigmoid(x: Expr) -> Expr:
    return (x * 2).Sigmoid() * 2 - 1


def test_a_spelling_in_each_block_is_identified_by_its_values():
    first, ends = _blocks(lambda x: x.Tanh(), 4)
    second, others = _blocks(_tanh_of_sigmoid, 4)
    found = compared(first, second)
    assert found.is_same_network
    assert [found.of_a.get(tensor) for tensor in ends] == others
    assert all(pair.is_same_function for pair in found.pairs)
    longer, _ = _blocks(_tanh_of_sigmoid, 5)
    ambiguous = compared(first, longer)
    assert not ambiguous.is_same_network
    assert ambiguous.of_a.keys().isdisjoint(ends[2:-1])
    different = compared(first, _blocks(lambda x: x * x.Sigmoid(), 4)[0])
    assert not different.is_same_network
    layer = "Conv 3x3 4 to 4 pads 1"
    assert (("Tanh", layer), ("Sigmoid", "Mul", layer)) in different.operators_behind
    assert different.of_a.keys().isdisjoint(ends[1:-2])


def _packed(x: Expr) -> tuple[Expr, list[Expr]]:
    whole = x @ x.weight(CHANNELS, 3 * CHANNELS)
    return whole, [whole.Gather(range(first, first + CHANNELS), axis=2) for first in range(0, 3 * CHANNELS, CHANNELS)]


def _separate(x: Expr) -> list[Expr]:
    return [x @ x.weight(CHANNELS, CHANNELS) for _ in range(3)]


def test_a_symmetric_mask_does_not_confuse_queries_and_keys():
    x = start()
    flags = x.ReduceMean([2], keepdims=0)
    query, key, value = parts = _separate(x)
    scores = query @ key.Transpose(perm=[0, 2, 1]) + flags.Unsqueeze([1]) * flags.Unsqueeze([2])
    model = ended(scores.Softmax() @ value, SEQUENCE)
    found = compared(model, model)
    assert found.is_same_network
    assert found.unmatched_a == ()
    assert all(found.of_a[part.name] == part.name for part in parts)


def test_packed_projections_are_reported_before_a_difference():
    sides = []
    for axis in (-1, 1):
        query, key, value = _packed(start())[1]
        sides.append(ended((query @ key.Transpose(perm=[0, 2, 1])).Softmax(axis=axis) @ value, SEQUENCE))
    found = compared(*sides)
    assert not found.is_same_network
    first, second = found.operators_behind[0]
    assert first[:2] == second[:2] == (f"MatMul {CHANNELS} to {3 * CHANNELS}", "Gather")


def test_a_packed_layer_differs_from_a_layer_of_its_size():
    both, ranges = _packed(start())
    x = start()
    query, key, value = _separate(x)
    large = (x @ x.weight(CHANNELS, 3 * CHANNELS)).Relu()
    second = ended(attended(query + large.ReduceMean([2]), key, value), SEQUENCE)
    assert both.name not in compared(ended(attended(*ranges), SEQUENCE), second).of_a


@pytest.mark.parametrize(
    "one, other",
    [
        (
            lambda x: x @ x.Transpose(perm=[0, 2, 1]),
            lambda x: (rows := x.Reshape([-1, CHANNELS])) @ rows.Transpose(perm=[1, 0]),
        ),
        (lambda x: x.Gather([0, 2, 1], axis=1), lambda x: x.Slice([0], [2], [1])),
    ],
    ids=["products of each sample and of all", "three tokens and two"],
)
def test_a_tensor_with_different_elements_is_a_different_value(one: Part, other: Part):
    tensors = [part(start()) for part in (one, other)]
    means = [tensor.Reshape([BATCH, -1]).ReduceMean([1], keepdims=1) for tensor in tensors]
    models = [x.net.model((x @ x.weight(1, 3)).name, SEQUENCE, (BATCH, 3)) for x in means]
    assert tensors[0].name not in compared(*models).of_a


def test_multiples_are_matched_with_their_factor():
    y, z = (start().Sigmoid() * factor for factor in (0.25, 0.5))
    found = compared(ended((y * 2.0).Softmax()), ended((z * 1.0).Softmax()))
    assert found.is_same_network
    (pair,) = [pair for pair in found.pairs if pair.a == y.name]
    assert pair.factor == pytest.approx(2.0) or pair.b != z.name
    assert found.of_a[y.name]


@pytest.mark.parametrize("kernel, is_distinguished", [(3, True), (1, False)])
def test_only_different_uses_distinguish_equal_tensors(kernel: int, is_distinguished: bool):
    x = start()
    relus = [x.Relu(), x.Relu()]
    ends = [conv(relus[0]), conv(relus[1], kernel)]
    model = ended(ends[0] + ends[1])
    found = compared(model, model)
    names = [tensor.name for tensor in (*relus, *ends)]
    if is_distinguished:
        assert [found.of_a[name] for name in names] == names
    else:
        assert all(_details(found)[name][0] is Reason.AMBIGUOUS for name in names)


def test_another_batch_is_rejected_with_a_remedy():
    model, _ = network(["convolution"])
    other = read_model(model, input_shapes={"x": (3, *IMAGE[1:])})
    with pytest.raises(ShapeError, match=r"batches of 2 and 3.*--input-shapes"):
        match(read_model(model), other)


def test_a_wrapped_index_is_the_index():
    inputs = "(int64[2] i, float[9, 3] w) => (float[2, 3] y)"
    bodies = (
        "{ y = Gather<axis = 0>(w, i) }",
        "<int64 zero = {0}, int64 rows = {9}> { is_negative = Less(i, zero) moved = Add(i, rows) "
        "j = Where(is_negative, moved, i) y = Gather<axis = 0>(w, j) }",
    )
    found = compared(*(model_of(f"{inputs} {body}", w=(9, 3)) for body in bodies))
    assert found.is_same_network
    assert found.of_b["j"] == "i"


def test_random_draws_are_separate_values():
    x = start()
    noises = [x.RandomNormalLike() for _ in range(2)]
    sums = [x * noise for noise in noises]
    y = conv(sums[0])
    model = ended(y.Relu() + sums[1])
    found = compared(model, model)
    assert all(pair.a == pair.b for pair in found.pairs)
    assert found.of_a[y.name] == y.name


def test_consecutive_normalisations_are_separate_layers():
    once = ended(batch_norm(conv(start())).Relu())
    twice = ended(batch_norm(batch_norm(conv(start()))).Relu())
    assert not compared(once, twice).is_same_network


def _crossed(is_crossed: bool, tails: int = 1) -> tuple[onnx.ModelProto, str]:
    """Pairs of equal branches, each with a gate from itself or from the other; and the gated sum."""
    x = start()
    ends = [conv(x).Relu() for _ in range(2 * tails)]
    whole = apply(x.net, "Sum", *(end * conv(ends[index ^ is_crossed]).Sigmoid() for index, end in enumerate(ends)))
    return ended(whole.Relu()), whole.name


@pytest.mark.parametrize("tails", [1, 20])
def test_crossed_equal_branches_are_a_different_network(tails: int):
    (own, whole), (crossed, _) = _crossed(False, tails), _crossed(True, tails)
    found = compared(own, crossed)
    assert not found.is_same_network
    assert found.last_from_inputs
    assert found.last_from_outputs
    is_same_function = {pair.a: pair.is_same_function for pair in found.pairs}
    assert is_same_function["x"]
    assert not is_same_function.get(whole, False)
    for model in (own, crossed):
        found = compared(model, model)
        assert found.is_same_network
        assert all(pair.is_same_function for pair in found.pairs)
        assert _reasons(found) == {Reason.AMBIGUOUS}


def test_skips_to_other_branches_are_a_different_network():
    def skipped(sources: Sequence[int]) -> onnx.ModelProto:
        x = start()
        ends = [conv(x).Relu() for _ in sources]
        twice = [conv(end) for end in ends]
        return ended(apply(x.net, "Sum", *((ends[s] + y).Tanh() for s, y in zip(sources, twice, strict=True))))

    assert compared(skipped([0, 1, 2]), skipped([0, 1, 2])).is_same_network
    assert compared(skipped([1, 2, 0]), skipped([2, 0, 1])).is_same_network
    assert not compared(skipped([0, 1, 2]), skipped([1, 0, 2])).is_same_network
    assert not compared(skipped([1, 0, 2]), skipped([1, 2, 0])).is_same_network


def test_deep_networks_are_matched_in_bounded_time():
    y = start()
    for _ in range(260):
        y = y + ((y @ y.weight(CHANNELS, CHANNELS)).Relu() + y.weight(CHANNELS))
    model = ended(y, SEQUENCE)
    started = time.process_time()
    assert not compared(model, model).unmatched_a
    assert time.process_time() - started < 7


def test_many_consecutive_transposes_are_matched():
    x = start()
    first, second = x.Relu(), x.Relu()
    for _ in range(1100):
        first = first.Transpose(perm=[0, 1, 3, 2])
    model = ended(conv(first) + conv(second))
    assert compared(model, model).is_same_network
