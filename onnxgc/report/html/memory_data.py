"""What the page shows of a training step and of its schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from onnxgc.graph.computation_graph import Vertex
from onnxgc.model.core.draft import operator_name
from onnxgc.model.core.ir import dtype_name
from onnxgc.planning.allocations import Storage, allocations
from onnxgc.planning.schedule import Compute, Recompute, Release, Schedule
from onnxgc.tracing.step_graph import TrainingStep


class Phase(Enum):
    """What a step of a schedule belongs to."""

    FORWARD = "forward"
    AGAIN = "recomputation"
    BACKWARD = "backward"


class MemoryRole(Enum):
    """What memory is held for, from the bottom of the picture to its top."""

    STATE = "optimizer's state"
    PARAMETER_GRADIENT = "parameters' gradients"
    OUTPUT = "loss, statistics, outputs"
    KEPT = "kept from forward"
    AGAIN = "computed again"
    GRADIENT = "gradients on their way"
    PASSING = "passing in forward"
    WORKSPACE = "workspace"


NOT_MADE = (MemoryRole.STATE, MemoryRole.WORKSPACE)
"""What is in memory without being what an operator makes."""


@dataclass(frozen=True, slots=True)
class Run:
    """One operator as a schedule runs it.

    `source` is the forward operator that it differentiates, or the operator that it runs again.
    """

    name: str
    kind: str
    phase: Phase
    source: str = ""


def step_number(run: int) -> int:
    """What people are told for the place of a run (or of an operator): the first one is step 1."""
    return run + 1


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Memory that is held from the run `first` to the run `last`, both included."""

    tensor: str
    original: str
    first: int
    last: int
    size_bytes: int
    role: MemoryRole
    form: str


@dataclass(frozen=True, slots=True)
class Course:
    """A schedule as it is shown: its runs, and what memory each of them finds held.

    At each run the bytes of the lifetimes that cover it are what the judge's timeline says, and the
    optimizer's state, where there is one.
    """

    label: str
    runs: tuple[Run, ...]
    lifetimes: tuple[Lifetime, ...]

    def held_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes by role (in the order of `MemoryRole`) and run: [roles, runs]."""
        row = {role: number for number, role in enumerate(MemoryRole)}
        change = np.zeros((len(row), len(self.runs) + 1), np.int64)
        for life in self.lifetimes:
            change[row[life.role], life.first] += life.size_bytes
            change[row[life.role], life.last + 1] -= life.size_bytes
        return np.cumsum(change, axis=1)[:, :-1]

    def step_text(self, run: int) -> str:
        return f"step {step_number(run):,} of {len(self.runs):,}"

    def alive_at(self, run: int) -> list[Lifetime]:
        """What is held at a run, the largest first."""
        alive = [life for life in self.lifetimes if life.first <= run <= life.last]
        return sorted(alive, key=lambda life: -life.size_bytes)


class TensorFate(Enum):
    """What becomes of what a forward operator makes."""

    KEPT = "kept for backward"
    AGAIN = "computed again"
    PASSING = "not needed by backward"
    RETURNED = "returned by the step"
    SHARED = "takes no memory of its own"


@dataclass(frozen=True, slots=True)
class ForwardOperator:
    """One operator of the network.

    `size_bytes` is the memory that its first run takes, `times_again` how often it runs again,
    `segment` what it is computed again with, `reads` the operators before it whose tensors it reads.
    """

    name: str
    kind: str
    tensor: str
    form: str
    size_bytes: int
    fate: TensorFate
    times_again: int
    segment: int | None
    is_checkpoint: bool
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KindOfOperator:
    """All operators of one name: how many, what they hold for backward, and what they take."""

    kind: str
    forward: int
    backward: int
    kept_bytes: int
    again: int
    nanoseconds: int
    nanoseconds_again: int


def course_of(label: str, step: TrainingStep, schedule: Schedule) -> Course:
    """What a schedule of a step runs, and what is held meanwhile."""
    graph = step.graph
    runs: list[Run] = []
    for planned in schedule.steps:
        match planned:
            case Compute(operator, chunk):
                phase, source = (
                    (Phase.FORWARD, "") if chunk is None else (Phase.BACKWARD, graph.sources[chunk])
                )
                runs.append(Run(operator.name, operator_name(step.nodes[operator.name]), phase, source))
            case Recompute(operator, source):
                runs.append(Run(operator.name, operator_name(step.nodes[source]), Phase.AGAIN, source))
            case Release():
                pass
    return Course(label, tuple(runs), tuple(_lifetimes(step, schedule, runs)))


def _lifetimes(step: TrainingStep, schedule: Schedule, runs: Sequence[Run]) -> list[Lifetime]:
    graph, outputs = step.graph, frozenset(step.graph.outputs)

    def role_of(storage: Storage, first: int, last: int) -> MemoryRole:
        if storage.tensor in graph.parameter_gradients:
            return MemoryRole.PARAMETER_GRADIENT
        if storage.tensor in outputs:
            return MemoryRole.OUTPUT
        match runs[first].phase:
            case Phase.AGAIN:
                return MemoryRole.AGAIN
            case Phase.BACKWARD:
                return MemoryRole.GRADIENT
            case Phase.FORWARD:
                return MemoryRole.PASSING if runs[last].phase is Phase.FORWARD else MemoryRole.KEPT

    begun: dict[Storage, int] = {}
    found: list[Lifetime] = []
    if step.updates is not None and step.updates.state_bytes and runs:
        name, count = f"{step.updates.optimizer.name}'s state", len(step.updates.state_names)
        found.append(
            Lifetime(
                name, name, 0, len(runs) - 1, step.updates.state_bytes, MemoryRole.STATE, f"{count:,} tensors"
            )
        )

    def end(storage: Storage, last: int) -> None:
        first = begun.pop(storage)
        original = schedule.original_of.get(storage.tensor, storage.tensor)
        found.append(
            Lifetime(
                storage.tensor,
                original,
                first,
                last,
                storage.size_bytes,
                role_of(storage, first, last),
                form_of(step, original),
            )
        )

    for index, taken in enumerate(allocations(schedule, graph)):
        begun.update((storage, index) for storage in taken.made)
        operator = taken.operator
        if operator.workspace_bytes:
            name, size = operator.name, operator.workspace_bytes
            found.append(Lifetime(name, name, index, index, size, MemoryRole.WORKSPACE, ""))
        for storage in taken.freed:
            end(storage, index)
    for storage in tuple(begun):
        end(storage, len(runs) - 1)
    return sorted(found, key=lambda life: life.first)


def form_of(step: TrainingStep, tensor: str) -> str:
    """Element type and shape of a tensor, as `float32 2x64x56x56`."""
    known = step.types[tensor]
    return f"{dtype_name(known.dtype)} {'x'.join(map(str, known.shape)) or 'scalar'}"


def forward_operators(
    step: TrainingStep, schedule: Schedule, course: Course, checkpoints: Iterable[Vertex]
) -> tuple[ForwardOperator, ...]:
    """The network's operators in the order in which they first run."""
    kept = frozenset(checkpoints)
    again, segments = _repeats(schedule)
    made: dict[str, list[Lifetime]] = {}
    for life in course.lifetimes:
        if course.runs[life.first].phase is Phase.FORWARD and life.role not in NOT_MADE:
            made.setdefault(course.runs[life.first].name, []).append(life)
    place_of: dict[str, int] = {}
    found: list[ForwardOperator] = []
    first_runs = (planned for planned in schedule.steps if isinstance(planned, Compute))
    for planned in first_runs:
        if planned.chunk is not None:
            continue
        operator, lives = planned.operator, made.get(planned.operator.name, [])
        reads = dict.fromkeys(place_of[name] for name in operator.inputs if name in place_of)
        place_of.update(dict.fromkeys(operator.outputs, len(found)))
        found.append(
            ForwardOperator(
                operator.name,
                operator_name(step.nodes[operator.name]),
                operator.outputs[0],
                form_of(step, operator.outputs[0]),
                sum(life.size_bytes for life in lives),
                _fate(lives, again[operator.name]),
                again[operator.name],
                segments.get(operator.name) if planned.segment is None else planned.segment,
                any(name in kept for name in operator.outputs),
                tuple(reads),
            )
        )
    return tuple(found)


def _repeats(schedule: Schedule) -> tuple[Counter[str], dict[str, int]]:
    """How often each operator runs again, and the segment in which it does so first."""
    segments: dict[str, int] = {}
    for planned in schedule.recomputed:
        segments.setdefault(planned.source, planned.segment)
    return Counter(planned.source for planned in schedule.recomputed), segments


def _fate(lives: Sequence[Lifetime], again: int) -> TensorFate:
    if again:
        return TensorFate.AGAIN
    if not lives:
        return TensorFate.SHARED
    roles = {life.role for life in lives}
    return (
        TensorFate.KEPT
        if MemoryRole.KEPT in roles
        else TensorFate.RETURNED
        if MemoryRole.OUTPUT in roles
        else TensorFate.PASSING
    )


def kinds_of_operators(
    step: TrainingStep, course: Course, durations_ns: Mapping[str, int]
) -> tuple[KindOfOperator, ...]:
    """Figures by kind of operator, the one that holds most first."""
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    again: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    once_ns: Counter[str] = Counter()
    again_ns: Counter[str] = Counter()
    for run in course.runs:
        if run.phase is Phase.AGAIN:
            again[run.kind] += 1
            again_ns[run.kind] += durations_ns[run.source]
        else:
            (forward if run.phase is Phase.FORWARD else backward)[run.kind] += 1
            once_ns[run.kind] += durations_ns[run.name]
    for life in course.lifetimes:
        if life.role is MemoryRole.KEPT:
            kept[course.runs[life.first].kind] += life.size_bytes
    kinds = sorted(forward | backward, key=lambda kind: (-kept[kind], -once_ns[kind], kind))
    return tuple(
        KindOfOperator(
            kind,
            forward[kind],
            backward[kind],
            kept[kind],
            again[kind],
            once_ns[kind] + again_ns[kind],
            again_ns[kind],
        )
        for kind in kinds
    )
