"""What must run again with an operator: whatever makes its inputs and serves nobody else by then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from onnxgc.budget.bounds.integer_programs import CoveringProgram
from onnxgc.budget.operator_problem import OperatorProblem


class RecomputeClosures:
    """Which operators must run again if a storage is computed again.

    An input that is dead by then (no first run reads it any more) must be computed again, unless it is
    in memory all the while. But while it is, the storage itself might as well be, if it is no larger.
    An input that serves several storages this way stands in for as many as fit into its size.
    """

    def __init__(self, problem: OperatorProblem) -> None:
        self._problem = problem
        self._room = list(problem.sizes)
        self._serves: set[tuple[int, int]] = set()

    def of(self, storage: int, is_dead: Callable[[int], bool]) -> list[tuple[int, int]]:
        """Dead inputs and the operators that make them: those of the storage's operator, and so on."""
        problem = self._problem
        found: dict[int, int] = {}
        pending = [problem.producer[storage]]
        while pending:
            for read in problem.operations[pending.pop()].reads:
                if read in found or read in problem.kept or not is_dead(read):
                    continue
                if not self._has_room(read, storage):
                    continue
                found[read] = problem.producer[read]
                pending.append(problem.producer[read])
        return list(found.items())

    def _has_room(self, read: int, storage: int) -> bool:
        if (read, storage) in self._serves:
            return True
        size = self._problem.sizes[storage]
        if self._room[read] < size:
            return False
        self._room[read] -= size
        self._serves.add((read, storage))
        return True


class Runs:
    """Costs of gaps in a covering program.

    One run of an operator writes all its outputs and may serve several storages, so an operator runs
    again as often as any one of them needs it.
    """

    def __init__(self, problem: OperatorProblem, program: CoveringProgram, unit: int) -> None:
        self._problem, self._program, self._unit = problem, program, unit
        self._own: dict[int, dict[int, list[int]]] = {}
        """By operator: columns of the gaps of each of its outputs."""
        self._dead: dict[int, dict[int, list[int]]] = {}
        """The same for gaps that begin when nobody's first run reads the output any more."""
        self._served: dict[int, dict[tuple[int, int], list[int]]] = {}
        """By operator: columns of the gaps of others, by its output and the storage that it serves."""

    def require(
        self, storage: int, column: int, cone: Iterable[tuple[int, int]], *, is_dead: bool = False
    ) -> None:
        """A gap of a storage, with the cone that must run again for it.

        `is_dead` says that nobody's first run reads the storage when the gap begins.
        """
        producer = self._problem.producer[storage]
        gaps = self._dead if is_dead else self._own
        gaps.setdefault(producer, {}).setdefault(storage, []).append(column)
        for read, operator in cone:
            self._served.setdefault(operator, {}).setdefault((read, storage), []).append(column)

    def bind(self) -> None:
        """Put the costs into the program."""
        for operator in sorted({*self._own, *self._dead, *self._served}):
            self._bind(operator)

    def _bind(self, operator: int) -> None:
        program = self._program
        cost = self._problem.operations[operator].duration // self._unit
        own, dead = self._own.get(operator, {}), self._dead.get(operator, {})
        served = self._served.get(operator, {})
        # What an output serves after its death is served by later runs than bridge its gaps before.
        groups: list[Sequence[int]] = [
            [*own.get(read, ()), *columns] for (read, _), columns in served.items()
        ]
        covered = {read for read, _ in served}
        groups += [
            [*own.get(storage, ()), *dead.get(storage, ())]
            for storage in dict.fromkeys((*own, *dead))
            if storage in dead or storage not in covered
        ]
        if len(groups) == 1:
            for column in groups[0]:
                program.costs[column] += cost
            return
        runs = program.column(cost, free=True)
        for columns in groups:
            program.require([runs, *columns], [1.0, *(-1.0 for _ in columns)], 0.0)
