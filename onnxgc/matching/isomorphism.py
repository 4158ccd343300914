"""Isomorphism of two networks: a one-to-one map of layers that preserves who reads whom.

Equal digests do not prove equality: they count a value with two readers as two values. Two branches with
equal digests may each be read once, or one of them twice, and consumers of such branches may be swapped.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnxgc.matching.cone_digests import ConeDigests
from onnxgc.matching.graph_helpers import grouped, reachable

# Ties beyond that count as isomorphic.
MAX_TRIALS = 1000
# Isomorphism tests per network and direction, to find the values at which networks diverge.
MAX_VERIFICATIONS = 100


@dataclass(frozen=True, slots=True)
class Isomorphism:
    """Whether there is an isomorphism, and the class of each layer.

    An isomorphism maps layers to layers of the same class.
    """

    exists: bool
    classes_a: Mapping[int, Hashable]
    classes_b: Mapping[int, Hashable]


def find_isomorphism(a: ConeDigests, outputs_a: Sequence[int], b: ConeDigests, outputs_b: Sequence[int]) -> Isomorphism:
    """Searches for an isomorphism of the cones of `outputs` with equal digests, by colour refinement.

    Where networks have different numbers of equal layers, as by shared weights, only inputs are compared.
    """
    graph = _Graph()
    layers = graph.add(a, outputs_a), graph.add(b, outputs_b)
    middle = len(layers[0])
    classes: Sequence[Hashable] = graph.keys
    if Counter(classes[:middle]) != Counter(classes[middle:]):
        inputs = [Counter(classes[n] for n in side.values() if graph.is_input(n)) for side in layers]
        exists = inputs[0] == inputs[1]
    else:
        partition = _Partition(graph, middle)
        exists = partition.refine()
        classes = partition.classes()
        exists = exists and _break_ties(partition)
    return Isomorphism(exists, *({layer: classes[n] for layer, n in side.items()} for side in layers))


def verified_pairs(
    a: ConeDigests, b: ConeDigests, pairs: Mapping[int, int], ties: Collection[int], *, is_forward: bool
) -> dict[int, int]:
    """The pairs of values with equal digests whose cones are isomorphic.

    A value inside a layer shares the result of that layer. `ties` are values whose pairs might be swapped: a
    failure at one of them does not extend to the values that depend on it.
    """
    verified = dict(pairs)
    a, b = (a, b) if is_forward else (a.reversed(), b.reversed())
    pending = [value for value, other in pairs.items() if _is_layer(a, value) and _is_layer(b, other)]
    pending.sort(reverse=not is_forward)
    position = len(pending) - 1
    for _ in range(MAX_VERIFICATIONS):
        if not pending:
            break
        value = pending[position]
        isomorphism = find_isomorphism(a, [value], b, [pairs[value]])
        if isomorphism.exists:
            classes_a, classes_b = isomorphism.classes_a, isomorphism.classes_b
            decided = set(classes_a)
            wrong = {v for v in decided if v in pairs and classes_a[v] != classes_b.get(pairs[v])}
        else:
            decided = wrong = {value} if value in ties else _dependents(a, value)
        for other in wrong.intersection(pending):
            del verified[other]
        pending = [other for other in pending if other not in decided]
        # Bisection: either result decides all values on one side.
        position = len(pending) // 2
    rejected = pairs.keys() - verified.keys()
    return {value: other for value, other in verified.items() if a.anchors.get(value) not in rejected}


def _is_layer(cones: ConeDigests, value: int) -> bool:
    return value in cones.operands and value not in cones.anchors


def _dependents(cones: ConeDigests, value: int) -> set[int]:
    return reachable([value], lambda operand: (reader for reader, _ in cones.readers[operand]))


def _break_ties(partition: "_Partition") -> bool:
    """Whether each layer can be identified with one of its class so that the neighbours follow."""
    trials = 0
    for node in range(partition.middle):
        others = partition.candidates_for(node)
        for other in others if len(others) > 1 else ():
            trials += 1
            if trials > MAX_TRIALS or partition.identify(node, other):
                break
        else:
            if len(others) > 1:
                return False
    return True


class _Graph:
    """The layers of both networks as one graph, with a key for each and edges in both directions."""

    def __init__(self) -> None:
        self.keys: list[Hashable] = []
        self.edges: list[list[tuple[str, int]]] = []

    def add(self, cones: ConeDigests, outputs: Sequence[int]) -> Mapping[int, int]:
        """Adds the layers that contribute to outputs of a network, and returns their nodes."""

        def operands_of(layer: int) -> Iterable[tuple[int, str]]:
            reads = ((cones.anchors.get(value, value), path) for value, path in cones.operands[layer])
            return dict.fromkeys(reads)

        times = Counter(outputs)
        layers = reachable(outputs, lambda layer: (operand for operand, _ in operands_of(layer)))
        nodes = {layer: node for node, layer in enumerate(sorted(layers), len(self.keys))}
        self.keys += ((cones.forward[layer], times[layer]) for layer in nodes)
        self.edges += ([] for _ in nodes)
        for layer, node in nodes.items():
            for operand, path in operands_of(layer):
                self.edges[node].append((f"reads {path}", nodes[operand]))
                self.edges[nodes[operand]].append((f"is read {path}", node))
        return nodes

    def is_input(self, node: int) -> bool:
        return not any(path.startswith("reads ") for path, _ in self.edges[node])


class _Partition:
    """Classes of layers that are not yet distinguished, each with as many members of either network.

    The nodes before `middle` are those of the first network.
    """

    def __init__(self, graph: _Graph, middle: int) -> None:
        self.middle = middle
        self._edges = graph.edges
        self._members = _with_equal_keys(dict(enumerate(graph.keys)))
        self._class_of = [0] * len(graph.keys)
        for number, members in enumerate(self._members):
            for node in members:
                self._class_of[node] = number
        self._undo: list[tuple[int, list[int]]] = []

    def classes(self) -> list[int]:
        return list(self._class_of)

    def candidates_for(self, node: int) -> list[int]:
        """The nodes of the second network to which an isomorphism may map this one."""
        return [other for other in self._members[self._class_of[node]] if other >= self.middle]

    def refine(self) -> bool:
        """Distinguishes nodes by neighbours; False once a class has more members of one network."""
        return self._propagate(range(len(self._class_of)))

    def identify(self, node: int, other: int) -> bool:
        """Maps a node to another one and refines; restores the partition if that fails."""
        self._undo = []
        count, number = len(self._members), self._class_of[node]
        rest = [member for member in self._members[number] if member not in (node, other)]
        if self._propagate(self._neighbours(self._split(number, [rest, [node, other]]))):
            return True
        for number, members in reversed(self._undo):
            self._members[number] = members
            for member in members:
                self._class_of[member] = number
        del self._members[count:]
        return False

    def _neighbours(self, nodes: Iterable[int]) -> set[int]:
        return {neighbour for node in nodes for _, neighbour in self._edges[node]}

    def _propagate(self, nodes: Iterable[int]) -> bool:
        """Splits the classes of these nodes by their neighbours, then those around the split classes."""
        while nodes:
            touched: dict[int, dict[int, Hashable]] = {}
            for node in sorted(nodes):
                seen = tuple(sorted((path, self._class_of[other]) for path, other in self._edges[node]))
                touched.setdefault(self._class_of[node], {})[node] = seen
            moved: list[int] = []
            for number, seen_by in touched.items():
                untouched = [node for node in self._members[number] if node not in seen_by]
                groups = [*([untouched] if untouched else []), *_with_equal_keys(seen_by)]
                if not all(self._is_balanced(group) for group in groups):
                    return False
                moved += self._split(number, groups)
            nodes = self._neighbours(moved)
        return True

    def _is_balanced(self, nodes: Sequence[int]) -> bool:
        return 2 * sum(node < self.middle for node in nodes) == len(nodes)

    def _split(self, number: int, groups: Sequence[list[int]]) -> list[int]:
        """Splits a class into groups, the largest of which keeps its number; returns the other members."""
        if len(groups) < 2:
            return []
        self._undo.append((number, self._members[number]))
        largest = max(groups, key=len)
        self._members[number] = largest
        moved: list[int] = []
        for group in groups:
            if group is largest:
                continue
            for node in group:
                self._class_of[node] = len(self._members)
            self._members.append(group)
            moved += group
        return moved


def _with_equal_keys(keys: Mapping[int, Hashable]) -> list[list[int]]:
    return list(grouped((key, node) for node, key in keys.items()).values())
