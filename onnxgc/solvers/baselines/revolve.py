"""Binomial checkpointing: the fewest forward steps that reverse a chain with so many stored states.

Source: A. Griewank, A. Walther, "Algorithm 799: revolve", ACM TOMS 26(1), 2000. Slots include the
one of the initial state, as there; the forward step inside each backward step is not counted.
"""

from __future__ import annotations

from math import comb

from onnxgc.errors import PlanError
from onnxgc.planning.plan import CheckpointPlan, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.bounds import any_plan_lower_bound_bytes
from onnxgc.solvers.chain_reversal import (
    Action,
    ReversalObjective,
    check_sizes,
    default_slots,
    first_sweep_states,
    unroll,
)
from onnxgc.solvers.families import GraphFamily


def optimal_evaluations(steps: int, slots: int) -> int:
    """The fewest forward steps: r l - C(s + r, r - 1) for l steps and s slots.

    Here r is the most often that any step advances, the least number with l <= C(s + r, r). Twenty
    steps with three slots, each advanced at most three times:

    >>> optimal_evaluations(20, 3)
    45

    Raises:
        ValueError: `steps` is negative, or `slots` is less than 1.

    Source: Griewank & Walther 2000, Proposition 1.
    """
    check_sizes(steps, slots)
    if steps < 2:
        return 0
    repeats = _repeats(steps, slots)
    return repeats * steps - comb(slots + repeats, repeats - 1)


def reversal_schedule(steps: int, slots: int) -> tuple[Action, ...]:
    """A schedule with `optimal_evaluations` forward steps and never more than `slots` stored states.

    Raises:
        ValueError: `steps` is negative, or `slots` is less than 1.
    """
    return unroll(steps, slots, _split)


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """The states that the first sweep of the optimal schedule stores, for `options.slots`.

    Raises:
        PlanError: there are less than 1 slots.
    """
    vertices = problem.graph.vertices
    steps = len(vertices) - 1
    slots = default_slots(steps) if options.slots is None else options.slots
    if slots < 1:
        raise PlanError(f"{slots} slots cannot hold the first state of a chain; give at least 1")
    states = first_sweep_states(reversal_schedule(steps, slots))
    plan = CheckpointPlan.for_graph(problem.graph, [vertices[state] for state in states])
    return Finding(plan, Status.FEASIBLE, any_plan_lower_bound_bytes(problem))


def _repeats(steps: int, slots: int) -> int:
    repeats, reach = 0, 1  # reach = C(slots + repeats, repeats)
    while reach < steps:
        repeats += 1
        reach = reach * (slots + repeats) // repeats
    return repeats


def _split(steps: int, slots: int) -> int:
    """The longest first part that an optimal schedule can have.

    With r repeats for the whole, the first part may be as long as r - 1 repeats can reverse; and
    the second must leave nothing of what r - 1 repeats can reverse with a slot less.
    """
    repeats = _repeats(steps, slots)
    return min(
        steps - 1,
        comb(slots + repeats - 1, slots),
        steps - comb(slots + repeats - 2, slots - 1),
    )


REVOLVE = Solver(
    name="revolve",
    summary="Griewank and Walther's reversal schedule; as a plan, only the states of its first sweep",
    search=search,
    exact_for=ReversalObjective.FORWARD_STEPS,
    exact_on=GraphFamily.EQUAL_CHAIN,
    family=GraphFamily.EQUAL_CHAIN,
)
