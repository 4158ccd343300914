"""The search of neighbourhoods on sequences: a schedule of calls of the compiled loops."""

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from onnxgc.budget.improve import compiled_loops
from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator, simulate_sequence

_NO_LIMIT = 1 << 62
_MAX_REPEATS = 4
"""The longest sequence, roughly, as a multiple of the number of operators."""
_CYCLE = 16
"""Rounds from hot to cold in the first four cycles; each further four cycles are twice as long."""
_MAX_EFFORT = 20_000
"""Evaluations in a round, at most."""
_WORK_PER_ROUND = 6_000_000
"""Evaluations in a round times the number of operators."""
_RUIN_EFFORT = 4
"""Effort of a round of ruins, as a multiple of a round of annealing."""
_HOT, _COLD = 0.05, 0.001
"""Growth of a sequence that is accepted in ruins, roughly, as a share of the best extra time."""
_ANNEAL_HOT, _ANNEAL_COLD = 0.3, 0.005
"""The same for annealing, in units of the mean duration."""
_OVERFLOW_PRICE = 1.0
_EVICTIONS = ((1.0, 1.0), (1.0, 0.3), (1.0, 0.0), (0.5, 1.0))
"""Weights of size and distance in the choice of evicted storages, for each try."""
_MOVES_SHARE = 0.25
"""Share of annealing steps that move a run, in free order."""
_SLACK_ROUNDS = 8
"""In free order, one round in this number begins with moves for less memory."""
_SLACK_STEPS = 3_000
_REORDER_STEPS = 100_000
_WORK_PER_ORDER = 50_000_000
"""Limit of one call of `reorder`: steps times runs."""
_WORK_PER_REPAIR = 500_000_000
"""Limit of one call of `repair`: rounds times runs squared."""
_MIN_STEPS = 2_000
"""Moves in a search for an order of a lower peak, at least."""
_PEAK_STEP = 200
"""Each order must have a peak lower by one part in this number."""
_REORDER_HOT, _REORDER_COLD = 0.5, 0.002


@functools.cache
def run_all_loops() -> None:
    """Run each inner loop on a small problem: numba compiles it, or reads it from disk."""
    run_repairs()
    search = _small_search()
    for _ in range(_CYCLE + 2):
        search.improve([0, 1, 0, 2])


@functools.cache
def run_repairs() -> None:
    """The same for the loops of `quick_sequences`, about half of all."""
    list(_small_search().quick_sequences([[0, 1, 2]]))


def _small_search() -> "LocalMoves":
    operators = [ProblemOperator("0", (), (0,), 1), ProblemOperator("1", (0,), (1,), 1)]
    operators.append(ProblemOperator("2", (0, 1), (2,), 1))
    problem = OperatorProblem(tuple(operators), (1, 1, 1), frozenset((2,)))
    return LocalMoves(problem, 3, free_order=True, seed=0)


def order_of_least_peak(problem: OperatorProblem, is_over: Callable[[], bool], seed: int = 0) -> tuple[int, ...]:
    """All operators once, in the order of the lowest peak found by moves of runs."""
    best = tuple(range(len(problem)))
    search = LocalMoves(problem, 0, free_order=True, seed=seed, is_over=is_over)
    steps = max(_MIN_STEPS, min(_REORDER_STEPS, _WORK_PER_ORDER // len(problem)))
    while not is_over():
        peak = simulate_sequence(problem, best).peak
        moved = search._reorder(best, peak - 1 - peak // _PEAK_STEP, steps)
        if simulate_sequence(problem, moved).peak >= peak:
            break
        best = tuple(moved)
    return best


class LocalMoves:
    """Sequences within a budget, each found from others.

    The same seed and the same calls give the same sequences. Once `is_over`, long loops end early. A round
    takes at most `effort` evaluations.
    """

    def __init__(
        self,
        problem: OperatorProblem,
        budget: int,
        *,
        free_order: bool,
        seed: int,
        is_over: Callable[[], bool] = lambda: False,
        effort: int = _MAX_EFFORT,
    ) -> None:
        self._tables = compiled_loops.tables_of(problem)
        self._count = len(problem)
        max_length = _MAX_REPEATS * self._count + 256
        self._state = compiled_loops.state_for(self._tables, max_length)
        self._other = compiled_loops.state_for(self._tables, max_length)
        self._spare = compiled_loops.state_for(self._tables, max_length)
        self._budget = budget
        self._free_order = free_order
        self._seed = seed
        self._is_over = is_over
        self._effort = max(200, min(effort, _WORK_PER_ROUND // self._count))
        self._cycle = self._phase = 0
        self._current: list[int] | None = None

    def first_sequences(
        self, starts: Sequence[Sequence[int]], is_enough: Callable[[], bool]
    ) -> Iterator[tuple[str, list[int]]]:
        """Sequences within the budget from other sequences, each with the name of its method.

        Repairs each start, runs the first on demand, and in free order repairs each after moves of runs.
        It ends once its sequences satisfy `is_enough`. Out of time and without a sequence, it repairs the
        first start, however long that takes.
        """
        attempts = self._first_attempts(starts, is_enough)
        return ((how, sequence) for how, sequence in attempts if sequence is not None)

    def quick_sequences(self, starts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Sequences within the budget by repairs of the starts, and of the first one run on demand."""
        repaired = (self._repair(start) for start in starts)
        on_demand = (self._run_on_demand(starts[0], *weights) for weights in _EVICTIONS)
        return (found for found in itertools.chain(repaired, on_demand) if found is not None)

    def _first_attempts(
        self, starts: Sequence[Sequence[int]], is_enough: Callable[[], bool]
    ) -> Iterator[tuple[str, list[int] | None]]:
        for start in starts:
            if is_enough():
                return
            yield "repair", self._repair(start)
        for start, weights in itertools.product(starts[:1], _EVICTIONS):
            if is_enough():
                return
            yield "on demand", self._run_on_demand(start, *weights)
        if self._is_over() and not is_enough():
            yield "repair", self._repair(starts[0], to_the_end=True)
        for start in starts if self._free_order else ():
            if self._is_over():
                return
            moved = self._reorder(start, self._budget, _REORDER_STEPS)
            yield "order", self._repair(moved) or self._run_on_demand(moved, *_EVICTIONS[0])

    def improve(self, best: Sequence[int] | None) -> list[int] | None:
        """One more round; a sequence within the budget, if it finds one. `best` is the best so far.

        A cycle of rounds begins hot and ends cold. It starts from the best sequence or from a new one, and
        cycles of annealing alternate with cycles of ruin and recreate.
        """
        cycle, phase = self._cycle, self._phase
        length = _CYCLE << cycle // 4
        self._cycle, self._phase = (cycle, phase + 1) if phase + 1 < length else (cycle + 1, 0)
        if phase == 0:
            is_new = best is None or cycle % 4 in (2, 3)
            self._current = self._new_start(cycle) if is_new else list(best or ())
        if phase % _SLACK_ROUNDS == 1 and self._free_order and self._current is not None:
            self._current = self._with_slack(self._current)
        begin, end = phase / length, (phase + 1) / length
        if cycle % 2 == 0 or self._current is None or not self._is_within_budget(self._current):
            return self._anneal(begin, end)
        return self._ruin_and_recreate(begin, end)

    def _anneal(self, begin: float, end: float) -> list[int] | None:
        current, best, length = self._buffers(self._current or range(self._count))
        best_length, last_length = compiled_loops.anneal(
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
        self._current = current[:last_length].tolist()
        return _listed(best[:best_length]) if best_length else None

    def _buffers(self, sequence: Sequence[int]) -> tuple[compiled_loops.Array, compiled_loops.Array, int]:
        """Arrays for the current sequence, which is filled in, and for the best; and its length."""
        current = np.zeros_like(self._state.sequence)
        current[: len(sequence)] = list(sequence)
        return current, np.zeros_like(current), len(sequence)

    def _ruin_and_recreate(self, begin: float, end: float) -> list[int]:
        assert self._current is not None
        current, best, length = self._buffers(self._current)
        best_length, last_length = compiled_loops.search_neighbourhoods(
            self._tables,
            self._state,
            self._other,
            current,
            length,
            self._budget,
            _RUIN_EFFORT * self._effort,
            self._next_seed(),
            best,
            _HOT * (_COLD / _HOT) ** begin,
            _HOT * (_COLD / _HOT) ** end,
        )
        self._current = current[:last_length].tolist()
        return _listed(best[:best_length])

    def evict_at_random(self, best: Sequence[int]) -> list[int] | None:
        """A sequence with the first runs of the best in order, by evictions of random weights."""
        draw = random.Random(self._next_seed())
        return self._run_on_demand(best, draw.uniform(0.5, 1.2), draw.uniform(0.0, 1.0))

    def _new_start(self, cycle: int) -> list[int] | None:
        """A sequence from a repair with noise; in free order, in every second case after moves of runs."""
        start: Sequence[int] = range(self._count)
        if self._free_order and cycle % 8 >= 4:
            start = self._reorder(start, self._budget, _REORDER_STEPS)
        return self._repair(start, noise=1.0)

    def _repair(self, start: Sequence[int], noise: float = 0.0, *, to_the_end: bool = False) -> list[int] | None:
        if len(start) > _MAX_REPEATS * self._count:
            return None
        self._load(start)
        compiled_loops.seed(self._next_seed())
        length, before, overflow = len(start), -1, 1.0
        while overflow > 0 and length != before and (before < 0 or to_the_end or not self._is_over()):
            before = length
            length, overflow, _ = compiled_loops.repair(
                self._tables,
                self._state,
                self._other,
                length,
                self._budget,
                max(10, _WORK_PER_REPAIR // length**2),
                noise,
                _NO_LIMIT,
            )
        return self._pruned(length) if overflow == 0 else None

    def _run_on_demand(self, start: Sequence[int], by_size: float, by_distance: float) -> list[int] | None:
        """First runs in the order of a start with evictions for each; without needless runs."""
        order = np.asarray(list(dict.fromkeys(start)), np.int64)
        length = compiled_loops.run_on_demand(self._tables, self._state, order, self._budget, by_size, by_distance)
        return self._pruned(length) if length else None

    def _pruned(self, length: int) -> list[int]:
        length = compiled_loops.prune(self._tables, self._state, self._other, length, self._budget, 100)
        return _listed(self._state.sequence[:length])

    def _reorder(self, start: Sequence[int], limit: int, steps: int) -> list[int]:
        self._load(start)
        calls = 1 + steps * len(start) // _WORK_PER_ORDER
        fall = (_REORDER_COLD / _REORDER_HOT) ** (1 / calls)
        for call in range(calls):
            left = compiled_loops.reorder(
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
        """The sequence with runs moved for less memory, then without runs that became needless."""
        moved = self._reorder(sequence, self._budget - self._budget // 20, _SLACK_STEPS)
        return self._pruned(len(moved)) if self._is_within_budget(moved) else list(sequence)

    def _is_within_budget(self, sequence: Sequence[int]) -> bool:
        """Whether the peak is within the budget; `self._state` contains the sequence afterwards."""
        self._load(sequence)
        peak, _ = compiled_loops.evaluate(self._tables, self._state, len(sequence), self._budget)
        return peak <= self._budget

    def _load(self, sequence: Sequence[int]) -> None:
        self._state.sequence[: len(sequence)] = list(sequence)

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed


def _listed(sequence: compiled_loops.Array) -> list[int]:
    return [int(index) for index in sequence]
