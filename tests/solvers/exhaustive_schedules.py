"""The least peak over all schedules of a small training step: ground truth for the solver `peak`.

Solvers choose an order and a set of kept tensors; the recomputations follow from these. This search does
not restrict these: operators run in any order that the data allow, and a tensor may be released at any
time. Two conditions remain: backward begins after forward, and each forward operator runs at most twice.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations, count
from typing import NamedTuple

from onnxgc.budget.from_step import problem_of
from onnxgc.errors import PlanError
from onnxgc.planning.schedule import StepGraph

MAX_STATES = 2_000_000


class State(NamedTuple):
    """Bitsets: operators that have run, forward operators that have run twice, live tensors."""

    ran: int
    twice: int
    live: int


def least_peak_of_schedules(step: StepGraph, *, max_states: int = MAX_STATES) -> int:
    """The least simulated peak in bytes over all schedules of a step.

    Bottleneck shortest path (Dijkstra's algorithm with the maximum in place of the sum) over the states. A
    tensor is released right after an operator that reads or writes it, or not at all: keeping it longer
    without a use never helps.

    Raises:
        PlanError: the search visits more than `max_states` states.
    """
    transitions = _Transitions(step)
    start = State(0, 0, 0)
    best = {start: 0}
    # Among equal peaks, prefer the most operators run, then the latest entry: depth first.
    latest = count(0, -1)
    queue = [(0, 0, next(latest), start)]
    visited: set[State] = set()
    while queue:
        peak, _, _, state = heapq.heappop(queue)
        if state in visited:
            continue
        if state.ran == transitions.all_run:
            return peak
        visited.add(state)
        if len(visited) > max_states:
            raise PlanError(f"the step has more than {max_states} states to search; take one with fewer operators")
        for live_bytes, following in transitions.after(state):
            reached = max(peak, live_bytes)
            if following not in visited and reached < best.get(following, reached + 1):
                best[following] = reached
                heapq.heappush(queue, (reached, -following.ran.bit_count(), next(latest), following))
    raise PlanError("no order of the step's operators has their inputs in memory; check the step")


def with_linked_backward(step: StepGraph) -> StepGraph:
    """A step without named gradients, with a gradient of 0 bytes from each chunk to its consumers.

    The data then allow only the orders of backward that the chain rule allows. Each chunk has one operator.
    """
    number = {name: place for place, name in enumerate(step.sources)}
    readers: dict[str, list[str]] = {}
    for operator in step.forward:
        for tensor in operator.inputs:
            readers.setdefault(tensor, []).append(operator.name)
    after = {
        operator.name: [name for tensor in operator.outputs for name in readers.get(tensor, ())]
        for operator in step.forward
    }
    chunks = []
    for (operator,), source in zip(step.chunks, step.sources, strict=True):
        incoming = (f"link{number[name]}" for name in after[source] if name in number)
        linked = replace(
            operator, inputs=(*operator.inputs, *incoming), outputs=(*operator.outputs, f"link{number[source]}")
        )
        chunks.append((linked,))
    links = {f"link{place}": 0 for place in number.values()}
    return replace(step, chunks=tuple(chunks), sizes={**step.sizes, **links})


class _Transitions:
    def __init__(self, step: StepGraph) -> None:
        self._problem = problem_of(step, {}).problem
        names = {operator.name for operator in step.forward}
        operators = list(enumerate(self._problem.operators))
        self.all_run = (1 << len(operators)) - 1
        self._forward = _bits(place for place, operator in operators if operator.name in names)
        self._repeatable = self._forward & _bits(place for place, operator in operators if operator.may_repeat)

    def after(self, state: State) -> Iterator[tuple[int, State]]:
        """For each possible next run: the live bytes during it, and the state after it."""
        sizes = self._problem.sizes
        memory = sum(size for storage, size in enumerate(sizes) if state.live >> storage & 1)
        possible = self.all_run if not self._forward & ~state.ran else self._forward
        for place, operator in enumerate(self._problem.operators):
            bit = 1 << place
            again = state.ran & bit
            if not possible & bit or _bits(operator.reads) & ~state.live or again & (state.twice | ~self._repeatable):
                continue
            ran, twice = state.ran | bit, state.twice | again
            wanted = [not state.live >> s & 1 and self._may_be_read(s, ran, twice) for s in operator.writes]
            if again and not any(wanted):
                continue
            for number in range(operator.min_writes, len(operator.writes) + 1):
                # An output after the last wanted one would be useless.
                if number > operator.min_writes and not wanted[number - 1]:
                    continue
                written = operator.writes[:number]
                live_bytes = memory + sum(sizes[storage] for storage in written) + operator.workspace
                for released in self._releases({*operator.reads, *written}, ran, twice):
                    shared = sizes[operator.in_place] if operator.in_place in released else 0
                    live = (state.live | _bits(written)) & ~_bits(released)
                    yield live_bytes - shared, State(ran, twice, live)

    def _releases(self, storages: set[int], ran: int, twice: int) -> Iterator[set[int]]:
        """Each choice of storages to release: those without a reader, and some that are made again."""
        free = storages - self._problem.kept
        unneeded = {storage for storage in free if not self._may_be_read(storage, ran, twice)}
        choices = [storage for storage in free - unneeded if self._may_be_released(storage, ran, twice)]
        for number in range(len(choices) + 1):
            yield from (unneeded.union(chosen) for chosen in combinations(choices, number))

    def _may_be_read(self, storage: int, ran: int, twice: int) -> bool:
        return any((~ran | self._repeatable & ~twice) >> reader & 1 for reader in self._problem.readers[storage])

    def _may_be_released(self, storage: int, ran: int, twice: int) -> bool:
        """Whether the step can finish without the storage, or with another run of its producer."""
        if (self._repeatable & ~twice) >> self._problem.producer[storage] & 1:
            return True
        return all(ran >> reader & 1 for reader in self._problem.readers[storage])


def _bits(places: Iterable[int]) -> int:
    return sum(1 << place for place in set(places))
