"""Memory over a training step: operators as they run, lifetimes of tensors, and the network."""

from collections import Counter, defaultdict
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
    """The part of a training step that an operator belongs to."""

    FORWARD = "forward"
    RECOMPUTATION = "recomputation"
    BACKWARD = "backward"


class MemoryRole(Enum):
    """The role of a live tensor, from the bottom of the picture to its top."""

    STATE = "optimizer state"
    PARAMETER_GRADIENT = "parameter gradients"
    OUTPUT = "loss, statistics, outputs"
    KEPT = "kept activations"
    RECOMPUTED = "recomputed"
    GRADIENT = "activation gradients"
    TEMPORARY = "temporary forward tensors"
    WORKSPACE = "workspace"


NOT_OUTPUTS = (MemoryRole.STATE, MemoryRole.WORKSPACE)
"""Roles of memory other than outputs of operators."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of an operator.

    `source` is the forward operator that it differentiates, or the operator that it recomputes.
    """

    name: str
    kind: str
    phase: Phase
    source: str = ""
    module: str = ""


def step_number(run: int) -> int:
    """The number of a run or an operator for users, from 1."""
    return run + 1


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Memory that is live from the run `first` to the run `last`, both included."""

    tensor: str
    original: str
    first: int
    last: int
    size_bytes: int
    role: MemoryRole
    form: str
    module: str = ""


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """A schedule's runs and the lifetimes of its tensors.

    At each run the bytes of the lifetimes that cover it are the simulator's, plus an optimizer's state.
    """

    label: str
    runs: tuple[Run, ...]
    lifetimes: tuple[Lifetime, ...]

    def live_bytes(self) -> npt.NDArray[np.int64]:
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
        """Live memory at a run, the largest first."""
        alive = [life for life in self.lifetimes if life.first <= run <= life.last]
        return sorted(alive, key=lambda life: -life.size_bytes)


class TensorFate(Enum):
    """The fate of a forward operator's output."""

    KEPT = "kept for backward"
    RECOMPUTED = "recomputed"
    TEMPORARY = "not needed by backward"
    RETURNED = "returned by the step"
    SHARED = "shares other memory"


@dataclass(frozen=True, slots=True)
class ForwardOperator:
    """One operator of the network.

    `size_bytes` is the memory that its first run allocates, `recomputations` the number of further runs,
    `segment` the number of the segment it is recomputed in, `reads` the operators whose tensors it reads.
    """

    name: str
    kind: str
    tensor: str
    form: str
    size_bytes: int
    fate: TensorFate
    recomputations: int
    segment: int | None
    is_checkpoint: bool
    reads: tuple[int, ...]
    module: str = ""


@dataclass(frozen=True, slots=True)
class OperatorKind:
    """All operators of one kind: their numbers, the bytes they keep for backward, and their time."""

    kind: str
    forward: int
    backward: int
    kept_bytes: int
    again: int
    nanoseconds: int
    nanoseconds_again: int


def memory_curve(label: str, step: TrainingStep, schedule: Schedule) -> MemoryCurve:
    runs = [_run(step, run) for run in schedule.instructions if not isinstance(run, Release)]
    return MemoryCurve(label, tuple(runs), tuple(_lifetimes(step, schedule, runs)))


def _run(step: TrainingStep, run: Compute | Recompute) -> Run:
    name = run.operator.name
    node = step.nodes[run.source if isinstance(run, Recompute) else name]
    if isinstance(run, Recompute):
        return Run(name, operator_name(node), Phase.RECOMPUTATION, run.source, node.module)
    if run.chunk is None:
        return Run(name, operator_name(node), Phase.FORWARD, module=node.module)
    return Run(name, operator_name(node), Phase.BACKWARD, step.graph.sources[run.chunk], node.module)


def _lifetimes(step: TrainingStep, schedule: Schedule, runs: Sequence[Run]) -> list[Lifetime]:
    graph, outputs = step.graph, frozenset(step.graph.outputs)

    def role_of(storage: Storage, first: int, last: int) -> MemoryRole:
        if storage.tensor in graph.parameter_gradients:
            return MemoryRole.PARAMETER_GRADIENT
        if storage.tensor in outputs:
            return MemoryRole.OUTPUT
        match runs[first].phase:
            case Phase.RECOMPUTATION:
                return MemoryRole.RECOMPUTED
            case Phase.BACKWARD:
                return MemoryRole.GRADIENT
            case Phase.FORWARD:
                return MemoryRole.TEMPORARY if runs[last].phase is Phase.FORWARD else MemoryRole.KEPT

    begun: dict[Storage, int] = {}
    lifetimes: list[Lifetime] = []
    end_of_step = len(runs) - 1
    if step.updates is not None and step.updates.state_bytes and runs:
        name, form = f"{step.updates.optimizer.name} state", f"{len(step.updates.state_names):,} tensors"
        size = step.updates.state_bytes
        lifetimes.append(Lifetime(name, name, 0, end_of_step, size, MemoryRole.STATE, form))

    def end(storage: Storage, last: int) -> None:
        name, size, first = storage.tensor, storage.size_bytes, begun.pop(storage)
        original = schedule.original_of.get(name, name)
        role = role_of(storage, first, last)
        form = form_of(step, original)
        lifetimes.append(Lifetime(name, original, first, last, size, role, form, runs[first].module))

    for index, allocation in enumerate(allocations(schedule, graph)):
        begun.update((storage, index) for storage in allocation.made)
        operator = allocation.operator
        if operator.workspace_bytes:
            name, size = operator.name, operator.workspace_bytes
            lifetimes.append(Lifetime(name, name, index, index, size, MemoryRole.WORKSPACE, "", runs[index].module))
        for storage in allocation.freed:
            end(storage, index)
    for storage in tuple(begun):
        end(storage, end_of_step)
    return sorted(lifetimes, key=lambda life: life.first)


def form_of(step: TrainingStep, tensor: str) -> str:
    """Element type and shape of a tensor, as `float32 2x64x56x56`."""
    known = step.types[tensor]
    return f"{dtype_name(known.dtype)} {'x'.join(map(str, known.shape)) or 'scalar'}"


def forward_operators(
    step: TrainingStep, schedule: Schedule, curve: MemoryCurve, checkpoints: Iterable[Vertex]
) -> tuple[ForwardOperator, ...]:
    """The network's operators in the order of their first runs."""
    kept = frozenset(checkpoints)
    again = Counter(run.source for run in schedule.recomputed)
    # The segment of an operator's first recomputation.
    segments = {run.source: run.segment for run in reversed(schedule.recomputed)}
    outputs: defaultdict[str, list[Lifetime]] = defaultdict(list)
    for life in curve.lifetimes:
        if curve.runs[life.first].phase is Phase.FORWARD and life.role not in NOT_OUTPUTS:
            outputs[curve.runs[life.first].name].append(life)
    index_of: dict[str, int] = {}
    operators: list[ForwardOperator] = []
    for run in schedule.instructions:
        if not isinstance(run, Compute) or run.chunk is not None:
            continue
        name, made = run.operator.name, run.operator.outputs
        reads = dict.fromkeys(index_of[read] for read in run.operator.inputs if read in index_of)
        index_of.update(dict.fromkeys(made, len(operators)))
        operators.append(
            ForwardOperator(
                name,
                operator_name(step.nodes[name]),
                made[0],
                form_of(step, made[0]),
                sum(life.size_bytes for life in outputs[name]),
                TensorFate.RECOMPUTED if again[name] else _fate(outputs[name]),
                again[name],
                segments.get(name) if run.segment is None else run.segment,
                not kept.isdisjoint(made),
                tuple(reads),
                step.nodes[name].module,
            )
        )
    return tuple(operators)


def _fate(outputs: Sequence[Lifetime]) -> TensorFate:
    """The fate of outputs that are not recomputed."""
    if not outputs:
        return TensorFate.SHARED
    roles = {life.role for life in outputs}
    if MemoryRole.KEPT in roles:
        return TensorFate.KEPT
    return TensorFate.RETURNED if MemoryRole.OUTPUT in roles else TensorFate.TEMPORARY


def operator_kinds(step: TrainingStep, curve: MemoryCurve, durations_ns: Mapping[str, int]) -> tuple[OperatorKind, ...]:
    """Figures by kind of operator, in decreasing order of kept bytes."""
    runs = {phase: Counter(run.kind for run in curve.runs if run.phase is phase) for phase in Phase}
    forward, again, backward = runs.values()
    kept: Counter[str] = Counter()
    once_ns: Counter[str] = Counter()
    again_ns: Counter[str] = Counter()
    for run in curve.runs:
        if run.phase is Phase.RECOMPUTATION:
            again_ns[run.kind] += durations_ns[run.source]
        else:
            once_ns[run.kind] += durations_ns[run.name]
    for life in curve.lifetimes:
        if life.role is MemoryRole.KEPT:
            kept[curve.runs[life.first].kind] += life.size_bytes
    kinds = sorted(forward | backward, key=lambda kind: (-kept[kind], -once_ns[kind], kind))
    return tuple(
        OperatorKind(
            kind, forward[kind], backward[kind], kept[kind], again[kind], once_ns[kind] + again_ns[kind], again_ns[kind]
        )
        for kind in kinds
    )
