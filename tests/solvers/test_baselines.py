from random import Random

import pytest

from onnxgc.errors import PlanError
from onnxgc.graph.division_tree import DivisionKind, build_division_tree
from onnxgc.graph.segments import is_valid_reading_a
from onnxgc.graph.virtual_terminals import with_single_terminals
from onnxgc.planning.objective import paper_objective
from onnxgc.planning.plan import CheckpointPlan, Status
from onnxgc.solvers.base import Solver, SolverOptions
from onnxgc.solvers.baselines.chen import CHEN_GREEDY, CHEN_SQRT
from onnxgc.solvers.baselines.exhaustive import EXHAUSTIVE, MAX_VERTICES
from onnxgc.solvers.baselines.fixed_plans import MANUAL, STORE_ALL
from onnxgc.solvers.baselines.random_draws import MAX_CHECKPOINTS, RANDOM
from onnxgc.solvers.families import splitting_vertices
from onnxgc.solvers.paper.acg import ACG
from onnxgc.solvers.plan_bounds import paper_lower_bound_bytes
from scripts.benchmarking.paper_graphs import paper_problem
from tests.graph.random_graphs import chain, problem_of, random_problem
from tests.solvers import networks


def test_bound_holds_for_all_sets():
    random = Random(21)
    for _ in range(400):
        problem = random_problem(random, 7)
        vertices = problem.graph.vertices
        plans = (
            CheckpointPlan(tuple(v for n, v in enumerate(vertices) if bits >> n & 1))
            for bits in range(1 << len(vertices))
        )
        assert paper_lower_bound_bytes(problem) <= min(paper_objective(problem, p).total_bytes for p in plans)


def test_bound_is_tight_on_unit_chains():
    for inner in (1, 2, 10, 99, 1000):
        problem = chain([1] * (inner + 2))
        assert paper_lower_bound_bytes(problem) == ACG.solve(problem).objective_bytes
    assert paper_lower_bound_bytes(chain([2, 9, 3])) == 14


BOTH = (CHEN_SQRT, CHEN_GREEDY)


def test_sqrt_is_optimal_on_chains_of_equal_states():
    for inner in range(200):
        problem = chain([5, *[3] * inner, 2])
        solution = CHEN_SQRT.solve(problem)
        assert solution.objective_bytes == ACG.solve(problem).objective_bytes
        assert solution.status is Status.OPTIMAL
        assert solution.gap == 0.0


def test_sqrt_cuts_evenly():
    assert CHEN_SQRT.solve(chain([1] * 17)).plan.checkpoints == (0, 4, 8, 12, 16)


def test_sizes_make_sqrt_suboptimal():
    """The even cuts fall on the large tensors."""
    problem = chain([0, 1, 9, 1, 0])
    solution = CHEN_SQRT.solve(problem)
    assert solution.status is Status.FEASIBLE
    assert (solution.objective_bytes, ACG.solve(problem).objective_bytes) == (10, 10)
    problem = chain([0, 1, 1, 9, 1, 1, 9, 1, 1, 0])
    assert CHEN_SQRT.solve(problem).objective_bytes > ACG.solve(problem).objective_bytes


def test_greedy_is_optimal_on_equal_states_and_uses_sizes():
    for inner in (*range(100), 1000, 2345):
        problem = chain([500, *[3] * inner, 500])
        assert CHEN_GREEDY.solve(problem).objective_bytes == ACG.solve(problem).objective_bytes
    vgg = paper_problem("vgg16")
    assert CHEN_GREEDY.solve(vgg).objective_bytes < 0.7 * vgg.total_bytes


@pytest.mark.parametrize("solver", BOTH, ids=lambda solver: solver.name)
def test_cuts_are_splitting_vertices(solver: Solver):
    random = Random(41)
    for _ in range(400):
        problem = random_problem(random, 12)
        solution = solver.solve(problem)
        ends = {*problem.graph.sources, *problem.graph.sinks}
        assert set(solution.plan.checkpoints) <= {*splitting_vertices(problem), *ends}
        assert is_valid_reading_a(problem.graph, solution.plan.checkpoints)


def test_splitting_vertices_equal_those_of_the_division_tree():
    random = Random(42)
    for _ in range(500):
        problem = random_problem(random, 12)
        closed = with_single_terminals(problem.graph)
        expected: tuple[object, ...] = ()
        if len(closed) > 1:
            root = build_division_tree(closed)
            expected = root.connectors if root.kind is DivisionKind.LINEAR else ()
        assert splitting_vertices(problem) == expected


def test_only_the_ends_are_kept_without_a_splitting_vertex():
    problem = problem_of([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)], [0, 3, 5, 0])
    for solver in BOTH:
        assert solver.solve(problem).plan.checkpoints == (0, 3)


@pytest.mark.parametrize(
    "edges, sizes, optimum",
    [
        # By hand: every set of the diamond is valid, and of the bridge only {} and all.
        ([(0, 1), (0, 2), (1, 3), (2, 3)], [0, 3, 5, 0], 5),
        ([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)], [0, 3, 5, 0], 8),
        ([(0, 1), (1, 2), (2, 3), (3, 4)], [0, 4, 1, 4, 0], 5),
        ([(0, 2), (1, 2)], [4, 6, 1], 7),
    ],
)
def test_optima_derived_by_hand(edges: list[tuple[int, int]], sizes: list[int], optimum: int):
    solution = EXHAUSTIVE.solve(problem_of(edges, sizes))
    assert solution.objective_bytes == solution.lower_bound_bytes == optimum
    assert solution.status is Status.OPTIMAL


def test_result_is_valid_and_optimal():
    """The same search with the definitions of validity and objective used elsewhere."""
    random = Random(19)
    for _ in range(150):
        problem = random_problem(random, 6)
        vertices = problem.graph.vertices
        values = []
        for bits in range(1 << len(vertices)):
            plan = CheckpointPlan.for_graph(problem.graph, [v for n, v in enumerate(vertices) if bits >> n & 1])
            if is_valid_reading_a(problem.graph, plan.checkpoints):
                values.append(paper_objective(problem, plan).total_bytes)
        solution = EXHAUSTIVE.solve(problem)
        assert solution.objective_bytes == min(values)
        assert is_valid_reading_a(problem.graph, solution.plan.checkpoints)


def test_larger_graphs_are_rejected():
    problem = chain([1] * (MAX_VERTICES + 1))
    assert EXHAUSTIVE.refusal(problem) is not None
    with pytest.raises(PlanError, match=f"up to {MAX_VERTICES} vertices, this one has {MAX_VERTICES + 1}"):
        EXHAUSTIVE.solve(problem)


def test_manual_accepts_any_set_without_guarantee():
    # Not valid under reading A: {3} is fed by 0 and by 2.
    problem = problem_of([(0, 1), (1, 2), (2, 3), (3, 4), (0, 3)], [1, 1, 1, 9, 7])
    solution = MANUAL.solve(problem, SolverOptions(checkpoints=(2,)))
    assert solution.plan.checkpoints == (0, 2, 4)
    assert solution.objective_bytes == 8 + 10
    assert solution.status is Status.FEASIBLE
    assert solution.lower_bound_bytes <= solution.objective_bytes


def test_manual_without_checkpoints_keeps_the_ends():
    solution = MANUAL.solve(chain([1, 2, 3, 4]))
    assert solution.plan.checkpoints == (0, 3)
    assert solution.objective_bytes == 10


def test_manual_rejects_unknown_checkpoints():
    with pytest.raises(PlanError, match="did you mean"):
        MANUAL.solve(chain([1] * 20), SolverOptions(checkpoints=(99, 3)))


def test_store_all_is_the_total():
    random = Random(20)
    for _ in range(50):
        problem = random_problem(random, 10)
        solution = STORE_ALL.solve(problem)
        assert solution.plan.checkpoints == problem.graph.vertices
        assert solution.objective_bytes == problem.total_bytes
        assert solution.status is Status.FEASIBLE


def test_plans_are_valid_small_and_no_better_than_the_optimum():
    random = Random(51)
    solved = 0
    for seed in range(300):
        problem = random_problem(random, 12)
        try:
            solution = RANDOM.solve(problem, SolverOptions(seed=seed))
        except PlanError:
            continue
        solved += 1
        ends = {*problem.graph.sources, *problem.graph.sinks}
        assert len(set(solution.plan.checkpoints) - ends) <= MAX_CHECKPOINTS
        assert is_valid_reading_a(problem.graph, solution.plan.checkpoints)
        assert solution.objective_bytes >= ACG.solve(problem).objective_bytes
        assert solution.status is Status.FEASIBLE
    assert solved > 250


def test_seed_and_number_of_draws():
    problem = paper_problem("vgg16")
    plans = [RANDOM.solve(problem, SolverOptions(seed=seed)).plan for seed in range(20)]
    assert plans == [RANDOM.solve(problem, SolverOptions(seed=seed)).plan for seed in range(20)]
    assert len(set(plans)) > 5
    few, many = (RANDOM.solve(problem, SolverOptions(draws=draws)).objective_bytes for draws in (1, 200))
    assert many < few


def test_not_applicable_is_said_in_one_line():
    """As for the paper's NAS networks: hardly any set of a densely connected graph is valid."""
    problem = networks.dense_block_with_wide_concats(200)
    with pytest.raises(PlanError, match="not applicable: none of 100 draws") as caught:
        RANDOM.solve(problem)
    assert "\n" not in str(caught.value)
