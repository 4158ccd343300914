from itertools import pairwise
from random import Random

import pytest

from onnxgc.graph.segments import is_valid_reading_a
from onnxgc.graph.virtual_terminals import forced_checkpoints
from onnxgc.planning.objective import PaperObjective, paper_objective
from onnxgc.planning.plan import CheckpointPlan, Solution, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.baselines.exhaustive import EXHAUSTIVE
from onnxgc.solvers.paper.acg import ACG, CappedSearch
from scripts.benchmarking.paper_graphs import PAPER_GRAPHS, paper_problem
from tests.graph.random_graphs import chain, problem_of, random_problem
from tests.solvers import networks

MIB = 2**20


def interior_bytes(problem: CheckpointProblem, solution: Solution) -> int:
    """The objective without the source and the target."""
    ends = {problem.graph.sources[0], problem.graph.sinks[0]}
    return solution.objective_bytes - sum(problem.size_bytes(vertex) for vertex in ends)


def assert_optimal(problem: CheckpointProblem) -> None:
    found, truth = ACG.solve(problem), EXHAUSTIVE.solve(problem)
    assert found.objective_bytes == truth.objective_bytes, problem
    assert found.status is Status.OPTIMAL
    assert found.lower_bound_bytes == found.objective_bytes
    assert found.gap == 0.0
    assert is_valid_reading_a(problem.graph, found.plan.checkpoints)
    assert len(found.plan.checkpoints) == len(set(found.plan.checkpoints))


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_optimal_on_random_graphs(seed: int):
    random = Random(seed)
    for _ in range(700):
        assert_optimal(random_problem(random, max_vertices=10))


@pytest.mark.slow
def test_optimal_on_larger_random_graphs():
    random = Random(100)
    for _ in range(300):
        assert_optimal(random_problem(random, max_vertices=14))


@pytest.mark.parametrize(
    "edges, sizes, optimum, checkpoints",
    [
        # A chain of unit costs, which the printed Algorithm 5 does not divide.
        ([(0, 1), (1, 2), (2, 3), (3, 4)], [1] * 5, 2, (0, 2, 4)),
        # Branches between a pair without other neighbours, which the printed Algorithm 4 loses.
        ([(0, 1), (0, 2), (1, 3), (1, 5), (2, 3), (3, 4), (4, 5)], [1, 1, 11, 1, 1, 20], 13, (0, 1, 3, 5)),
        ([(0, 1), (0, 4), (1, 2), (2, 3), (2, 5), (3, 6), (4, 5), (5, 6)], [8, 1, 1, 1, 3, 1, 4], 5, (0, 2, 5, 6)),
        # Branches between the same pair are separate segments.
        ([(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)], [1, 5, 5, 1, 1], 6, (0, 3, 4)),
        # {2} alone would be better, but its second segment has two entries.
        ([(0, 1), (1, 2), (2, 3), (3, 4), (0, 3)], [1, 1, 1, 9, 7], 11, None),
        # A direct edge from source to target.
        ([(0, 1), (1, 2), (2, 3), (0, 3)], [5, 2, 2, 5], 4, None),
        ([(0, 1)], [3, 4], 0, (0, 1)),
    ],
)
def test_known_optima(
    edges: list[tuple[int, int]], sizes: list[int], optimum: int, checkpoints: tuple[int, ...] | None
):
    problem = problem_of(edges, sizes)
    solution = ACG.solve(problem)
    assert interior_bytes(problem, solution) == optimum
    if checkpoints is not None:
        assert solution.plan.checkpoints == checkpoints


def test_equal_sets_are_resolved_by_the_fewest_checkpoints():
    # Tensors of 0 bytes could all be kept at no cost.
    assert ACG.solve(chain([0] * 6)).plan.checkpoints == (0, 5)
    assert ACG.solve(chain([1, 4, 0, 0, 0, 4, 1])).plan.checkpoints in {(0, 2, 6), (0, 3, 6), (0, 4, 6)}


@pytest.mark.parametrize("inner", [0, 1, 2, 3, 10, 99, 998, 1000])
def test_unit_chain_equals_the_closed_form(inner: int):
    problem = chain([1] * (inner + 2))
    best = min(kept + -(-(inner - kept) // (kept + 1)) for kept in range(inner + 1))
    assert interior_bytes(problem, ACG.solve(problem)) == best


def test_cost_never_rises_with_the_cap_and_the_cap_holds():
    random = Random(14)
    for _ in range(300):
        problem = random_problem(random, 14)
        search = CappedSearch(problem)
        caps = range(0, problem.total_bytes + 1, 1 + problem.total_bytes // 40)
        found = [search.cheapest_under(cap_bytes) for cap_bytes in caps]
        assert all(f.heaviest_segment_bytes <= cap_bytes for f, cap_bytes in zip(found, caps, strict=True))
        assert all(looser.interior_bytes <= tighter.interior_bytes for tighter, looser in pairwise(found))


def test_capped_optimum_has_the_value_of_the_objective():
    random = Random(15)
    for _ in range(500):
        problem = random_problem(random, 14)
        found = CappedSearch(problem).cheapest_under(problem.total_bytes // random.randint(2, 8))
        plan = CheckpointPlan.for_graph(problem.graph, found.checkpoints)
        value = paper_objective(problem, plan)
        ends = sum(problem.size_bytes(vertex) for vertex in forced_checkpoints(problem.graph))
        assert value == PaperObjective(found.interior_bytes + ends, found.heaviest_segment_bytes)
        assert is_valid_reading_a(problem.graph, plan.checkpoints)


@pytest.mark.parametrize("name", PAPER_GRAPHS)
def test_networks_of_the_paper(name: str):
    """The values of the paper's reference code under the same costs."""
    problem, known = paper_problem(name), PAPER_GRAPHS[name]
    solution = ACG.solve(problem)
    assert (len(problem.graph), round(problem.total_bytes / MIB)) == (known.vertices, known.mebibytes)
    assert len(problem.graph.sources) == len(problem.graph.sinks) == 1
    assert abs(solution.objective_bytes / MIB - known.code_mebibytes) <= 0.51
    assert solution.status is Status.OPTIMAL
    # Twenty times the duration on a slow machine; the reference code takes up to 95 s.
    assert solution.seconds < 2


def test_long_and_deep_graphs_are_solved_in_seconds():
    random = Random(16)
    long = ACG.solve(chain([random.randint(1, 10**9) for _ in range(2000)]))
    assert long.status is Status.OPTIMAL
    assert long.seconds < 5

    depth = 1500
    edges = [(v, v + 1) for v in range(depth)] + [(v, depth) for v in range(depth - 1)]
    deep = ACG.solve(problem_of(edges, [1] * (depth + 1)), SolverOptions(time_limit_seconds=0.3))
    assert deep.objective_bytes >= deep.lower_bound_bytes > 0

    assert ACG.solve(networks.dense_block_with_wide_concats(40)).seconds < 5


def test_time_limit_gives_a_feasible_plan_with_a_valid_bound():
    random = Random(17)
    feasible = 0
    for _ in range(200):
        problem = random_problem(random, 12)
        hurried = ACG.solve(problem, SolverOptions(time_limit_seconds=0.0))
        optimum = ACG.solve(problem).objective_bytes
        assert hurried.lower_bound_bytes <= optimum <= hurried.objective_bytes
        if hurried.status is Status.OPTIMAL:
            assert hurried.objective_bytes == optimum
        feasible += hurried.status is Status.FEASIBLE
    assert feasible > 20
