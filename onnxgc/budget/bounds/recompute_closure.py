"""Operators that must be rerun with another: the producers of its inputs that are no longer live."""

from collections.abc import Callable, Iterable, Sequence

from onnxgc.budget.bounds.integer_programs import CoveringProgram
from onnxgc.budget.operator_problem import OperatorProblem


class RecomputeClosures:
    """The operators that must be rerun if a storage is recomputed.

    A dead input (all first runs that read it are over) must be recomputed, unless it was kept. Keeping it is
    pointless if the storage itself is no larger: then that could be kept instead. An input of several
    storages counts for at most as many of them as fit into its size.
    """

    def __init__(self, problem: OperatorProblem) -> None:
        self._problem = problem
        self._room = list(problem.sizes)
        self._serves: set[tuple[int, int]] = set()

    def needed_for(self, storage: int, is_dead: Callable[[int], bool]) -> list[tuple[int, int]]:
        """Dead inputs and their producers: those of the storage's operator, of their producers, and so on."""
        problem = self._problem
        closure: dict[int, int] = {}
        pending = [problem.producer[storage]]
        while pending:
            for read in problem.operators[pending.pop()].reads:
                if read in closure or read in problem.kept or not is_dead(read):
                    continue
                if not self._has_room(read, storage):
                    continue
                closure[read] = problem.producer[read]
                pending.append(problem.producer[read])
        return list(closure.items())

    def _has_room(self, read: int, storage: int) -> bool:
        if (read, storage) in self._serves:
            return True
        size = self._problem.sizes[storage]
        if self._room[read] < size:
            return False
        self._room[read] -= size
        self._serves.add((read, storage))
        return True


class RerunCosts:
    """Costs of gaps in a covering program.

    One run of an operator writes all its outputs and may serve several storages, so the number of reruns
    is the greatest that any one of them needs.
    """

    def __init__(self, problem: OperatorProblem, program: CoveringProgram, unit: int) -> None:
        self._problem, self._program, self._unit = problem, program, unit
        self._own: dict[int, dict[int, list[int]]] = {}
        """By operator: columns of the gaps of each of its outputs."""
        self._dead: dict[int, dict[int, list[int]]] = {}
        """The same for gaps that begin after all first runs that read the output."""
        self._served: dict[int, dict[tuple[int, int], list[int]]] = {}
        """By operator: columns of the gaps of others, by its output and the storage that it serves."""

    def require(self, storage: int, column: int, closure: Iterable[tuple[int, int]], *, is_dead: bool = False) -> None:
        """Add a gap of a storage with the closure that must be rerun for it.

        `is_dead`: the gap begins after all first runs that read the storage.
        """
        producer = self._problem.producer[storage]
        gaps = self._dead if is_dead else self._own
        gaps.setdefault(producer, {}).setdefault(storage, []).append(column)
        for read, operator in closure:
            self._served.setdefault(operator, {}).setdefault((read, storage), []).append(column)

    def bind(self) -> None:
        """Write the costs into the program."""
        for operator in sorted({*self._own, *self._dead, *self._served}):
            self._bind(operator)

    def _bind(self, operator: int) -> None:
        program = self._program
        cost = self._problem.operators[operator].duration // self._unit
        own, dead = self._own.get(operator, {}), self._dead.get(operator, {})
        served = self._served.get(operator, {})
        # Gaps after the last reader of an output need separate reruns.
        groups: list[Sequence[int]] = [[*own.get(read, ()), *columns] for (read, _), columns in served.items()]
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
