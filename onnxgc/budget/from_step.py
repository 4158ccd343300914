"""A training step as a rematerialisation problem."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator
from onnxgc.planning.schedule import Operator, Recompute, Schedule, StepGraph
from onnxgc.planning.schedule_from_sequence import StepOperators


@dataclass(frozen=True, slots=True)
class StepProblem:
    """The problem of a training step; its operator `i` has the name `names[i]`.

    Views are left out: their readers read the storage of their source.
    """

    problem: OperatorProblem
    names: tuple[str, ...]

    def sequence_of(self, schedule: Schedule) -> list[int]:
        """The operators of a schedule of this step."""
        number = {name: index for index, name in enumerate(self.names)}
        ran = (run.source if isinstance(run, Recompute) else run.operator.name for run in schedule.runs)
        return [number[name] for name in ran if name in number]

    def names_of(self, sequence: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.names[index] for index in sequence)


def problem_of(step: StepGraph, durations: Mapping[str, int]) -> StepProblem:
    """The rematerialisation problem of a training step; `durations` of operators by name.

    Operators that write outputs of the step must not repeat.
    """
    builder = _Builder(step, durations)
    parts = StepOperators.from_step(step)
    for operator in step.operators:
        if operator.name in parts.operators:
            builder.add_operator(operator)
        else:
            builder.add_view(operator)
    return builder.problem()


class _Builder:
    def __init__(self, step: StepGraph, durations: Mapping[str, int]) -> None:
        self._step = step
        self._durations = durations
        self._outputs = set(step.outputs)
        self._storages_of: dict[str, tuple[int, ...]] = {}
        """The storages that a reader of a tensor reads; the first contains its values."""
        self._sizes: list[int] = []
        self._kept: set[int] = set()
        self._operators: list[ProblemOperator] = []
        self._source = {old: old for old in step.replaced.values()}
        """For each replaced resident tensor and its views: the resident tensor."""
        self._marks: dict[str, list[int]] = {}
        """By replaced tensor, storages of no bytes that its readers write and its replacement reads."""

    def add_view(self, operator: Operator) -> None:
        self._storages_of[operator.outputs[0]] = self._reads(operator)
        if operator.inputs[0] in self._source:
            self._source[operator.outputs[0]] = self._source[operator.inputs[0]]

    def add_operator(self, operator: Operator) -> None:
        replaced = [self._step.replaced[name] for name in operator.outputs if name in self._step.replaced]
        marks = [mark for old in replaced for mark in self._marks.get(old, ())]
        reads = tuple(dict.fromkeys((*self._reads(operator), *marks)))
        writes = tuple(range(len(self._sizes), len(self._sizes) + len(operator.outputs)))
        in_place = self._in_place(operator)
        returned = [count for count, name in enumerate(operator.outputs, start=1) if name in self._outputs]
        for name, storage in zip(operator.outputs, writes, strict=True):
            self._sizes.append(self._step.sizes[name])
            self._storages_of[name] = (storage,)
            if name in self._outputs:
                self._kept.add(storage)
        needed = len(writes) if operator.needs_all_outputs else min(1, len(writes))
        for old in dict.fromkeys(self._source[name] for name in operator.inputs if name in self._source):
            if old not in replaced:
                self._marks.setdefault(old, []).append(len(self._sizes))
                writes = (*writes, len(self._sizes))
                self._sizes.append(0)
        self._operators.append(
            ProblemOperator(
                operator.name,
                reads,
                writes,
                self._durations.get(operator.name, 0),
                operator.workspace_bytes,
                in_place,
                may_repeat=not operator.once and not returned,
                min_writes=max([needed, *returned]),
            )
        )

    def problem(self) -> StepProblem:
        marks = frozenset(mark for marks in self._marks.values() for mark in marks)
        problem = OperatorProblem(tuple(self._operators), tuple(self._sizes), frozenset(self._kept), marks)
        return StepProblem(problem, tuple(operator.name for operator in self._operators))

    def _reads(self, operator: Operator) -> tuple[int, ...]:
        return tuple(dict.fromkeys(storage for name in operator.inputs for storage in self._storages_of.get(name, ())))

    def _in_place(self, operator: Operator) -> int | None:
        if not operator.in_place or operator.outputs[0] in self._outputs:
            return None
        source = self._storages_of.get(operator.inputs[0], ())[:1]
        sizes = self._step.sizes
        if not source or sizes[operator.inputs[0]] != sizes[operator.outputs[0]]:
            return None
        return source[0] if self._sizes[source[0]] == sizes[operator.outputs[0]] else None
