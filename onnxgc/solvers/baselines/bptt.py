"""Backpropagation through time under a memory budget, by dynamic programming.

Source: A. Gruslys et al., "Memory-Efficient Backpropagation Through Time", NeurIPS 2016, section 3.1
(the variant that stores hidden states).
"""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnxgc.errors import BudgetError
from onnxgc.planning.plan import Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.baselines.reversal_plan import reversal_plan
from onnxgc.solvers.families import GraphFamily
from onnxgc.solvers.plan_bounds import paper_lower_bound_bytes
from onnxgc.solvers.reversal_schedule import Action, ReversalObjective, check_sizes, default_slots, unroll

_Table: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Policy:
    """A reversal schedule and its cost.

    `evaluations` counts every forward step, including the one inside each backward step, as in the source.
    """

    evaluations: int
    schedule: tuple[Action, ...] = field(repr=False)


def policy(steps: int, budget: int) -> Policy:
    """The optimal execution of `steps` with at most `budget` hidden states stored at once.

    The initial state is one of them. O(steps^2 budget).

    >>> policy(20, 3).evaluations
    65

    Raises:
        ValueError: `steps` is negative, or `budget` is less than 1.
    """
    check_sizes(steps, budget)
    if not steps:
        return Policy(0, ())
    states = min(budget, steps)  # More than one for each step is useless.
    costs, splits = _tables(steps, states)
    schedule = unroll(steps, states, lambda length, slots: int(splits[slots, length]))
    return Policy(int(costs[states, steps]), schedule)


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """The optimal policy as a sequence, with the states of its first sweep as checkpoints.

    O(steps^2 states).

    Args:
        problem: a chain of equal tensors, sizes in bytes.
        options: `budget_bytes` limits the stored states, including the source; the memory inside a step is
            additional. The default is `default_slots` states.

    Raises:
        BudgetError: the source exceeds the budget.

    Source: Gruslys et al. 2016, section 3.1.
    """
    steps = len(problem.graph) - 1
    plan = reversal_plan(problem, policy(steps, _states_within(problem, options.budget_bytes)).schedule)
    return Finding(plan, Status.FEASIBLE, paper_lower_bound_bytes(problem))


def _states_within(problem: CheckpointProblem, budget_bytes: int | None) -> int:
    source, *others = problem.graph.vertices
    if budget_bytes is None:
        return default_slots(len(others))
    left_bytes = budget_bytes - problem.size_bytes(source)
    if left_bytes < 0:
        raise BudgetError(
            f"a budget of {budget_bytes:,} bytes is less than the first state, {source!r}, "
            f"of {problem.size_bytes(source):,} bytes; give at least that"
        )
    state_bytes = problem.size_bytes(others[0]) if len(others) > 1 else 0
    return 1 + (left_bytes // state_bytes if state_bytes else len(others))


def _tables(steps: int, states: int) -> tuple[_Table, _Table]:
    """C(t, m) and its split y, at `[m, t]`, both of shape [states + 1, steps + 1].

    C(t, 1) = t (t + 1) / 2; C(t, m) = 2 t - 1 for m >= t; otherwise the minimum over y of
    y + C(t - y, m - 1) + C(y, m): advance y steps and store, reverse the steps after it, then those before.
    """
    length = np.arange(steps + 1, dtype=np.int64)
    costs = np.zeros((states + 1, steps + 1), dtype=np.int64)
    splits = np.ones_like(costs)
    costs[1] = length * (length + 1) // 2
    for slots in range(2, states + 1):
        costs[slots, 1 : slots + 1] = 2 * length[1 : slots + 1] - 1
        for t in range(slots + 1, steps + 1):
            sums = length[1:t] + costs[slots - 1, t - 1 : 0 : -1] + costs[slots, 1:t]
            # Among equally good splits the last one: it stores fewer states near the start.
            split = t - 1 - int(sums[::-1].argmin())
            splits[slots, t] = split
            costs[slots, t] = sums[split - 1]
    return costs, splits


BPTT = Solver(
    name="bptt",
    summary="Gruslys et al.'s reversal policy: the fewest forward steps for a budget of stored states",
    search=search,
    exact_for=ReversalObjective.FORWARD_STEPS,
    exact_on=GraphFamily.EQUAL_CHAIN,
    family=GraphFamily.EQUAL_CHAIN,
    takes_budget=True,
)
