"""Another order of forward: what is taken over from the first trace is what tracing anew finds."""

from __future__ import annotations

import pytest

from onnxgc.graph.orders import topological_orders
from onnxgc.model.read import read_model
from onnxgc.planning.joint import operator_order, vertex_of_operators
from onnxgc.tracing.solver_graph import checkpoint_problem
from onnxgc.tracing.step_graph import retrace, trace
from tests.test_models import MODELS


@pytest.mark.parametrize("network", ["inception_v3", "densenet121", "darts"])
def test_retrace_is_trace(network: str) -> None:
    pixels = 32 if network == "darts" else 96
    model = read_model(MODELS / f"{network}.onnx", input_shapes={"x": (2, 3, pixels, pixels)})
    step = trace(model, seed="loss_scale")
    problem = checkpoint_problem(step).problem
    joint = problem.joint()
    for order in topological_orders(problem.graph, problem.size_bytes)[:2]:
        names = operator_order(joint.step, vertex_of_operators(joint.step, joint.members, order))
        again, anew = retrace(step, names), trace(model, seed="loss_scale", order=names)
        assert again.graph == anew.graph
        assert again.types == anew.types
        assert again.nodes == anew.nodes
        assert [operator.name for operator in again.graph.forward] == list(names)
