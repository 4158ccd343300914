"""A bound in fixed order that knows what is in memory at every first run, for small problems.

It asks for more than the covering bound: what runs again needs its inputs, which were in memory at the
first run before or ran again since (docs/rematerialisation.md).
"""

from __future__ import annotations

from collections import defaultdict
from threading import Event

from onnxgc.budget.bounds.covering import duration_unit, rounded_bound
from onnxgc.budget.bounds.integer_programs import CoveringProgram
from onnxgc.budget.operator_problem import OperatorProblem

MOST_OPERATORS = 150
"""Columns grow with the square of the operators."""


def residency_bound(
    problem: OperatorProblem, budget: int, best_extra: int, time_limit: float, stop: Event | None = None
) -> int:
    """No sequence with first runs in the given order takes less extra time, nor needs one more than the best.

    `best_extra` is the extra time of a sequence within the budget. Stopped early it is what was proved so
    far.
    """
    return _Residency(problem, budget, best_extra).bound(time_limit, stop)


class _Residency:
    """The program. Moments are the first runs, in order, and the end.

    There is a column for each storage and moment, whether it is in memory there, and one for each operator
    and moment, whether it runs again between the moment before and that one.
    """

    def __init__(self, problem: OperatorProblem, budget: int, best_extra: int) -> None:
        self._problem = problem
        self._best_extra = best_extra
        self._unit = duration_unit(problem)
        self._program = CoveringProgram()
        self._again: dict[tuple[int, int], int] = {}
        self._held: dict[tuple[int, int], int] = {}
        count = len(problem)
        for moment in range(count + 1):
            for operator in range(moment - 1):
                if problem.operations[operator].may_repeat:
                    cost = problem.operations[operator].duration / self._unit
                    self._again[operator, moment] = self._program.column(cost)
            for operator in range(min(moment, count)):
                for storage in problem.operations[operator].writes:
                    self._held[storage, moment] = self._program.column(0.0)
        for moment in range(count + 1):
            self._add_needs(moment)
            self._add_memory(moment, budget)
        costs = [(column, cost) for column, cost in enumerate(self._program.costs) if cost]
        if costs:
            limit = best_extra / self._unit + 0.5
            columns, weights = zip(*costs, strict=True)
            self._program.require(columns, [-weight for weight in weights], -limit)

    def bound(self, time_limit: float, stop: Event | None) -> int:
        solution = self._program.solved(time_limit, stop=stop)
        if solution is None:
            return 0
        return min(self._best_extra, rounded_bound(solution, self._program, self._unit))

    def _add_needs(self, moment: int) -> None:
        """What is held now was held a moment before or is made anew; what runs again has its inputs."""
        problem, require = self._problem, self._program.require
        reads = problem.operations[moment].reads if moment < len(problem) else tuple(problem.kept)
        for storage in reads:
            require([self._held[storage, moment]], [1.0], 1.0)
        wanted: dict[int, list[int]] = defaultdict(list)
        """By storage, what may want it from the moment before."""
        for operator in range(moment - 1):
            for storage in problem.operations[operator].writes:
                wanted[storage].append(self._held[storage, moment])
            again = self._again.get((operator, moment))
            if again is not None:
                for storage in problem.operations[operator].reads:
                    wanted[storage].append(again)
        for storage, columns in wanted.items():
            producer = problem.producer[storage]
            there = [self._held[storage, moment - 1]]
            if (producer, moment) in self._again:
                there.append(self._again[producer, moment])
            for column in columns:
                require([*there, column], [*([1.0] * len(there)), -1.0], 0.0)

    def _add_memory(self, moment: int, budget: int) -> None:
        problem = self._problem
        room = budget
        if moment < len(problem):
            operation = problem.operations[moment]
            room -= sum(problem.sizes[storage] for storage in operation.writes[: operation.fewest])
            room -= operation.workspace
            if operation.in_place is not None:
                room += problem.sizes[operation.in_place]
        held = [
            (self._held[storage, moment], problem.sizes[storage])
            for operator in range(min(moment, len(problem)))
            for storage in problem.operations[operator].writes
            if problem.sizes[storage]
        ]
        if sum(size for _, size in held) > room:
            unit = max(size for _, size in held)
            columns, sizes = zip(*held, strict=True)
            self._program.require(columns, [-size / unit for size in sizes], -room / unit)
