"""Shapes of a frontier, and how a decision changes them.

A shape describes a set of kept vertices as far as later decisions depend on it, without numbers of
bytes (`onnxgc.solvers.paper.frontier_search`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from onnxgc.solvers.paper.indexed_problem import IndexedProblem

Shape: TypeAlias = tuple[tuple[int, ...], int]
"""Labels and paths of a frontier.

The label of a frontier vertex is its component's number, by first appearance, or -1 if it is kept.
Items are the components, followed by the kept frontier vertices in the frontier's order. Bit
x * items + y of the paths is set where item x reaches item y through decided vertices.
"""


@dataclass(frozen=True, slots=True)
class Elimination:
    """How the frontier changes when a vertex is decided.

    Slots number the frontier's vertices before the decision; the new vertex has the last slot.
    """

    vertex: int
    size_bytes: int
    forced: bool
    predecessor_slots: tuple[int, ...]
    successor_slots: tuple[int, ...]
    staying_slots: tuple[int, ...]
    predecessors_decided: tuple[bool, ...]
    """By staying slot: whether all predecessors are decided."""
    successors_decided: tuple[bool, ...]
    """By staying slot: whether all successors are decided."""
    transitions: "dict[tuple[Shape, bool], Transition | None]" = field(default_factory=dict)
    """Cache of `transition`, by shape and decision."""

    def transition(self, shape: Shape, *, keep: bool) -> "Transition | None":
        """The shape after the decision; `None` if it makes the set invalid."""
        key = (shape, keep)
        if key not in self.transitions:
            self.transitions[key] = _transition(self, shape, keep=keep)
        return self.transitions[key]


@dataclass(frozen=True, slots=True)
class Transition:
    """The change of a shape by one decision.

    `merged` are the components that join the new vertex. `sources` gives the old number of each
    component of the new shape, -1 for the joined one. `unchanged` if no component changes.
    """

    shape: Shape
    merged: tuple[int, ...]
    sources: tuple[int, ...]
    unchanged: bool


def eliminations(problem: IndexedProblem, order: Sequence[int]) -> list[Elimination]:
    """The changes of the frontier along an elimination order."""
    undecided_above = [len(tails) for tails in problem.predecessors]
    undecided_below = [len(heads) for heads in problem.successors]
    frontier: list[int] = []
    steps = []
    for vertex in order:
        for head in problem.successors[vertex]:
            undecided_above[head] -= 1
        for tail in problem.predecessors[vertex]:
            undecided_below[tail] -= 1
        slot = {v: index for index, v in enumerate(frontier)}
        frontier.append(vertex)
        staying = [index for index, v in enumerate(frontier) if undecided_above[v] or undecided_below[v]]
        frontier_after = [frontier[index] for index in staying]
        steps.append(
            Elimination(
                vertex=vertex,
                size_bytes=0 if problem.forced[vertex] else problem.sizes[vertex],
                forced=problem.forced[vertex],
                predecessor_slots=tuple(slot[v] for v in problem.predecessors[vertex] if v in slot),
                successor_slots=tuple(slot[v] for v in problem.successors[vertex] if v in slot),
                staying_slots=tuple(staying),
                predecessors_decided=tuple(undecided_above[v] == 0 for v in frontier_after),
                successors_decided=tuple(undecided_below[v] == 0 for v in frontier_after),
            )
        )
        frontier = frontier_after
    return steps


def unpack(shape: Shape) -> tuple[list[int], list[int]]:
    """The item of each frontier vertex, and for each item the bitset of items that it reaches."""
    labels, paths = shape
    items: list[int] = []
    count = max(labels, default=-1) + 1
    for label in labels:
        items.append(label if label >= 0 else count)
        count += label < 0
    reach = [0] * count
    for bit in _bits(paths):
        x, y = divmod(bit, count)
        reach[x] |= 1 << y
    return items, reach


def _transition(step: Elimination, shape: Shape, *, keep: bool) -> Transition | None:
    labels, _ = shape
    items, reach = unpack(shape)
    new = len(reach)
    merged: list[int] = []

    def adjacent(slots: Sequence[int]) -> int:
        """Items next to the new one, as a bitset; components that join it go to `merged`."""
        adjacent_items = 0
        for slot in slots:
            if keep or labels[slot] < 0:
                adjacent_items |= 1 << items[slot]
            elif items[slot] not in merged:
                merged.append(items[slot])
        return adjacent_items

    inputs, outputs = adjacent(step.predecessor_slots), adjacent(step.successor_slots)
    joined = sum(1 << item for item in merged)
    if not _add_paths(reach, joined, inputs, outputs):
        return None

    # Staying vertices get new numbers: components by first appearance, then kept vertices.
    new_labels: list[int] = []
    number: dict[int, int] = {}
    # Items in the new order, and whether paths from them and to them matter.
    kept_rows: list[tuple[int, bool, bool]] = []
    for staying, slot in enumerate(step.staying_slots):
        is_new = slot == len(labels)
        item = new if is_new or joined >> items[slot] & 1 else items[slot]
        if keep if is_new else labels[slot] < 0:
            new_labels.append(-1)
            # With all predecessors decided, no new path will reach the vertex, so no path from it can
            # become part of a cycle. With all successors decided, the same holds for paths to it.
            from_counts = not step.predecessors_decided[staying]
            to_counts = not step.successors_decided[staying]
            kept_rows.append((item, from_counts, to_counts))
        else:
            new_labels.append(number.setdefault(item, len(number)))
    rows = [(item, True, True) for item in number] + kept_rows
    sources = tuple(-1 if item == new else item for item in number)
    return Transition(
        shape=(tuple(new_labels), _packed_paths(reach, rows)),
        merged=tuple(merged),
        sources=sources,
        unchanged=sources == tuple(range(max(labels, default=-1) + 1)),
    )


def _add_paths(reach: list[int], joined: int, inputs: int, outputs: int) -> bool:
    """Add a new item and its paths to `reach`; `False` if they close a cycle.

    The new item takes in the items `joined`, and is between the items `inputs` and `outputs`.
    """
    new = len(reach)
    above, below = inputs, outputs
    for item, reached in enumerate(reach):
        if reached:
            if reached & (joined | inputs):
                above |= 1 << item
            if (joined | outputs) >> item & 1:
                below |= reached
    if (above | joined) & below or above & joined:
        return False
    for item in _bits(above):
        reach[item] |= below | 1 << new
    reach.append(below)
    return True


def _packed_paths(reach: Sequence[int], rows: Sequence[tuple[int, bool, bool]]) -> int:
    """Paths between items renumbered as `rows`: (item, whether paths from it count, and paths to it)."""
    if not any(reach):
        return 0
    column = {item: y for y, (item, _, to_counts) in enumerate(rows) if to_counts}
    counted = sum(1 << item for item in column)
    paths = 0
    for x, (item, from_counts, _) in enumerate(rows):
        if from_counts:
            for reached in _bits(reach[item] & counted):
                paths |= 1 << x * len(rows) + column[reached]
    return paths


def _bits(bits: int) -> Iterator[int]:
    """Numbers of the bits that are set, rising."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
