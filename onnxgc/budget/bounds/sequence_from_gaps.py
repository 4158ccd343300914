"""Sequences that follow from a choice of gaps."""

from __future__ import annotations

from collections.abc import Iterable

from onnxgc.budget.bounds.covering import Gap
from onnxgc.budget.operator_problem import OperatorProblem


def sequence_of_gaps(problem: OperatorProblem, gaps: Iterable[Gap]) -> list[int]:
    """Operators in the given order, each after the recomputation that it needs.

    A storage is recomputed right before the use that ends its gap, together with those of its inputs that
    are not live then.
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

    def is_live(storage: int, step: int) -> bool:
        return last[storage] >= step and not any(a < step <= b for a, b in absent.get(storage, ()))

    sequence: list[int] = []
    for step in range(count + 1):
        rerun: set[int] = set()
        missing = list(ending.get(step, ()))
        while missing:
            index = problem.producer[missing.pop()]
            if index not in rerun and problem.operators[index].may_repeat:
                rerun.add(index)
                missing.extend(s for s in problem.operators[index].reads if not is_live(s, step))
        sequence.extend(sorted(rerun))
        if step < count:
            sequence.append(step)
    return sequence
