import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from onnxgc.model.core.ir import Array
from scripts import benchmark
from scripts.benchmarking import file_gradients, gradients, gradients_cuda
from scripts.benchmarking.gradient_comparison import cells, distances, outputs_of
from scripts.benchmarking.gradient_comparison import failures_of as failures
from scripts.benchmarking.gradients import Options
from scripts.benchmarking.records import Progress
from scripts.benchmarking.torch_truth import SINGLE_RUNS, Truth
from scripts.exports.torch_models import TORCH_MODELS, Recipe, TorchModel
from tests.model.model_helpers import model_of, normal

pytest.importorskip("onnxscript")
OPTIONS = Options(threads=1, all_exports=True)
WITHOUT_VERIFY = replace(OPTIONS, verify=False)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.outer = nn.LayerNorm(6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens).mean(dim=1)
        x = torch.relu(self.norm(self.inner(x)))
        return self.outer(x) @ self.table.weight.T


MODEL = TorchModel(
    lambda small: Network(), lambda small: {"tokens": torch.randint(0, 9, (8, 3))}, recipes=(Recipe.SCRIPT,)
)


def rows_of(
    model: TorchModel, monkeypatch: pytest.MonkeyPatch, options: Options = WITHOUT_VERIFY
) -> list[dict[str, Any]]:
    monkeypatch.setitem(TORCH_MODELS, "tried", model)
    return gradients.compare_model("tried", options)


def test_correct_gradients_pass(monkeypatch: pytest.MonkeyPatch):
    rows = rows_of(MODEL, monkeypatch, OPTIONS)
    assert [row["export"] for row in rows] == ["script-static", "script-dynamic"]
    for row in rows:
        assert row["holds"], failures(row)
        assert row["parameters"] == row["parameters_of"] == 7
        assert row["vanishing"] == ["inner.bias"]
        assert row["loss_distance"] < 1e-6
        assert row["planned_peak_bytes"] <= row["regular_peak_bytes"]
        assert row["verify"] == {}


def test_forms_for_cuda_are_compared_with_those_for_cpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(TORCH_MODELS, "tried", MODEL)
    monkeypatch.setattr(gradients_cuda, "_EXPORT", "script-static")
    rows = gradients_cuda.compare_model("tried", gradients_cuda.Options(verify=False))
    assert [row["export"] for row in rows] == ["script-static, cpu forms", "script-static, cuda forms"]
    assert [failures(row) for row in rows] == [[]] * 2
    assert [row["of_cpu_forms"] == 1 for row in rows] == [True, False]
    assert all(row["holds"] for row in rows)
    for wrong in (1.6, np.nan):
        assert failures({**rows[1], "of_cpu_forms": wrong}) == ["too far from float64"]


@pytest.mark.parametrize("factor", [1.0001, -1.0, np.nan])
def test_wrong_gradients_fail(factor: float, monkeypatch: pytest.MonkeyPatch):
    def wrong(*arguments: Any) -> dict[str, Array]:
        outputs = outputs_of(*arguments)
        (name,) = (name for name in outputs if name.startswith("inner.weight"))
        return {**outputs, name: outputs[name] * np.float32(factor)}

    monkeypatch.setattr(gradients, "outputs_of", wrong)
    for row in rows_of(MODEL, monkeypatch):
        assert not row["holds"]
        assert row["ratio_max_parameter"] == "inner.weight"
        assert list(row["too_far_on_batches"]) == list(gradients.SEEDS)
        assert "too far from float64" in cells(row)[-1]


def test_a_failing_batch_is_repeated_with_another_seed(monkeypatch: pytest.MonkeyPatch):
    seen: list[Array] = []

    def wrong_once(training: Path, feeds: Mapping[str, Array], threads: int) -> dict[str, Array]:
        outputs = outputs_of(training, feeds, threads)
        seen.append(feeds["tokens"])
        if len(seen) > 1:
            return outputs
        return {name: value if name == "loss" else value * 1.01 for name, value in outputs.items()}

    monkeypatch.setattr(gradients, "outputs_of", wrong_once)
    first, second = rows_of(MODEL, monkeypatch)
    assert first["holds"]
    assert first["batch"] == 2
    assert list(first["too_far_on_batches"]) == [1]
    assert second["batch"] == 1
    assert not np.array_equal(seen[0], seen[1])
    assert np.array_equal(seen[0], seen[2])


def test_buffers_taken_for_parameters_are_reported(monkeypatch: pytest.MonkeyPatch):
    class Confusing(nn.Module):
        """A buffer in the place of a weight, and a scalar parameter."""

        basis: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("basis", torch.randn(4, 4))
            self.linear = nn.Linear(4, 3)
            self.factor = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.factor * self.linear(x @ self.basis)
            return result

    model = TorchModel(lambda small: Confusing(), lambda small: {"x": torch.randn(5, 4)})
    for row in rows_of(model, monkeypatch):
        # Only the newer exporter marks buffers.
        is_marked = row["export"].startswith("dynamo")
        assert row["holds"] == is_marked
        assert row["no_parameters_of_the_module"] == ([] if is_marked else ["basis"])
        assert is_marked or "basis is not a parameter" in failures(row)
        assert "no gradient of factor" in failures({**row, "missing": ["factor"]})


def test_rejected_models_and_failed_exports_keep_a_row(monkeypatch: pytest.MonkeyPatch):
    class Rejected(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.det(super().forward(x)).reshape(-1, 1)

    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.i0(super().forward(x))

    batch = {"x": torch.randn(2, 4, 4)}
    rejected, failing = Rejected(4, 4), Failing(4, 4)
    for build, reason in ((lambda small: rejected, "Det"), (lambda small: failing, "not exported")):
        model = TorchModel(build, lambda small: batch, "mse", recipes=(Recipe.SCRIPT,))
        for row in rows_of(model, monkeypatch):
            assert not row["holds"]
            assert reason in row["error"]
            assert reason in cells(row)[-1]


def test_casts_of_a_module_are_double_in_the_truth():
    class Casting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.softmax(super().forward(x).float(), dim=-1, dtype=torch.float32)
            return y.to(torch.float32)

    model = TorchModel(lambda small: Casting(5, 5), lambda small: {"x": torch.randn(3, 5)}, "mse")
    truth = Truth.of(model, small=True)
    module = model.module(small=True).double()
    x = torch.from_numpy(truth.batch["x"]).double()
    y = torch.softmax(nn.Linear.forward(module, x), dim=-1)  # type: ignore[arg-type]
    nn.functional.mse_loss(y, torch.from_numpy(truth.target).double()).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert np.allclose(truth.exact[name], parameter.grad.numpy(), rtol=1e-12, atol=0)
        assert len(truth.singles) == len(SINGLE_RUNS)
        assert all(single[name].dtype == np.float32 for single in truth.singles)


def test_distances_are_relative_to_the_exact_gradient():
    exact = {"a": np.array([3.0, 4.0]), "gone": np.array([0.0]), "tiny": np.array([1e-12])}
    singles = [
        {"a": np.array([3.0, 4.0 + 5e-5]), "gone": np.zeros(1), "tiny": np.array([2e-12])},
        {"a": np.array([3.0, 4.0 + 1e-5]), "gone": np.zeros(1), "tiny": np.array([1e-12])},
    ]
    found = distances({"a": np.array([3.0, 4.0 + 1e-4]), "tiny": np.array([0.0])}, exact, singles)
    assert found["ratio_max_parameter"] == "a"
    assert found["ratio_max"] == pytest.approx(2.0)
    assert found["missing"] == []
    assert found["vanishing"] == ["tiny"]
    noise = {"a": exact["a"], "tiny": np.array([1e-12 + 1e-8])}
    assert distances(noise, exact, singles)["ratio_max"] == pytest.approx(0.2)
    assert distances({"a": exact["a"]}, {**exact, "gone": np.ones(1)}, singles)["missing"] == [
        "gone", "tiny",
    ]  # fmt: skip


@pytest.mark.slow
def test_command_writes_a_record(tmp_path: Path):
    arguments = ["gradients", "--only", "unet", "--no-verify", "--threads", "2", "--record", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    record = json.loads((tmp_path / "gradients.json").read_text(encoding="utf-8"))
    assert record["environment"]["threads"] == 2
    figures = record["figures"]
    assert figures["size"] == "small"
    assert figures["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert [row["model"] for row in figures["rows"]] == ["unet"] * 2
    assert [row["export"] for row in figures["rows"]] == ["dynamo-dynamic", "script-static"]
    assert all(row["holds"] for row in figures["rows"])


def test_a_failed_process_keeps_a_row():
    # The process refuses the number of threads.
    (row,) = gradients.run(Options(only=("gru",), threads=-1), Progress())["rows"]
    assert row["model"] == "gru"
    assert "the process ended with status 1" in row["error"]
    assert not row["holds"]


def _file(folder: Path, text: str, **weights: Array) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    model = model_of(text, opset=17, **weights)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, path)
    return path


def test_files_are_compared_with_torch_of_the_file(tmp_path: Path):
    text = "(float[batch,3] x) => (float y) { a = MatMul(x, w) b = Tanh(a) c = Dropout(b) y = MatMul(c, v) }"
    path = _file(tmp_path, text, w=normal(3, 4), v=normal(4, 5))
    (tmp_path / file_gradients.SHAPES).write_text(json.dumps({path.name: {"x": [4, 3]}}))
    row = file_gradients.compare_file(path, OPTIONS)
    assert row["holds"], failures(row)
    assert row["truth"] == "torch, source file"
    assert row["parameters"] == 2
    assert row["verify"] == {}


def test_classes_may_be_on_the_last_axis(tmp_path: Path):
    path = _file(tmp_path, "(float[2,6,3] x) => (float y) { a = MatMul(x, w) y = Softmax<axis=-1>(a) }", w=normal(3, 4))
    row = file_gradients.compare_file(path, WITHOUT_VERIFY)
    assert row["holds"], failures(row)
    assert row["truth"] == "torch, forward graph"
    assert set(row["other_truths"]) == {"torch, source file"}


def test_files_without_reference_are_compared_with_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = "(float[2,3] x) => (float y) { a = MatMul(x, w) b = Reshape(a, s) y = DepthToSpace<blocksize=2>(b) }"
    path = _file(tmp_path, text, w=normal(3, 16), s=np.array([2, 4, 2, 2]))
    row = file_gradients.compare_file(path, WITHOUT_VERIFY)
    assert row["holds"], failures(row)
    assert row["truth"] == "differences"
    assert row["difference_max"] < 1e-4
    assert "differences" in cells(row)[2]

    def wrong(*arguments: Any) -> dict[str, Array]:
        return {name: value if name == "loss" else value * 1.5 for name, value in outputs_of(*arguments).items()}

    monkeypatch.setattr(file_gradients, "outputs_of", wrong)
    assert not file_gradients.compare_file(path, WITHOUT_VERIFY)["holds"]


def test_rejected_files_keep_a_row(tmp_path: Path):
    _file(tmp_path / "a", "(float[2,3] x) => (float y) { y = Relu(x) }")
    arguments = ["gradients_of_files", "--folder", str(tmp_path), "--threads", "1", "--record", str(tmp_path)]
    assert benchmark.main(arguments) == 1
    record = json.loads((tmp_path / "gradients_of_files.json").read_text(encoding="utf-8"))
    (row,) = record["figures"]["rows"]
    assert row["file"].endswith("a/model.onnx")
    assert "no trainable parameter" in row["error"]
