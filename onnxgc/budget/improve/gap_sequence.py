"""Sequences that follow from a choice of gaps."""

from __future__ import annotations

from collections.abc import Iterable

from onnxgc.budget.bounds.covering import Gap
from onnxgc.budget.operator_problem import OperatorProblem


def sequence_of_gaps(problem: OperatorProblem, gaps: Iterable[Gap]) -> list[int]:
    """Operators in the given order, each behind what must be computed again for it.

    A storage is computed again right before the use that ends its gap, together with those of its
    inputs that are not in memory then.
    """
    count = len(problem)
    ending: dict[int, list[int]] = {}
    absent: dict[int, list[tuple[int, int]]] = {}
    for gap in gaps:
        ending.setdefault(gap.before, []).append(gap.storage)
        absent.setdefault(gap.storage, []).append((gap.after, gap.before))
    last = [readers[-1] if readers else problem.producer[s] for s, readers in enumerate(problem.readers)]
    for storage in problem.kept:
        last[storage] = count

    def is_there(storage: int, step: int) -> bool:
        return last[storage] >= step and not any(a < step <= b for a, b in absent.get(storage, ()))

    sequence: list[int] = []
    for step in range(count + 1):
        again: set[int] = set()
        missing = list(ending.get(step, ()))
        while missing:
            index = problem.producer[missing.pop()]
            if index not in again and problem.operations[index].may_repeat:
                again.add(index)
                missing.extend(s for s in problem.operations[index].reads if not is_there(s, step))
        sequence.extend(sorted(again))
        if step < count:
            sequence.append(step)
    return sequence
