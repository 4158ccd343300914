"""Search of neighbourhoods on sequences: the compiled loops, and in which order they are called."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from onnxgc.budget.improve import kernels
from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator, simulate_sequence

DEEPEST = 40
"""Operators that repair computes again behind one another."""
_NO_LIMIT = 1 << 62
_ROOM = 4
"""Runs in a sequence, as a multiple of the operators."""
_CYCLE = 16
"""Rounds from hot to cold in the first four cycles; in each four more, twice as many."""
_MOST_EFFORT = 20_000
_WORK_A_ROUND = 6_000_000
"""Evaluations in a round times operators; there are at most `_MOST_EFFORT`."""
_RUIN_EFFORT = 4
"""A round of ruins may take so many times as much as one of annealing."""
_HOT, _COLD = 0.05, 0.001
"""How much longer a sequence may get and be taken, roughly, as a share of the best extra time."""
_ANNEAL_HOT, _ANNEAL_COLD = 0.3, 0.005
"""The same for annealing, in units of the mean duration."""
_OVERFLOW_PRICE = 1.0
_EVICTING = ((1.0, 1.0), (1.0, 0.3), (1.0, 0.0), (0.5, 1.0))
"""How much size and distance count when room is made, in each try."""
_MOVES_SHARE = 0.25
_MOVING_ROUNDS = 8
"""In free order, one round in so many begins with moves for less memory."""
_MOVES = 3_000
_REORDER_STEPS = 100_000
_WORK_AN_ORDER = 50_000_000
_WORK_A_REPAIR = 500_000_000
"""Of a call of a loop that long sequences keep busy: steps times runs, and rounds times runs squared."""
_FEWEST_STEPS = 2_000
"""Moves for an order of a lower peak: so many times operators, and at least so many."""
_LESS = 200
"""Each order is to have a peak lower by one part in so many."""
_REORDER_HOT, _REORDER_COLD = 0.5, 0.002


@functools.cache
def run_all_loops() -> None:
    """Run each inner loop on a small problem, so that all are compiled or read from disk."""
    operations = [ProblemOperator("0", (), (0,), 1), ProblemOperator("1", (0,), (1,), 1)]
    operations.append(ProblemOperator("2", (0, 1), (2,), 1))
    problem = OperatorProblem(tuple(operations), (1, 1, 1), frozenset((2,)))
    search = LocalMoves(problem, 3, free_order=True, seed=0)
    for _ in range(_CYCLE + 2):
        search.improved([0, 1, 0, 2])
    search._run_on_demand([0, 1, 2], 1.0, 1.0)


def order_of_least_peak(
    problem: OperatorProblem, is_over: Callable[[], bool], seed: int = 0
) -> tuple[int, ...]:
    """All operators once, in the order of the lowest peak that is found by moving runs."""
    best = tuple(range(len(problem)))
    search = LocalMoves(problem, 0, free_order=True, seed=seed, is_over=is_over)
    steps = max(_FEWEST_STEPS, min(_REORDER_STEPS, _WORK_AN_ORDER // len(problem)))
    while not is_over():
        peak = simulate_sequence(problem, best).peak
        moved = search._reordered(best, peak - 1 - peak // _LESS, steps)
        if simulate_sequence(problem, moved).peak >= peak:
            break
        best = tuple(moved)
    return best


class LocalMoves:
    """Sequences within a budget, each found from others.

    The same seed and the same calls give the same sequences. Once `is_over`, what takes long ends early.
    """

    def __init__(
        self,
        problem: OperatorProblem,
        budget: int,
        *,
        free_order: bool,
        seed: int,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._tables = kernels.tables_of(problem)
        self._count = len(problem)
        most = _ROOM * self._count + 256
        self._state = kernels.state_for(self._tables, most)
        self._other = kernels.state_for(self._tables, most)
        self._spare = kernels.state_for(self._tables, most)
        self._seen = np.zeros(self._count, np.int64)
        self._places = np.zeros(most + 3, np.int64)
        self._budget = budget
        self._free_order = free_order
        self._seed = seed
        self._is_over = is_over
        self._effort = max(200, min(_MOST_EFFORT, _WORK_A_ROUND // self._count))
        self._cycle = self._phase = 0
        self._current: list[int] | None = None

    def first(
        self, starts: Sequence[Sequence[int]], is_enough: Callable[[], bool]
    ) -> Iterator[tuple[str, list[int]]]:
        """Repair of each start, the first with room made on demand, and in free order each with runs moved.

        It ends once what it gave `is_enough`. When there is no more time and nothing was found, repair of
        the first start takes what it takes.
        """
        for start in starts:
            if is_enough():
                return
            found = self._repaired(start)
            if found is not None:
                yield "repair", found
        for start, (by_size, by_distance) in itertools.product(starts[:1], _EVICTING):
            if is_enough():
                return
            found = self._run_on_demand(start, by_size, by_distance)
            if found is not None:
                yield "on demand", found
        if self._is_over() and not is_enough():
            found = self._repaired(starts[0], to_the_end=True)
            if found is not None:
                yield "repair", found
        if not self._free_order:
            return
        for start in starts:
            if self._is_over():
                return
            moved = self._reordered(start, self._budget, _REORDER_STEPS)
            found = self._repaired(moved) or self._run_on_demand(moved, *_EVICTING[0])
            if found is not None:
                yield "order", found

    def improved(self, best: Sequence[int] | None) -> list[int] | None:
        """A sequence within the budget from one more round, if it found one; `best` is the best so far.

        A cycle of rounds begins hot and ends cold. It begins at the best sequence or at one made anew, and
        ruins and recreates or anneals, in turn.
        """
        cycle, phase = self._cycle, self._phase
        length = _CYCLE << cycle // 4
        self._cycle, self._phase = (cycle, phase + 1) if phase + 1 < length else (cycle + 1, 0)
        if phase == 0:
            afresh = best is None or cycle % 4 in (2, 3)
            self._current = self._made_anew(cycle) if afresh else list(best or ())
        if phase % _MOVING_ROUNDS == 1 and self._free_order and self._current is not None:
            self._current = self._with_slack(self._current)
        from_phase, to_phase = phase / length, (phase + 1) / length
        if cycle % 2 == 0 or self._current is None or not self._keeps_to_budget(self._current):
            return self._annealed(from_phase, to_phase)
        return self._ruined_and_recreated(from_phase, to_phase)

    def _annealed(self, begin: float, end: float) -> list[int] | None:
        current, best, length = self._rooms(self._current or range(self._count))
        best_length, now_length = kernels.anneal(
            self._tables,
            self._state,
            self._other,
            self._spare,
            current,
            length,
            self._budget,
            self._effort,
            self._next_seed(),
            _ANNEAL_HOT * (_ANNEAL_COLD / _ANNEAL_HOT) ** begin,
            _ANNEAL_HOT * (_ANNEAL_COLD / _ANNEAL_HOT) ** end,
            _OVERFLOW_PRICE * (1 + 2 * begin),
            _MOVES_SHARE if self._free_order else 0.0,
            best,
        )
        self._current = current[:now_length].tolist()
        return _listed(best[:best_length]) if best_length else None

    def _rooms(self, sequence: Sequence[int]) -> tuple[kernels.Array, kernels.Array, int]:
        """Room for the current and for the best sequence, the former filled."""
        current = np.zeros_like(self._state.sequence)
        current[: len(sequence)] = list(sequence)
        return current, np.zeros_like(current), len(sequence)

    def _ruined_and_recreated(self, begin: float, end: float) -> list[int]:
        assert self._current is not None
        current, best, length = self._rooms(self._current)
        best_length, now_length = kernels.search_neighbourhoods(
            self._tables,
            self._state,
            self._other,
            current,
            length,
            self._budget,
            DEEPEST,
            _RUIN_EFFORT * self._effort,
            self._next_seed(),
            best,
            _HOT * (_COLD / _HOT) ** begin,
            _HOT * (_COLD / _HOT) ** end,
        )
        self._current = current[:now_length].tolist()
        return _listed(best[:best_length])

    def made_anew(self, best: Sequence[int]) -> list[int] | None:
        """Another sequence with first runs in the order of the best, with room made in some other way."""
        draw = random.Random(self._next_seed())
        return self._run_on_demand(best, draw.uniform(0.5, 1.2), draw.uniform(0.0, 1.0))

    def _made_anew(self, cycle: int) -> list[int] | None:
        """A sequence from a repair with noise, in free order of runs that were moved first, in turn."""
        start: Sequence[int] = range(self._count)
        if self._free_order and cycle % 8 >= 4:
            start = self._reordered(start, self._budget, _REORDER_STEPS)
        return self._repaired(start, noise=1.0)

    def _repaired(
        self, start: Sequence[int], noise: float = 0.0, *, to_the_end: bool = False
    ) -> list[int] | None:
        if len(start) > _ROOM * self._count:
            return None
        self._load(start)
        kernels.seed(self._next_seed())
        length, before, overflow = len(start), -1, 1.0
        while overflow > 0 and length != before and (before < 0 or to_the_end or not self._is_over()):
            before = length
            length, overflow, _ = kernels.repair(
                self._tables,
                self._state,
                self._other,
                length,
                self._budget,
                DEEPEST,
                max(10, _WORK_A_REPAIR // length**2),
                noise,
                _NO_LIMIT,
            )
        return self._pruned(length) if overflow == 0 else None

    def _run_on_demand(self, start: Sequence[int], by_size: float, by_distance: float) -> list[int] | None:
        """First runs in the order of a start, with room made for each; without what is not needed."""
        order = np.asarray(list(dict.fromkeys(start)), np.int64)
        length = kernels.run_on_demand(self._tables, self._state, order, self._budget, by_size, by_distance)
        return self._pruned(length) if length else None

    def _pruned(self, length: int) -> list[int]:
        length = kernels.prune(
            self._tables, self._state, self._other, length, self._budget, self._seen, self._places, 100
        )
        return _listed(self._state.sequence[:length])

    def _reordered(self, start: Sequence[int], limit: int, steps: int) -> list[int]:
        self._load(start)
        calls = 1 + steps * len(start) // _WORK_AN_ORDER
        fall = (_REORDER_COLD / _REORDER_HOT) ** (1 / calls)
        for call in range(calls):
            left = kernels.reorder(
                self._tables,
                self._state,
                self._other,
                len(start),
                limit,
                steps // calls,
                self._next_seed(),
                _REORDER_HOT * fall**call,
                _REORDER_HOT * fall ** (call + 1),
            )
            if left == 0 or self._is_over():
                break
        return _listed(self._state.sequence[: len(start)])

    def _with_slack(self, sequence: Sequence[int]) -> list[int]:
        """The sequence with runs moved so that less is held, then without what is not needed any more."""
        moved = self._reordered(sequence, self._budget - self._budget // 20, _MOVES)
        return self._pruned(len(moved)) if self._keeps_to_budget(moved) else list(sequence)

    def _keeps_to_budget(self, sequence: Sequence[int]) -> bool:
        """Whether memory never passes the budget; the sequence is loaded then."""
        self._load(sequence)
        peak, _ = kernels.evaluate(self._tables, self._state, len(sequence), self._budget)
        return peak <= self._budget

    def _load(self, sequence: Sequence[int]) -> None:
        self._state.sequence[: len(sequence)] = list(sequence)

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed


def _listed(sequence: kernels.Array) -> list[int]:
    return [int(index) for index in sequence]
