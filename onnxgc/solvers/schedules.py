"""The least peak of all schedules of a small training step: the truth behind the solver `peak`.

Solvers choose an order and what to keep; when things are computed again follows from that. Here
nothing follows: operators run in any order that the data allows, and each tensor may be dropped at
any time. That backward begins after forward, and that each forward operator runs at most twice, is
all that is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeAlias

from onnxgc.errors import PlanError
from onnxgc.planning.schedule import Operator, StepGraph

State: TypeAlias = tuple[int, int, int]
"""Bit sets: operators that have run, forward operators that have run twice, tensors in memory."""

MOST_STATES = 2_000_000


def least_peak_of_schedules(step: StepGraph, *, most_states: int = MOST_STATES) -> int:
    """The least peak in bytes, as the judge counts it, over all schedules of a step.

    A schedule runs each operator once, and each forward operator that may be computed again at most
    once more, in any order in which inputs are in memory. Backward begins when all of forward has run,
    since the loss depends on it. A tensor that was dropped is back only after its operator's second
    run; step outputs are never dropped.

    A bottleneck shortest path (Dijkstra's algorithm, with the maximum in place of the sum) over what has
    run and what is in memory. A tensor is dropped right after an operator that touched it, if at
    all: to hold it for longer without a use never helps.

    Raises:
        PlanError: the step has views, or more than `most_states` states were visited.
    """
    moves = _Moves(step)
    start: State = (0, 0, 0)
    best = {start: 0}
    # Of equal peaks, where most has run, then the latest: straight to the end where nothing is in the way.
    latest = count(0, -1)
    queue = [(0, 0, next(latest), start)]
    visited: set[State] = set()
    while queue:
        peak, _, _, state = heapq.heappop(queue)
        if state in visited:
            continue
        if state[0] == moves.all_run:
            return peak
        visited.add(state)
        if len(visited) > most_states:
            raise PlanError(
                f"the step has more than {most_states} states to search; take one with fewer operators"
            )
        for held, following in moves.from_state(state):
            reached = max(peak, held)
            if following not in visited and reached < best.get(following, reached + 1):
                best[following] = reached
                most_run = -(following[0].bit_count())
                heapq.heappush(queue, (reached, most_run, next(latest), following))
    raise PlanError("no order of the step's operators has their inputs in memory; check the step")


def with_linked_backward(step: StepGraph) -> StepGraph:
    """A step that names no gradients, with one of no bytes from each chunk to those that need it.

    So the data allows no order of backward but one that the chain rule allows. Each chunk has one
    operator.
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
            operator,
            inputs=(*operator.inputs, *incoming),
            outputs=(*operator.outputs, f"link{number[source]}"),
        )
        chunks.append((linked,))
    links = {f"link{place}": 0 for place in number.values()}
    return replace(step, chunks=tuple(chunks), sizes={**step.sizes, **links})


@dataclass(frozen=True, slots=True)
class _Move:
    """An operator in bits and tensor numbers.

    It writes at least `fewest` of its outputs in its first run, `fewest_again` in its second.
    `takes` is the tensor whose memory its first output may take, -1 for none; what the step returns
    takes none in its first run.
    """

    bit: int
    reads: int
    writes: tuple[int, ...]
    fewest: int
    fewest_again: int
    takes: int
    takes_again: int
    workspace_bytes: int
    is_forward: bool
    may_repeat: bool


class _Moves:
    """What can run next in a state, what is held meanwhile, and what may be in memory afterwards."""

    def __init__(self, step: StepGraph) -> None:
        operators = [*step.forward, *(operator for chunk in step.chunks for operator in chunk)]
        if any(operator.is_view for operator in operators):
            raise PlanError("the step has views, which this search does not know; take one without")
        names = dict.fromkeys(name for operator in operators for name in operator.outputs)
        self._number = {name: number for number, name in enumerate(names)}
        self._sizes = [step.sizes[name] for name in names]
        self._returned = self._bits(step.outputs)
        self.all_run = (1 << len(operators)) - 1
        self._forward = (1 << len(step.forward)) - 1
        self._moves = [
            self._move(operator, place, is_forward=place < len(step.forward))
            for place, operator in enumerate(operators)
        ]
        self._readers = [[m for m in self._moves if m.reads >> tensor & 1] for tensor in range(len(names))]
        self._maker = {tensor: move for move in self._moves for tensor in move.writes}

    def _bits(self, names: Iterable[str]) -> int:
        return sum(1 << self._number[name] for name in set(names) if name in self._number)

    def _move(self, operator: Operator, place: int, *, is_forward: bool) -> _Move:
        writes = tuple(self._number[name] for name in operator.outputs)
        fewest = len(writes) if operator.needs_all_outputs else min(1, len(writes))
        returned = [at for at, tensor in enumerate(writes, start=1) if self._returned >> tensor & 1]
        takes = -1
        if operator.in_place and writes:
            source = self._number.get(operator.inputs[0], -1)
            if source >= 0 and self._sizes[source] == self._sizes[writes[0]]:
                takes = source
        return _Move(
            bit=1 << place,
            reads=self._bits(operator.inputs),
            writes=writes,
            fewest=max([fewest, *returned]),
            fewest_again=fewest,
            takes=-1 if 1 in returned else takes,
            takes_again=takes,
            workspace_bytes=operator.workspace_bytes,
            is_forward=is_forward,
            may_repeat=is_forward and not operator.once,
        )

    def from_state(self, state: State) -> Iterator[tuple[int, State]]:
        """Bytes held while some operator runs, and the state after it, for each way to go on."""
        run, twice, present = state
        held = sum(self._sizes[tensor] for tensor in _members(present))
        forward_is_over = self._forward & ~run == 0
        for move in self._moves:
            again = bool(run & move.bit)
            if move.reads & ~present or not (forward_is_over or move.is_forward):
                continue
            if again and (not move.may_repeat or twice & move.bit):
                continue
            after = run | move.bit, twice | move.bit if again else twice
            wanted = [not present >> t & 1 and self._may_be_read(t, *after) for t in move.writes]
            if again and not any(wanted):
                continue
            fewest = move.fewest_again if again else move.fewest
            for number in range(fewest, len(move.writes) + 1):
                # An output behind all that are wanted would be made for nothing.
                if number == fewest or wanted[number - 1]:
                    yield from self._run(move, move.writes[:number], held, present, after, again=again)

    def _run(
        self,
        move: _Move,
        written: tuple[int, ...],
        held: int,
        present: int,
        after: tuple[int, int],
        *,
        again: bool,
    ) -> Iterator[tuple[int, State]]:
        held += sum(self._sizes[tensor] for tensor in written) + move.workspace_bytes
        made = sum(1 << tensor for tensor in written)
        takes = move.takes_again if again else move.takes
        dropped = 0
        choices = []
        for tensor in _members((move.reads | made) & ~self._returned):
            if not self._may_be_read(tensor, *after):
                dropped |= 1 << tensor
            elif self._may_go(tensor, *after):
                choices.append(tensor)
        for chosen in range(1 << len(choices)):
            gone = dropped | sum(1 << choices[at] for at in _members(chosen))
            shared = self._sizes[takes] if takes >= 0 and gone >> takes & 1 else 0
            yield held - shared, (*after, (present | made) & ~gone)

    def _may_be_read(self, tensor: int, run: int, twice: int) -> bool:
        return any(not run & m.bit or (m.may_repeat and not twice & m.bit) for m in self._readers[tensor])

    def _may_go(self, tensor: int, run: int, twice: int) -> bool:
        """Whether a step can end without the tensor, or with another run of what makes it."""
        maker = self._maker[tensor]
        if maker.may_repeat and not twice & maker.bit:
            return True
        return all(run & reader.bit for reader in self._readers[tensor])


def _members(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
