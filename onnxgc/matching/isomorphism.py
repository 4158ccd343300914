"""Whether one network can be laid on the other, layer on layer, so that what is read twice is so on both.

Digests say what an output is a function of as if each value had one reader. Two networks with equal digests
may still be two: where what reads twin branches takes from each of them its own part, or the other's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnxgc.matching.cone_digests import ConeDigests

# So many layers are laid on others by trial. What is left then is taken to be the same.
_MOST_TRIES = 1000
# So many values are looked at to find where networks begin to be read otherwise.
_MOST_LAYINGS = 100


@dataclass(frozen=True, slots=True)
class Isomorphism:
    """Whether the layers of one side can be laid on those of the other.

    Where they can, those of one kind may lie on each other, by what is around them.
    """

    is_possible: bool
    kinds_a: Mapping[int, Hashable]
    kinds_b: Mapping[int, Hashable]


def find_isomorphism(
    a: ConeDigests, outputs_a: Sequence[int], b: ConeDigests, outputs_b: Sequence[int]
) -> Isomorphism:
    """Lays the layers that make `outputs` with equal digests on each other.

    Where layers of one side are one on the other, as by weights that they share, only inputs are compared.
    """
    graph = _Graph()
    layers = graph.add(a, outputs_a), graph.add(b, outputs_b)
    middle = len(layers[0])
    kinds: Sequence[Hashable] = graph.keys
    if Counter(kinds[:middle]) != Counter(kinds[middle:]):
        inputs = [Counter(kinds[n] for n in side.values() if graph.is_input(n)) for side in layers]
        is_possible = inputs[0] == inputs[1]
    else:
        partition = _Partition(graph, middle)
        is_possible = partition.is_refined()
        kinds = partition.kinds()
        is_possible = is_possible and _are_ties_laid(partition)
    return Isomorphism(is_possible, *({layer: kinds[n] for layer, n in side.items()} for side in layers))


def verified_pairs(
    a: ConeDigests, b: ConeDigests, pairs: Mapping[int, int], ties: Collection[int], *, is_forward: bool
) -> dict[int, int]:
    """The pairs of values with equal digests of which what they are made of, or else lead to, can be laid.

    What is no layer by itself is as the layer that it is inside of. `ties` are pairs of which either may be
    another one, so that what is made of them says nothing of them.
    """
    found = dict(pairs)
    a, b = (a, b) if is_forward else (a.reversed(), b.reversed())
    pending = [value for value, other in pairs.items() if _is_layer(a, value) and _is_layer(b, other)]
    pending.sort(reverse=not is_forward)
    place = len(pending) - 1
    for _ in range(_MOST_LAYINGS):
        if not pending:
            break
        value = pending[place]
        laying = find_isomorphism(a, [value], b, [pairs[value]])
        if laying.is_possible:
            decided = set(laying.kinds_a)
            wrong = {v for v in decided if v in pairs and laying.kinds_a[v] != laying.kinds_b.get(pairs[v])}
        else:
            decided = wrong = {value} if value in ties else _behind(a, value)
        for other in wrong.intersection(pending):
            del found[other]
        pending = [other for other in pending if other not in decided]
        # What is in the middle says most, whether it can be laid or not.
        place = len(pending) // 2
    given_up = pairs.keys() - found.keys()
    return {value: other for value, other in found.items() if a.anchors.get(value) not in given_up}


def _is_layer(cones: ConeDigests, value: int) -> bool:
    return value in cones.operands and value not in cones.anchors


def _behind(cones: ConeDigests, value: int) -> set[int]:
    found, pending = {value}, [value]
    while pending:
        for reader, _ in cones.readers[pending.pop()]:
            if reader not in found:
                found.add(reader)
                pending.append(reader)
    return found


def _are_ties_laid(partition: _Partition) -> bool:
    """Lays each layer that has several alike on one of these, so that all around them can follow."""
    tries = 0
    for node in range(partition.middle):
        others = partition.partners_of(node)
        for other in others if len(others) > 1 else ():
            tries += 1
            if tries > _MOST_TRIES or partition.can_lay(node, other):
                break
        else:
            if len(others) > 1:
                return False
    return True


class _Graph:
    """The layers of both sides: what each is by itself, and what it reads and is read by."""

    def __init__(self) -> None:
        self.keys: list[Hashable] = []
        self.around: list[list[tuple[str, int]]] = []

    def add(self, cones: ConeDigests, outputs: Sequence[int]) -> Mapping[int, int]:
        """The numbers that the layers of a side have in the graph."""
        times = Counter(outputs)
        operands: dict[int, dict[tuple[int, str], None]] = {}
        pending = list(times)
        while pending:
            layer = pending.pop()
            if layer not in operands:
                reads = ((cones.anchors.get(value, value), path) for value, path in cones.operands[layer])
                operands[layer] = dict.fromkeys(reads)
                pending += (operand for operand, _ in operands[layer])
        numbers = {layer: number for number, layer in enumerate(sorted(operands), len(self.keys))}
        self.keys += ((cones.forward[layer], times[layer]) for layer in numbers)
        self.around += ([] for _ in numbers)
        for layer, number in numbers.items():
            for operand, path in operands[layer]:
                self.around[number].append((f"reads {path}", numbers[operand]))
                self.around[numbers[operand]].append((f"is read {path}", number))
        return numbers

    def is_input(self, node: int) -> bool:
        return not any(path.startswith("reads ") for path, _ in self.around[node])


class _Partition:
    """Sets of layers that nothing tells apart so far, each with as many of both sides.

    Those before `middle` are of the first side.
    """

    def __init__(self, graph: _Graph, middle: int) -> None:
        self.middle = middle
        self._around = graph.around
        self._sets: list[list[int]] = list(_grouped(dict(enumerate(graph.keys))))
        self._set_of = [0] * len(graph.keys)
        for place, members in enumerate(self._sets):
            for node in members:
                self._set_of[node] = place
        self._before: list[tuple[int, list[int]]] = []

    def kinds(self) -> list[int]:
        """The set of each layer."""
        return list(self._set_of)

    def partners_of(self, node: int) -> list[int]:
        """The layers of the second side that this one of the first may be."""
        return [other for other in self._sets[self._set_of[node]] if other >= self.middle]

    def is_refined(self) -> bool:
        """Tells apart what has other neighbours, while there are as many of both sides."""
        return self._is_spread(range(len(self._set_of)))

    def can_lay(self, node: int, other: int) -> bool:
        """Takes two layers for one where all around them can follow; else nothing is changed."""
        self._before = []
        count, place = len(self._sets), self._set_of[node]
        rest = [member for member in self._sets[place] if member not in (node, other)]
        if self._is_spread(self._neighbours(self._part(place, [rest, [node, other]]))):
            return True
        for place, members in reversed(self._before):
            self._sets[place] = members
            for member in members:
                self._set_of[member] = place
        del self._sets[count:]
        return False

    def _neighbours(self, nodes: Iterable[int]) -> set[int]:
        return {neighbour for node in nodes for _, neighbour in self._around[node]}

    def _is_spread(self, nodes: Iterable[int]) -> bool:
        """Parts sets by the neighbours of these nodes, and goes on with those around what was parted."""
        while nodes:
            touched: dict[int, dict[int, Hashable]] = {}
            for node in sorted(nodes):
                seen = tuple(sorted((path, self._set_of[other]) for path, other in self._around[node]))
                touched.setdefault(self._set_of[node], {})[node] = seen
            moved: list[int] = []
            for place, seen_by in touched.items():
                untouched = [node for node in self._sets[place] if node not in seen_by]
                groups = [untouched, *_grouped(seen_by)] if untouched else list(_grouped(seen_by))
                if not all(self._is_even(group) for group in groups):
                    return False
                moved += self._part(place, groups)
            nodes = self._neighbours(moved)
        return True

    def _is_even(self, nodes: Sequence[int]) -> bool:
        return 2 * sum(node < self.middle for node in nodes) == len(nodes)

    def _part(self, place: int, groups: Sequence[list[int]]) -> list[int]:
        """Makes a set several ones, and returns the members of all but the largest, which it stays."""
        if len(groups) < 2:
            return []
        self._before.append((place, self._sets[place]))
        first = max(groups, key=len)
        self._sets[place] = first
        moved: list[int] = []
        for group in groups:
            if group is first:
                continue
            for node in group:
                self._set_of[node] = len(self._sets)
            self._sets.append(group)
            moved += group
        return moved


def _grouped(keys: Mapping[int, Hashable]) -> Iterable[list[int]]:
    """Nodes with the same keys."""
    groups: dict[Hashable, list[int]] = {}
    for node, key in keys.items():
        groups.setdefault(key, []).append(node)
    return groups.values()
