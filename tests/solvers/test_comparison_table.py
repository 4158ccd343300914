"""The paper's table of approaches, derived from the registry, with each claim tested on instances.

Source: the paper, section 2, the table that compares approaches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest

from onnxgc.errors import BudgetError, PlanError
from onnxgc.graph.segments import is_valid_reading_a
from onnxgc.planning.plan import Objective, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Solver, SolverOptions
from onnxgc.solvers.baselines.exhaustive import EXHAUSTIVE
from onnxgc.solvers.budget_solver import BUDGET
from onnxgc.solvers.families import GraphFamily
from onnxgc.solvers.registry import SOLVERS
from tests.graph.random_graphs import chain, random_problem

COLUMNS = (GraphFamily.EQUAL_CHAIN, GraphFamily.CHAIN, GraphFamily.ANY)
RANK = {GraphFamily.ANY: 0, GraphFamily.CHAIN: 1, GraphFamily.EQUAL_CHAIN: 2}

PAPER = {
    # approach: (applicable and optimal on equal chains, on chains, on any graph), automatic, budget
    "manual": ("yes no", "yes no", "yes no", False, False),
    "revolve": ("yes yes", "no no", "no no", True, False),
    "chen-sqrt": ("yes yes", "yes no", "no no", True, False),
    "bptt": ("yes yes", "no no", "no no", True, True),
    "acg": ("yes yes", "yes yes", "yes yes", True, False),
}

AS_PRACTISED = {("chen-sqrt", GraphFamily.ANY): "yes no"}
"""Extension of the paper's table: Chen's method over splitting vertices of any graph."""

OTHERS = {
    "lcg": ("yes yes", "yes yes", "no no", True, False),
    "chen-greedy": ("yes no", "yes no", "yes no", True, False),
    "random": ("yes no", "yes no", "yes no", True, False),
    "store-all": ("yes no", "yes no", "yes no", True, False),
    "exhaustive": ("yes yes", "yes yes", "yes yes", True, False),
}


FOR_THE_PAPER = {name: solver for name, solver in SOLVERS.items() if solver.objectives[0] is Objective.PAPER}
"""The table compares solvers for the paper's objective."""


@dataclass(frozen=True, slots=True)
class Claim:
    applicable: bool
    optimal: bool

    def __str__(self) -> str:
        return " ".join("yes" if holds else "no" for holds in (self.applicable, self.optimal))


def claim(solver: Solver, column: GraphFamily) -> Claim:
    applicable = RANK[solver.family] <= RANK[column]
    exact = solver.exact_for is not None and RANK[solver.exact_on] <= RANK[column]
    return Claim(applicable, applicable and exact)


def instances(column: GraphFamily) -> Iterator[CheckpointProblem]:
    random = Random(61)
    for _ in range(40):
        if column is GraphFamily.EQUAL_CHAIN:
            yield chain([random.randint(1, 9)] * random.randint(1, 11))
        elif column is GraphFamily.CHAIN:
            yield chain([1, 2, 3, *(random.randint(0, 20) for _ in range(random.randint(1, 8)))])
        else:
            problem = random_problem(random, 9)
            if any(len(problem.graph.successors(vertex)) > 1 for vertex in problem.graph.vertices):
                yield problem


def row(solver: Solver) -> tuple[object, ...]:
    return (*(str(claim(solver, c)) for c in COLUMNS), solver.automatic, solver.takes_budget)


def test_table_equals_the_paper():
    for name, published in PAPER.items():
        expected = list(published)
        for place, column in enumerate(COLUMNS):
            expected[place] = AS_PRACTISED.get((name, column), published[place])
        assert row(SOLVERS[name]) == tuple(expected), name
    for name, expected_row in OTHERS.items():
        assert row(SOLVERS[name]) == expected_row, name
    assert PAPER.keys() | OTHERS.keys() == FOR_THE_PAPER.keys()


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name.lower())
@pytest.mark.parametrize("name", FOR_THE_PAPER)
def test_each_claim_holds(name: str, column: GraphFamily):
    """Applicable: solves, or rejects in one line. Optimal for the paper: no set is better."""
    solver = SOLVERS[name]
    claimed = claim(solver, column)
    worse = 0
    for problem in instances(column):
        if not claimed.applicable:
            with pytest.raises(PlanError, match=f"solver '{name}' takes chains") as caught:
                solver.solve(problem)
            assert "\n" not in str(caught.value)
            continue
        try:
            solution = solver.solve(problem)
        except PlanError:
            if name != "random":
                raise
            continue
        optimum = EXHAUSTIVE.solve(problem).objective_bytes
        if claimed.optimal and solver.exact_for is Objective.PAPER:
            assert solution.objective_bytes == optimum
            assert solution.status is Status.OPTIMAL
        else:
            assert solution.status is Status.FEASIBLE
        worse += solution.objective_bytes > optimum
        if solver.automatic:
            assert is_valid_reading_a(problem.graph, solution.plan.checkpoints)
            assert solution.lower_bound_bytes <= optimum <= solution.objective_bytes
    # Chen's greedy sweep misses the optimum of equal states only on chains of millions.
    if claimed.applicable and not claimed.optimal and (name, column) != ("chen-greedy", COLUMNS[0]):
        assert worse, "the solver is optimal here; update the registry"


def test_automatic_solvers_need_no_input():
    for name, solver in SOLVERS.items():
        if solver is BUDGET:
            with pytest.raises(PlanError, match="needs --budget"):
                solver.solve(chain([1] * 12))
            continue
        kept = solver.solve(chain([1] * 12)).plan.checkpoints
        assert (kept == (0, 11)) is not solver.automatic, name


def test_budgets_are_respected():
    problem = chain([2] * 12)
    assert BUDGET.solve(problem, SolverOptions(budget_bytes=10, max_rounds=2)).objective_bytes <= 10
    with pytest.raises(BudgetError, match="no plan fits 1 bytes"):
        BUDGET.solve(problem, SolverOptions(budget_bytes=1, max_rounds=2))
    for solver in SOLVERS.values():
        if solver is BUDGET:
            continue
        tight, loose = (solver.solve(problem, SolverOptions(budget_bytes=b)).plan for b in (4, 40))
        assert (tight != loose) is solver.takes_budget
        if solver.takes_budget:
            assert sum(problem.size_bytes(vertex) for vertex in tight.checkpoints[:-1]) <= 4
            with pytest.raises(BudgetError):
                solver.solve(problem, SolverOptions(budget_bytes=1))
