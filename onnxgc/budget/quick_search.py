"""The fastest sequence within a budget by repairs alone, in a small part of a search's time."""

from collections.abc import Iterable, Sequence

from onnxgc.budget.improve.removable_runs import without_needless_repeats
from onnxgc.budget.operator_problem import OperatorProblem, settled, simulate_sequence
from onnxgc.planning.deadline import Deadline


def quick_within(
    problem: OperatorProblem, budget: int, starts: Iterable[Sequence[int]] = (), seconds: float | None = None
) -> tuple[int, ...] | None:
    """The fastest sequence found within a budget, or None: from the problem's own order and from `starts`.

    A search ends after about `seconds`.
    """
    # Imported here, since it imports the compiler.
    from onnxgc.budget.improve.local_moves import LocalMoves

    given = [range(len(problem)), *starts]
    best: tuple[int, ...] | None = None
    least = 0

    def offer(sequence: Sequence[int]) -> None:
        nonlocal best, least
        sequence = settled(problem, sequence)
        found = simulate_sequence(problem, sequence)
        if found.peak <= budget and (best is None or found.duration < least):
            best, least = tuple(sequence), found.duration

    for start in given:
        offer(start)
    if best is None or least > problem.duration:
        deadline = Deadline(seconds)
        moves = LocalMoves(problem, budget, free_order=True, seed=0, is_over=deadline.is_over)
        for sequence in moves.quick_sequences(given):
            offer(sequence)
            if deadline.is_over():
                break
    if best is not None:
        offer(without_needless_repeats(problem, best, budget))
    return best
