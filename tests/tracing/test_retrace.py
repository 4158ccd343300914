import pytest

from onnxgc.graph.orders import topological_orders
from onnxgc.model.read import read_model
from onnxgc.tracing.checkpoint_problem import checkpoint_problem
from onnxgc.tracing.step_graph import retrace, trace
from tests.test_models import MODELS


@pytest.mark.parametrize(
    "network, pixels",
    [
        ("resnet18", 32),
        pytest.param("inception_v3", 96, marks=pytest.mark.slow),
        pytest.param("densenet121", 96, marks=pytest.mark.slow),
        pytest.param("darts", 32, marks=pytest.mark.slow),
    ],
)
def test_retrace_equals_a_new_trace(network: str, pixels: int):
    model = read_model(MODELS / f"{network}.onnx", input_shapes={"x": (2, 3, pixels, pixels)})
    step = trace(model, seed="loss_scale")
    problem = checkpoint_problem(step).problem
    joint = problem.joint()
    for order in topological_orders(problem.graph, problem.size_bytes)[:2]:
        names = tuple(operator.name for operator in joint.step_in(order).forward)
        retraced, traced = retrace(step, names), trace(model, seed="loss_scale", order=names)
        assert retraced.graph == traced.graph
        assert retraced.types == traced.types
        assert retraced.nodes == traced.nodes
        assert [operator.name for operator in retraced.graph.forward] == list(names)
