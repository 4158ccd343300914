from random import Random

import pytest

from onnxgc.graph.division_tree import DivisionKind, build_division_tree
from onnxgc.graph.segments import is_valid_reading_a
from onnxgc.graph.virtual_terminals import with_single_terminals
from onnxgc.planning.plan import Status
from onnxgc.solvers.base import Solver
from onnxgc.solvers.baselines.chen import CHEN_GREEDY, CHEN_SQRT
from onnxgc.solvers.families import splitting_vertices
from onnxgc.solvers.paper.acg import ACG
from tests.graph.random_graphs import chain, problem_of, random_problem
from tests.solvers import networks

BOTH = (CHEN_SQRT, CHEN_GREEDY)


def test_sqrt_is_optimal_on_chains_of_equal_states() -> None:
    for inner in range(200):
        problem = chain([5, *[3] * inner, 2])
        solution = CHEN_SQRT.solve(problem)
        assert solution.objective_bytes == ACG.solve(problem).objective_bytes
        assert solution.status is Status.OPTIMAL
        assert solution.gap == 0.0


def test_sqrt_cuts_evenly() -> None:
    assert CHEN_SQRT.solve(chain([1] * 17)).plan.checkpoints == (0, 4, 8, 12, 16)


def test_sizes_make_sqrt_suboptimal() -> None:
    """The even cuts fall on the large tensors."""
    problem = chain([0, 1, 9, 1, 0])
    solution = CHEN_SQRT.solve(problem)
    assert solution.status is Status.FEASIBLE
    assert (solution.objective_bytes, ACG.solve(problem).objective_bytes) == (10, 10)
    problem = chain([0, 1, 1, 9, 1, 1, 9, 1, 1, 0])
    assert CHEN_SQRT.solve(problem).objective_bytes > ACG.solve(problem).objective_bytes


def test_greedy_is_optimal_on_equal_states_and_uses_sizes() -> None:
    for inner in (*range(100), 1000, 2345):
        problem = chain([500, *[3] * inner, 500])
        assert CHEN_GREEDY.solve(problem).objective_bytes == ACG.solve(problem).objective_bytes
    vgg = networks.vgg("66M77M888M999M999M", batch=64)
    assert CHEN_GREEDY.solve(vgg).objective_bytes < 0.7 * vgg.total_bytes


@pytest.mark.parametrize("solver", BOTH, ids=lambda solver: solver.name)
def test_cuts_are_splitting_vertices(solver: Solver) -> None:
    random = Random(41)
    for _ in range(400):
        problem = random_problem(random, 12)
        solution = solver.solve(problem)
        ends = {*problem.graph.sources, *problem.graph.sinks}
        assert set(solution.plan.checkpoints) <= {*splitting_vertices(problem), *ends}
        assert is_valid_reading_a(problem.graph, solution.plan.checkpoints)


def test_splitting_vertices_equal_those_of_the_division_tree() -> None:
    random = Random(42)
    for _ in range(500):
        problem = random_problem(random, 12)
        closed = with_single_terminals(problem.graph)
        expected: tuple[object, ...] = ()
        if len(closed) > 1:
            root = build_division_tree(closed)
            expected = root.connectors if root.kind is DivisionKind.LINEAR else ()
        assert splitting_vertices(problem) == expected


@pytest.mark.parametrize("solver", BOTH, ids=lambda solver: solver.name)
def test_a_network_of_residual_blocks(solver: Solver) -> None:
    problem = networks.resnet((3, 4, 6, 3), bottleneck=True, batch=64)
    value = solver.solve(problem).objective_bytes
    assert ACG.solve(problem).objective_bytes <= value < 0.7 * problem.total_bytes


def test_only_the_ends_are_kept_without_a_splitting_vertex() -> None:
    problem = problem_of([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)], [0, 3, 5, 0])
    for solver in BOTH:
        assert solver.solve(problem).plan.checkpoints == (0, 3)
