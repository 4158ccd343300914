"""The training file's contract: names, inputs, outputs and annotations, and stock tools that run it."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxgc.api import OptimizeResult, optimize
from onnxgc.errors import OutputFileError, UnsupportedOperatorError
from onnxgc.model.core.ir import Array
from onnxgc.model.operators.registry import VIEW_OPERATORS
from onnxgc.runtime.measure import executed_order
from onnxgc.runtime.ort import SessionSettings, make_session
from onnxgc.tracing.optimizers import AdamW
from tests.model.model_helpers import model_of, normal

MODELS = Path(__file__).resolve().parent.parent.parent / "models"


def build(body: str, **weights: Array) -> onnx.ModelProto:
    return model_of(body, opset=17, ir_version=9, **weights)


@pytest.fixture(scope="module")
def resnet() -> OptimizeResult:
    return optimize(MODELS / "resnet18.onnx", input_shapes={"x": (2, 3, 64, 64)}, solver="peak")


def metadata(proto: onnx.ModelProto | onnx.NodeProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}


def test_versions_inputs_and_outputs(resnet: OptimizeResult):
    proto = resnet.training_graph.model
    onnx.checker.check_model(proto, full_check=True)
    assert proto.ir_version == 9
    assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", 18)]
    graph = proto.graph
    model = resnet.planned.model
    inputs = [value.name for value in graph.input]
    assert inputs[:2] == ["x", "labels"]
    initial = {tensor.name for tensor in graph.initializer}
    assert set(inputs[2:]) <= initial, "all other inputs have default values"
    statistics = [statistic.name for statistic in model.statistics]
    assert set(inputs[2:]) == {*model.parameters, *statistics, "loss_scale", "barrier_zero"}
    outputs = [value.name for value in graph.output]
    assert outputs[0] == "loss"
    assert outputs[1:63] == [f"{name}_grad" for name in model.parameters]
    assert set(outputs[63:]) == {f"{name}_new" for name in statistics}
    shapes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in graph.output}
    for tensor in graph.initializer:
        if tensor.name in model.parameters:
            assert shapes[f"{tensor.name}_grad"] == list(tensor.dims)


def test_inputs_and_outputs_are_described(resnet: OptimizeResult):
    source = build("(float[8, 4] x) => (float[8, 4] y) { y = MatMul (x, w) }", w=normal(4, 4))
    updating = optimize(source, loss="mse", optimizer=AdamW(clip_norm=1.0), check=False)
    found: dict[str, str] = {}
    for model in (result.training_graph.model for result in (updating, resnet)):
        values = (*model.graph.input, *model.graph.output)
        assert all(value.doc_string for value in values)
        found |= {value.name: value.doc_string for value in values}
    assert 50 * sum(len(value.doc_string) + 2 for value in values) < model.ByteSize()
    assert (found["w_new"], found["w_exp_avg"]) == ("new value of w", "state of adamw for w")
    assert found["fc.bias_grad"] == "gradient of fc.bias"


def test_every_inner_tensor_has_a_type(resnet: OptimizeResult):
    graph = resnet.training_graph.model.graph
    typed = {value.name: value.type.tensor_type.shape.dim for value in (*graph.value_info, *graph.output)}
    assert all(name in typed for node in graph.node for name in node.output)
    empty = [dimensions for name, dimensions in typed.items() if name.endswith("/empty")]
    assert empty
    # With a 0 instead, the runtime would fold the barrier away.
    assert all(dimensions[0].dim_param for dimensions in empty)


def test_first_dimensions_have_few_names(resnet: OptimizeResult):
    """On loading, the runtime compares each new tensor with all dead buffers, at least one per name."""
    graph = resnet.training_graph.model.graph
    types = {value.name: value.type.tensor_type.shape.dim for value in graph.value_info}
    kernels = [node for node in graph.node if node.op_type not in VIEW_OPERATORS]
    names = [
        dimensions[0].dim_param
        for node in kernels
        for output in node.output
        if (dimensions := types.get(output)) and dimensions[0].dim_param
    ]
    assert len(set(names)) < 0.3 * len(names)


def test_node_annotations(resnet: OptimizeResult):
    graph = resnet.training_graph.model.graph
    sources = {node.name for node in onnx.load(MODELS / "resnet18.onnx").graph.node}
    roles = []
    for node in graph.node:
        found = metadata(node)
        roles.append(found["onnxgc.role"])
        assert ("__recompute" in [a.name for a in node.attribute]) <= node.name.endswith("__recompute")
        if found["onnxgc.role"] == "recompute" and node.name.endswith("__recompute"):
            assert found["onnxgc.node"] in sources | {"loss"}
            assert found["onnxgc.segment"].isdigit()
            assert all(name.endswith("__recompute") for name in node.output)
    assert set(roles) == {"forward", "recompute", "backward"}
    assert "backward" not in roles[: roles.index("recompute")] or roles.index("backward") > roles.index("forward")


def test_metadata(resnet: OptimizeResult):
    values = metadata(resnet.training_graph.model)
    plan = json.loads(values["onnxgc.plan"])
    assert plan["checkpoints"] == list(resnet.plan.checkpoints)
    assert int(values["onnxgc.simulated_peak_bytes"]) == resnet.planned.profile.peak_bytes
    assert values["onnxgc.loss"] == "cross-entropy"
    assert values["onnxgc.schema"] == "1"
    assert values["onnxgc.version"]
    names = json.loads(values["onnxgc.names"])
    assert names["loss"] == "loss"
    assert names["labels"] == "labels"
    assert names["gradients"]["fc.bias"] == "fc.bias_grad"
    assert names["statistics"]["bn1.running_mean"] == "bn1.running_mean_new"


def test_source_metadata_is_kept():
    model = build("(float[2,3] x) => (float[2,3] y) {y = MatMul(x, w)}", w=normal(3, 3))
    model.metadata_props.add(key="author", value="someone")
    assert metadata(optimize(model, loss="mse").training_graph.model)["author"] == "someone"


def test_the_file_runs_alone_and_a_binding_overrides_a_parameter():
    model = build("(float[2,3] x) => (float[2,3] y) {y = MatMul(x, w)}", w=normal(3, 3))
    session = make_session(optimize(model, loss="mse").training_graph.model, threads=1)
    feeds = {"x": normal(2, 3), "target": normal(2, 3)}
    own, own_gradient = session.run(["loss", "w_grad"], feeds)
    other, _ = session.run(["loss", "w_grad"], {**feeds, "w": np.zeros((3, 3), np.float32)})
    assert own == pytest.approx(np.mean((feeds["x"] @ normal(3, 3) - feeds["target"]) ** 2), rel=1e-5)
    assert other == pytest.approx(np.mean(feeds["target"] ** 2), rel=1e-5)
    again, gradient = session.run(["loss", "w_grad"], {**feeds, "loss_scale": np.asarray(8, np.float32)})
    assert again == own
    np.testing.assert_allclose(gradient, 8 * own_gradient, rtol=1e-6)


def test_taken_names_get_a_suffix_and_the_metadata_lists_them():
    text = """(float[2,3] loss, float[2,3] labels, float[2,3] w_grad) => (float[2,3] target) {
        loss_scale = MatMul(loss, w)
        barrier_zero = Add(loss_scale, labels)
        target = Add(barrier_zero, w_grad)
    }"""
    model = build(text, w=normal(3, 3))
    result = optimize(model, loss="mse")
    names = json.loads(metadata(result.training_graph.model)["onnxgc.names"])
    feeds = {name: normal(2, 3) for name in ("loss", "labels", "w_grad", names["target"])}
    loss, gradient = make_session(result.training_graph.model).run([names["loss"], names["gradients"]["w"]], feeds)
    assert np.isfinite(loss)
    assert gradient.shape == (3, 3)
    roles = [names[role] for role in ("loss", "target", "loss_scale", "barrier_zero")]
    assert len({*roles, "loss", "labels", "w_grad", "target", "loss_scale", "barrier_zero"}) == 10
    assert names["gradients"]["w"] != "w_grad"


def test_keep_outputs_returns_the_models_own_except_inputs():
    body = "(float[2,3] x) => (float[2,3] y, float[2,3] x, float[3,3] w) {a = MatMul(x, w) y = Relu(a)}"
    model = build(body, w=normal(3, 3))
    plain = optimize(model, loss="mse").training_graph.model
    assert [value.name for value in plain.graph.output] == ["loss", "w_grad"]
    found = optimize(model, loss="mse", keep_outputs=True)
    kept = found.training_graph.model
    assert [value.name for value in kept.graph.output] == ["loss", "w_grad", "y"]
    x = normal(2, 3)
    (y,) = make_session(kept).run(["y"], {"x": x, "target": x})
    np.testing.assert_allclose(y, np.maximum(x @ normal(3, 3), 0), rtol=1e-5)
    (note,) = (note for note in found.planned.model.notes if "--keep-outputs" in note)
    assert note == "--keep-outputs excludes 'x', 'w', which are inputs of the step"


def test_a_branch_that_captures_tensors_runs_once():
    """Only frozen weights precede it, and its subgraphs' inputs are live when it runs."""
    body = """(float[2,3] x) => (float[2,3] y) {
        total = ReduceSum<keepdims=0>(x)  condition = Greater(total, zero)
        [if] z = If(condition)<then_branch = one () => (float[2,3] t) { t = Mul(x, k) },
                               else_branch = two () => (float[2,3] e) { e = Mul(x, k2) }>
        h = MatMul(z, w)  r = Relu(h)  y = MatMul(r, w) }"""
    model = build(body, w=normal(3, 3), k=normal(2, 3), k2=normal(2, 3), zero=np.zeros(()))
    with pytest.raises(UnsupportedOperatorError, match="If at 'if'"):
        optimize(model, loss="mse")
    emitted = optimize(model, loss="mse", freeze=["k*"], checkpoints=["y"]).training_graph.model
    onnx.checker.check_model(emitted, full_check=True)
    x = np.abs(normal(2, 3))
    loss, gradient = make_session(emitted).run(["loss", "w_grad"], {"x": x, "target": x})
    hidden = np.maximum(x * normal(2, 3) @ normal(3, 3), 0)
    assert loss == pytest.approx(np.mean((hidden @ normal(3, 3) - x) ** 2), rel=1e-5)
    assert np.linalg.norm(gradient) > 0


def test_frozen_weights_are_not_inputs():
    text = "(float[2,3] x) => (float[2,3] y) {a = MatMul(x, w) y = MatMul(a, v)}"
    model = build(text, w=normal(3, 3), v=2 * normal(3, 3))
    graph = optimize(model, loss="mse", freeze=["w"]).training_graph.model.graph
    assert "w" not in [value.name for value in graph.input]
    assert "w" in [tensor.name for tensor in graph.initializer]
    assert [value.name for value in graph.output] == ["loss", "v_grad"]


def test_dropout_draws_one_mask_per_step_under_every_setting():
    """Forward and recomputation drop the same elements, and the next step drops others."""
    text = """(float[64,64] x) => (float[64,64] y) {
        a = MatMul(x, w)  b = Dropout(a)  c = Relu(b)  d = MatMul(c, u)  e = Relu(d)  y = MatMul(e, v)
    }"""
    model = build(text, w=normal(64, 64), u=normal(64, 64), v=normal(64, 64))
    result = optimize(model, loss="mse", checkpoints=["e"], keep_outputs=True)
    emitted = result.training_graph.model
    dropouts = [node for node in emitted.graph.node if node.op_type == "Dropout"]
    assert len(dropouts) == 2, "one in forward, one recomputed"
    probe = onnx.ModelProto()
    probe.CopyFrom(emitted)
    for node in probe.graph.node:
        if node.op_type == "Dropout":
            probe.graph.output.append(helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, (64, 64)))
    feeds = {"x": normal(64, 64), "target": normal(64, 64)}
    for settings in (SessionSettings(), SessionSettings(file_order=False)):
        session = make_session(probe, settings=settings)
        forward, recomputed = session.run([node.output[0] for node in dropouts], feeds)
        np.testing.assert_array_equal(forward, recomputed)
        assert 0.3 < np.mean(forward == 0) < 0.7
        (later,) = session.run([dropouts[0].output[0]], feeds)
        assert (later == 0).tolist() != (forward == 0).tolist()
        assert {node.name for node in dropouts} <= set(executed_order(emitted, feeds, settings).order)


@pytest.mark.parametrize(
    "pool, size",
    [
        ("MaxPool <ceil_mode = 1, kernel_shape = [1, 1], strides = [2, 2]>", (8, 8)),
        ("MaxPool <ceil_mode = 1, kernel_shape = [3, 3], strides = [3, 3], pads = [1, 1, 1, 1]>", (8, 7)),
        ("MaxPool <ceil_mode = 1, kernel_shape = [3, 2], strides = [1, 2], pads = [2, 0, 0, 1]>", (25, 4)),
        ("AveragePool <ceil_mode = 1, kernel_shape = [2, 2], strides = [2, 2], pads = [1, 1, 1, 1]>", (7, 7)),
    ],
)
def test_pooling_with_ceil_mode_has_one_shape_everywhere(pool: str, size: tuple[int, int]):
    """The checker, every session and the source model agree on the extent."""
    height, width = size
    text = f"""(float[2,3,{height},{width}] x) => (float[2,3,a,b] y) {{
        h = Conv(x, w)  p = {pool} (h)  s = Sigmoid(p)  y = Mul(s, p)
    }}"""
    source = build(text, w=normal(3, 3, 1, 1))
    result = optimize(source, loss="mse", keep_outputs=True)
    onnx.checker.check_model(result.training_graph.model, full_check=True)
    x = normal(2, 3, height, width)
    (expected,) = make_session(source).run(["y"], {"x": x})
    for settings in (SessionSettings(), SessionSettings(file_order=False)):
        session = make_session(result.training_graph.model, settings=settings)
        (y,) = session.run(["y"], {"x": x, "target": expected})
        np.testing.assert_allclose(y, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["out.textproto", "out.json"])
def test_the_suffix_of_a_text_format_raises(name: str, tmp_path: Path):
    source = build("(float[2,3] x) => (float[2,3] y) { y = MatMul(x, w) }", w=normal(3, 3))
    with pytest.raises(OutputFileError, match=r"the file is binary, and \.\w+ is for text") as caught:
        optimize(source, tmp_path / name, loss="mse")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
