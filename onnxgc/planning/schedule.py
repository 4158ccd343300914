"""From the decision what to discard to the exact sequence of operators of one training step."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Operator:
    """What scheduling and judging know of one operator.

    `inputs` and `outputs` are tensors. `is_view`: output 0 shares input 0's memory. `in_place`:
    output 0 takes input 0's memory where nobody else needs that any more. `once`: must not run a
    second time. `needs_all_outputs`: none may be left out, even if nobody reads it. `workspace_bytes`
    is held only while the operator runs; with `workspace_first` it is taken before the outputs are.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    is_view: bool = False
    in_place: bool = False
    once: bool = False
    needs_all_outputs: bool = False
    workspace_bytes: int = 0
    workspace_first: bool = False
    flops: int = 0


@dataclass(frozen=True, slots=True)
class StepGraph:
    """One training step with nothing decided: forward operators, then backward in chunks.

    `sources` names the forward operator that each chunk differentiates. `resident` tensors (fed
    values, parameters, constants) are there before and after and count nothing. `outputs` are kept to
    the end, in the order in which they are returned. `parameter_gradients` are reported apart. `replaced`
    maps an output of no bytes to the resident tensor whose memory it is written to: nothing may read that
    afterwards.
    """

    forward: tuple[Operator, ...]
    chunks: tuple[tuple[Operator, ...], ...]
    sources: tuple[str, ...]
    sizes: Mapping[str, int]
    resident: frozenset[str]
    outputs: tuple[str, ...]
    parameter_gradients: frozenset[str]
    replaced: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an operator of forward (`chunk` is None) or of a backward chunk for the first time."""

    operator: Operator
    chunk: int | None = None
    segment: int | None = None


@dataclass(frozen=True, slots=True)
class Recompute:
    """Run the operator `source` again, under new tensor names."""

    operator: Operator
    source: str
    segment: int


@dataclass(frozen=True, slots=True)
class Release:
    """Nobody needs these tensors any more; one that nobody ever read is released where it was made."""

    tensors: tuple[str, ...]


Step = Compute | Recompute | Release


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of one training step in order; `original_of` maps each copy to its tensor."""

    steps: tuple[Step, ...]
    original_of: Mapping[str, str]

    @property
    def recomputed(self) -> tuple[Recompute, ...]:
        return tuple(step for step in self.steps if isinstance(step, Recompute))

    @property
    def extra_flops(self) -> int:
        return sum(step.operator.flops for step in self.recomputed)


def build_schedule(graph: StepGraph, discarded: frozenset[str], copy_name: Callable[[str], str]) -> Schedule:
    """Schedule that drops the `discarded` forward tensors and computes them again for backward.

    A tensor is computed again right before the first chunk that reads it, together with what it needs
    and nothing else, and stays until its last reader. Discarded tensors that depend on one another
    form a segment, whose number the steps carry.
    """
    segments = _segments(graph, discarded)
    producer = {name: index for index, operator in enumerate(graph.forward) for name in operator.outputs}
    steps: list[Step] = [
        Compute(operator, None, next((segments[name] for name in operator.outputs if name in segments), None))
        for operator in graph.forward
    ]
    renamed: dict[str, str] = {}
    for index, chunk in enumerate(graph.chunks):
        missing = [name for operator in chunk for name in operator.inputs if name in segments]
        again: set[int] = set()
        while missing:
            name = missing.pop()
            if name not in renamed and producer[name] not in again:
                again.add(producer[name])
                missing.extend(read for read in graph.forward[producer[name]].inputs if read in segments)
        for position in sorted(again):
            operator = graph.forward[position]
            renamed.update((name, copy_name(name)) for name in operator.outputs)
            copy = replace(_with_names(operator, renamed), name=f"{operator.name}__recompute")
            steps.append(Recompute(copy, operator.name, _segment_of(operator, segments)))
        steps.extend(Compute(_with_names(operator, renamed), index) for operator in chunk)
    original_of = {copy: name for name, copy in renamed.items()}
    return Schedule(with_exact_lifetimes(steps, graph), original_of)


def with_exact_lifetimes(steps: Sequence[Step], graph: StepGraph) -> tuple[Step, ...]:
    """Steps that compute, without outputs that nobody reads, and with the releases behind last readers."""
    return tuple(_with_releases(_without_idle_outputs(steps, graph), graph))


def with_late_replacements(schedule: Schedule, graph: StepGraph) -> Schedule:
    """The schedule with each operator that replaces a tensor behind the last that reads the old one.

    A plan that runs operators again may do so behind the update of what they read.
    """
    steps = [step for step in schedule.steps if not isinstance(step, Release)]
    last_reader: dict[str, int] = {}
    shown = {old: old for old in graph.replaced.values()}
    for index, step in enumerate(steps):
        for name in step.operator.inputs:
            if name in shown:
                last_reader[shown[name]] = index
        if step.operator.is_view and step.operator.inputs[0] in shown:
            shown[step.operator.outputs[0]] = shown[step.operator.inputs[0]]
    late: dict[int, list[Step]] = {}
    rest: list[tuple[int, Step]] = []
    for index, step in enumerate(steps):
        old = next((graph.replaced[name] for name in step.operator.outputs if name in graph.replaced), None)
        last = index if old is None else last_reader.get(old, index)
        if last > index:
            late.setdefault(last, []).append(step)
        else:
            rest.append((index, step))
    if not late:
        return schedule
    ordered = [moved for index, step in rest for moved in (step, *late.get(index, ()))]
    return replace(schedule, steps=with_exact_lifetimes(ordered, graph))


def segment_read_first(graph: StepGraph, discarded: frozenset[str]) -> frozenset[str]:
    """The discarded tensors of the segment that backward reaches first.

    Nothing has been released by then, so a plan that only names checkpoints keeps them.
    """
    segments = _segments(graph, discarded)
    for chunk in graph.chunks:
        for operator in chunk:
            for name in operator.inputs:
                if name in segments:
                    return frozenset(other for other in segments if segments[other] == segments[name])
    return frozenset()


def segment_order(graph: StepGraph, discarded: frozenset[str]) -> tuple[str, ...]:
    """Names of the forward operators in an order that finishes each segment before the next.

    Parallel segments that the model's own order interleaves would have interleaved backward passes,
    and both their recomputations in memory at once. Where the order is free it stays the model's.
    """
    segments = _segments(graph, discarded)
    producer = {name: index for index, operator in enumerate(graph.forward) for name in operator.outputs}
    segment_of: list[int | None] = []
    for operator in graph.forward:
        own = [segments[name] for name in operator.outputs if name in segments]
        read = [segments[name] for name in operator.inputs if name in segments]
        segment_of.append(own[0] if own else read[-1] if read and operator.once else None)
    missing: list[int] = []
    readers: list[list[int]] = [[] for _ in graph.forward]
    for index, operator in enumerate(graph.forward):
        sources = {producer[name] for name in operator.inputs if name in producer}
        missing.append(len(sources))
        for source in sources:
            readers[source].append(index)
    ready: dict[int | None, list[int]] = {}
    for index, count in enumerate(missing):
        if count == 0:
            heapq.heappush(ready.setdefault(segment_of[index], []), index)
    order: list[str] = []
    current: int | None = None
    while ready:
        if current is None or current not in ready:
            current = min(ready, key=lambda segment: ready[segment][0])
        index = heapq.heappop(ready[current])
        if not ready[current]:
            del ready[current]
        order.append(graph.forward[index].name)
        for reader in readers[index]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready.setdefault(segment_of[reader], []), reader)
    return tuple(order)


def _segment_of(operator: Operator, segments: Mapping[str, int]) -> int:
    return next(segments[name] for name in operator.outputs if name in segments)


def _with_names(operator: Operator, renamed: Mapping[str, str]) -> Operator:
    if not any(name in renamed for name in (*operator.inputs, *operator.outputs)):
        return operator
    return replace(
        operator,
        inputs=tuple(renamed.get(name, name) for name in operator.inputs),
        outputs=tuple(renamed.get(name, name) for name in operator.outputs),
    )


def _segments(graph: StepGraph, discarded: frozenset[str]) -> dict[str, int]:
    """Segment number of each discarded tensor, in order of forward."""
    parent: dict[str, str] = {}

    def find(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for operator in graph.forward:
        outputs = [name for name in operator.outputs if name in discarded and not operator.once]
        for name in outputs:
            parent[name] = name
        linked = [*outputs, *(name for name in operator.inputs if name in parent)] if outputs else []
        for name in linked[1:]:
            parent[find(name)] = find(linked[0])
    numbers: dict[str, int] = {}
    return {name: numbers.setdefault(find(name), len(numbers)) for name in parent}


def _without_idle_outputs(steps: Sequence[Step], graph: StepGraph) -> list[Step]:
    """The steps without trailing optional outputs that nobody reads: a runtime would never free them."""
    read = {name for step in steps if not isinstance(step, Release) for name in step.operator.inputs}
    trimmed: list[Step] = []
    for step in steps:
        assert not isinstance(step, Release)
        outputs = step.operator.outputs
        fewest = len(outputs) if step.operator.needs_all_outputs else 1
        while len(outputs) > fewest and outputs[-1] not in read and outputs[-1] not in graph.outputs:
            outputs = outputs[:-1]
        if len(outputs) < len(step.operator.outputs):
            step = replace(step, operator=replace(step.operator, outputs=outputs))
        trimmed.append(step)
    return trimmed


def _with_releases(steps: Sequence[Step], graph: StepGraph) -> Iterable[Step]:
    """The steps, each followed by the release of what it used last, and of what nobody will use."""
    kept = graph.resident.union(graph.outputs)
    last_use: dict[str, int] = {}
    for index, step in enumerate(steps):
        assert not isinstance(step, Release)
        for name in step.operator.inputs:
            last_use[name] = index
    for index, step in enumerate(steps):
        assert not isinstance(step, Release)
        yield step
        touched = dict.fromkeys((*step.operator.inputs, *step.operator.outputs))
        dead = tuple(name for name in touched if last_use.get(name, index) == index and name not in kept)
        if dead:
            yield Release(dead)
