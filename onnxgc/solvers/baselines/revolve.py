"""Binomial checkpointing: the fewest forward steps that reverse a chain within a number of slots.

Source: A. Griewank, A. Walther, "Algorithm 799: revolve", ACM TOMS 26(1), 2000. As there, the slots
include the one of the initial state, and the forward step inside each backward step is not counted.
"""

from math import comb

from onnxgc.errors import PlanError
from onnxgc.planning.plan import Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.baselines.reversal_plan import reversal_plan
from onnxgc.solvers.families import GraphFamily
from onnxgc.solvers.plan_bounds import paper_lower_bound_bytes
from onnxgc.solvers.reversal_schedule import Action, ReversalObjective, default_slots, unroll


def reversal_schedule(steps: int, slots: int) -> tuple[Action, ...]:
    """A schedule with the fewest forward steps and at most `slots` stored states. O(forward steps).

    For l steps and s slots these are r l - C(s + r, r - 1) forward steps, where r is the largest number of
    times that any step advances: the least number with l <= C(s + r, r).

    >>> from onnxgc.solvers.reversal_schedule import Advance
    >>> schedule = reversal_schedule(20, 3)
    >>> sum(action.stop - action.start for action in schedule if isinstance(action, Advance))
    45

    Raises:
        ValueError: `steps` is negative, or `slots` is less than 1.

    Source: Griewank & Walther 2000, Proposition 1.
    """
    return unroll(steps, slots, _split)


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """The optimal reversal schedule as a sequence, with the states of its first sweep as checkpoints.

    O(forward steps).

    Args:
        problem: a chain of equal tensors.
        options: `slots` is the number of states stored at once (default: `default_slots`).

    Raises:
        PlanError: there are fewer than 1 slots.

    Source: Griewank & Walther 2000.
    """
    steps = len(problem.graph) - 1
    slots = default_slots(steps) if options.slots is None else options.slots
    if slots < 1:
        raise PlanError(f"{slots} slots have no room for the first state of a chain; give at least 1")
    plan = reversal_plan(problem, reversal_schedule(steps, slots))
    return Finding(plan, Status.FEASIBLE, paper_lower_bound_bytes(problem))


def _repeats(steps: int, slots: int) -> int:
    """The largest number of times that a step advances."""
    repeats, reach = 0, 1  # reach = C(slots + repeats, repeats)
    while reach < steps:
        repeats += 1
        reach = reach * (slots + repeats) // repeats
    return repeats


def _split(steps: int, slots: int) -> int:
    """The longest first part of an optimal schedule.

    With r repeats for the whole, r - 1 repeats reverse the first part, and the second part is at least as
    long as r - 1 repeats can reverse with one slot less.
    """
    repeats = _repeats(steps, slots)
    return min(steps - 1, comb(slots + repeats - 1, slots), steps - comb(slots + repeats - 2, slots - 1))


REVOLVE = Solver(
    name="revolve",
    summary="Griewank and Walther's reversal schedule: the fewest forward steps for a number of states",
    search=search,
    exact_for=ReversalObjective.FORWARD_STEPS,
    exact_on=GraphFamily.EQUAL_CHAIN,
    family=GraphFamily.EQUAL_CHAIN,
)
