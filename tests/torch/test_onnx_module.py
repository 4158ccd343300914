import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from onnxgc.errors import ModelFileError, ShapeError
from onnxgc.model.draw_weights import draw_weights
from onnxgc.model.read import read_model
from onnxgc.torch import OnnxModule, checkpoint, from_onnx
from onnxgc.torch.fx_program import Origin
from onnxgc.torch.onnx_module import state_keys
from scripts.exports.torch_export import Export, export_module, match_parameters
from scripts.exports.torch_models import TORCH_MODELS, Recipe
from tests.model.model_helpers import LIGHT_MODELS, image_input, light_path, normal, run, text_model, with_weights


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8 * 4 * 4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.pool(self.stem(x))
        return self.head(self.dropout(features.flatten(1))), features.mean((2, 3))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    module = Network()
    for _ in range(3):
        module(torch.randn(4, 3, 8, 8) + 1)
    path = tmp_path_factory.mktemp("exported") / "network.onnx"
    export_module(module, {"x": torch.randn(2, 3, 8, 8)}, path, Export(Recipe.SCRIPT, dynamic=True))
    return module, path


@pytest.fixture
def pair(exported: tuple[nn.Module, Path]) -> tuple[nn.Module, OnnxModule]:
    module, found = copy.deepcopy(exported[0]), from_onnx(exported[1])
    found.load_state_dict(own_state(module))
    return module, found


def own_state(module: nn.Module) -> dict[str, Tensor]:
    """The state without counters, which ONNX does not have."""
    state = module.state_dict().items()
    return {name: value.clone() for name, value in state if not name.endswith("num_batches_tracked")}


def test_outputs_equal_those_of_torch_for_any_batch_and_keep_statistics(pair: Any) -> None:
    module, found = (each.eval() for each in pair)
    before = own_state(found)
    for batch in (1, 2, 7):
        x = torch.randn(batch, 3, 8, 8)
        assert all(map(torch.equal, found(x), module(x)))
    assert found.batched_inputs == ("x",)
    assert all(torch.equal(value, before[name]) for name, value in found.state_dict().items())


def test_a_training_step_equals_that_of_torch(pair: Any) -> None:
    module, found = (each.train() for each in pair)
    x = torch.randn(6, 3, 8, 8)
    for each in (module, found):
        torch.manual_seed(3)  # Equal Dropout masks.
        sum(output.square().sum() for output in each(x)).backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert gradients.keys() == {name for name, _ in found.named_parameters()}
    assert all(torch.equal(parameter.grad, gradients[name]) for name, parameter in found.named_parameters())
    # Running statistics are updated once, with the unbiased variance.
    expected = own_state(module)
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())


def test_a_training_step_can_be_planned(pair: Any) -> None:
    found = pair[1].train()
    planned, x = copy.deepcopy(found), torch.randn(6, 3, 8, 8)
    steps = {"regular": found, "planned": checkpoint(planned, x, budget="min", device="a100", step_limit=2)}
    for module in steps.values():
        torch.manual_seed(3)
        sum(output.square().sum() for output in module(x)).backward()
    gradients = {name: parameter.grad for name, parameter in planned.named_parameters()}
    assert all(torch.equal(parameter.grad, gradients[name]) for name, parameter in found.named_parameters())
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in planned.state_dict().items())


def test_frozen_statistics_are_used_in_training(exported: Any) -> None:
    found = from_onnx(exported[1], freeze_bn=True).train()
    before = own_state(found)
    x = torch.randn(2, 3, 8, 8)
    trained = found(x)[1]
    assert torch.equal(trained, found.eval()(x)[1])
    assert all(torch.equal(value, before[name]) for name, value in found.state_dict().items())


def test_globs_freeze_and_train_weights(exported: Any) -> None:
    found = from_onnx(exported[1], freeze=["*"], trainable=["head.*"])
    assert {name for name, p in found.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}
    assert "stem.0.weight" in dict(found.named_parameters())


@pytest.mark.parametrize("make", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_equal_and_share_no_weights(pair: Any, make: Any) -> None:
    found, x = pair[1].eval(), torch.randn(3, 3, 8, 8)
    copied, expected = make(found), found(x)[0]
    assert torch.equal(copied(x)[0], expected)
    with torch.no_grad():
        copied.head.weight.zero_()
    assert torch.equal(found(x)[0], expected)
    assert not torch.equal(copied(x)[0], expected)
    assert onnx.load_from_string(copied.to_onnx().SerializeToString()).graph.node


def test_modules_can_be_cast_to_other_types(pair: Any) -> None:
    found, x = pair[1].eval(), torch.randn(2, 3, 8, 8)
    expected = found(x)[0]
    assert torch.allclose(copy.deepcopy(found).double()(x.double())[0].float(), expected, atol=1e-5)
    half = copy.deepcopy(found).to(torch.bfloat16)(x.bfloat16())[0]
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), expected, atol=0.1)


def test_files_keep_structure_and_contain_trained_weights(pair: Any, exported: Any, tmp_path: Path) -> None:
    found = pair[1].train()
    optimizer = torch.optim.SGD(found.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        found(torch.randn(6, 3, 8, 8))[0].square().sum().backward()
        optimizer.step()
    path = tmp_path / "trained.onnx"
    proto, source = found.to_onnx(path), onnx.load(exported[1])
    assert onnx.load(path) == proto
    assert [node.name for node in proto.graph.node] == [node.name for node in source.graph.node]
    assert (proto.graph.input, proto.graph.output) == (source.graph.input, source.graph.output)
    assert [t.name for t in proto.graph.initializer] == [t.name for t in source.graph.initializer]
    assert (proto.opset_import, proto.metadata_props) == (source.opset_import, source.metadata_props)
    assert proto.producer_name == source.producer_name
    again, x = from_onnx(path), torch.randn(2, 3, 8, 8)
    assert torch.equal(again.eval()(x)[0], found.eval()(x)[0])
    # The source was exported in training mode.
    for value, expected in zip(found(x), run(proto, {"x": x.numpy()}), strict=True):
        assert np.allclose(value.detach().numpy(), expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(v, found.state_dict()[name]) for name, v in again.state_dict().items())


_QUICK = ("light_inception_v1", "light_shufflenet", "light_squeezenet")


@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LIGHT_MODELS]
)
def test_light_models_equal_onnx_runtime(name: str) -> None:
    path = light_path(name)
    module = from_onnx(path, seed=1).eval()
    x = normal(1, 3, 224, 224)
    with torch.no_grad():
        found = module(torch.from_numpy(x)).numpy()
    (expected,) = run(module.to_onnx(), {image_input(path): x})
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()
    assert expected.std() > 0


def test_weights_are_drawn_as_for_training_files() -> None:
    path = light_path("light_shufflenet")
    module = from_onnx(path, seed=7)
    drawn = draw_weights(read_model(path), 7, only_constant_filled=True)
    state = {module.onnx_names()[key]: value for key, value in module.state_dict().items()}
    assert drawn
    assert all(np.array_equal(state[name], value) for name, value in drawn.items())


@pytest.mark.parametrize(
    "name, recipe",
    [
        pytest.param("mobilenet_v3_large", Recipe.SCRIPT, marks=pytest.mark.slow),
        pytest.param("vit_b_16", Recipe.SCRIPT, marks=pytest.mark.slow),
        ("bert", Recipe.SCRIPT),
        ("lstm", Recipe.SCRIPT),
        ("gpt2", Recipe.DYNAMO),
    ],
)
def test_exports_equal_their_modules(name: str, recipe: Recipe, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("transformers")
    if recipe is Recipe.DYNAMO:
        pytest.importorskip("onnxscript")
    entry = TORCH_MODELS[name]
    module, batch = entry.module(small=True).eval(), entry.batch(small=True)
    path = tmp_path / "model.onnx"
    export_module(module, batch, path, Export(recipe, dynamic=True))
    found = from_onnx(path).eval()
    stated = {key: value for key, value in own_state(module).items() if key in found.state_dict()}
    # TorchScript's exporter runs the module once, which updates its statistics.
    found.load_state_dict(stated, strict=False)
    for inputs in (batch, {key: torch.cat([value, value[:1]]) for key, value in batch.items()}):
        module.zero_grad()
        found.zero_grad()
        value, expected = found(**inputs), module(*inputs.values())
        assert (value - expected).abs().max() <= 1e-5 * expected.abs().max()
        value.square().sum().backward()
        expected.square().sum().backward()
    _check_gradients(module, found, path)


def _check_gradients(module: nn.Module, found: OnnxModule, path: Path) -> None:
    keys = {name: key for key, name in found.onnx_names().items()}
    gradients = {name: parameter.grad for name, parameter in found.named_parameters()}
    compared = 0
    for name, matches in match_parameters(module, onnx.load(path)).items():
        expected = module.get_parameter(name).grad
        if expected is None or len(matches) != 1:
            continue
        ((onnx_name, is_transposed),) = matches
        gradient = gradients[keys[onnx_name]]
        assert gradient is not None
        gradient = gradient.t() if is_transposed else gradient
        assert (gradient - expected).norm() <= 1e-4 * expected.norm() + 1e-6
        compared += 1
    assert compared > 10


def test_models_can_be_paths_and_objects(exported: Any) -> None:
    path, x = exported[1], torch.randn(2, 3, 8, 8)
    expected = from_onnx(path).eval()(x)[0]
    proto = onnx.load(path)
    assert torch.equal(from_onnx(proto).eval()(x)[0], expected)
    assert torch.equal(from_onnx(str(path)).eval()(x)[0], expected)
    program = type("Program", (), {"model_proto": proto})()
    assert torch.equal(from_onnx(program).eval()(x)[0], expected)
    onnx_ir = pytest.importorskip("onnx_ir")
    assert torch.equal(from_onnx(onnx_ir.from_proto(proto)).eval()(x)[0], expected)
    with pytest.raises(ModelFileError, match="not a int"):
        from_onnx(3)


TWO_INPUTS = with_weights(
    text_model(
        "(float[2,3] first, float[2,3] second) => (float[2,3] y) { d = Sub(first, second) [scale] y = Mul(d, w) }"
    ),
    w=normal(2, 3),
)
TWO_INPUTS.graph.input[1].name = TWO_INPUTS.graph.node[0].input[1] = "second.input"
TWO_INPUTS.graph.node[0].name = "take away"


def test_inputs_by_position_and_by_name() -> None:
    module, a, b = from_onnx(TWO_INPUTS), torch.randn(2, 3), torch.randn(2, 3)
    expected = (a - b) * module.get_parameter("w")
    assert torch.equal(module(a, b), expected)
    assert torch.equal(module(a, **{"second.input": b}), expected)
    assert torch.equal(module(**{"second.input": b, "first": a}), expected)
    with pytest.raises(TypeError, match=r"inputs \['second.input'\] are missing"):
        module(a)
    with pytest.raises(TypeError, match="3 inputs are given, and the model has 2"):
        module(a, b, a)
    with pytest.raises(TypeError, match="'third' is not among the model's inputs"):
        module(a, b, third=a)
    with pytest.raises(TypeError, match="'first' is given twice"):
        module(a, first=a)
    with pytest.raises(ShapeError, match=r"'first' has the shape \[4, 3\], and the model was read for \[2, 3\]"):
        module(torch.randn(4, 3), b)


def test_nodes_of_the_graph_have_origins() -> None:
    module = from_onnx(TWO_INPUTS)
    nodes = [node for node in module.graph_module.graph.nodes if node.op == "call_function"]
    assert [node.name for node in nodes] == ["take_away", "scale"]
    assert nodes[0].meta["custom"]["onnx"] == Origin("take away", ("d",))


@pytest.mark.parametrize(
    "names, keys",
    [
        (["a.b.weight", "a.c"], ["a.b.weight", "a.c"]),
        (["onnx::Conv_12", "layer/0:0", "weight"], ["onnx::Conv_12", "layer/0:0", "weight"]),
        (["a", "a.b"], ["a", "a_.b"]),
        (["a.b", "a"], ["a.b", "a_"]),
        (["a", "a_", "a.b"], ["a", "a_", "a__.b"]),
        ([".a", "a..b", "c."], ["_.a", "a._.b", "c._"]),
        (["train", "forward.weight", "training"], ["train_", "forward_.weight", "training_"]),
        (["program", "x._parameters"], ["program_", "x._parameters_"]),
    ],
)
def test_every_name_has_a_valid_key(names: list[str], keys: list[str]) -> None:
    model = text_model(f"(float[2,3] x) => (float[2,3] y) {{ y = Sum(x, {', '.join('w' for _ in names)}) }}")
    model.graph.node[0].input[1:] = names
    model = with_weights(model, **{name: normal(2, 3, seed=i) for i, name in enumerate(names)})
    module, x = from_onnx(model), torch.randn(2, 3)
    assert list(state_keys(names, module_without_weights()).values()) == keys
    assert module.onnx_names() == dict(zip(keys, names, strict=True))
    assert set(module.state_dict()) == set(keys)
    other = from_onnx(model)
    other.load_state_dict({key: value + 1 for key, value in module.state_dict().items()})
    assert torch.allclose(other(x), module(x) + len(names), atol=1e-5)
    stored = {t.name: numpy_helper.to_array(t) for t in other.to_onnx().graph.initializer}
    assert all(np.array_equal(stored[n], other.state_dict()[k].numpy()) for n, k in zip(names, keys, strict=True))


def module_without_weights() -> OnnxModule:
    return from_onnx(text_model("(float[2] x) => (float[2] y) { y = Relu(x) }"))


def test_outputs_may_be_inputs_and_weights() -> None:
    model = with_weights(
        text_model("(float[2] x) => (float[2] y, float[2] z, float[2] w) { y = Identity(x) z = Mul(y, w) }"),
        w=normal(2),
    )
    x = torch.randn(2)
    y, z, w = from_onnx(model)(x)
    assert torch.equal(y, x)
    assert torch.equal(z, x * w)
