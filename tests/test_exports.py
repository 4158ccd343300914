import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from scripts.exports import __main__ as exports
from scripts.exports.torch_export import Export, export_module, exports_of, match_parameters
from scripts.exports.torch_models import TORCH_MODELS, Recipe, TorchModel, UNet

pytest.importorskip("onnxscript")
EXPORTS = exports_of(TORCH_MODELS["gru"])


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.embedding(tokens).sum(dim=1)))
        return result


@pytest.mark.parametrize("export", EXPORTS, ids=lambda export: export.suffix)
def test_every_parameter_of_an_export_is_found(export: Export, tmp_path: Path):
    module = UNet(4, 1, 2).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    path = tmp_path / "deeper" / "unet.onnx"
    export_module(module, {"x": torch.randn(2, 3, 8, 8)}, path, export)
    model = onnx.load(path)
    assert all(match_parameters(module, model).values())
    batch = model.graph.input[0].type.tensor_type.shape.dim[0]
    assert bool(batch.dim_param) == export.dynamic
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_parameters_match_by_value_transposed_or_repeated():
    module = _Tied()
    table = module.embedding.weight.detach().numpy()
    arrays = {"renamed": table, "transposed": np.ascontiguousarray(table.T), "other": table + 1}
    arrays["scale"] = module.norm.weight.detach().numpy()
    initializers = [numpy_helper.from_array(value, name) for name, value in arrays.items()]
    model = helper.make_model(helper.make_graph([], "g", [], [], initializers))
    found = match_parameters(module, model)
    assert found["embedding.weight"] == [("renamed", False), ("transposed", True)]
    assert found["norm.weight"] == [("scale", False)]
    assert found["norm.bias"] == []
    assert "head.weight" not in found


@pytest.mark.parametrize("name", ["unet", "lstm", "gru"])
def test_models_are_deterministic_without_equal_parameters(name: str):
    model = TORCH_MODELS[name]
    module, batch = model.module(small=True), model.batch(small=True)
    assert module.training
    with torch.no_grad():
        first, second = (module(*batch.values()) for _ in range(2))
    assert torch.equal(first, second)
    values = [p.detach().numpy().tobytes() for p in module.parameters()]
    assert len(set(values)) == len(values)
    again = model.module(small=True).state_dict()
    assert all(torch.equal(p, again[key]) for key, p in module.named_parameters())
    target = model.target(first)
    assert torch.isfinite(model.loss_of(first, target))


@pytest.mark.parametrize("part", [nn.Dropout(0.5), nn.LSTM(2, 2, num_layers=2, dropout=0.5)])
def test_dropout_rates_are_set_to_zero(part: nn.Module):
    model = TorchModel(lambda small: nn.Sequential(part), lambda small: {"x": torch.ones(4, 2)})
    rates = [getattr(part, name) for name in ("p", "dropout") if hasattr(part, name)]
    model.module(small=True)
    assert rates
    assert all(getattr(part, name) == 0 for name in ("p", "dropout") if hasattr(part, name))


def test_labels_follow_the_class_axis():
    language = TorchModel(lambda small: nn.Identity(), lambda small: {}, class_axis=2)
    output = torch.randn(2, 5, 7)
    target = language.target(output)
    assert target.shape == (2, 5)
    expected = nn.functional.cross_entropy(output.reshape(10, 7), target.reshape(10))
    assert torch.allclose(language.loss_of(output, target), expected)


def test_exports_include_data_for_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def failing(small: bool) -> nn.Module:
        raise RuntimeError("cannot be built\nfor more than one line")

    inputs: Callable[[bool], dict[str, Tensor]] = TORCH_MODELS["gru"].inputs
    broken = TorchModel(failing, inputs, recipes=(Recipe.SCRIPT,))
    monkeypatch.setitem(TORCH_MODELS, "broken", broken)
    monkeypatch.setitem(TORCH_MODELS, "gru", replace(TORCH_MODELS["gru"], recipes=(Recipe.SCRIPT,)))
    only = ["--only", "gru", "--only", "broken"]
    assert exports.main(["torch", str(tmp_path), *only]) == 1
    printed = capsys.readouterr().out
    assert "broken-small-script-static: RuntimeError: cannot be built" in printed
    paths = sorted(tmp_path.glob("*.onnx"))
    assert [path.stem for path in paths] == ["gru-small-script-dynamic", "gru-small-script-static"]
    for path in paths:
        described = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        assert described["loss"] == "cross-entropy"
        assert all(described["parameters"].values())
        with np.load(path.with_suffix(".npz")) as arrays:
            assert arrays["tokens"].shape == (2, 12)
            assert arrays["target"].shape == (2,)
