"""The tensors of one network in two files, matched by what they are a function of and where they lead.

Names play no part. A match rests on a value that is the only one in either network to be that function of
the inputs, or to reach the outputs in that way. Where the two say different things, or several values are
alike in both, nothing is matched: the tensor is ambiguous.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from onnxgc.errors import ShapeError
from onnxgc.matching.cone_digests import ConeDigests, grounds, refine_digests
from onnxgc.matching.divergence import BATCH_NORMALISATIONS, Difference, behind, differences, frontier
from onnxgc.matching.isomorphism import find_isomorphism, verified_pairs
from onnxgc.matching.network_view import NetworkView, Pair, but_for_layout, full_key, key_ignoring_scale
from onnxgc.matching.normal_form.structure import View
from onnxgc.matching.probes.function_probes import spelled_apart
from onnxgc.model.core.ir import TrainableModel

# How far a tie is followed: from a query's projection to the softmax that its keys are divided by.
_FURTHEST_NEIGHBOUR = 6


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
    """Tensors of a kind that one export materialises more often; bytes are those of the tensors."""

    kind: str
    count_a: int
    count_b: int
    bytes_a: int
    bytes_b: int


@dataclass(frozen=True, slots=True)
class Matching:
    """What of two models is the same.

    `of_a` and `of_b` give each matched tensor its counterpart. The same network has not `has_same_biases`
    where a layer has a bias or a normalisation in one model only, maybe because it was zero and left out.
    Where the models are not `is_same_network`, `last_from_inputs` are the last pairs that are the same
    function of the inputs, `operators_behind` those that follow there on each side, up to the next layer,
    and `last_from_outputs` the first pairs from where both go on alike. `differences` are others, that make
    no other network of them.
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
    """The tensors of two models that hold the same, as far as structure and shapes tell.

    Raises:
        ShapeError: the models were read for different batches.
    """
    _check_batches(a, b)
    first, second, has_same_biases = _best_view(a, b)
    found = _matched_values(first, second)
    labels = {other: value for value, other in found.pairs.items()}
    own = {value: value for value in found.pairs}
    tensors = _Tensors(first, second, first.uses(own), second.uses(labels))
    of_a, of_b = {}, {}
    pairs: list[Pair] = []
    for value, other in sorted(found.pairs.items()):
        here, there = first.holders.get(value, []), second.holders.get(other, [])
        chosen = [
            replace(pair, is_same_function=value in found.by_forward) for pair in tensors.paired(here, there)
        ]
        pairs += chosen
        of_a.update({pair.a: pair.b for pair in reversed(chosen)})
        of_b.update({pair.b: pair.a for pair in reversed(chosen)})
    is_same = _are_same(first, second)
    ends = () if is_same else frontier(first, second, pairs, found.alike(found.by_forward), is_forward=True)
    others = differences(first, second, is_same=is_same)
    values_a, values_b = found.pairs.keys(), set(found.pairs.values())
    left_a, left_b = (
        {(v.value, key_ignoring_scale(v)) for name, v in side.structure.views.items() if name not in matched}
        for side, matched in ((first, of_a), (second, of_b))
    )
    return Matching(
        tuple(pairs),
        of_a,
        of_b,
        tuple(_unmatched(first, of_a, found.pairs, left_b, found.ambiguous_a, is_same)),
        tuple(_unmatched(second, of_b, labels, left_a, found.ambiguous_b, is_same)),
        is_same,
        has_same_biases and not any(other.what == BATCH_NORMALISATIONS for other in others),
        ends,
        tuple((behind(first, pair.a, values_a), behind(second, pair.b, values_b)) for pair in ends),
        () if is_same else frontier(first, second, pairs, found.alike(found.by_backward), is_forward=False),
        _extras(first, second),
        others,
    )


def _best_view(a: TrainableModel, b: TrainableModel) -> tuple[NetworkView, NetworkView, bool]:
    """Both models so that they are one network, where they can be; and whether biases are seen then.

    Exporters leave out biases of zeros, and spell activations in ways of their own.
    """
    first, second = plain = NetworkView.of(a), NetworkView.of(b)
    if _are_same(*plain):
        return *plain, True
    without_biases = NetworkView.of(a, are_biases_seen=False), NetworkView.of(b, are_biases_seen=False)
    if _are_same(*without_biases):
        return *without_biases, False
    functions = spelled_apart((a, first.structure), (b, second.structure))
    if not functions[0]:
        return *plain, True
    for are_biases_seen in (True, False):
        by_values = [
            NetworkView.of(model, are_biases_seen, known)
            for model, known in zip((a, b), functions, strict=True)
        ]
        if _are_same(*by_values):
            return by_values[0], by_values[1], are_biases_seen
    by_values = [NetworkView.of(model, True, known) for model, known in zip((a, b), functions, strict=True)]
    counts = [len(_matched_values(*sides).pairs) for sides in (plain, by_values)]
    return (*plain, True) if counts[0] >= counts[1] else (by_values[0], by_values[1], True)


def _are_same(a: NetworkView, b: NetworkView) -> bool:
    digests = a.outputs_digests(), b.outputs_digests()
    return (
        digests[0] == digests[1] and find_isomorphism(a.cones, a.outputs(), b.cones, b.outputs()).is_possible
    )


def _check_batches(a: TrainableModel, b: TrainableModel) -> None:
    shapes = [Counter(tuple(sorted(model.types[name].shape)) for name in model.inputs) for model in (a, b)]
    samples = [
        Counter(tuple(sorted(model.types[name].shape[1:])) for name in model.inputs) for model in (a, b)
    ]
    if shapes[0] == shapes[1] or samples[0] != samples[1]:
        return
    firsts = [model.types[model.inputs[0]].shape[:1] for model in (a, b)]
    raise ShapeError(
        f"the models are read for batches of {firsts[0][0]} and {firsts[1][0]}, and their tensors cannot be "
        f"matched; pass --input-shapes with one batch for both"
    )


# -- values -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _MatchedValues:
    """Values of one side by those of the other, the evidence for them, and what is in doubt."""

    pairs: dict[int, int]
    by_forward: frozenset[int]
    by_backward: frozenset[int]
    ambiguous_a: dict[int, int]
    ambiguous_b: dict[int, int]

    def alike(self, evident: frozenset[int]) -> dict[int, int]:
        """The pairs for which there is this evidence."""
        return {value: other for value, other in self.pairs.items() if value in evident}


def _matched_values(a: NetworkView, b: NetworkView) -> _MatchedValues:
    forward = _unique_pairs(a.forward(), b.forward())
    ties = _ties_broken(a.forward(), b.forward(), a.cones, b.cones, is_forward=True)
    forward = verified_pairs(a.cones, b.cones, forward | ties, ties, is_forward=True)
    backward = _unique_pairs(a.cones.backward, b.cones.backward)
    ties = _ties_broken(a.cones.backward, b.cones.backward, a.cones, b.cones, is_forward=False)
    backward = verified_pairs(a.cones, b.cones, backward | ties, ties, is_forward=False)
    of_a: dict[int, set[int]] = {}
    of_b: dict[int, set[int]] = {}
    for pairs in (forward, backward):
        for one, other in pairs.items():
            of_a.setdefault(one, set()).add(other)
            of_b.setdefault(other, set()).add(one)
    checks = (
        _Contradiction.of(a.forward(), b.forward()),
        _Contradiction.of(a.cones.backward, b.cones.backward),
    )
    agreed: dict[int, int] = {}
    for one, others in of_a.items():
        other = min(others)
        is_only = len(others) == 1 and len(of_b[other]) == 1
        if is_only and not any(check.holds(one, other) for check in checks):
            agreed[one] = other
    for one, other in list(agreed.items()):
        if one not in a.cones.backward and other not in b.cones.backward:
            # Nothing says where it leads: that it is not of another layer like its own, only this does.
            ends = grounds(a.cones, one), grounds(b.cones, other)
            if {agreed.get(ground) for ground in ends[0]} != ends[1]:
                del agreed[one]
    doubts_a = {one: len(others) for one, others in of_a.items() if one not in agreed}
    doubts_b = {one: len(others) for one, others in of_b.items() if one not in agreed.values()}
    _add_ties(doubts_a, a, b, agreed.keys())
    _add_ties(doubts_b, b, a, set(agreed.values()))
    return _MatchedValues(agreed, frozenset(forward), frozenset(backward), doubts_a, doubts_b)


@dataclass(frozen=True, slots=True)
class _Contradiction:
    """Whether two values are not alike by one kind of cone, though one of them is like another value."""

    keys_a: Mapping[int, str]
    keys_b: Mapping[int, str]
    found_a: frozenset[str]
    found_b: frozenset[str]

    @classmethod
    def of(cls, keys_a: Mapping[int, str], keys_b: Mapping[int, str]) -> _Contradiction:
        return cls(keys_a, keys_b, frozenset(keys_a.values()), frozenset(keys_b.values()))

    def holds(self, one: int, other: int) -> bool:
        here, there = self.keys_a.get(one, ""), self.keys_b.get(other, "")
        return here != there and (here in self.found_b or there in self.found_a)


def _add_ties(
    doubts: dict[int, int], side: NetworkView, other: NetworkView, matched: Collection[int]
) -> None:
    """Adds what has several counterparts that are alike."""
    counts = Counter(other.forward().values())
    for value, key in side.forward().items():
        if value not in matched and counts[key]:
            doubts.setdefault(value, counts[key])


def _unique_pairs(keys_a: Mapping[int, str], keys_b: Mapping[int, str]) -> dict[int, int]:
    """Values that alone have a key on their side, and have the same."""
    counts_a, counts_b = Counter(keys_a.values()), Counter(keys_b.values())
    by_key = {key: value for value, key in keys_b.items() if counts_b[key] == 1}
    return {value: by_key[key] for value, key in keys_a.items() if counts_a[key] == 1 and key in by_key}


def _ties_broken(
    keys_a: dict[int, str], keys_b: dict[int, str], a: ConeDigests, b: ConeDigests, *, is_forward: bool
) -> dict[int, int]:
    """Pairs of values that are alike but for what their neighbours on the other side of the cone are.

    Neighbours are known by the same kind of cone, so that what differs elsewhere does not reach here.
    """
    counts_a, counts_b = Counter(keys_a.values()), Counter(keys_b.values())
    tied = {key for key, count in counts_a.items() if count > 1 and counts_b[key] == count}
    sides = []
    for keys, cones in ((keys_a, a), (keys_b, b)):
        around = (cones.readers if is_forward else cones.operands).get
        sides.append((keys, around))
    found: dict[int, int] = {}
    refined_a, refined_b = keys_a, keys_b
    for _ in range(_FURTHEST_NEIGHBOUR if tied else 0):
        refined_a = refine_digests(refined_a, keys_a, lambda value: sides[0][1](value, []))
        refined_b = refine_digests(refined_b, keys_b, lambda value: sides[1][1](value, []))
        pairs = _unique_pairs(
            {value: key for value, key in refined_a.items() if keys_a[value] in tied},
            {value: key for value, key in refined_b.items() if keys_b[value] in tied},
        )
        found = pairs | found
    return found


# -- tensors ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Pairs the tensors of matched values. What each is used for is said in the same words for both sides."""

    a: NetworkView
    b: NetworkView
    uses_a: Mapping[str, str]
    uses_b: Mapping[str, str]

    def paired(self, here: Sequence[str], there: Sequence[str]) -> list[Pair]:
        """The tensors of a value: those alike in all first, then in all but layout, then in all but scale."""
        pairs: list[Pair] = []
        views_a, views_b = self.a.structure.views, self.b.structure.views
        left_a, left_b = list(here), list(there)
        for likeness in (full_key, but_for_layout, key_ignoring_scale):
            groups_a = _grouped(here, {name: likeness(views_a[name]) for name in here})
            groups_b = _grouped(there, {name: likeness(views_b[name]) for name in there})
            for key, names in groups_a.items():
                others = groups_b.get(key, [])
                for name, other in self._told_apart(names, others):
                    if name in left_a or other in left_b:
                        pairs.append(_pair(name, other, views_a[name], views_b[other]))
            # What is in doubt here is not looked for among what is less alike.
            left_a = [name for name in left_a if likeness(views_a[name]) not in groups_b]
            left_b = [name for name in left_b if likeness(views_b[name]) not in groups_a]
        return pairs

    def _told_apart(self, names: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
        """Where each side has several that hold the same, what reads them tells them apart, or nothing.

        Those that are rearrangements of one tensor are not several.
        """
        if not names or not others:
            return []
        if min(len({self.a.root_of(n) for n in names}), len({self.b.root_of(n) for n in others})) == 1:
            last = (len(names) - 1, len(others) - 1)
            return [
                (names[min(place, last[0])], others[min(place, last[1])]) for place in range(max(last) + 1)
            ]
        uses = _grouped(others, self.uses_b)
        alike = _grouped(names, self.uses_a)
        return [
            (name, other)
            for use, group in alike.items()
            if min(len(group), len(uses.get(use, []))) == 1
            for name in group
            for other in uses[use]
        ]


def _pair(name: str, other: str, one: View, two: View) -> Pair:
    is_rearranged = full_key(replace(one, scale=1.0)) != full_key(replace(two, scale=1.0))
    factor = two.scale / one.scale
    return Pair(name, other, is_rearranged, 1.0 if math.isclose(factor, 1.0, rel_tol=1e-5) else factor)


def _grouped(names: Sequence[str], keys: Mapping[str, object]) -> dict[object, list[str]]:
    groups: dict[object, list[str]] = {}
    for name in names:
        groups.setdefault(keys[name], []).append(name)
    return groups


# -- what is told of the rest -----------------------------------------------------------------


def _unmatched(
    side: NetworkView,
    matched: Mapping[str, str],
    partners: Mapping[int, int],
    left: Collection[tuple[int, object]],
    doubts: Mapping[int, int],
    is_same: bool,
) -> Iterator[Unmatched]:
    """`left` are values of the other model that unmatched tensors hold, with what those are alike in."""
    packed = {whole for whole, _ in side.structure.parts.values()}
    for name, view in side.structure.views.items():
        if name in matched:
            continue
        value = view.value
        if value in doubts:
            several = f"{doubts[value]} values of the other model fit"
            yield Unmatched(
                name, Reason.AMBIGUOUS, several if doubts[value] > 1 else "its context fits another"
            )
        elif value in side.cones.anchors:
            yield Unmatched(name, Reason.ONE_SIDE, "inside of a layer: a bias or a normalisation follows")
        elif (partners.get(value), key_ignoring_scale(view)) in left:
            yield Unmatched(name, Reason.AMBIGUOUS, "several tensors hold the same and are read alike")
        elif value in partners:
            yield Unmatched(
                name, Reason.ONE_SIDE, "inside of an operator of the other model, or behind a dropout"
            )
        elif value in packed:
            yield Unmatched(name, Reason.ONE_SIDE, "read in parts, which the other model computes one by one")
        elif value not in side.cones.backward:
            yield Unmatched(
                name, Reason.ONE_SIDE, "inside of an operator that is written out here, such as an activation"
            )
        else:
            reason = Reason.ONE_SIDE if is_same else Reason.PARTED
            yield Unmatched(name, reason, "no value of the other model is computed so and read so")


_COPIES = frozenset({"Transpose"})


def _extras(a: NetworkView, b: NetworkView) -> tuple[Extra, ...]:
    found: list[Extra] = []
    counted = [_materialised(side) for side in (a, b)]
    for kind in counted[0]:
        here, there = counted[0][kind], counted[1][kind]
        if here != there:
            found.append(Extra(kind, here[0], there[0], here[1], there[1]))
    return tuple(found)


def _materialised(side: NetworkView) -> dict[str, tuple[int, int]]:
    """Tensors and bytes by what makes them more than the network needs."""
    kinds: dict[str, list[str]] = {
        "transposed copies": [],
        "inside of layers": [],
        "inside of composed operators": [],
    }
    for node in side.model.nodes:
        name = node.outputs[0]
        view = side.structure.views.get(name)
        if view is None:
            continue
        if node.op in _COPIES:
            kinds["transposed copies"].append(name)
        elif view.value in side.cones.anchors:
            kinds["inside of layers"].append(name)
        elif view.value not in side.cones.backward:
            kinds["inside of composed operators"].append(name)
    types = side.model.types
    return {
        kind: (len(names), sum(types[name].size_bytes for name in names)) for kind, names in kinds.items()
    }
