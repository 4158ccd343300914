import time
from random import Random

import pytest

import onnxgc.solvers.paper.orderable_segments as general
from onnxgc.planning.plan import CheckpointPlan, Solution, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.paper.acg import ACG
from onnxgc.solvers.paper.cuts import CutSearch
from onnxgc.solvers.paper.elimination_orders import frontier_widths, narrow_order, narrow_part
from onnxgc.solvers.paper.frontier_search import FrontierSearch
from onnxgc.solvers.paper.indexed_problem import IndexedProblem
from onnxgc.solvers.paper.orderable_segments import GENERAL
from scripts.benchmarking.paper_graphs import PAPER_GRAPHS, paper_problem
from tests.graph.random_graphs import chain, problem_of, random_problem
from tests.graph.reading_g_validity import is_valid_reading_g
from tests.solvers import networks
from tests.solvers.reading_g import compare, optimum_bytes

MIB = 2**20


def ladder(count: int) -> CheckpointProblem:
    return problem_of([(v, v + step) for step in (1, 2) for v in range(count - step)], [1] * count)


def unet(depth: int) -> CheckpointProblem:
    """Two vertices a level on the way down and up; each level's last one is read on the way up."""
    count = 4 * depth
    down = [(2 * level + 1, count - 2 - 2 * level) for level in range(depth - 1)]
    return problem_of([(v, v + 1) for v in range(count - 1)] + down, [1] * count)


def wide(random: Random, vertices: int, edges: int) -> CheckpointProblem:
    chosen = {tuple(sorted(random.sample(range(vertices), 2))) for _ in range(edges)}
    return problem_of([(a, b) for a, b in chosen], [random.randint(1, 1000) for _ in range(vertices)])


def cells(random: Random, count: int) -> CheckpointProblem:
    """Cells of four branches over the two cells before them, as in networks from architecture search."""
    sketch = networks.Sketch(batch=1)
    before = last = sketch.add(40)
    for _ in range(count):
        branches = [sketch.row(random.choice([before, last]), *[20] * random.randint(1, 4)) for _ in range(4)]
        before, last = last, sketch.add(80, *branches)
    sketch.row(last, 5)
    return sketch.problem()


def assert_sound(problem: CheckpointProblem, solution: Solution) -> None:
    assert is_valid_reading_g(problem.graph, solution.plan.checkpoints)
    assert solution.lower_bound_bytes <= solution.objective_bytes
    assert (solution.status is Status.OPTIMAL) == (solution.lower_bound_bytes == solution.objective_bytes)
    assert solution.objective_bytes <= ACG.solve(problem).objective_bytes


@pytest.mark.parametrize(
    "seed, graphs, max_vertices", [(0, 200, 12), (3, 40, 15), pytest.param(1, 1000, 12, marks=pytest.mark.slow)]
)
def test_optimal_on_random_graphs(seed: int, graphs: int, max_vertices: int):
    found = compare(seed, graphs, max_vertices)
    assert (found.equal, found.proved, found.false_bounds) == (found.graphs, found.graphs, 0)


@pytest.mark.parametrize(
    "edges, sizes, optimum",
    [
        # {2} alone: its second segment has two entries. Reading A: 11 without the ends.
        ([(0, 1), (1, 2), (2, 3), (3, 4), (0, 3)], [1, 1, 1, 9, 7], 10 + 8),
        # With only {3} kept, a path leaves the other segment and returns.
        ([(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)], [0, 5, 9, 1, 5, 0], 15),
        # Several sources and sinks are free.
        ([(0, 2), (1, 2), (2, 3), (2, 4)], [4, 4, 1, 4, 4], 5),
        ([], [7], 7),
    ],
)
def test_known_optima(edges: list[tuple[int, int]], sizes: list[int], optimum: int):
    problem = problem_of(edges, sizes)
    solution = GENERAL.solve(problem)
    assert solution.objective_bytes == solution.lower_bound_bytes == optimum == optimum_bytes(problem)
    assert_sound(problem, solution)


def test_segments_that_depend_on_each_other_are_invalid():
    """No path leaves and re-enters a segment, but the backward passes would interleave."""
    edges = [(1, 2), (1, 5), (1, 8), (2, 7), (3, 6), (3, 7), (4, 6), (4, 8), (5, 7), (6, 8)]
    problem = problem_of(edges, [6, 0, 2, 4, 0, 0, 5, 10, 8])
    solution = GENERAL.solve(problem)
    assert solution.objective_bytes == optimum_bytes(problem)
    assert_sound(problem, solution)
    twisted = problem_of([(0, 1), (2, 3), (0, 4), (4, 3), (2, 5), (5, 1)], [1] * 6)
    assert not is_valid_reading_g(twisted.graph, [4, 5])
    assert is_valid_reading_g(twisted.graph, [0, 4, 5])


def test_ladder_with_steps_of_one_and_two():
    """Reading A cannot split it: 400 bytes. The value 55 includes the ends."""
    solution = GENERAL.solve(ladder(400))
    assert ACG.solve(ladder(400)).objective_bytes == 400
    assert solution.objective_bytes == 55
    assert solution.status is Status.OPTIMAL


def test_unet():
    solution = GENERAL.solve(unet(20))
    assert ACG.solve(unet(20)).objective_bytes > 40
    assert solution.objective_bytes == 25
    assert solution.status is Status.OPTIMAL
    assert_sound(unet(20), solution)


@pytest.mark.parametrize(
    "name",
    [
        "resnet101",
        "densenet121",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet152", "densenet201")),
    ],
)
def test_networks_of_the_paper(name: str):
    """At most the best known plans by cuts over an order; the plans here are proved optimal."""
    problem = paper_problem(name)
    solution = GENERAL.solve(problem)
    assert solution.objective_bytes / MIB <= PAPER_GRAPHS[name].cuts_mebibytes + 0.51
    assert solution.gap < 0.001
    assert_sound(problem, solution)


def test_chains_are_solved_by_the_papers_search():
    random = Random(41)
    problem = chain([random.randint(1, 10**9) for _ in range(3_000)])
    started = time.perf_counter()
    solution = GENERAL.solve(problem)
    assert solution.status is Status.OPTIMAL
    assert time.perf_counter() - started < 20


def test_result_is_never_above_any_start():
    random = Random(42)
    for _ in range(8):
        problem = cells(random, random.randint(2, 8))
        solution = GENERAL.solve(problem)
        assert_sound(problem, solution)
        indexed = IndexedProblem.from_problem(problem)
        cuts = CutSearch(indexed, range(len(indexed)), problem.total_bytes, float("inf"))
        for share in range(1, 10):
            kept = cuts.cheapest_under(problem.total_bytes * share // 20)
            evaluated = None if kept is None else indexed.evaluate(kept)
            if evaluated is not None:
                plan = CheckpointPlan(tuple(problem.graph.vertices[v] for v in evaluated.kept))
                assert is_valid_reading_g(problem.graph, plan.checkpoints)
                ends = sum(s for s, f in zip(indexed.sizes, indexed.forced, strict=True) if f)
                assert solution.objective_bytes <= evaluated.total_bytes + ends


@pytest.mark.slow
def test_large_graphs_are_solved_in_seconds():
    random = Random(43)
    for problem in (cells(random, 60), wide(random, 1200, 2400)):
        solution = GENERAL.solve(problem)
        assert_sound(problem, solution)
        assert solution.lower_bound_bytes > 0
        assert solution.seconds < 40  # Five times the duration on a slow machine.


def test_bounds_hold_with_little_effort(monkeypatch: pytest.MonkeyPatch):
    """Walks with lost states, merged states and parts of graphs, on graphs with known optimum."""
    random = Random(44)
    problems = [random_problem(random, 14) for _ in range(40)]
    optima = [optimum_bytes(problem) for problem in problems]
    monkeypatch.setattr(general, "STATES_PER_WALK", 0)
    monkeypatch.setattr(general, "_MIN_STATES", 4)
    for effort in (0, 100, 1000):
        monkeypatch.setattr(general, "FIRST_ROUND_EFFORT", effort)
        monkeypatch.setattr(general, "MAX_EFFORT", effort)
        for width in (150, 2):
            monkeypatch.setattr(general, "MAX_FRONTIER", width)
            monkeypatch.setattr(general, "PART_WIDTH", 2)
            feasible = 0
            for problem, optimum in zip(problems, optima, strict=True):
                solution = GENERAL.solve(problem)
                assert solution.lower_bound_bytes <= optimum <= solution.objective_bytes
                assert_sound(problem, solution)
                feasible += solution.status is Status.FEASIBLE
            assert effort == 1000 or feasible > 2


def test_a_walk_under_a_cap_bounds_the_kept_bytes():
    random = Random(45)
    for _ in range(300):
        problem = random_problem(random, 12)
        indexed = IndexedProblem.from_problem(problem)
        order = random.choice([list(range(len(indexed))), narrow_order(indexed)])
        random.shuffle(order)
        cap = problem.total_bytes // random.randint(1, 6)
        exact = FrontierSearch(indexed, range(len(indexed))).cheapest_under(cap, 10**9, 10**6)
        assert exact.kept is not None
        evaluated = indexed.evaluate(exact.kept)
        assert evaluated is not None
        assert evaluated.interior_bytes == exact.floor_bytes
        assert evaluated.heaviest_segment_bytes <= cap
        shuffled = FrontierSearch(indexed, order)
        assert shuffled.cheapest_under(cap, 10**9, 10**6).floor_bytes == exact.floor_bytes
        for max_states in (4, 10):
            relaxed = shuffled.cheapest_under(cap, 10**9, max_states, relax=True)
            assert relaxed.floor_bytes <= exact.floor_bytes
            restricted = shuffled.cheapest_under(cap, 10**9, max_states)
            assert restricted.floor_bytes <= exact.floor_bytes
            if restricted.kept is not None:
                found = indexed.evaluate(restricted.kept)
                assert found is not None
                assert found.interior_bytes >= exact.floor_bytes
                assert found.heaviest_segment_bytes <= cap


def test_narrow_orders_and_parts():
    indexed = IndexedProblem.from_problem(unet(20))
    assert max(frontier_widths(indexed, range(len(indexed)))) == 20
    assert max(frontier_widths(indexed, narrow_order(indexed))) == 2
    random = Random(46)
    for _ in range(100):
        indexed = IndexedProblem.from_problem(random_problem(random, 30))
        order = narrow_order(indexed)
        assert sorted(order) == list(range(len(indexed)))
        part, part_order = narrow_part(indexed, order, 3)
        assert sorted(part_order) == list(range(len(part)))
        assert max(frontier_widths(part, part_order)) <= 3


def test_time_limit_is_respected():
    random = Random(47)
    problem = cells(random, 100)
    for limit in (0.0, 0.5):
        started = time.perf_counter()
        solution = GENERAL.solve(problem, SolverOptions(time_limit_seconds=limit))
        assert time.perf_counter() - started < limit + 2
        assert is_valid_reading_g(problem.graph, solution.plan.checkpoints)
        assert 0 < solution.lower_bound_bytes <= solution.objective_bytes
    small = random_problem(random, 12)
    hurried = GENERAL.solve(small, SolverOptions(time_limit_seconds=0.0))
    assert hurried.lower_bound_bytes <= optimum_bytes(small) <= hurried.objective_bytes
