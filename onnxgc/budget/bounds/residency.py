"""A stronger lower bound for a fixed order and small problems, by the live storages at each first run.

It is stronger than the covering bound: a rerun operator needs its inputs, which were live at the first run
before or were recomputed since (docs/rematerialisation.md).
"""

from __future__ import annotations

from collections import defaultdict
from threading import Event

from onnxgc.budget.bounds.covering import duration_unit, rounded_bound
from onnxgc.budget.bounds.integer_programs import CoveringProgram
from onnxgc.budget.operator_problem import OperatorProblem

MAX_OPERATORS = 150
"""The number of columns grows with its square."""


def residency_bound(
    problem: OperatorProblem, budget: int, best_extra: int, time_limit: float, stop: Event | None = None
) -> int:
    """A lower bound on the extra time of every sequence with first runs in the given order.

    `best_extra` is the extra time of a sequence within the budget, which limits the bound. Stopped early,
    the bound is the one proved so far.
    """
    return _Residency(problem, budget, best_extra).bound(time_limit, stop)


class _Residency:
    """The program. Moments are the first runs, in order, and the end.

    There is a column for each storage and moment: whether it is live there; and one for each operator and
    moment: whether it is rerun between the moment before and that one.
    """

    def __init__(self, problem: OperatorProblem, budget: int, best_extra: int) -> None:
        self._problem = problem
        self._best_extra = best_extra
        self._unit = duration_unit(problem)
        self._program = CoveringProgram()
        self._rerun: dict[tuple[int, int], int] = {}
        self._live: dict[tuple[int, int], int] = {}
        count = len(problem)
        for moment in range(count + 1):
            for index in range(moment - 1):
                if problem.operators[index].may_repeat:
                    cost = problem.operators[index].duration / self._unit
                    self._rerun[index, moment] = self._program.column(cost)
            for index in range(min(moment, count)):
                for storage in problem.operators[index].writes:
                    self._live[storage, moment] = self._program.column(0.0)
        for moment in range(count + 1):
            self._add_needs(moment)
            self._add_memory(moment, budget)
        costs = [(column, cost) for column, cost in enumerate(self._program.costs) if cost]
        if costs:
            limit = best_extra / self._unit + 0.5
            columns, weights = zip(*costs, strict=True)
            self._program.require(columns, [-weight for weight in weights], -limit)

    def bound(self, time_limit: float, stop: Event | None) -> int:
        solution = self._program.solve(time_limit, stop=stop)
        if solution is None:
            return 0
        return min(self._best_extra, rounded_bound(solution, self._program, self._unit))

    def _add_needs(self, moment: int) -> None:
        """A live storage was live a moment before or is recomputed; a rerun operator has its inputs."""
        problem, require = self._problem, self._program.require
        reads = problem.operators[moment].reads if moment < len(problem) else tuple(problem.kept)
        for storage in reads:
            require([self._live[storage, moment]], [1.0], 1.0)
        wanted: dict[int, list[int]] = defaultdict(list)
        """By storage, the columns that need it from the moment before."""
        for index in range(moment - 1):
            for storage in problem.operators[index].writes:
                wanted[storage].append(self._live[storage, moment])
            rerun = self._rerun.get((index, moment))
            if rerun is not None:
                for storage in problem.operators[index].reads:
                    wanted[storage].append(rerun)
        for storage, columns in wanted.items():
            producer = problem.producer[storage]
            sources = [self._live[storage, moment - 1]]
            if (producer, moment) in self._rerun:
                sources.append(self._rerun[producer, moment])
            for column in columns:
                require([*sources, column], [*([1.0] * len(sources)), -1.0], 0.0)

    def _add_memory(self, moment: int, budget: int) -> None:
        problem = self._problem
        room = budget
        if moment < len(problem):
            operator = problem.operators[moment]
            room -= sum(problem.sizes[storage] for storage in operator.writes[: operator.min_writes])
            room -= operator.workspace
            if operator.in_place is not None:
                room += problem.sizes[operator.in_place]
        live = [
            (self._live[storage, moment], problem.sizes[storage])
            for index in range(min(moment, len(problem)))
            for storage in problem.operators[index].writes
            if problem.sizes[storage]
        ]
        if sum(size for _, size in live) > room:
            unit = max(size for _, size in live)
            columns, sizes = zip(*live, strict=True)
            self._program.require(columns, [-size / unit for size in sizes], -room / unit)
