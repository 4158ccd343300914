from random import Random

import networkx as nx
import pytest

from onnxgc.errors import PlanError
from onnxgc.planning.objective import PaperObjective, paper_objective
from onnxgc.planning.plan import CheckpointPlan
from tests.graph.random_graphs import chain, problem_of, random_problem


def test_a_segment_may_have_several_stored_inputs():
    # The optimum is 11 under reading A, 10 under reading G, without the ends.
    problem = problem_of([(0, 1), (1, 2), (2, 3), (3, 4), (0, 3)], [0, 1, 1, 9, 0])
    assert paper_objective(problem, CheckpointPlan((2,))).total_bytes == 10


def test_ends_count_whether_named_or_not():
    problem = chain([7, 1, 2, 5])
    assert paper_objective(problem, CheckpointPlan(())) == PaperObjective(12, 3)
    assert paper_objective(problem, CheckpointPlan((0, 3))) == PaperObjective(12, 3)
    assert paper_objective(chain([7]), CheckpointPlan(())) == PaperObjective(7, 0)


def test_several_ends_are_tensors_like_any_other():
    problem = problem_of([(0, 2), (1, 2), (2, 3), (2, 4)], [1, 2, 4, 8, 16])
    assert paper_objective(problem, CheckpointPlan(())) == PaperObjective(0, 31)
    assert paper_objective(problem, CheckpointPlan((2,))) == PaperObjective(4, 16)


def test_value_is_kept_plus_heaviest_component():
    random = Random(12)
    for _ in range(300):
        problem = random_problem(random, 10)
        graph = problem.graph
        plan = CheckpointPlan.for_graph(graph, [v for v in graph.vertices if random.random() < 0.4])
        view = nx.Graph(list(graph.edges))
        view.add_nodes_from(graph.vertices)
        view.remove_nodes_from(plan.checkpoints)
        weights = [sum(map(problem.size_bytes, component)) for component in nx.connected_components(view)]
        kept = sum(map(problem.size_bytes, plan.checkpoints))
        assert paper_objective(problem, plan) == PaperObjective(kept, max(weights, default=0))


def test_an_unknown_checkpoint_raises():
    with pytest.raises(PlanError, match="'9'"):
        paper_objective(chain([1, 1, 1]), CheckpointPlan((9,)))
