import pytest

from onnxgc.errors import PlanError
from onnxgc.graph.computation_graph import ComputationGraph
from onnxgc.planning.plan import CheckpointPlan, Objective, Solution, Status

GRAPH = ComputationGraph.from_unsorted(
    ["input", "layer1/conv", "layer1/relu", "output"],
    [("input", "layer1/conv"), ("layer1/conv", "layer1/relu"), ("layer1/relu", "output")],
)


def test_plan_is_sorted_and_keeps_the_ends():
    plan = CheckpointPlan.for_graph(GRAPH, ["layer1/relu", "layer1/conv", "layer1/relu"])
    assert plan.checkpoints == ("input", "layer1/conv", "layer1/relu", "output")
    assert CheckpointPlan.for_graph(GRAPH, []).checkpoints == ("input", "output")
    two_sources = ComputationGraph(("a", "b", "c"), (("a", "c"), ("b", "c")))
    assert CheckpointPlan.for_graph(two_sources, []).checkpoints == ("c",)


def test_an_unknown_checkpoint_raises_with_the_closest_names_in_one_line():
    with pytest.raises(PlanError, match=r"^.*'layer1/rleu'.*'layer1/relu'.*$"):
        CheckpointPlan.for_graph(GRAPH, ["input", "layer1/rleu"])
    with pytest.raises(PlanError, match="'input'"):
        CheckpointPlan.for_graph(GRAPH, ["zzz"])
    with pytest.raises(PlanError, match="did you mean '12'"):
        CheckpointPlan.for_graph(ComputationGraph((11, 12), ((11, 12),)), [112])


@pytest.mark.parametrize(
    "objective_bytes, lower_bound_bytes, gap", [(100, 80, 0.2), (100, 100, 0.0), (0, 0, 0.0), (90, 100, 0.0)]
)
def test_gap_is_a_share_of_the_objective(objective_bytes: int, lower_bound_bytes: int, gap: float):
    plan = CheckpointPlan(())
    solution = Solution(plan, "acg", Status.FEASIBLE, Objective.PAPER, objective_bytes, lower_bound_bytes, seconds=0.0)
    assert solution.gap == pytest.approx(gap)
