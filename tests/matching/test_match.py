"""Results of matching: pairs, reasons for unmatched tensors, points of divergence, and extra tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import onnx
import pytest

from onnxgc.errors import ShapeError
from onnxgc.matching.match import Extra, Matching, Reason, match
from onnxgc.model.read import read_model
from tests.matching.networks import BATCH, CHANNELS, EXTENT, TOKENS, Network, network
from tests.matching.spelling_checks import compared
from tests.model.model_helpers import normal, text_model, with_weights

_IMAGE = (2, CHANNELS, EXTENT, EXTENT)


def _ended(net: Network, x: str) -> onnx.ModelProto:
    pooled = net.node("ReduceMean", x, net.ints(2, 3), keepdims=0)
    return net.model(net.node("MatMul", pooled, net.weight(CHANNELS, 3)), _IMAGE, (2, 3))


def _details(found: Matching) -> dict[str, tuple[Reason, str]]:
    return {item.tensor: (item.reason, item.detail) for item in (*found.unmatched_a, *found.unmatched_b)}


def test_equal_branches_are_ambiguous_and_their_sum_is_not() -> None:
    model, ends = network(["twins"])
    found = compared(model, model)
    assert found.is_same_network
    assert {item.reason for item in found.unmatched_a} == {Reason.AMBIGUOUS}
    assert len(found.unmatched_a) == 4
    assert found.of_a[ends[0][1]] == ends[0][1]


@pytest.mark.parametrize("blocks", [["ordered twins"], ["attention"], ["shuffled channels", "concatenated"]])
def test_order_and_later_use_distinguish_branches(blocks: list[str]) -> None:
    model, _ = network(blocks)
    found = compared(model, model)
    assert found.unmatched_a == ()
    assert all(pair.a == pair.b for pair in found.pairs)


def test_the_tensor_before_a_normalisation_has_no_counterpart_where_that_is_folded() -> None:
    folded, separate = Network(), Network()
    y = folded.node("Conv", "x", folded.weight(CHANNELS, CHANNELS, 1, 1), folded.weight(CHANNELS))
    z = separate.node("Conv", "x", separate.weight(CHANNELS, CHANNELS, 1, 1))
    statistics = [separate.weight(CHANNELS) for _ in range(4)]
    normal = separate.node("BatchNormalization", z, *statistics)
    first = _ended(folded, folded.node("Relu", y))
    second = _ended(separate, separate.node("Relu", normal))
    found = compared(first, second, freeze_bn=True)
    assert found.is_same_network
    assert found.of_b[normal] == y
    assert _details(found) == {z: (Reason.ONE_SIDE, "inside a layer: a bias or a normalisation follows")}
    size = 4 * 2 * CHANNELS * EXTENT * EXTENT
    assert found.extras == (Extra("inside layers", 0, 1, 0, size),)


def test_a_bias_in_one_model_only_is_reported() -> None:
    without, with_bias = Network(), Network()
    y = without.node("Conv", "x", without.weight(CHANNELS, CHANNELS, 1, 1))
    weights = with_bias.weight(CHANNELS, CHANNELS, 1, 1), with_bias.weight(CHANNELS)
    z = with_bias.node("Conv", "x", *weights)
    found = compared(_ended(without, without.node("Relu", y)), _ended(with_bias, with_bias.node("Relu", z)))
    assert found.is_same_network
    assert not found.has_same_biases
    assert found.of_a[y] == z
    elu = compared(_ended(without, without.node("Elu", y)), _ended(with_bias, with_bias.node("Relu", z)))
    assert not elu.is_same_network
    assert y not in elu.of_a


def test_networks_diverge_at_a_different_operator() -> None:
    first, second = Network(), Network()
    ends = []
    for net, op in ((first, "Relu"), (second, "Elu")):
        before = net.node("Conv", "x", net.weight(CHANNELS, CHANNELS, 1, 1))
        after = net.node("Conv", net.node(op, before), net.weight(CHANNELS, CHANNELS, 3, 3))
        ends.append((before, after))
    found = compared(
        *(_ended(net, net.node("Sigmoid", after)) for net, (_, after) in zip((first, second), ends, strict=True))
    )
    assert not found.is_same_network
    assert [(p.a, p.b) for p in found.last_from_inputs] == [(ends[0][0], ends[1][0])]
    assert found.operators_behind == ((("Relu",), ("Elu",)),)
    assert [(p.a, p.b) for p in found.last_from_outputs] == [(ends[0][1], ends[1][1])]
    of_function = {pair.a: pair.is_same_function for pair in found.pairs}
    assert of_function[ends[0][0]]
    assert not of_function[ends[0][1]]
    assert {item.reason for item in found.unmatched_a} == {Reason.PARTED}


def _blocks(activation: Callable[[Network, str], str], count: int) -> tuple[onnx.ModelProto, list[str]]:
    """Residual blocks of two convolutions with an activation between them, and tensors of each block."""
    net, x, ends = Network(), "x", []
    for _ in range(count):
        y = net.node("Conv", x, net.weight(CHANNELS, CHANNELS, 1, 1))
        active = activation(net, y)
        x = net.node("Add", x, net.node("Conv", active, net.weight(CHANNELS, CHANNELS, 3, 3), pads=[1] * 4))
        ends += [y, active, x]
    return _ended(net, x), ends


def _tanh(net: Network, x: str) -> str:
    return net.node("Tanh", x)


def _tanh_of_sigmoid(net: Network, x: str) -> str:
    gate = net.node("Sigmoid", net.node("Mul", x, net.constant(2)))
    return net.node("Sub", net.node("Mul", gate, net.constant(2)), net.constant(1))


def test_a_spelling_in_each_block_is_identified_by_its_values() -> None:
    first, ends = _blocks(_tanh, 4)
    second, others = _blocks(_tanh_of_sigmoid, 4)
    found = compared(first, second)
    assert found.is_same_network
    assert [found.of_a.get(tensor) for tensor in ends] == others
    assert all(pair.is_same_function for pair in found.pairs)
    longer, _ = _blocks(_tanh_of_sigmoid, 5)
    ambiguous = compared(first, longer)
    assert not ambiguous.is_same_network
    assert ambiguous.of_a.keys().isdisjoint(ends[2:-1])


def test_a_different_function_in_each_block_is_reported_and_not_matched() -> None:
    first, ends = _blocks(_tanh, 4)
    second, _ = _blocks(lambda net, x: net.node("Mul", x, net.node("Sigmoid", x)), 4)
    found = compared(first, second)
    assert not found.is_same_network
    layer = "Conv 3x3 4 to 4 pads 1"
    assert (("Tanh", layer), ("Sigmoid", "Mul", layer)) in found.operators_behind
    assert found.of_a.keys().isdisjoint(ends[1:-2])


def _attention(net: Network, parts: Sequence[str], mask: str = "", axis: int = -1) -> onnx.ModelProto:
    query, key, value = parts
    scores = net.node("MatMul", query, net.node("Transpose", key, perm=[0, 2, 1]))
    masked = net.node("Add", scores, mask) if mask else scores
    mixed = net.node("MatMul", net.node("Softmax", masked, axis=axis), value)
    pooled = net.node("ReduceMean", mixed, net.ints(1), keepdims=0)
    head = net.node("MatMul", pooled, net.weight(CHANNELS, 3))
    return net.model(head, (BATCH, TOKENS, CHANNELS), (BATCH, 3))


def test_a_symmetric_mask_does_not_confuse_queries_and_keys() -> None:
    net = Network()
    flags = net.node("ReduceMean", "x", net.ints(2), keepdims=0)
    mask = net.node("Mul", net.node("Unsqueeze", flags, net.ints(1)), net.node("Unsqueeze", flags, net.ints(2)))
    parts = [net.node("MatMul", "x", net.weight(CHANNELS, CHANNELS)) for _ in range(3)]
    model = _attention(net, parts, mask)
    found = compared(model, model)
    assert found.is_same_network
    assert found.unmatched_a == ()
    assert {found.of_a[part] for part in parts} == set(parts)


def test_packed_projections_are_reported_before_a_difference() -> None:
    sides = []
    for axis in (-1, 1):
        net = Network()
        packed = net.node("MatMul", "x", net.weight(CHANNELS, 3 * CHANNELS))
        ranges = [net.ints(*range(index * CHANNELS, (index + 1) * CHANNELS)) for index in range(3)]
        parts = [net.node("Gather", packed, chosen, axis=2) for chosen in ranges]
        sides.append(_attention(net, parts, axis=axis))
    found = compared(*sides)
    assert not found.is_same_network
    first, second = found.operators_behind[0]
    assert first[:2] == second[:2] == (f"MatMul {CHANNELS} to {3 * CHANNELS}", "Gather")


def test_a_packed_layer_differs_from_a_layer_of_its_size() -> None:
    packed, separate = Network(), Network()
    both = packed.node("MatMul", "x", packed.weight(CHANNELS, 3 * CHANNELS))
    ranges = [packed.ints(*range(index * CHANNELS, (index + 1) * CHANNELS)) for index in range(3)]
    first = _attention(packed, [packed.node("Gather", both, chosen, axis=2) for chosen in ranges])
    parts = [separate.node("MatMul", "x", separate.weight(CHANNELS, CHANNELS)) for _ in range(3)]
    large = separate.node("Relu", separate.node("MatMul", "x", separate.weight(CHANNELS, 3 * CHANNELS)))
    parts[0] = separate.node("Add", parts[0], separate.node("ReduceMean", large, separate.ints(2)))
    assert both not in compared(first, _attention(separate, parts)).of_a


def _with_mean_of(part: Callable[[Network], str]) -> tuple[onnx.ModelProto, str]:
    net = Network()
    tensor = part(net)
    spread = net.node("Reshape", tensor, net.ints(BATCH, -1))
    mean = net.node("ReduceMean", spread, net.ints(1), keepdims=1)
    head = net.node("MatMul", mean, net.weight(1, 3))
    return net.model(head, (BATCH, TOKENS, CHANNELS), (BATCH, 3)), tensor


def _of_all_samples(net: Network) -> str:
    rows = net.node("Reshape", "x", net.ints(-1, CHANNELS))
    return net.node("MatMul", rows, net.node("Transpose", rows, perm=[1, 0]))


@pytest.mark.parametrize(
    "one, other",
    [
        (lambda net: net.node("MatMul", "x", net.node("Transpose", "x", perm=[0, 2, 1])), _of_all_samples),
        (
            lambda net: net.node("Gather", "x", net.ints(0, 2, 1), axis=1),
            lambda net: net.node("Slice", "x", net.ints(0), net.ints(2), net.ints(1)),
        ),
    ],
    ids=["products of each sample and of all", "three tokens and two"],
)
def test_a_tensor_with_different_elements_is_a_different_value(
    one: Callable[[Network], str], other: Callable[[Network], str]
) -> None:
    (first, tensor), (second, _) = _with_mean_of(one), _with_mean_of(other)
    assert tensor not in compared(first, second).of_a


def test_multiples_are_matched_with_their_factor() -> None:
    first, second = Network(), Network()
    y = first.node("Mul", first.node("Sigmoid", "x"), first.constant(0.25))
    z = second.node("Mul", second.node("Sigmoid", "x"), second.constant(0.5))
    sums = [
        net.node("Softmax", net.node("Mul", x, net.constant(factor)))
        for net, x, factor in ((first, y, 2.0), (second, z, 1.0))
    ]
    found = compared(_ended(first, sums[0]), _ended(second, sums[1]))
    assert found.is_same_network
    (pair,) = [pair for pair in found.pairs if pair.a == y]
    assert pair.factor == pytest.approx(2.0) or pair.b != z
    assert found.of_a[y]


def test_uses_distinguish_equal_tensors() -> None:
    net = Network()
    first, second = net.node("Relu", "x"), net.node("Relu", "x")
    y = net.node("Conv", first, net.weight(CHANNELS, CHANNELS, 1, 1))
    z = net.node("Conv", second, net.weight(CHANNELS, CHANNELS, 3, 3), pads=[1, 1, 1, 1])
    model = _ended(net, net.node("Add", y, z))
    found = compared(model, model)
    assert found.of_a[first] == first
    assert found.of_a[second] == second


def test_equal_tensors_with_equal_uses_are_ambiguous() -> None:
    net = Network()
    relus = [net.node("Relu", "x") for _ in range(2)]
    y, z = (net.node("Conv", relu, net.weight(CHANNELS, CHANNELS, 1, 1)) for relu in relus)
    model = _ended(net, net.node("Add", y, z))
    details = _details(compared(model, model))
    assert all(details[name][0] is Reason.AMBIGUOUS for name in (*relus, y, z))


def test_another_batch_is_rejected_with_a_remedy() -> None:
    model, _ = network(["convolution"])
    other = read_model(model, input_shapes={"x": (3, *_IMAGE[1:])})
    with pytest.raises(ShapeError, match=r"batches of 2 and 3.*--input-shapes"):
        match(read_model(model), other)


def test_a_wrapped_index_is_the_index() -> None:
    numbers = "<int64 zero = {0}, int64 rows = {9}>"
    inputs = "(int64[2] i, float[9, 3] w) => (float[2, 3] y)"
    plain = text_model(f"{inputs} {{ y = Gather<axis = 0>(w, i) }}")
    wrapped = text_model(
        f"{inputs} {numbers} {{ is_negative = Less(i, zero) moved = Add(i, rows) "
        "j = Where(is_negative, moved, i) y = Gather<axis = 0>(w, j) }"
    )
    plain, wrapped = (with_weights(model, w=normal(9, 3)) for model in (plain, wrapped))
    found = compared(plain, wrapped)
    assert found.is_same_network
    assert found.of_b["j"] == "i"


def test_random_draws_are_separate_values() -> None:
    net = Network()
    noises = [net.node("RandomNormalLike", "x") for _ in range(2)]
    sums = [net.node("Mul", "x", noise) for noise in noises]
    y = net.node("Conv", sums[0], net.weight(CHANNELS, CHANNELS, 1, 1))
    model = _ended(net, net.node("Add", net.node("Relu", y), sums[1]))
    found = compared(model, model)
    assert all(pair.a == pair.b for pair in found.pairs)
    assert found.of_a[y] == y


def test_consecutive_normalisations_are_separate_layers() -> None:
    one, two = Network(), Network()
    ends = []
    for net, count in ((one, 1), (two, 2)):
        x = net.node("Conv", "x", net.weight(CHANNELS, CHANNELS, 1, 1))
        for _ in range(count):
            x = net.node("BatchNormalization", x, *(net.weight(CHANNELS) for _ in range(4)))
        ends.append(_ended(net, net.node("Relu", x)))
    assert not compared(*ends).is_same_network


def _crossed(is_crossed: bool, tails: int = 1) -> tuple[onnx.ModelProto, str]:
    """Pairs of equal branches, each with a gate from itself or from the other; and the gated sum."""
    net = Network()
    ends = [net.node("Relu", net.node("Conv", "x", net.weight(CHANNELS, CHANNELS, 1, 1))) for _ in range(2 * tails)]
    gated = []
    for index, end in enumerate(ends):
        source = ends[index ^ 1] if is_crossed else end
        gate = net.node("Sigmoid", net.node("Conv", source, net.weight(CHANNELS, CHANNELS, 1, 1)))
        gated.append(net.node("Mul", end, gate))
    whole = net.node("Sum", *gated)
    return _ended(net, net.node("Relu", whole)), whole


@pytest.mark.parametrize("tails", [1, 20])
def test_crossed_equal_branches_are_a_different_network(tails: int) -> None:
    own, crossed = _crossed(False, tails)[0], _crossed(True, tails)[0]
    assert not compared(own, crossed).is_same_network
    for model in (own, crossed):
        found = compared(model, model)
        assert found.is_same_network
        assert {item.reason for item in found.unmatched_a} == {Reason.AMBIGUOUS}


def test_skips_to_other_branches_are_a_different_network() -> None:
    def skipped(sources: Sequence[int]) -> onnx.ModelProto:
        net = Network()
        ends = [net.node("Relu", net.node("Conv", "x", net.weight(CHANNELS, CHANNELS, 1, 1))) for _ in sources]
        twice = [net.node("Conv", end, net.weight(CHANNELS, CHANNELS, 1, 1)) for end in ends]
        sums = [net.node("Tanh", net.node("Add", ends[s], y)) for s, y in zip(sources, twice, strict=True)]
        return _ended(net, net.node("Sum", *sums))

    assert compared(skipped([0, 1, 2]), skipped([0, 1, 2])).is_same_network
    assert compared(skipped([1, 2, 0]), skipped([2, 0, 1])).is_same_network
    assert not compared(skipped([0, 1, 2]), skipped([1, 0, 2])).is_same_network
    assert not compared(skipped([1, 0, 2]), skipped([1, 2, 0])).is_same_network


def test_deep_networks_are_matched_in_bounded_time() -> None:
    net, y = Network(), "x"
    for _ in range(260):
        branch = net.node("Relu", net.node("MatMul", y, net.weight(CHANNELS, CHANNELS)))
        y = net.node("Add", y, net.node("Add", branch, net.weight(CHANNELS)))
    model = net.model(net.node("ReduceMean", y, net.ints(1), keepdims=0), (2, TOKENS, CHANNELS), (2, CHANNELS))
    started = time.process_time()
    assert not compared(model, model).unmatched_a
    assert time.process_time() - started < 7


def test_many_consecutive_transposes_are_matched() -> None:
    transposed = Network()
    ends = [transposed.node("Relu", "x"), transposed.node("Relu", "x")]
    for _ in range(1100):
        ends[0] = transposed.node("Transpose", ends[0], perm=[0, 1, 3, 2])
    ends = [transposed.node("Conv", end, transposed.weight(CHANNELS, CHANNELS, 1, 1)) for end in ends]
    model = _ended(transposed, transposed.node("Add", *ends))
    assert compared(model, model).is_same_network


def test_the_sum_of_crossed_branches_is_not_a_pair() -> None:
    (own, whole), (crossed, _) = _crossed(False), _crossed(True)
    found = compared(own, crossed)
    is_same_function = {pair.a: pair.is_same_function for pair in found.pairs}
    assert is_same_function["x"]
    assert not is_same_function.get(whole, False)
    assert all(pair.is_same_function for pair in compared(crossed, crossed).pairs)


def test_crossed_branches_diverge_between_the_inputs_and_the_outputs() -> None:
    found = compared(_crossed(False)[0], _crossed(True)[0])
    assert found.last_from_inputs
    assert found.last_from_outputs
