"""Backpropagation through time under a memory budget, by dynamic programming.

Source: A. Gruslys et al., "Memory-Efficient Backpropagation Through Time", NeurIPS 2016, section 3.1:
the variant that stores hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnxgc.errors import BudgetError
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

_Table: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Policy:
    """What to store and what to recompute, and its cost.

    `evaluations` counts every forward step, the one inside each backward step included, as the
    source does.
    """

    evaluations: int
    schedule: tuple[Action, ...] = field(repr=False)


def policy(steps: int, budget: int) -> Policy:
    """The optimal execution of `steps` with at most `budget` hidden states stored at once.

    The initial state is one of them. O(steps^2 budget) operations in numpy.

    Raises:
        ValueError: `steps` is negative, or `budget` is less than 1.
    """
    check_sizes(steps, budget)
    if not steps:
        return Policy(0, ())
    states = min(budget, steps)  # No more than one for each step is of use.
    costs, splits = _tables(steps, states)
    schedule = unroll(steps, states, lambda length, slots: int(splits[slots, length]))
    return Policy(int(costs[states, steps]), schedule)


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """The hidden states that the first sweep of the optimal policy stores.

    `options.budget_bytes` is for the stored states, the source among them: what one step needs
    inside comes on top.

    Raises:
        BudgetError: the budget does not hold the source.
    """
    vertices = problem.graph.vertices
    steps = len(vertices) - 1
    states = first_sweep_states(policy(steps, _states_within(problem, options.budget_bytes)).schedule)
    plan = CheckpointPlan.for_graph(problem.graph, [vertices[state] for state in states])
    return Finding(plan, Status.FEASIBLE, any_plan_lower_bound_bytes(problem))


def _states_within(problem: CheckpointProblem, budget_bytes: int | None) -> int:
    source, *others = problem.graph.vertices
    if budget_bytes is None:
        return default_slots(len(others))
    left_bytes = budget_bytes - problem.size_bytes(source)
    if left_bytes < 0:
        raise BudgetError(
            f"a budget of {budget_bytes} bytes does not hold the first state, {source!r}, "
            f"of {problem.size_bytes(source)} bytes; give at least that"
        )
    state_bytes = problem.size_bytes(others[0]) if len(others) > 1 else 0
    return 1 + (left_bytes // state_bytes if state_bytes else len(others))


def _tables(steps: int, states: int) -> tuple[_Table, _Table]:
    """C(t, m) and the split y that reaches it, at `[m, t]`.

    C(t, 1) = t (t + 1) / 2; C(t, m) = 2 t - 1 where m >= t; else the least over y of
    y + C(t - y, m - 1) + C(y, m): advance y steps and store, go back behind it, then before it.
    """
    length = np.arange(steps + 1, dtype=np.int64)
    costs = np.zeros((states + 1, steps + 1), dtype=np.int64)
    splits = np.ones_like(costs)
    costs[1] = length * (length + 1) // 2
    for slots in range(2, states + 1):
        costs[slots, 1 : slots + 1] = 2 * length[1 : slots + 1] - 1
        for t in range(slots + 1, steps + 1):
            found = length[1:t] + costs[slots - 1, t - 1 : 0 : -1] + costs[slots, 1:t]
            # Of equally good splits the last: fewer states are then crowded at the start.
            split = t - 1 - int(found[::-1].argmin())
            splits[slots, t] = split
            costs[slots, t] = found[split - 1]
    return costs, splits


BPTT = Solver(
    name="bptt",
    summary="Gruslys et al.'s policy under a budget; as a plan, only the states of its first sweep",
    search=search,
    exact_for=ReversalObjective.FORWARD_STEPS,
    exact_on=GraphFamily.EQUAL_CHAIN,
    family=GraphFamily.EQUAL_CHAIN,
    takes_budget=True,
)
