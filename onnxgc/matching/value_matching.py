"""Values of two networks that correspond to each other, by forward and backward cones."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from onnxgc.matching.cone_digests import ConeDigests, Edge, nearest_live_operands, refine_digests
from onnxgc.matching.isomorphism import verified_pairs
from onnxgc.matching.network_view import NetworkView

# From the projection of a query to the softmax by which keys differ from it.
_MAX_NEIGHBOUR_DISTANCE = 6


@dataclass(frozen=True, slots=True)
class MatchedValues:
    """Pairs of values, the evidence for each, and the ambiguous values of both sides.

    `pairs` maps values of the first network to those of the second. The pairs of the values `by_forward` have
    equal forward cones, those of the values `by_backward` equal backward cones. `ambiguous_*` map a value to
    its number of candidates.
    """

    pairs: dict[int, int]
    by_forward: frozenset[int]
    by_backward: frozenset[int]
    ambiguous_a: dict[int, int]
    ambiguous_b: dict[int, int]

    def pairs_of(self, values: frozenset[int]) -> dict[int, int]:
        return {value: other for value, other in self.pairs.items() if value in values}


def match_values(a: NetworkView, b: NetworkView) -> MatchedValues:
    """Matches values on which all evidence agrees, and of which each is the only candidate."""
    forward = _verified_pairs(a.forward(), b.forward(), a.cones, b.cones, is_forward=True)
    backward = _verified_pairs(a.cones.backward, b.cones.backward, a.cones, b.cones, is_forward=False)
    candidates_a: dict[int, set[int]] = defaultdict(set)
    candidates_b: dict[int, set[int]] = defaultdict(set)
    for one, other in (*forward.items(), *backward.items()):
        candidates_a[one].add(other)
        candidates_b[other].add(one)
    contradicts_forward = _contradiction(a.forward(), b.forward())
    contradicts_backward = _contradiction(a.cones.backward, b.cones.backward)
    agreed: dict[int, int] = {}
    for one, others in candidates_a.items():
        other = min(others)
        is_only = len(others) == 1 and len(candidates_b[other]) == 1
        if is_only and not contradicts_forward(one, other) and not contradicts_backward(one, other):
            agreed[one] = other
    _remove_unsupported(agreed, a.cones, b.cones)
    ambiguous_a = {one: len(others) for one, others in candidates_a.items() if one not in agreed}
    ambiguous_b = {one: len(others) for one, others in candidates_b.items() if one not in agreed.values()}
    _add_ties(ambiguous_a, a, b, agreed.keys())
    _add_ties(ambiguous_b, b, a, set(agreed.values()))
    return MatchedValues(agreed, frozenset(forward), frozenset(backward), ambiguous_a, ambiguous_b)


def _verified_pairs(
    keys_a: dict[int, str], keys_b: dict[int, str], a: ConeDigests, b: ConeDigests, *, is_forward: bool
) -> dict[int, int]:
    ties = _broken_ties(keys_a, keys_b, a, b, is_forward=is_forward)
    return verified_pairs(a, b, _unique_pairs(keys_a, keys_b) | ties, ties, is_forward=is_forward)


def _contradiction(keys_a: Mapping[int, str], keys_b: Mapping[int, str]) -> Callable[[int, int], bool]:
    """Whether the digests of a pair differ, and one of them has an equal in the other network."""
    all_a, all_b = set(keys_a.values()), set(keys_b.values())

    def contradicts(one: int, other: int) -> bool:
        here, there = keys_a.get(one, ""), keys_b.get(other, "")
        return here != there and (here in all_b or there in all_a)

    return contradicts


def _remove_unsupported(pairs: dict[int, int], a: ConeDigests, b: ConeDigests) -> None:
    """Removes pairs of dead values unless their nearest live operands are paired with each other.

    Such values have no backward cone. Only their operands show to which of several equal layers they belong.
    """
    for one, other in list(pairs.items()):
        if one not in a.backward and other not in b.backward:
            here, there = nearest_live_operands(a, one), nearest_live_operands(b, other)
            if {pairs.get(operand) for operand in here} != there:
                del pairs[one]


def _add_ties(ambiguous: dict[int, int], side: NetworkView, other: NetworkView, matched: Collection[int]) -> None:
    """Adds unmatched values whose forward digest occurs in the other network."""
    counts = Counter(other.forward().values())
    for value, key in side.forward().items():
        if value not in matched and counts[key]:
            ambiguous.setdefault(value, counts[key])


def _unique_pairs(keys_a: Mapping[int, str], keys_b: Mapping[int, str]) -> dict[int, int]:
    """Pairs of values with a key that occurs once on each side."""
    counts_a, counts_b = Counter(keys_a.values()), Counter(keys_b.values())
    by_key = {key: value for value, key in keys_b.items() if counts_b[key] == 1}
    return {value: by_key[key] for value, key in keys_a.items() if counts_a[key] == 1 and key in by_key}


def _broken_ties(
    keys_a: dict[int, str], keys_b: dict[int, str], a: ConeDigests, b: ConeDigests, *, is_forward: bool
) -> dict[int, int]:
    """Pairs of values with equal digests that only their neighbours outside the cone distinguish.

    Neighbours are compared by the same kind of cone: a difference elsewhere in the networks has no effect.
    """
    counts_a, counts_b = Counter(keys_a.values()), Counter(keys_b.values())
    tied = {key for key, count in counts_a.items() if count > 1 and counts_b[key] == count}
    refined = [keys_a, keys_b]
    pairs: dict[int, int] = {}
    for _ in range(_MAX_NEIGHBOUR_DISTANCE if tied else 0):
        refined = [
            _refined(keys, labels, cones.readers if is_forward else cones.operands)
            for keys, labels, cones in zip(refined, (keys_a, keys_b), (a, b), strict=True)
        ]
        tied_a, tied_b = (
            {value: key for value, key in keys.items() if labels[value] in tied}
            for keys, labels in zip(refined, (keys_a, keys_b), strict=True)
        )
        pairs = _unique_pairs(tied_a, tied_b) | pairs
    return pairs


def _refined(keys: dict[int, str], labels: dict[int, str], edges: Mapping[int, list[Edge]]) -> dict[int, str]:
    return refine_digests(keys, labels, lambda value: edges.get(value, []))
