from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from onnx import numpy_helper
from torch import Tensor, nn

import onnxgc
from onnxgc.errors import ExportError, OutputFileError, RuntimeUnavailableError
from onnxgc.runtime.ort import make_session
from onnxgc.torch import export_training, exporting, from_onnx

pytest.importorskip("onnxscript")
pytestmark = pytest.mark.usefixtures("cached_exporter")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.ones(4), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.unread = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.zeros_(self.left.bias)
        nn.init.zeros_(self.right.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).mean(dim=1) + self.shift
        result: Tensor = self.head(self.left(x) * self.right(x) * self.scale)
        return result


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4, momentum=0.3)
        self.deep = nn.Conv3d(2, 3, 2, bias=False)
        self.frozen = nn.BatchNorm3d(3)
        self.head = nn.Linear(4 + 3, 5)

    def train(self, mode: bool = True) -> Convolutions:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, image: Tensor, volume: Tensor) -> Tensor:
        left = self.norm(self.flat(image)).mean(dim=(2, 3))
        right = self.frozen(self.deep(volume)).mean(dim=(2, 3, 4))
        result: Tensor = self.head(torch.cat([left, right], dim=1))
        return result


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.elements, self.channels = nn.Dropout(0.1, inplace=True), nn.Dropout2d(0.2)
        self.recurrent = nn.GRU(4, 4, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(1)  # An unused draw still advances the generator.
        x = self.channels(self.elements(self.linear(x))).flatten(1, 2)
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.3 if self.training else 0.0)
        x, _ = self.recurrent(x)
        if self.training:
            x = x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.5).div_(0.5)
        return x


class Parts(NamedTuple):
    logits: Tensor
    hidden: Tensor


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor, wide: bool = True, *, scale: Tensor, offset: Tensor | None = None) -> dict[str, Any]:
        y = x * self.x * scale if wide else x
        return {"parts": Parts(y + 1, y), "again": y, "same": x, "none": offset}


def weights_of(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    counts = Counter(tensor.name for tensor in proto.graph.initializer)
    assert set(counts.values()) == {1}
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


def nodes_of(proto: onnx.ModelProto, op: str) -> list[onnx.NodeProto]:
    return [node for node in proto.graph.node if node.op_type == op]


def test_each_parameter_is_one_initializer_and_trains_on_onnx_runtime() -> None:
    module, tokens = Tied(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    proto = export_training(module, tokens)
    weights = weights_of(proto)
    expected = {name: p for name, p in module.named_parameters() if name != "unread"}
    assert set(weights) >= set(expected)
    assert all(np.array_equal(weights[name], p.detach().numpy()) for name, p in expected.items())
    assert all(weight.ndim == 0 for name, weight in weights.items() if name not in expected)

    result = onnxgc.optimize(proto, input_shapes={"tokens": (2, 3)})
    gradient_of = result.training_graph.gradient_of
    trained = [name for name in expected if name != "shift"]
    assert sorted(gradient_of) == sorted(trained)
    labels = torch.tensor([0, 3])
    F.cross_entropy(module(tokens), labels).backward()
    session = make_session(result.training_graph.model)
    names = [gradient_of[name] for name in trained]
    found = session.run(names, {"tokens": tokens.numpy(), "labels": labels.numpy()})
    for name, gradient in zip(trained, found, strict=True):
        true = expected[name].grad
        assert true is not None
        assert np.allclose(gradient, true.numpy(), rtol=1e-4, atol=1e-6), name


def test_normalisations_keep_their_modes_and_convolutions_get_no_bias() -> None:
    module = Convolutions().eval()
    module.norm.running_mean.fill_(0.5)  # type: ignore[union-attr]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    proto = export_training(module, (torch.randn(3, 3, 6, 6), torch.randn(3, 2, 4, 4, 4)))
    assert [len(node.input) for node in nodes_of(proto, "Conv")] == [2, 2]
    marked = {
        node.input[3]: any(attribute.name == "training_mode" and attribute.i for attribute in node.attribute)
        for node in nodes_of(proto, "BatchNormalization")
    }
    assert marked == {"norm.running_mean": True, "frozen.running_mean": False}
    assert not module.norm.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    network = from_onnx(proto)
    assert network.batched_inputs == ("image", "volume")
    image, volume = torch.randn(5, 3, 6, 6), torch.randn(5, 2, 4, 4, 4)
    assert torch.allclose(network.train()(image, volume), module.train()(image, volume), atol=1e-5)
    assert torch.allclose(network.get_buffer("norm.running_mean"), module.norm.running_mean)  # type: ignore[arg-type]
    model = onnxgc.optimize(proto, solver="store-all").training_graph.model
    assert [value.name for value in model.graph.output if "running" in value.name] == [
        "norm.running_mean_new",
        "norm.running_var_new",
    ]


def test_randomness_is_dropout_and_evaluation_is_deterministic() -> None:
    module, x = Random(), torch.randn(2, 2, 1, 4)
    torch.manual_seed(3)
    proto = export_training(module, x)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))
    assert not any(node.op_type.startswith("Random") for node in proto.graph.node)
    assert len(nodes_of(proto, "Dropout")) == 5
    network = from_onnx(proto, input_shapes={"x": tuple(x.shape)})
    assert torch.allclose(network.eval()(x), module.eval()(x), atol=1e-5)
    rows = network.train()(x).flatten(1)
    drawn = torch.stack([network(x).flatten(1).abs().sum(dim=1) for _ in range(16)])
    assert 0 < int((drawn == 0).sum()) < drawn.numel(), "stochastic depth drops some rows"
    assert not torch.equal(rows, network(x).flatten(1))


def test_inputs_and_outputs_have_the_names_of_the_call(tmp_path: Path) -> None:
    path = tmp_path / "module.onnx"
    kwargs = {"offset": None, "scale": torch.full((2, 3), 2.0)}
    proto = export_training(Structured(), (torch.ones(2, 3), True), path, kwargs=kwargs)
    assert onnx.load(path) == proto
    assert [value.name for value in proto.graph.input] == ["x_input", "scale"]
    outputs = [value.name for value in proto.graph.output]
    assert outputs == ["parts_logits", "parts_hidden", "again", "same"]
    assert [value.type.tensor_type.shape.dim[0].dim_param for value in proto.graph.input] == ["batch"] * 2
    found = from_onnx(proto)(x_input=torch.ones(4, 3), scale=torch.full((4, 3), 2.0))
    assert [value[3].tolist() for value in found] == [[3, 5, 7], [2, 4, 6], [2, 4, 6], [1, 1, 1]]
    assert not any("stack_trace" in entry.key for node in proto.graph.node for entry in node.metadata_props)
    with pytest.raises(OutputFileError):
        export_training(Structured(), torch.ones(2, 3), tmp_path / "no" / "x.onnx", kwargs=kwargs)


def test_a_batch_that_cannot_be_symbolic_is_fixed() -> None:
    class Fixed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).reshape(2, 3)

    with pytest.warns(UserWarning, match=r"the batch stays 2, .*specialized it to be a constant \(2\)"):
        proto = export_training(Fixed(3, 3), torch.randn(2, 3), check=False)
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2
    # `torch.export` specialises on dimensions of size 1.
    proto = export_training(nn.Linear(3, 3), torch.randn(1, 3), check=False)
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    proto = export_training(Fixed(3, 3), torch.randn(2, 3), dynamic_batch=False, check=False)
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2


class _Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    "module, reason",
    [
        (_Branching(3, 3), "the module cannot be captured: .*data-dependent"),
        (nn.Sequential(nn.BatchNorm1d(3, momentum=None)), "'0' averages its running statistics"),
        (nn.InstanceNorm1d(3, track_running_stats=True), "'' trains running statistics of an InstanceNorm"),
        (nn.Bilinear(3, 3, 3), "forward does not take these arguments: missing"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_unsupported_modules_raise_in_one_line(
    module: nn.Module, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    module.eval()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ExportError, match=reason) as caught:
        export_training(module, torch.randn(2, 3), dynamic_batch=False)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert not any(part.training for part in module.modules())
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_differences_of_a_file_are_warned_of() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)  # type: ignore[operator]
            return super().forward(x)

    module = Counting()
    with pytest.warns(UserWarning, match="forward changes the buffer 'calls'"):
        export_training(module, torch.randn(2, 3), dynamic_batch=False)
    assert module.calls == 0

    table = nn.Sequential(nn.Embedding(5, 3, padding_idx=0))
    with pytest.warns(UserWarning, match="row 0 of '0', its padding_idx, gets a gradient"):
        export_training(table, torch.tensor([[0, 1], [2, 0]]), dynamic_batch=False)

    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.rand_like(x))

    with pytest.warns(UserWarning, match=r"draws random numbers in evaluation, too \(RandomUniformLike\)"):
        export_training(Noisy(3, 3), torch.randn(2, 3), dynamic_batch=False)


def test_external_data_and_a_missing_exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, path = nn.Linear(64, 64), tmp_path / "module.onnx"
    export_training(module, torch.randn(2, 64), path, external_data=True, dynamic_batch=False)
    assert (tmp_path / "module.onnx.data").stat().st_size >= 64 * 64 * 4
    assert torch.equal(from_onnx(path).get_parameter("weight"), module.weight)
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    with pytest.raises(RuntimeUnavailableError, match="needs onnxscript, which is not installed"):
        export_training(module, torch.randn(2, 64))
