from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch import Tensor, nn  # noqa: E402

from onnxgc.torch import export_training  # noqa: E402
from onnxgc.training import SGD, AdamW, Trainer  # noqa: E402
from tests.training.networks import digits  # noqa: E402


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.short = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.short(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(1, 8, 1), Block(8, 16, 2), Block(16, 32, 2))
        self.head = nn.Linear(32, 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(image).mean((2, 3)))


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(8, 32)
        self.places = nn.Parameter(torch.zeros(1, 8, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.layers(self.patches(image[:, 0]) + self.places).mean(1))


@pytest.mark.parametrize(
    "network, optimizer", [(Residual, SGD(momentum=0.9)), pytest.param(Attentive, AdamW(), marks=pytest.mark.slow)]
)
def test_trained_weights_equal_the_modules(network: Any, optimizer: Any, tmp_path: Path):
    torch.manual_seed(0)
    module = network()
    train, test = digits()
    export_training(module, (torch.zeros(4, 1, 8, 8),), tmp_path / "model.onnx")
    trainer = Trainer(tmp_path / "model.onnx", optimizer=optimizer, learning_rate=3e-3, batch=32, threads=1)
    image, labels = trainer.inputs
    history = trainer.fit({image: train["image"], labels: train["labels"]}, 3)
    assert history[-1]["loss"] < history[0]["loss"] / 2
    trainer.export(tmp_path / "trained.onnx")
    deployed = onnx.load(tmp_path / "trained.onnx")
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in deployed.graph.initializer}
    state = module.state_dict()
    assert {name for name, _ in module.named_parameters()} <= held.keys()
    module.load_state_dict(
        {name: torch.tensor(np.array(held[name])) if name in held else value for name, value in state.items()}
    )
    with torch.no_grad():
        wanted = module.eval()(torch.tensor(test["image"])).numpy()
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: test["image"]})[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    accuracy = trainer.evaluate({image: test["image"], labels: test["labels"]})["accuracy"]
    assert accuracy == (wanted.argmax(1) == test["labels"]).mean() > 0.8
