"""Schedules: the exact order of operators of one training step under a plan."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator as the scheduler and the simulator see it.

    `inputs` and `outputs` are tensors. `is_view`: output 0 shares input 0's memory. `in_place`: output 0
    reuses input 0's memory if this is the last use of it. `once`: must not run a second time.
    `needs_all_outputs`: no output may be omitted, even if unread. `workspace_bytes` are live only while the
    operator runs; with `workspace_first` they are allocated before the outputs.
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
    """One training step without a plan: forward operators, then backward in chunks.

    `sources` names the forward operator that each chunk differentiates. `resident` tensors (fed values,
    parameters, constants) are live before and after the step and not counted. `outputs` are kept to the
    end, in the order in which they are returned. `parameter_gradients` are reported separately. `replaced`
    maps an output of no bytes to the resident tensor whose memory it overwrites: nothing may read that
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
    output_set: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_set", frozenset(self.outputs))

    @property
    def operators(self) -> tuple[Operator, ...]:
        """Forward, then backward."""
        return (*self.forward, *(operator for chunk in self.chunks for operator in chunk))


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an operator of forward (`chunk` is None) or of a backward chunk for the first time."""

    operator: Operator
    chunk: int | None = None
    segment: int | None = None


@dataclass(frozen=True, slots=True)
class Recompute:
    """Rerun the operator `source`, under new tensor names."""

    operator: Operator
    source: str
    segment: int


@dataclass(frozen=True, slots=True)
class Release:
    """Release tensors after their last use; unread tensors, after the operator that writes them."""

    tensors: tuple[str, ...]


Run = Compute | Recompute
Instruction = Run | Release


@dataclass(frozen=True, slots=True)
class Schedule:
    """The instructions of one training step in order; `original_of` maps each copy to its tensor."""

    instructions: tuple[Instruction, ...]
    original_of: Mapping[str, str]

    @property
    def runs(self) -> tuple[Run, ...]:
        """The instructions without releases."""
        return tuple(entry for entry in self.instructions if not isinstance(entry, Release))

    @property
    def recomputed(self) -> tuple[Recompute, ...]:
        return tuple(entry for entry in self.instructions if isinstance(entry, Recompute))

    @property
    def extra_flops(self) -> int:
        return sum(entry.operator.flops for entry in self.recomputed)


def copy_namer() -> Callable[[str], str]:
    """A function that names copies `x__recompute`, `x__recompute2`, ..., for steps without such names."""
    copies: Counter[str] = Counter()

    def name_of_copy(name: str) -> str:
        copies[name] += 1
        return f"{name}__recompute" if copies[name] == 1 else f"{name}__recompute{copies[name]}"

    return name_of_copy


def build_schedule(graph: StepGraph, discarded: frozenset[str], copy_name: Callable[[str], str]) -> Schedule:
    """Schedule that discards the `discarded` forward tensors and recomputes them for backward.

    A tensor is recomputed right before the first chunk that reads it, together with the discarded tensors
    that it depends on, and is live until its last reader. Discarded tensors that depend on one another form
    a segment, whose number its instructions have. `copy_name` names the copy of a tensor. Linear time.
    """
    segments = _segments(graph, discarded)
    producer = {name: index for index, operator in enumerate(graph.forward) for name in operator.outputs}
    runs: list[Run] = [
        Compute(operator, None, next((segments[name] for name in operator.outputs if name in segments), None))
        for operator in graph.forward
    ]
    renamed: dict[str, str] = {}
    for index, chunk in enumerate(graph.chunks):
        missing = [name for operator in chunk for name in operator.inputs if name in segments]
        rerun: set[int] = set()
        while missing:
            name = missing.pop()
            if name not in renamed and producer[name] not in rerun:
                rerun.add(producer[name])
                missing.extend(read for read in graph.forward[producer[name]].inputs if read in segments)
        for position in sorted(rerun):
            operator = graph.forward[position]
            renamed.update((name, copy_name(name)) for name in operator.outputs)
            copy = replace(_with_names(operator, renamed), name=f"{operator.name}__recompute")
            segment = next(segments[name] for name in operator.outputs if name in segments)
            runs.append(Recompute(copy, operator.name, segment))
        runs.extend(Compute(_with_names(operator, renamed), index) for operator in chunk)
    original_of = {copy: name for name, copy in renamed.items()}
    return Schedule(with_exact_lifetimes(runs, graph), original_of)


def with_exact_lifetimes(runs: Sequence[Run], graph: StepGraph) -> tuple[Instruction, ...]:
    """The runs without unread optional outputs, and with each release after the last reader."""
    return tuple(_with_releases(_without_idle_outputs(runs, graph), graph))


def with_late_replacements(schedule: Schedule, graph: StepGraph) -> Schedule:
    """The schedule with each operator that replaces a tensor after the last reader of the old one.

    Otherwise a recomputed operator could run after the update of its input.
    """
    runs = schedule.runs
    last_reader: dict[str, int] = {}
    source = {old: old for old in graph.replaced.values()}
    for index, entry in enumerate(runs):
        for name in entry.operator.inputs:
            if name in source:
                last_reader[source[name]] = index
        if entry.operator.is_view and entry.operator.inputs[0] in source:
            source[entry.operator.outputs[0]] = source[entry.operator.inputs[0]]
    late: dict[int, list[Run]] = {}
    rest: list[tuple[int, Run]] = []
    for index, entry in enumerate(runs):
        old = next((graph.replaced[name] for name in entry.operator.outputs if name in graph.replaced), None)
        last = index if old is None else last_reader.get(old, index)
        if last > index:
            late.setdefault(last, []).append(entry)
        else:
            rest.append((index, entry))
    if not late:
        return schedule
    ordered = [moved for index, entry in rest for moved in (entry, *late.get(index, ()))]
    return replace(schedule, instructions=with_exact_lifetimes(ordered, graph))


def segment_read_first(graph: StepGraph, discarded: frozenset[str]) -> frozenset[str]:
    """The discarded tensors of the segment that backward reaches first.

    Nothing has been released before, so a plan that consists of checkpoints alone keeps them.
    """
    segments = _segments(graph, discarded)
    read = (name for chunk in graph.chunks for operator in chunk for name in operator.inputs)
    first = next((segments[name] for name in read if name in segments), None)
    return frozenset(name for name, segment in segments.items() if segment == first)


def segment_order(graph: StepGraph, discarded: frozenset[str]) -> tuple[str, ...]:
    """Names of the forward operators in an order that completes each segment before the next.

    Parallel segments that the model's own order interleaves would have interleaved backward passes, and
    both their recomputations live at once. Otherwise the order is the model's. O(n log n) in operators.
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


def _without_idle_outputs(runs: Sequence[Run], graph: StepGraph) -> list[Run]:
    """The runs without unread trailing optional outputs, which a runtime would never free."""
    read = {name for entry in runs for name in entry.operator.inputs}
    trimmed: list[Run] = []
    for entry in runs:
        outputs = entry.operator.outputs
        min_outputs = len(outputs) if entry.operator.needs_all_outputs else 1
        while len(outputs) > min_outputs and outputs[-1] not in read and outputs[-1] not in graph.output_set:
            outputs = outputs[:-1]
        if len(outputs) < len(entry.operator.outputs):
            entry = replace(entry, operator=replace(entry.operator, outputs=outputs))
        trimmed.append(entry)
    return trimmed


def _with_releases(runs: Sequence[Run], graph: StepGraph) -> Iterator[Instruction]:
    """The runs, each followed by the release of the tensors whose last use it is."""
    kept = graph.resident.union(graph.outputs)
    last_use = {name: index for index, entry in enumerate(runs) for name in entry.operator.inputs}
    for index, entry in enumerate(runs):
        yield entry
        touched = dict.fromkeys((*entry.operator.inputs, *entry.operator.outputs))
        dead = tuple(name for name in touched if last_use.get(name, index) == index and name not in kept)
        if dead:
            yield Release(dead)
