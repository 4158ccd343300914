import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import onnxgc
from onnxgc.errors import PlanError
from onnxgc.planning.plan import CheckpointPlan, Objective, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions
from onnxgc.solvers.paper.acg import ACG
from onnxgc.solvers.plan_bounds import plan_lower_bound
from onnxgc.solvers.registry import solver_for
from tests.api.chains import chain

PLAN = CheckpointPlan(("h0",))


@dataclass
class Fixed:
    found: Any = None
    name: str = "mine"

    def search(self, problem: CheckpointProblem, options: SolverOptions) -> Finding:
        if isinstance(self.found, Exception):
            raise self.found
        if self.found is not None:
            return self.found
        assert options.objective is not None
        plan = CheckpointPlan.for_graph(problem.graph, problem.graph.vertices[::3])
        return Finding(plan, Status.FEASIBLE, plan_lower_bound(problem, options.objective)[0])


def test_an_object_plans_a_model():
    result = onnxgc.optimize(chain(6, batch=64), solver=Fixed(), check=False, objective="activations")
    assert result.report["solver"] == "mine"
    assert result.planned.solution.objective is Objective.ACTIVATIONS
    assert len(result.plan.checkpoints) == len(result.planned.traced.problem.graph.vertices[::3]) + 1
    given = onnxgc.optimize(chain(6, batch=64), solver=ACG, check=False)
    assert given.plan == onnxgc.optimize(chain(6, batch=64), solver="acg", check=False).plan


def test_objects_are_rows():
    refusing = Fixed(PlanError("too large for me"), "other")
    found = onnxgc.compare(chain(6, batch=64), solvers=["chen-sqrt", Fixed(), ACG, refusing])
    assert {row["name"] for row in found.report["rows"]} == {"mine", "acg", "chen-sqrt", "store-all"}
    assert found.report["left_out"] == [{"name": "other", "reason": "too large for me"}]
    again = onnxgc.optimize(chain(6, batch=64), plan=found.plans["mine"], check=False)
    assert again.plan == found.plans["mine"]
    several = onnxgc.compare(chain(2, 64), chain(3, 64), each=True, solvers=[Fixed()], workers=2)
    assert [len(one["rows"]) for one in several.report["comparisons"]] == [2, 2]


def test_objects_may_have_the_fields_of_a_solver():
    limited = SimpleNamespace(name="s", search=Fixed().search, objectives=[Objective.PAPER], max_vertices=3)
    solver = solver_for(limited)
    assert (solver.objectives, solver.max_vertices, solver.automatic) == ((Objective.PAPER,), 3, True)
    with pytest.raises(PlanError, match="takes graphs of up to 3 vertices"):
        onnxgc.optimize(chain(6, batch=64), solver=limited, check=False)
    with pytest.raises(PlanError, match="has the objective 'paper', not 'peak'"):
        onnxgc.optimize(chain(6, batch=64), solver=limited, objective="peak", check=False)
    mine = Solver("mine", "", Fixed().search)
    assert solver_for(mine) is mine
    assert pickle.loads(pickle.dumps(solver_for("acg"))) == ACG


@pytest.mark.parametrize(
    "solver, words",
    [
        (5, "or an object with a name and a method search(problem, options), not 5"),
        (lambda problem, options: None, "not <function"),
        (Fixed, "not the class Fixed, not an object of it"),
        (SimpleNamespace(name="mine", search=None), "not namespace"),
        (SimpleNamespace(name="", search=len), "the name of a solver is ''"),
        (Fixed(name="acg"), "the name 'acg' of a solver is that of a solver of onnxgc"),
        (SimpleNamespace(name="mine", search=len, objectives=["peak"]), "the objectives of solver 'mine'"),
        (Fixed(7), "solver 'mine' returned a int; return an onnxgc.solvers.base.Finding"),
        (Fixed(Finding(PLAN, "optimal", 0)), "a Finding without a CheckpointPlan or a Status"),  # type: ignore[arg-type]
        (Fixed(Finding(CheckpointPlan(["h0"]), Status.FEASIBLE, 0)), "parts are not tuples"),  # type: ignore[arg-type]
        (Fixed(Finding(CheckpointPlan(("h99",)), Status.FEASIBLE, 0)), "a plan with 'h99', which is not a"),
        (Fixed(Finding(CheckpointPlan(([],)), Status.FEASIBLE, 0)), "a plan with [], which is not a tensor"),  # type: ignore[arg-type]
        (Fixed(Finding(CheckpointPlan((), ("h0",)), Status.FEASIBLE, 0)), "an order without all tensors"),
        (Fixed(Finding(CheckpointPlan((), sequence=("f",)), Status.FEASIBLE, 0)), "an invalid plan: the plan"),
        (Fixed(Finding(PLAN, Status.FEASIBLE, 10**12)), "the lower bound 1,000,000,000,000, but its plan has"),
        (Fixed(Finding(PLAN, Status.FEASIBLE, 0.5)), "the lower bound 0.5; give a whole number"),  # type: ignore[arg-type]
        (Fixed(PlanError("not this one")), "not this one"),
    ],
)
def test_wrong_objects_and_results_are_one_line(solver: Any, words: str):
    calls = [lambda: onnxgc.optimize(chain(3, batch=64), solver=solver, check=False)]
    if words != "not this one":
        calls.append(lambda: onnxgc.compare(chain(3, batch=64), solvers=[solver]))  # type: ignore[arg-type,return-value]
    for call in calls:
        with pytest.raises(PlanError) as caught:
            call()
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_contradictions():
    with pytest.raises(PlanError, match="two rows have the name 'mine'"):
        onnxgc.compare(chain(2, batch=64), solvers=[Fixed(), Fixed()])
    with pytest.raises(PlanError, match="two rows have the name 'per-block'"):
        onnxgc.compare(chain(2, batch=64), solvers=[Fixed(name="per-block")])
    with pytest.raises(PlanError, match="give a list of names or solver objects"):
        onnxgc.compare(chain(2, batch=64), solvers="acg")
    with pytest.raises(PlanError, match="use the solver 'budget', not 'mine'"):
        onnxgc.optimize(chain(2, batch=64), solver=Fixed(), budget="90%")
