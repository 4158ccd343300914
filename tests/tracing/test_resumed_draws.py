from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxgc.api.pipeline import optimize
from onnxgc.api.planned_step import emit, store_all_schedule
from onnxgc.api.step_planning import plan_step
from onnxgc.model.read import read_model
from onnxgc.planning.simulate import simulate
from onnxgc.runtime.measure import measure
from onnxgc.runtime.ort import SessionSettings, make_session
from onnxgc.tracing.optimizers import SGD, AdamW, Optimizer
from tests.api.chains import chain
from tests.tracing.encoders import BATCH, TOKENS, WIDTH, encoder
from tests.tracing.test_optimizers import Run, batch, names_of, stock_session


def with_dropouts(model: onnx.ModelProto, *operators: str, ratio: float = 0.1) -> onnx.ModelProto:
    """The model with a Dropout after each of these operators."""
    kept: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        node.input[:] = [kept.get(name, name) for name in node.input]
        nodes.append(node)
        if node.op_type in operators:
            (output,) = node.output
            kept[output] = f"{output}_kept"
            nodes.append(helper.make_node("Dropout", [output, "ratio"], [kept[output]], name=kept[output]))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(ratio, np.float32), "ratio"))
    return model


def tokens(seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((BATCH, TOKENS, WIDTH)).astype(np.float32)
    return {"x": x, "labels": draw.integers(0, 4, BATCH)}


def noisy() -> onnx.ModelProto:
    """Noise of learned size, which depends on no input."""
    model = chain(3, batch=64)
    noise = [
        helper.make_node("RandomNormal", [], ["noise"], shape=[64, 16]),
        helper.make_node("MatMul", ["noise", "w0"], ["scaled"]),
        helper.make_node("Tanh", ["scaled"], ["shaped"]),
        helper.make_node("Add", ["h1", "shaped"], ["h1_noisy"]),
    ]
    nodes = list(model.graph.node)
    place = next(index for index, node in enumerate(nodes) if "h1" in node.input)
    nodes[place].input[0] = "h1_noisy"
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:place], *noise, *nodes[place:]])
    return model


SOURCES = {
    "chain": (lambda: with_dropouts(chain(4, batch=64), "Tanh", ratio=0.5), batch),
    "encoder": (lambda: with_dropouts(encoder(2), "Softmax", "Relu"), tokens),
    "noise": (noisy, batch),
}


@pytest.mark.parametrize(
    "name, how, optimizer",
    [
        ("chain", {"solver": "peak"}, SGD()),
        ("chain", {"budget": 0.8, "step_limit": 1}, SGD()),
        ("encoder", {"solver": "peak"}, AdamW()),
        ("noise", {"solver": "chen-sqrt"}, SGD()),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, how: Mapping[str, Any], optimizer: Optimizer):
    """Bit for bit: the baseline, and a plan that recomputes masks and changes session halfway."""
    source, feeds = SOURCES[name]
    regular = Run(optimize(source(), optimizer=optimizer, check=False, solver="store-all").training_graph.model)
    model = optimize(source(), optimizer=optimizer, check=False, **how).training_graph.model
    planned = Run(model)
    for number in range(2):
        assert regular.step(feeds(number)) == planned.step(feeds(number))
    resumed = Run(model)
    resumed.values, resumed.steps = planned.values, planned.steps
    for number in range(2, 4):
        assert regular.step(feeds(number)) == resumed.step(feeds(number))
    for key, value in regular.arrays().items():
        np.testing.assert_array_equal(resumed.arrays()[key], value, err_msg=key)
    random_outputs = [node.output[0] for node in model.graph.node if node.op_type in ("Less", "Cos")]
    assert any("__recompute" in output for output in random_outputs)


def test_gradients_equal_those_of_pytorch_with_the_same_masks():
    torch = pytest.importorskip("torch")
    source = with_dropouts(chain(3, batch=64), "Tanh", ratio=0.3)
    planned = plan_step(read_model(source, counted_draws=True), "peak")
    graph = emit(planned)
    masks = [f"h{number}_kept_mask" for number in range(3)]
    probe = onnx.ModelProto()
    probe.CopyFrom(graph.model)
    probe.graph.output.extend(helper.make_tensor_value_info(name, onnx.TensorProto.BOOL, (64, 16)) for name in masks)
    feeds = {**batch(0), "draw": np.asarray(5)}
    session = make_session(probe, threads=1)
    loss, *kept = session.run(["loss", *masks], feeds)
    gradients = session.run(list(graph.gradient_of.values()), feeds)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in probe.graph.initializer}
    values = {name: torch.tensor(stored[name], dtype=torch.float64, requires_grad=True) for name in graph.gradient_of}
    tensor = torch.tensor(feeds["x"], dtype=torch.float64)
    for number, mask in enumerate(kept):
        tensor = torch.tanh(tensor @ values[f"w{number}"]) * torch.tensor(mask) / 0.7
    expected = torch.nn.functional.cross_entropy(tensor @ values["v"], torch.tensor(feeds["labels"]))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, gradient in zip(graph.gradient_of, gradients, strict=True):
        np.testing.assert_allclose(gradient, values[name].grad, rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_simulator_counts_one_byte_per_element_of_a_mask(tmp_path: Path):
    """As for the masks of the runtime's own Dropout."""
    source = with_dropouts(chain(4), "Tanh")
    model = read_model(source, counted_draws=True)
    planned, plain = plan_step(model, "peak"), plan_step(read_model(source), "peak")
    assert planned.traced.problem.graph.vertices == plain.traced.problem.graph.vertices
    assert planned.regular_profile.peak_bytes == pytest.approx(plain.regular_profile.peak_bytes, rel=0.05)
    assert planned.profile.peak_bytes < 0.8 * planned.regular_profile.peak_bytes
    for schedule in (store_all_schedule(planned), planned.schedule):
        onnx.save(emit(planned, schedule=schedule).model, tmp_path / "step.onnx")
        feeds = {**batch(0, size=2048), "draw": np.asarray(1)}
        measured = measure(tmp_path / "step.onnx", feeds, settings=SessionSettings(threads=1), runs=2)
        simulated = simulate(schedule, planned.step.graph).peak_bytes
        assert measured.requested_peak_bytes == pytest.approx(simulated, rel=0.01)


def test_the_run_number_is_an_input_next_to_the_other_scalars():
    source = with_dropouts(chain(2, batch=64), "Tanh")
    model = optimize(source, optimizer="adamw", check=False).training_graph.model
    names = [value.name for value in model.graph.input]
    place = names.index("draw")
    assert set(names[place - 2 : place]) == {"learning_rate", "step"}
    assert names[place + 1] == "w0_exp_avg"
    assert "draw" not in {tensor.name for tensor in model.graph.initializer}
    assert names_of(model)["draw"] == "draw"
    without = optimize(source, check=False).training_graph.model
    assert "draw" not in {value.name for value in without.graph.input}


def test_a_session_with_default_settings_draws_the_same():
    model = optimize(with_dropouts(encoder(2), "Softmax", "Relu"), optimizer="sgd", check=False).training_graph.model
    one, other = Run(model), Run(model, stock_session(model))
    for number in range(3):
        assert one.step(tokens(number)) == pytest.approx(other.step(tokens(number)), rel=1e-5)
