import pytest

from onnxgc.errors import GraphFileError
from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.planning.problem import CheckpointProblem, TensorCost

GRAPH = ComputationGraph(("x", "h", "y"), (("x", "h"), ("h", "y")))


def test_sizes_and_their_total():
    problem = CheckpointProblem(GRAPH, {"x": TensorCost(4), "h": TensorCost(10, 99), "y": TensorCost(1)})
    assert problem.size_bytes("h") == 10
    assert problem.total_bytes == 15
    assert problem.closed_graph() is GRAPH


@pytest.mark.parametrize(
    "costs, message",
    [
        ({"x": TensorCost(1), "h": TensorCost(1)}, "vertex 'y' has no cost"),
        ({"x": TensorCost(1), "h": TensorCost(-1), "y": TensorCost(1)}, "vertex 'h' has a negative cost"),
        ({"x": TensorCost(1), "h": TensorCost(1, -1), "y": TensorCost(1)}, "vertex 'h' has a negative cost"),
        ({v: TensorCost(1) for v in ("x", "h", "y", "z")}, "cost is given for 'z'"),
    ],
)
def test_costs_must_fit_the_graph(costs: dict[Vertex, TensorCost], message: str):
    with pytest.raises(GraphFileError, match=message):
        CheckpointProblem(GRAPH, costs)
