"""Matches the tensors of one network in two files by function of the inputs and by paths to the outputs.

Names have no effect. Two values match if each is the only one in its network with that function of the
inputs, or with those paths to the outputs. If the two criteria disagree, or several values meet them, nothing
is matched: the tensor is ambiguous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from onnxgc.errors import ShapeError
from onnxgc.matching.divergence import (
    BATCH_NORMALISATIONS,
    Difference,
    differences,
    frontier,
    operators_after,
)
from onnxgc.matching.isomorphism import find_isomorphism
from onnxgc.matching.network_view import NetworkView, Pair, key_ignoring_scale
from onnxgc.matching.normal_form.builder import IdentifiedFunction
from onnxgc.matching.probes.shared_functions import differently_spelled
from onnxgc.matching.tensor_matching import TensorPairs
from onnxgc.matching.value_matching import MatchedValues, match_values
from onnxgc.model.core.ir import TrainableModel


class Reason(StrEnum):
    """Why a tensor has no counterpart."""

    AMBIGUOUS = "ambiguous"
    ONE_SIDE = "exists on one side only"
    PARTED = "the networks differ there"


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A tensor of one model without a counterpart in the other."""

    tensor: str
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Extra:
    """Numbers and bytes of tensors of one kind, of which one file has more than the other."""

    kind: str
    count_a: int
    count_b: int
    bytes_a: int
    bytes_b: int


@dataclass(frozen=True, slots=True)
class Matching:
    """The result of matching models a and b.

    `of_a` and `of_b` map each matched tensor to its counterpart. `has_same_biases` is False if a layer has a
    bias or a normalisation in one model only, for example a zero bias that an exporter omitted. Without
    `is_same_network`, `last_from_inputs` are the last pairs with equal functions of the inputs,
    `operators_behind` the operators that follow each of them in both models, up to the next layer, and
    `last_from_outputs` the first pairs after which both models are equal. `differences` are those that do not
    make the networks different.
    """

    pairs: tuple[Pair, ...]
    of_a: Mapping[str, str]
    of_b: Mapping[str, str]
    unmatched_a: tuple[Unmatched, ...]
    unmatched_b: tuple[Unmatched, ...]
    is_same_network: bool
    has_same_biases: bool
    last_from_inputs: tuple[Pair, ...]
    operators_behind: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    last_from_outputs: tuple[Pair, ...]
    extras: tuple[Extra, ...]
    differences: tuple[Difference, ...]


def match(a: TrainableModel, b: TrainableModel) -> Matching:
    """The tensors of two models that are equal, given equal weights.

    Structure and shapes decide; the numbers in weights do not.

    Raises:
        ShapeError: the models were read for different batch sizes.
    """
    _check_batches(a, b)
    first, second, has_same_biases = _best_views(a, b)
    values = match_values(first, second)
    pairs = _tensor_pairs(first, second, values)
    # The first pair of a tensor has priority.
    of_a = {pair.a: pair.b for pair in reversed(pairs)}
    of_b = {pair.b: pair.a for pair in reversed(pairs)}
    is_same = _are_same(first, second)
    ends, starts = ((), ()) if is_same else _frontiers(first, second, pairs, values)
    matched_a, matched_b = values.pairs.keys(), set(values.pairs.values())
    unmatched_a, unmatched_b = _unmatched_of_both(first, second, values, of_a, of_b, is_same)
    other_differences = differences(first, second, is_same=is_same)
    has_batch_difference = any(found.what == BATCH_NORMALISATIONS for found in other_differences)
    return Matching(
        pairs=tuple(pairs),
        of_a=of_a,
        of_b=of_b,
        unmatched_a=unmatched_a,
        unmatched_b=unmatched_b,
        is_same_network=is_same,
        has_same_biases=has_same_biases and not has_batch_difference,
        last_from_inputs=ends,
        operators_behind=tuple(
            (operators_after(first, pair.a, matched_a), operators_after(second, pair.b, matched_b))
            for pair in ends
        ),
        last_from_outputs=starts,
        extras=_extras(first, second),
        differences=other_differences,
    )


def _tensor_pairs(a: NetworkView, b: NetworkView, values: MatchedValues) -> list[Pair]:
    """The tensors of matched values."""
    own = {value: value for value in values.pairs}
    labels = {other: value for value, other in values.pairs.items()}
    pairs_of = TensorPairs(a, b, a.uses(own), b.uses(labels)).of
    return [
        replace(pair, is_same_function=value in values.by_forward)
        for value, other in sorted(values.pairs.items())
        for pair in pairs_of(a.holders.get(value, []), b.holders.get(other, []))
    ]


def _frontiers(
    a: NetworkView, b: NetworkView, pairs: list[Pair], values: MatchedValues
) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """The last pairs from the inputs, and from the outputs."""
    by_forward, by_backward = values.pairs_of(values.by_forward), values.pairs_of(values.by_backward)
    return (
        frontier(a, b, pairs, by_forward, is_forward=True),
        frontier(a, b, pairs, by_backward, is_forward=False),
    )


_Functions = Mapping[str, IdentifiedFunction]


def _best_views(a: TrainableModel, b: TrainableModel) -> tuple[NetworkView, NetworkView, bool]:
    """Views in which both models are one network, if there are any; and whether they include biases.

    Exporters omit biases of zeros, and compose activations differently.
    """

    def views(
        include_biases: bool, functions: tuple[_Functions, _Functions] = ({}, {})
    ) -> tuple[NetworkView, NetworkView]:
        first, second = functions
        return NetworkView.of(a, include_biases, first), NetworkView.of(b, include_biases, second)

    plain = views(True)
    if _are_same(*plain):
        return *plain, True
    without_biases = views(False)
    if _are_same(*without_biases):
        return *without_biases, False
    functions = differently_spelled((a, plain[0].structure), (b, plain[1].structure))
    if not functions[0]:
        return *plain, True
    identified = views(True, functions)
    if _are_same(*identified):
        return *identified, True
    without_biases = views(False, functions)
    if _are_same(*without_biases):
        return *without_biases, False
    counts = [len(match_values(*both).pairs) for both in (plain, identified)]
    return (*plain, True) if counts[0] >= counts[1] else (*identified, True)


def _are_same(a: NetworkView, b: NetworkView) -> bool:
    digests = a.output_digests(), b.output_digests()
    return digests[0] == digests[1] and find_isomorphism(a.cones, a.outputs(), b.cones, b.outputs()).exists


def _check_batches(a: TrainableModel, b: TrainableModel) -> None:
    shapes = [Counter(tuple(sorted(model.types[name].shape)) for name in model.inputs) for model in (a, b)]
    samples = [
        Counter(tuple(sorted(model.types[name].shape[1:])) for name in model.inputs) for model in (a, b)
    ]
    if shapes[0] == shapes[1] or samples[0] != samples[1]:
        return
    firsts = [model.types[model.inputs[0]].shape[:1] for model in (a, b)]
    raise ShapeError(
        f"the models are read for batches of {firsts[0][0]} and {firsts[1][0]}, so their tensors cannot be "
        f"matched; pass --input-shapes with one batch for both"
    )


# -- tensors without a counterpart ---------------------------------------------------------------


def _unmatched_of_both(
    a: NetworkView,
    b: NetworkView,
    values: MatchedValues,
    of_a: Mapping[str, str],
    of_b: Mapping[str, str],
    is_same: bool,
) -> tuple[tuple[Unmatched, ...], tuple[Unmatched, ...]]:
    partners = {other: value for value, other in values.pairs.items()}
    rest_a, rest_b = _values_of_unmatched(a, of_a), _values_of_unmatched(b, of_b)
    return (
        tuple(_unmatched(a, of_a, values.pairs, rest_b, values.ambiguous_a, is_same)),
        tuple(_unmatched(b, of_b, partners, rest_a, values.ambiguous_b, is_same)),
    )


def _values_of_unmatched(side: NetworkView, matched: Mapping[str, str]) -> set[tuple[int, object]]:
    views = side.structure.views
    return {(view.value, key_ignoring_scale(view)) for name, view in views.items() if name not in matched}


def _unmatched(
    side: NetworkView,
    matched: Mapping[str, str],
    partners: Mapping[int, int],
    rest: Collection[tuple[int, object]],
    ambiguous: Mapping[int, int],
    is_same: bool,
) -> Iterator[Unmatched]:
    """The tensors without a counterpart; `rest` are values of such tensors of the other model, with keys."""
    packed = {whole for whole, _ in side.structure.parts.values()}
    for name, view in side.structure.views.items():
        if name in matched:
            continue
        value, reason = view.value, Reason.ONE_SIDE
        if value in ambiguous:
            count, reason = ambiguous[value], Reason.AMBIGUOUS
            several = f"{count} values of the other model fit"
            detail = several if count > 1 else "it fits one value, but its context fits another"
        elif value in side.cones.anchors:
            detail = "inside a layer: a bias or a normalisation follows"
        elif (partners.get(value), key_ignoring_scale(view)) in rest:
            detail, reason = "several equal tensors have equal uses", Reason.AMBIGUOUS
        elif value in partners:
            detail = "inside an operator of the other model, or after a dropout"
        elif value in packed:
            detail = "read in parts, which are separate in the other model"
        elif value not in side.cones.backward:
            detail = "inside a composed operator, such as an activation"
        else:
            detail = "no value of the other model has its operands and its uses"
            reason = Reason.ONE_SIDE if is_same else Reason.PARTED
        yield Unmatched(name, reason, detail)


_COPIES = frozenset({"Transpose"})


def _extras(a: NetworkView, b: NetworkView) -> tuple[Extra, ...]:
    found: list[Extra] = []
    counted = [_by_kind(side) for side in (a, b)]
    for kind in counted[0]:
        here, there = counted[0][kind], counted[1][kind]
        if here != there:
            found.append(Extra(kind, here[0], there[0], here[1], there[1]))
    return tuple(found)


def _by_kind(side: NetworkView) -> dict[str, tuple[int, int]]:
    """Numbers and bytes of the tensors that exist because of the spelling, by kind."""
    kinds: dict[str, list[str]] = {
        "transposed copies": [],
        "inside layers": [],
        "inside composed operators": [],
    }
    for node in side.model.nodes:
        name = node.outputs[0]
        view = side.structure.views.get(name)
        if view is None:
            continue
        if node.op in _COPIES:
            kinds["transposed copies"].append(name)
        elif view.value in side.cones.anchors:
            kinds["inside layers"].append(name)
        elif view.value not in side.cones.backward:
            kinds["inside composed operators"].append(name)
    types = side.model.types
    return {
        kind: (len(names), sum(types[name].size_bytes for name in names)) for kind, names in kinds.items()
    }
