"""A training step as a rematerialisation problem, and its sequences as schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from onnxgc.planning.schedule import (
    Compute,
    Operator,
    Recompute,
    Schedule,
    Step,
    StepGraph,
    with_exact_lifetimes,
)
from onnxgc.rematerialisation.problem import Operation, OperatorProblem


@dataclass(frozen=True, slots=True)
class StepProblem:
    """The problem of a training step, and what its operations stand for.

    Views are no operations: their readers read what they show. `operators` are the step's operators by
    number, `chunks` the backward chunk of each, `None` in forward.
    """

    step: StepGraph
    problem: OperatorProblem
    operators: tuple[Operator, ...]
    chunks: tuple[int | None, ...]
    views: Mapping[str, tuple[Operator, int | None]]
    """By the tensor that a view writes."""

    def sequence_of(self, schedule: Schedule) -> list[int]:
        """The operators of a schedule of this step."""
        number = {operator.name: index for index, operator in enumerate(self.operators)}
        names = (
            step.source if isinstance(step, Recompute) else step.operator.name
            for step in schedule.steps
            if isinstance(step, Compute | Recompute)
        )
        return [number[name] for name in names if name in number]

    def names_of(self, sequence: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.operators[index].name for index in sequence)

    def schedule_of(self, sequence: Sequence[int], copy_name: Callable[[str], str]) -> Schedule:
        """The schedule of a sequence; tensors of later runs are named by `copy_name`."""
        return _Unrolling(self, copy_name).schedule(sequence)


def problem_of(step: StepGraph, durations: Mapping[str, int]) -> StepProblem:
    """The rematerialisation problem of a training step; `durations` are those of operators by name.

    What a step returns is made once: its operators do not run again.
    """
    flat = [(operator, None) for operator in step.forward]
    flat += [(operator, number) for number, chunk in enumerate(step.chunks) for operator in chunk]  # type: ignore[misc]
    outputs = set(step.outputs)
    storages_of: dict[str, tuple[int, ...]] = {}
    """What a reader of a tensor reads; the first is where its contents are."""
    sizes: list[int] = []
    kept: set[int] = set()
    operations: list[Operation] = []
    operators: list[Operator] = []
    chunks: list[int | None] = []
    views: dict[str, tuple[Operator, int | None]] = {}
    for operator, chunk in flat:
        reads = tuple(
            dict.fromkeys(storage for name in operator.inputs for storage in storages_of.get(name, ()))
        )
        if operator.is_view and operator.outputs[0] not in outputs:
            views[operator.outputs[0]] = operator, chunk
            storages_of[operator.outputs[0]] = reads
            continue
        writes = tuple(range(len(sizes), len(sizes) + len(operator.outputs)))
        returned = [place for place, name in enumerate(operator.outputs, start=1) if name in outputs]
        for name, storage in zip(operator.outputs, writes, strict=True):
            sizes.append(step.sizes[name])
            storages_of[name] = (storage,)
            if name in outputs:
                kept.add(storage)
        source = storages_of.get(operator.inputs[0], ())[:1] if operator.inputs else ()
        shares = (
            operator.in_place
            and bool(source)
            and operator.outputs[0] not in outputs
            and step.sizes[operator.inputs[0]] == step.sizes[operator.outputs[0]] == sizes[source[0]]
        )
        needed = len(writes) if operator.needs_all_outputs else min(1, len(writes))
        operations.append(
            Operation(
                operator.name,
                reads,
                writes,
                durations.get(operator.name, 0),
                operator.workspace_bytes,
                source[0] if shares else None,
                not operator.once and not returned,
                max([needed, *returned]),
            )
        )
        operators.append(operator)
        chunks.append(chunk)
    problem = OperatorProblem(tuple(operations), tuple(sizes), frozenset(kept))
    return StepProblem(step, problem, tuple(operators), tuple(chunks), views)


class _Unrolling:
    """Names the copies of a sequence and puts each view right before its first reader."""

    def __init__(self, problem: StepProblem, copy_name: Callable[[str], str]) -> None:
        self._problem = problem
        self._copy_name = copy_name
        self._current: dict[str, str] = {}
        """By tensor: the name of its latest copy."""
        self._shown: dict[str, tuple[str, ...]] = {}
        """By the latest copy of a view: what it was made from."""
        self._runs: Counter[str] = Counter()
        self._original_of: dict[str, str] = {}
        self._steps: list[Step] = []
        self._segment = -1
        self._is_recomputing = False

    def schedule(self, sequence: Sequence[int]) -> Schedule:
        problem = self._problem
        for index in sequence:
            operator = problem.operators[index]
            for name in operator.inputs:
                self._show(name)
            again = self._runs[operator.name] > 0
            if again and not self._is_recomputing:
                self._segment += 1
            self._is_recomputing = again
            self._run(operator, problem.chunks[index])
        return Schedule(with_exact_lifetimes(self._steps, problem.step), self._original_of)

    def _show(self, name: str) -> None:
        """Have the view of that name, if it is one, show the latest copy of its source."""
        if name not in self._problem.views:
            return
        operator, chunk = self._problem.views[name]
        for source in operator.inputs:
            self._show(source)
        sources = tuple(self._current.get(source, source) for source in operator.inputs)
        if name not in self._current or self._shown[name] != sources:
            self._run(operator, chunk)
            self._shown[name] = sources

    def _run(self, operator: Operator, chunk: int | None) -> None:
        number = self._runs[operator.name]
        self._runs[operator.name] += 1
        inputs = tuple(self._current.get(name, name) for name in operator.inputs)
        if number:
            for name in operator.outputs:
                self._current[name] = self._copy_name(name)
                self._original_of[self._current[name]] = name
        else:
            self._current.update((name, name) for name in operator.outputs)
        outputs = tuple(self._current[name] for name in operator.outputs)
        ran = replace(operator, inputs=inputs, outputs=outputs)
        if not number:
            self._steps.append(Compute(ran, chunk))
        else:
            suffix = "__recompute" if number == 1 else f"__recompute{number}"
            copy = replace(ran, name=f"{operator.name}{suffix}")
            self._steps.append(Recompute(copy, operator.name, max(self._segment, 0)))
