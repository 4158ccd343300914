"""The least peak over all schedules of a small training step: ground truth for the solver `peak`.

Solvers choose an order and a set of kept tensors; the recomputations follow from these. This search does
not restrict these: operators run in any order that the data allow, and a tensor may be released at any
time. Two conditions remain: backward begins after forward, and each forward operator runs at most twice.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeAlias

from onnxgc.errors import PlanError
from onnxgc.planning.schedule import Operator, StepGraph

State: TypeAlias = tuple[int, int, int]
"""Bitsets: operators that have run, forward operators that have run twice, live tensors."""

MAX_STATES = 2_000_000


def least_peak_of_schedules(step: StepGraph, *, max_states: int = MAX_STATES) -> int:
    """The least simulated peak in bytes over all schedules of a step.

    A schedule runs each operator once, and each forward operator that may be recomputed at most once
    more, in any order in which inputs are live. Backward begins after all of forward, since the loss
    depends on it. A released tensor is live again only after its operator's second run; step outputs are
    never released.

    Bottleneck shortest path (Dijkstra's algorithm with the maximum in place of the sum) over the operators
    that have run and the live tensors. A tensor is released right after an operator that reads or
    writes it, or not at all: keeping it longer without a use never helps.

    Raises:
        PlanError: the step has views, or the search visits more than `max_states` states.
    """
    transitions = _Transitions(step)
    start: State = (0, 0, 0)
    best = {start: 0}
    # Among equal peaks, prefer the most operators run, then the latest entry: depth first.
    latest = count(0, -1)
    queue = [(0, 0, next(latest), start)]
    visited: set[State] = set()
    while queue:
        peak, _, _, state = heapq.heappop(queue)
        if state in visited:
            continue
        if state[0] == transitions.all_run:
            return peak
        visited.add(state)
        if len(visited) > max_states:
            raise PlanError(f"the step has more than {max_states} states to search; take one with fewer operators")
        for live_bytes, following in transitions.from_state(state):
            reached = max(peak, live_bytes)
            if following not in visited and reached < best.get(following, reached + 1):
                best[following] = reached
                most_run = -(following[0].bit_count())
                heapq.heappush(queue, (reached, most_run, next(latest), following))
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


@dataclass(frozen=True, slots=True)
class _OperatorBits:
    """An operator in bits and tensor numbers.

    It writes at least `min_outputs` of its outputs in its first run, `min_outputs_again` in its second.
    `reuses` is the tensor whose memory its first output may reuse, -1 for none; a step output reuses none
    in its first run.
    """

    bit: int
    reads: int
    writes: tuple[int, ...]
    min_outputs: int
    min_outputs_again: int
    reuses: int
    reuses_again: int
    workspace_bytes: int
    is_forward: bool
    may_repeat: bool


class _Transitions:
    """Transitions between states: the next operators, their live bytes, and the live tensors after them."""

    def __init__(self, step: StepGraph) -> None:
        operators = [*step.forward, *(operator for chunk in step.chunks for operator in chunk)]
        if any(operator.is_view for operator in operators):
            raise PlanError("the step has views, which this search does not support; take a step without views")
        names = dict.fromkeys(name for operator in operators for name in operator.outputs)
        self._number = {name: number for number, name in enumerate(names)}
        self._sizes = [step.sizes[name] for name in names]
        self._returned = self._bits(step.outputs)
        self.all_run = (1 << len(operators)) - 1
        self._forward = (1 << len(step.forward)) - 1
        self._operators = [
            self._operator_bits(operator, place, is_forward=place < len(step.forward))
            for place, operator in enumerate(operators)
        ]
        self._readers = [[m for m in self._operators if m.reads >> tensor & 1] for tensor in range(len(names))]
        self._producer = {tensor: operator for operator in self._operators for tensor in operator.writes}

    def _bits(self, names: Iterable[str]) -> int:
        return sum(1 << self._number[name] for name in set(names) if name in self._number)

    def _operator_bits(self, operator: Operator, place: int, *, is_forward: bool) -> _OperatorBits:
        writes = tuple(self._number[name] for name in operator.outputs)
        min_outputs = len(writes) if operator.needs_all_outputs else min(1, len(writes))
        returned = [at for at, tensor in enumerate(writes, start=1) if self._returned >> tensor & 1]
        reuses = -1
        if operator.in_place and writes:
            source = self._number.get(operator.inputs[0], -1)
            if source >= 0 and self._sizes[source] == self._sizes[writes[0]]:
                reuses = source
        return _OperatorBits(
            bit=1 << place,
            reads=self._bits(operator.inputs),
            writes=writes,
            min_outputs=max([min_outputs, *returned]),
            min_outputs_again=min_outputs,
            reuses=-1 if 1 in returned else reuses,
            reuses_again=reuses,
            workspace_bytes=operator.workspace_bytes,
            is_forward=is_forward,
            may_repeat=is_forward and not operator.once,
        )

    def from_state(self, state: State) -> Iterator[tuple[int, State]]:
        run, twice, present = state
        live_bytes = sum(self._sizes[tensor] for tensor in _members(present))
        forward_is_over = self._forward & ~run == 0
        for operator in self._operators:
            again = bool(run & operator.bit)
            if operator.reads & ~present or not (forward_is_over or operator.is_forward):
                continue
            if again and (not operator.may_repeat or twice & operator.bit):
                continue
            after = run | operator.bit, twice | operator.bit if again else twice
            wanted = [not present >> t & 1 and self._may_be_read(t, *after) for t in operator.writes]
            if again and not any(wanted):
                continue
            min_outputs = operator.min_outputs_again if again else operator.min_outputs
            for number in range(min_outputs, len(operator.writes) + 1):
                # An output after the last wanted one would be useless.
                if number == min_outputs or wanted[number - 1]:
                    yield from self._run(operator, operator.writes[:number], live_bytes, present, after, again=again)

    def _run(
        self,
        operator: _OperatorBits,
        written: tuple[int, ...],
        live_bytes: int,
        present: int,
        after: tuple[int, int],
        *,
        again: bool,
    ) -> Iterator[tuple[int, State]]:
        live_bytes += sum(self._sizes[tensor] for tensor in written) + operator.workspace_bytes
        made = sum(1 << tensor for tensor in written)
        reuses = operator.reuses_again if again else operator.reuses
        unneeded = 0
        choices = []
        for tensor in _members((operator.reads | made) & ~self._returned):
            if not self._may_be_read(tensor, *after):
                unneeded |= 1 << tensor
            elif self._may_be_released(tensor, *after):
                choices.append(tensor)
        for chosen in range(1 << len(choices)):
            released = unneeded | sum(1 << choices[at] for at in _members(chosen))
            shared = self._sizes[reuses] if reuses >= 0 and released >> reuses & 1 else 0
            yield live_bytes - shared, (*after, (present | made) & ~released)

    def _may_be_read(self, tensor: int, run: int, twice: int) -> bool:
        return any(not run & m.bit or (m.may_repeat and not twice & m.bit) for m in self._readers[tensor])

    def _may_be_released(self, tensor: int, run: int, twice: int) -> bool:
        """Whether the step can finish without the tensor, or with another run of its producer."""
        producer = self._producer[tensor]
        if producer.may_repeat and not twice & producer.bit:
            return True
        return all(run & reader.bit for reader in self._readers[tensor])


def _members(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
