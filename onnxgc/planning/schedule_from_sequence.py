"""Schedules of sequences, in which any operator of a step may run anywhere, any number of times."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from onnxgc.errors import PlanError
from onnxgc.planning.schedule import (
    Compute,
    Operator,
    Recompute,
    Run,
    Schedule,
    StepGraph,
    copy_namer,
    with_exact_lifetimes,
)


@dataclass(frozen=True, slots=True)
class PlacedOperator:
    """An operator of a step and its backward chunk; `None` in forward."""

    operator: Operator
    chunk: int | None


@dataclass(frozen=True, slots=True)
class StepOperators:
    """The operators of a step that a sequence contains, and its views, placed by their readers.

    A view that is an output of the step is an operator: it is allocated.
    """

    operators: Mapping[str, PlacedOperator]
    views: Mapping[str, PlacedOperator]
    """By the tensor that the view writes."""

    @classmethod
    def from_step(cls, step: StepGraph) -> "StepOperators":
        outputs = set(step.outputs)
        placed = [PlacedOperator(operator, None) for operator in step.forward]
        placed += [PlacedOperator(operator, number) for number, chunk in enumerate(step.chunks) for operator in chunk]

        def is_view(entry: PlacedOperator) -> bool:
            return entry.operator.is_view and entry.operator.outputs[0] not in outputs

        return cls(
            {entry.operator.name: entry for entry in placed if not is_view(entry)},
            {entry.operator.outputs[0]: entry for entry in placed if is_view(entry)},
        )


def schedule_of_sequence(step: StepGraph, names: Sequence[str], copy_name: Callable[[str], str]) -> Schedule:
    """The schedule that runs operators by name; `copy_name` names the tensors of later runs.

    A reader reads the latest run. Each view runs right before its first reader. Consecutive repeated runs
    form one segment.

    Raises:
        PlanError: a name is not an operator of the step, an operator is missing, or runs before its inputs.
    """
    return _Unrolling(step, copy_name).schedule(names)


class _Unrolling:
    """A sequence as instructions, with a name for each copy of a tensor."""

    def __init__(self, step: StepGraph, copy_name: Callable[[str], str]) -> None:
        self._step = step
        self._parts = StepOperators.from_step(step)
        self._copy_name = copy_name
        self._copy_operator = copy_namer()
        self._computed = {
            name
            for entry in (*self._parts.operators.values(), *self._parts.views.values())
            for name in entry.operator.outputs
        }
        self._current: dict[str, str] = {}
        """By tensor: the name of its latest copy."""
        self._sources: dict[str, tuple[str, ...]] = {}
        """By view: the tensors that its latest copy reads."""
        self._runs: Counter[str] = Counter()
        self._original_of: dict[str, str] = {}
        self._ran: list[Run] = []
        self._segment = -1
        self._is_recomputing = False

    def schedule(self, names: Sequence[str]) -> Schedule:
        for name in names:
            entry = self._parts.operators.get(name)
            if entry is None:
                raise PlanError(f"the plan runs '{name}', which is not an operator of the step; create the plan again")
            self._prepare(entry.operator)
            is_repeat = self._runs[name] > 0
            if is_repeat and not self._is_recomputing:
                self._segment += 1
            self._is_recomputing = is_repeat
            self._run(entry)
        for name in self._parts.operators:
            if not self._runs[name]:
                raise PlanError(f"the plan never runs '{name}'; create the plan again")
        return Schedule(with_exact_lifetimes(self._ran, self._step), self._original_of)

    def _prepare(self, operator: Operator) -> None:
        """Update the views that an operator reads to the latest copies of their sources."""
        for name in operator.inputs:
            self._update_view(name)
            if name in self._computed and name not in self._current:
                raise PlanError(f"the plan runs '{operator.name}' before its inputs; create the plan again")

    def _update_view(self, name: str) -> None:
        entry = self._parts.views.get(name)
        if entry is None:
            return
        self._prepare(entry.operator)
        sources = tuple(self._current.get(source, source) for source in entry.operator.inputs)
        if name not in self._current or self._sources[name] != sources:
            self._run(entry)
            self._sources[name] = sources

    def _run(self, entry: PlacedOperator) -> None:
        operator = entry.operator
        is_first = not self._runs[operator.name]
        self._runs[operator.name] += 1
        inputs = tuple(self._current.get(name, name) for name in operator.inputs)
        for name in operator.outputs:
            self._current[name] = name if is_first else self._copy_name(name)
            if not is_first:
                self._original_of[self._current[name]] = name
        ran = replace(operator, inputs=inputs, outputs=tuple(self._current[name] for name in operator.outputs))
        if is_first:
            self._ran.append(Compute(ran, entry.chunk))
            return
        copy = replace(ran, name=self._copy_operator(operator.name))
        self._ran.append(Recompute(copy, operator.name, max(self._segment, 0)))
