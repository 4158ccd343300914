"""Plans whose peaks are those of the generated code: the search's own model is corrected by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onnxgc.budget.operator_problem import simulate_sequence
from onnxgc.budget.search import SearchOptions
from onnxgc.errors import BudgetError
from onnxgc.planning.memory_budget import Budget
from onnxgc.torch.joint_problem import JointStep
from onnxgc.torch.plan_search import BudgetPlanner

if TYPE_CHECKING:
    from onnxgc.torch.compiled_peak import PassMemory

_ROUNDS = 4
"""Plans of which the code is generated, beside that without recomputation."""
_NEAR = 0.97
"""Share of a budget above which a faster plan is no longer looked for."""
_Sequence = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """A sequence, a lower bound on its extra time, and the memory of its code and of that without recomputation."""

    sequence: _Sequence
    lower_bound: int
    memory: PassMemory
    regular: PassMemory


class CompiledPlanner:
    """Searches for the sequence of least extra time whose generated code is within a memory budget."""

    def __init__(self, step: JointStep, options: SearchOptions, memory: Callable[[_Sequence], PassMemory]) -> None:
        self._step, self._memory = step, memory
        limit = options.time_limit_seconds
        self._options = replace(options, time_limit_seconds=None if limit is None else limit / 2)
        self._known: dict[_Sequence, tuple[int, PassMemory]] = {}
        self._baseline = tuple(range(len(step.problem)))
        self._model_peak = simulate_sequence(step.problem, self._baseline).peak

    def plan(self, budget: Budget) -> CompiledPlan:
        """The plan of a budget; a share is one of the peak of the code without recomputation.

        Raises:
            BudgetError: no plan fits the budget.
        """
        regular = self._measured(self._baseline, 0)
        if budget.is_least:
            tried = list(self._least())
            best = min(tried, key=lambda one: self._known[one][1].peak)
        else:
            size = budget.bytes_of(regular.peak)
            tried = [self._baseline] if regular.peak <= size else list(self._within(size, regular.peak))
            fitting = [one for one in tried if self._known[one][1].peak <= size]
            if not fitting:
                least = min((self._known[one][1].peak for one in tried), default=regular.peak)
                raise BudgetError(
                    f"no plan within {size:,} bytes was found: the least peak of compiled code was {least:,}; give "
                    "more memory, a smaller batch, or budget='min'"
                )
            best = min(fitting, key=self._duration)
        return CompiledPlan(best, *self._known[best], regular)

    def _least(self) -> Iterator[_Sequence]:
        yield self._baseline
        yield (least := self._searched(Budget()))
        peak = simulate_sequence(self._step.problem, least).peak
        for share in (1.08, 1.2):
            if (size := round(peak * share)) < self._model_peak:
                yield self._searched(Budget(size_bytes=size))

    def _within(self, size: int, regular: int) -> Iterator[_Sequence]:
        asked, broken = size * self._model_peak / regular, float(self._model_peak)
        for _ in range(_ROUNDS):
            seen = set(self._known)
            try:
                sequence = self._searched(Budget(size_bytes=max(1, int(asked))))
            except BudgetError:
                sequence = self._searched(Budget())
            yield sequence
            peak = self._known[sequence][1].peak
            if sequence in seen or _NEAR * size <= peak <= size:
                return
            if peak > size:
                broken = min(broken, asked)
                asked *= 0.99 * size / peak
            else:
                asked = min(asked * size / peak, (asked + broken) / 2)

    def _searched(self, budget: Budget) -> _Sequence:
        sequence, bound = BudgetPlanner(budget, self._options)(self._step, 0)
        self._measured(sequence, bound)
        return sequence

    def _measured(self, sequence: _Sequence, bound: int) -> PassMemory:
        if sequence not in self._known:
            self._known[sequence] = bound, self._memory(sequence)
        return self._known[sequence][1]

    def _duration(self, sequence: _Sequence) -> int:
        return simulate_sequence(self._step.problem, sequence).duration
