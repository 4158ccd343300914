import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from onnxgc.errors import PlanError
from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.planning.objective import objective_bytes
from onnxgc.planning.plan import Objective, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Solver, SolverOptions
from onnxgc.solvers.families import GraphFamily
from onnxgc.solvers.paper.orderable_segments import GENERAL
from onnxgc.solvers.peak.cut_search import PEAK
from onnxgc.solvers.registry import SOLVERS, solver_for
from tests.graph.random_graphs import chain, random_problem
from tests.solvers.test_general import cells, unet

ROOT = Path(__file__).resolve().parent.parent.parent


def random_instance(random: Random, family: GraphFamily, max_vertices: int) -> CheckpointProblem:
    count = random.randint(1, max_vertices)
    if family is GraphFamily.ANY:
        return random_problem(random, max_vertices)
    if family is GraphFamily.CHAIN:
        return chain([random.randint(0, 12) for _ in range(count)])
    size = random.randint(0, 9)
    return chain([*[size] * count, random.randint(0, 9)])


def test_registered_solvers():
    assert all(name == solver.name for name, solver in SOLVERS.items())
    assert [name for name, solver in SOLVERS.items() if solver.takes_budget] == ["bptt", "budget"]
    assert [name for name, solver in SOLVERS.items() if not solver.automatic] == ["manual", "budget"]


@pytest.mark.parametrize("solver", [GENERAL, PEAK], ids=lambda solver: solver.name)
def test_plans_do_not_depend_on_names(solver: Solver):
    random = Random(48)
    for problem in [random_problem(random, 12) for _ in range(25)] + [cells(random, 6), unet(8)]:
        graph = problem.graph
        names: dict[Vertex, Vertex] = {v: f"tensor {random.random()}" for v in graph.vertices}
        edges = tuple((names[tail], names[head]) for tail, head in graph.edges)
        sizes = {names[v]: cost for v, cost in problem.costs.items()}
        renamed = CheckpointProblem(ComputationGraph(tuple(names.values()), edges), sizes)
        expected = tuple(names[v] for v in solver.solve(problem).plan.checkpoints)
        assert solver.solve(renamed).plan.checkpoints == expected


@pytest.mark.parametrize("name", [name for name in SOLVERS if name != "budget"])
def test_every_solution_has_its_value_a_bound_and_sorted_checkpoints(name: str):
    random = Random(22)
    solved = 0
    for _ in range(100):
        problem = random_instance(random, SOLVERS[name].family, 9)
        try:
            solution = SOLVERS[name].solve(problem)
        except PlanError:
            if name != "random":
                raise
            continue
        solved += 1
        assert solution.solver == name
        assert solution.objective is SOLVERS[name].objectives[0]
        assert solution.objective_bytes == objective_bytes(problem, solution.plan, solution.objective)
        assert solution.lower_bound_bytes <= solution.objective_bytes
        assert solution.plan.checkpoints == problem.graph.in_order(solution.plan.checkpoints)
        assert solution.seconds >= 0.0
        if solution.status is Status.OPTIMAL:
            assert solution.lower_bound_bytes == solution.objective_bytes
    assert solved > 80


PLANS_OF_ALL = """
from random import Random
from onnxgc.errors import PlanError
from onnxgc.graph.computation_graph import ComputationGraph
from onnxgc.planning.problem import CheckpointProblem, TensorCost
from onnxgc.solvers.registry import SOLVERS, solver_for
from tests.graph.random_graphs import random_graph
from tests.solvers.test_general import cells

random = Random(24)
for count in range(1, 15):
    graph = cells(random, 5).graph if count == 4 else random_graph(random, 14)
    if count % 2:
        graph = ComputationGraph(tuple(range(count)), tuple((v, v + 1) for v in range(count - 1)))
    names = {v: f"tensor {v}" for v in graph.vertices}
    edges = tuple((names[a], names[b]) for a, b in graph.edges)
    graph = ComputationGraph(tuple(names.values()), edges)
    equal = random.random() < 0.5
    sizes = {v: TensorCost(4 if equal else random.randint(0, 20)) for v in graph.vertices}
    problem = CheckpointProblem(graph, sizes)
    for name, solver in SOLVERS.items():
        if solver.refusal(problem) is None:
            try:
                print(count, name, solver.solve(problem).plan.checkpoints)
            except PlanError as error:
                print(count, name, error)
"""


def test_plans_do_not_depend_on_the_hash_seed():
    outputs = set()
    for seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", PLANS_OF_ALL], env=environment, capture_output=True, text=True, check=True
        )
        assert all(f" {name} " in done.stdout for name in SOLVERS)
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_unsupported_objectives_are_rejected():
    with pytest.raises(PlanError, match="solver 'acg' has the objective 'paper', not 'peak'"):
        SOLVERS["acg"].solve(chain([1, 2, 3]), SolverOptions(objective=Objective.PEAK))


def test_solver_for_an_objective():
    assert solver_for(None).name == "peak"
    assert solver_for(None, Objective.PAPER).name == "acg"
    assert solver_for("lcg", Objective.PEAK).name == "lcg", "rejected when it solves"
    with pytest.raises(PlanError, match="solver 'best' is not one of peak, acg, general"):
        solver_for("best")
