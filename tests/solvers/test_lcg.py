from itertools import accumulate
from random import Random

import pytest

from onnxgc.errors import PlanError
from onnxgc.planning.plan import Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.baselines.exhaustive import EXHAUSTIVE
from onnxgc.solvers.paper.acg import ACG
from onnxgc.solvers.paper.lcg import LCG
from onnxgc.solvers.paper.segment_cap_search import cheapest_stops
from tests.graph.random_graphs import chain, problem_of


def random_chain(random: Random, max_vertices: int) -> CheckpointProblem:
    largest = random.choice([1, 3, 10, 1000])
    return chain([random.choice([0, random.randint(0, largest)]) for _ in range(random.randint(1, max_vertices))])


def test_equals_both_other_exact_solvers_on_random_chains():
    """All three values come from the objective's definition, not from the solvers."""
    random = Random(31)
    for _ in range(250):
        problem = random_chain(random, 12)
        found = LCG.solve(problem)
        assert found.objective_bytes == EXHAUSTIVE.solve(problem).objective_bytes, problem
        assert found.objective_bytes == ACG.solve(problem).objective_bytes
        assert found.status is Status.OPTIMAL
        assert found.lower_bound_bytes == found.objective_bytes


def test_stops_under_a_cap_equal_the_shortest_path_over_all_pairs():
    random = Random(32)
    for _ in range(300):
        sizes = [random.randint(0, 30) for _ in range(random.randint(2, 30))]
        cap_bytes = random.choice([0, 7, 30, 100, 1000])
        cheapest = [(0, 0)]
        for stop in range(1, len(sizes)):
            reachable = [start for start in range(stop) if sum(sizes[start + 1 : stop]) <= cap_bytes]
            kept, number = min(cheapest[start] for start in reachable)
            cheapest.append((kept + sizes[stop], number + 1))
        stops = cheapest_stops(sizes, list(accumulate(sizes, initial=0)), cap_bytes)
        assert stops[0] == 0
        assert stops[-1] == len(sizes) - 1
        assert (sum(sizes[stop] for stop in stops[1:]), len(stops) - 1) == cheapest[-1]


def test_counterexample_to_the_printed_algorithm_5():
    solution = LCG.solve(chain([1] * 5))
    assert solution.objective_bytes - 2 == 2
    assert solution.plan.checkpoints == (0, 2, 4)


def test_long_chains_are_solved_in_seconds():
    random = Random(33)
    long = LCG.solve(chain([random.randint(1, 10**9) for _ in range(10_000)]))
    assert long.status is Status.OPTIMAL
    assert long.seconds < 20


def test_time_limit_gives_a_feasible_plan_with_a_valid_bound():
    random = Random(34)
    feasible = 0
    for _ in range(100):
        problem = random_chain(random, 12)
        hurried = LCG.solve(problem, SolverOptions(time_limit_seconds=0.0))
        optimum = ACG.solve(problem).objective_bytes
        assert hurried.lower_bound_bytes <= optimum <= hurried.objective_bytes
        feasible += hurried.status is Status.FEASIBLE
    assert feasible > 10


@pytest.mark.parametrize(
    "edges, count, message",
    [
        ([(0, 1), (1, 2), (1, 3), (2, 4), (3, 4)], 5, "vertex 1 branches into 2 and 3"),
        ([(0, 1), (1, 2), (0, 2)], 3, "vertex 0 branches into 1 and 2"),
        ([(0, 2), (1, 2)], 3, "vertex 2 joins 0 and 1"),
        ([(0, 1), (2, 3)], 4, "vertices 0 and 2 begin two separate chains"),
    ],
)
def test_other_graphs_are_rejected_in_one_line(edges: list[tuple[int, int]], count: int, message: str):
    problem = problem_of(edges, [1] * count)
    with pytest.raises(PlanError, match=message) as caught:
        LCG.solve(problem)
    assert "\n" not in str(caught.value)
    assert "use solver 'acg'" in str(caught.value)
