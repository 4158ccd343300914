"""Matches the tensors of one network in two files by function of the inputs and by paths to the outputs.

Names have no effect. Two values match if each is the only one in its network with that function of the
inputs, or with those paths to the outputs. If the two criteria disagree, or several values meet them, nothing
is matched: the tensor is ambiguous.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from onnxgc.errors import ShapeError
from onnxgc.matching.divergence import BATCH_NORMALISATIONS, Difference, differences, frontier, operators_after
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
    views = _best_views(a, b)
    first, second, is_same = views.a, views.b, views.are_same
    values = match_values(first, second)
    pairs = _tensor_pairs(first, second, values)
    # The first pair of a tensor has priority.
    of_a = {pair.a: pair.b for pair in reversed(pairs)}
    of_b = {pair.b: pair.a for pair in reversed(pairs)}
    ends, starts = ((), ()) if is_same else _frontiers(first, second, pairs, values)
    partners = {other: value for value, other in values.pairs.items()}
    rest_a, rest_b = _values_of_unmatched(first, of_a), _values_of_unmatched(second, of_b)
    other_differences = differences(first, second, is_same=is_same)
    has_batch_difference = any(difference.what == BATCH_NORMALISATIONS for difference in other_differences)
    return Matching(
        pairs=tuple(pairs),
        of_a=of_a,
        of_b=of_b,
        unmatched_a=tuple(_unmatched(first, of_a, values.pairs, rest_b, values.ambiguous_a, is_same)),
        unmatched_b=tuple(_unmatched(second, of_b, partners, rest_a, values.ambiguous_b, is_same)),
        is_same_network=is_same,
        has_same_biases=views.include_biases and not has_batch_difference,
        last_from_inputs=ends,
        operators_behind=tuple(
            (operators_after(first, pair.a, values.pairs), operators_after(second, pair.b, partners)) for pair in ends
        ),
        last_from_outputs=starts,
        extras=_extras(first, second),
        differences=other_differences,
    )


def _tensor_pairs(a: NetworkView, b: NetworkView, values: MatchedValues) -> list[Pair]:
    own = {value: value for value in values.pairs}
    labels = {other: value for value, other in values.pairs.items()}
    pairs_of = TensorPairs(a, b, a.uses(own), b.uses(labels)).pairs_of
    return [
        replace(pair, is_same_function=value in values.by_forward)
        for value, other in sorted(values.pairs.items())
        for pair in pairs_of(a.tensors_of.get(value, []), b.tensors_of.get(other, []))
    ]


def _frontiers(
    a: NetworkView, b: NetworkView, pairs: list[Pair], values: MatchedValues
) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """The last pairs from the inputs, and from the outputs."""
    by_forward, by_backward = values.pairs_of(values.by_forward), values.pairs_of(values.by_backward)
    return (frontier(a, b, pairs, by_forward, is_forward=True), frontier(a, b, pairs, by_backward, is_forward=False))


class _Views(NamedTuple):
    """Views of both models, whether they include biases, and whether they are one network."""

    a: NetworkView
    b: NetworkView
    include_biases: bool
    are_same: bool

    def match_count(self) -> int:
        return len(match_values(self.a, self.b).pairs)


def _best_views(a: TrainableModel, b: TrainableModel) -> _Views:
    """Views in which both models are one network, if there are any.

    Exporters omit biases of zeros, and compose activations differently.
    """
    plain = _views(a, b, {}, {})
    if plain.are_same:
        return plain
    functions = differently_spelled((a, plain.a.structure), (b, plain.b.structure))
    if not functions[0]:
        return plain
    identified = _views(a, b, *functions)
    is_better = identified.are_same or identified.match_count() > plain.match_count()
    return identified if is_better else plain


_Functions = Mapping[str, IdentifiedFunction]


def _views(a: TrainableModel, b: TrainableModel, of_a: _Functions, of_b: _Functions) -> _Views:
    """Views with biases, or without them if only then both models are one network."""
    first, second = NetworkView.from_model(a, True, of_a), NetworkView.from_model(b, True, of_b)
    if _are_same(first, second):
        return _Views(first, second, include_biases=True, are_same=True)
    bare = NetworkView.from_model(a, False, of_a), NetworkView.from_model(b, False, of_b)
    if _are_same(*bare):
        return _Views(*bare, include_biases=False, are_same=True)
    return _Views(first, second, include_biases=True, are_same=False)


def _are_same(a: NetworkView, b: NetworkView) -> bool:
    has_equal_digests = a.output_digests() == b.output_digests()
    return has_equal_digests and find_isomorphism(a.cones, a.outputs(), b.cones, b.outputs()).exists


def _check_batches(a: TrainableModel, b: TrainableModel) -> None:
    shapes = [Counter(tuple(sorted(model.types[name].shape)) for name in model.inputs) for model in (a, b)]
    samples = [Counter(tuple(sorted(model.types[name].shape[1:])) for name in model.inputs) for model in (a, b)]
    if shapes[0] == shapes[1] or samples[0] != samples[1]:
        return
    firsts = [model.types[model.inputs[0]].shape[:1] for model in (a, b)]
    raise ShapeError(
        f"the models are read for batches of {firsts[0][0]} and {firsts[1][0]}, so their tensors cannot be "
        f"matched; pass --input-shapes with one batch for both"
    )


# -- tensors without a counterpart --


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


def _extras(a: NetworkView, b: NetworkView) -> tuple[Extra, ...]:
    sizes_a, sizes_b = _sizes_by_kind(a), _sizes_by_kind(b)
    extras = (
        Extra(kind, len(here), len(there), sum(here), sum(there))
        for (kind, here), there in zip(sizes_a.items(), sizes_b.values(), strict=True)
    )
    return tuple(extra for extra in extras if extra.count_a != extra.count_b or extra.bytes_a != extra.bytes_b)


def _sizes_by_kind(side: NetworkView) -> dict[str, list[int]]:
    """Bytes of the tensors that exist because of the spelling, by kind."""
    copies, in_layers, in_composed = list[int](), list[int](), list[int]()
    for node in side.model.nodes:
        view = side.structure.views.get(node.outputs[0])
        if view is None:
            continue
        size = side.model.types[node.outputs[0]].size_bytes
        if node.op == "Transpose":
            copies.append(size)
        elif view.value in side.cones.anchors:
            in_layers.append(size)
        elif view.value not in side.cones.backward:
            in_composed.append(size)
    return {"transposed copies": copies, "inside layers": in_layers, "inside composed operators": in_composed}
