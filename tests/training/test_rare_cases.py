from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgc.api.pipeline import optimize
from onnxgc.errors import TrainingError
from onnxgc.runtime.ort import make_session
from onnxgc.training import SGD, Event, Trainer
from onnxgc.training.data import IteratedData
from onnxgc.training.state import load_state, save_state
from tests.api.chains import chain
from tests.model.model_helpers import normal, text_model, with_weights
from tests.training.samples import make_trainer, samples, unstored


def part(data: dict[str, Any], size: int) -> dict[str, Any]:
    return {name: array[:size] for name, array in data.items()}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_in_half_precision_are_updated_in_float32(accumulate: int):
    source = chain(2, batch=64)
    for value in (*source.graph.input, *source.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for tensor in source.graph.initializer:
        half = numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    data = {**samples(0), "x": samples(0)["x"].astype(np.float16)}
    graph = optimize(source, solver="store-all", check=False).training_graph
    gradients = make_session(graph.model, threads=1).run(list(graph.gradient_of.values()), data)
    optimizer = SGD(momentum=0.9, weight_decay=0.1)
    trainer = make_trainer(source, optimizer=optimizer, learning_rate=0.5, accumulate=accumulate)
    before = trainer.parameters()
    trainer.step(data)
    for name, gradient in zip(graph.gradient_of, gradients, strict=True):
        old = before[name].astype(np.float32)
        direction = gradient.astype(np.float32) + old * np.float32(0.1)
        # To the next float16 at most: a runtime may fuse a product with a sum.
        wanted = (old - direction * np.float32(0.5)).astype(np.float16)
        np.testing.assert_array_max_ulp(trainer.array(name), wanted, 1)
        assert trainer.array(name).dtype == np.float16


def test_other_batch_sizes_use_the_same_frozen_weights(tmp_path: Path):
    how: dict[str, Any] = {"freeze": ("w0",), "threads": 1, "check": False}
    one, other = (Trainer(unstored(), batch=batch, **how) for batch in (64, 8))
    few = part(samples(0), 8)
    assert [one.step(few) for _ in range(2)] == pytest.approx([other.step(few) for _ in range(2)], rel=1e-6)
    np.testing.assert_allclose(one.array("w1"), other.array("w1"), rtol=1e-5, atol=1e-7)
    # They are deployed as well.
    one.export(tmp_path / "trained.onnx")
    deployed = Trainer(tmp_path / "trained.onnx", batch=8, seed=1, **how)
    assert deployed.evaluate(few) == pytest.approx(one.evaluate(few), rel=1e-6)


def test_frozen_weights_may_be_external(tmp_path: Path):
    how: dict[str, Any] = {"optimizer": "sgd", "freeze": ("w0",), "check": False}
    result = optimize(chain(2, batch=64), tmp_path / "training.onnx", external_data=True, **how)
    assert (tmp_path / "training.onnx.data").exists()
    apart, whole = (
        Trainer(training, threads=1) for training in (tmp_path / "training.onnx", result.training_graph.model)
    )
    assert [apart.step(samples(0)) for _ in range(2)] == [whole.step(samples(0)) for _ in range(2)]


@pytest.mark.parametrize("inputs", ["float[N, 16] x, SHIFT", "float[8, 16] x, SHIFT", "SHIFT, float[N, 16] x"])
def test_an_input_without_samples_is_in_every_batch(inputs: str):
    declared = inputs.replace("SHIFT", "float[1, 16] shift")
    source = text_model(f"({declared}) => (float y) {{ s = Add (x, shift) y = MatMul (s, w) }}")
    source.graph.output[0].type.tensor_type.ClearField("shape")
    source = with_weights(source, w=normal(16, 4))
    trainer, plain = (make_trainer(source, optimizer="sgd", batch=64) for _ in range(2))
    shift = np.linspace(-1, 1, 16, dtype=np.float32)[None]
    data = samples(0, 72)
    trainer.fit({**data, "shift": shift}, shuffle=False)
    shifted = {**data, "x": data["x"] + shift, "shift": np.zeros((1, 16), np.float32)}
    plain.fit(shifted, shuffle=False)
    assert trainer.updates == 2
    np.testing.assert_allclose(trainer.array("w"), plain.array("w"), rtol=1e-5, atol=1e-7)
    found, wanted = trainer.evaluate({**data, "shift": shift}), plain.evaluate(shifted)
    assert found == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(TrainingError, match=r"'shift' has the shape \[1, 15\], and the model takes \[1, 16\]"):
        trainer.step({**samples(0), "shift": shift[:, 1:]})


def test_figures_are_means_over_labels_that_are_not_ignored():
    trainer = make_trainer(chain(1), optimizer="sgd", learning_rate=0.0, batch=64)
    data = samples(0, 72)
    history = trainer.fit(data, shuffle=False)
    assert history[0]["loss"] == pytest.approx(trainer.evaluate(data)["loss"], rel=1e-6)
    # Of the first batch little is left, of the second all, and of a third nothing.
    data = samples(0, 192)
    data["labels"][np.r_[5:64, 128:192]] = -100
    scores = np.tanh(data["x"] @ trainer.array("w0")) @ trainer.array("v")
    logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    kept = data["labels"] >= 0
    found = trainer.evaluate(data)
    assert found["loss"] == pytest.approx(-logs[kept, data["labels"][kept]].mean(), rel=1e-5)
    assert found["accuracy"] == (scores.argmax(1) == data["labels"])[kept].mean()


@pytest.mark.parametrize(
    "product", ["y = MatMul (flat, w)", "z = MatMul (flat, w)  y = Transpose <perm = [0, 3, 1, 2]> (z)"]
)
def test_accuracy_ignores_dimensions_of_1(product: str):
    """Classes are last behind a product, and else the second."""
    source, value = text_model(f"(float[N, 1, 1, 6] flat) => (float y) {{ {product} }}"), normal(6, 4)
    source.graph.output[0].type.tensor_type.ClearField("shape")
    trainer = make_trainer(with_weights(source, w=value), batch=32, loss="cross-entropy")
    data = {"flat": normal(32, 1, 1, 6), "labels": np.random.default_rng(1).integers(0, 4, 32)}
    wanted = (data["flat"].reshape(32, 6) @ value).argmax(1) == data["labels"]
    assert trainer.evaluate(data)["accuracy"] == wanted.mean()


def test_a_failed_epoch_restarts():
    def fail(event: Event) -> None:
        if event.updates == 2:
            raise ZeroDivisionError

    trainer = make_trainer(chain(1), batch=32)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(samples(0, 128), callbacks=[fail])
    assert trainer.fit(samples(0, 128))[-1]["samples"] == 128
    assert trainer.updates == 6


def test_iterated_batches_are_distributed_and_resumed():
    batches = [{"x": np.array([number])} for number in range(7)]

    def shared(worker: int, first: int) -> list[int]:
        data = IteratedData(lambda: iter(batches), ["x"], worker, 2)
        return [int(batch["x"][0]) for batch in data.epoch(0, first)]

    # The seventh batch is dropped: one worker would wait for the other.
    assert [shared(worker, 0) for worker in range(2)] == [[0, 2, 4], [1, 3, 5]]
    assert [shared(worker, 2) for worker in range(2)] == [[4], [5]]


def test_the_last_incomplete_group_is_an_update():
    trainer = make_trainer(chain(1), batch=16, accumulate=2)
    assert trainer.updates_of(samples(0, 72)) == 3
    trainer.fit(samples(0, 72))
    assert trainer.updates == 3
    # Two averages of each parameter, and the sum of its gradients.
    assert trainer.described()["state_bytes"] == 3 * 4 * (16 * 16 + 16 * 4)


@dataclass
class Alone:
    """One of two workers that are not there."""

    rank: int
    count: int = 2

    def total(self, value: float) -> float:
        return value * self.count

    def add_up(self, arrays: Any, names: Any) -> None:
        pass


def masked() -> onnx.ModelProto:
    source = chain(1)
    keep = onnx.helper.make_node("Dropout", ["h0", "ratio"], ["kept"])
    source.graph.node[-1].input[0] = "kept"
    source.graph.node.insert(2, keep)
    source.graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), "ratio"))
    return source


def test_workers_draw_different_masks():
    losses = []
    for rank in range(2):
        trainer = make_trainer(masked(), learning_rate=0.0, batch=64, workers=Alone(rank))
        losses.append([trainer.step(samples(0)) for _ in range(2)])
    assert len({loss for each in losses for loss in each}) == 4


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": np.zeros((0, 16), np.float32), "labels": np.zeros(0, np.int64)}, "a batch has no samples"),
        ({"labels": np.full(64, 2**63, np.uint64)}, "'labels' has values outside of the range of int64"),
    ],
)
def test_impossible_batches_are_rejected_in_one_line(change: dict[str, Any], words: str):
    trainer = make_trainer(chain(1), batch=64)
    with pytest.raises(TrainingError, match=words):
        trainer.step({**samples(0), **change})


def test_states_of_another_type_or_version_are_rejected_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.safetensors"
    trainer = make_trainer(chain(1), batch=64)
    trainer.save(path)
    state = load_state(path)
    wide = {name: array.astype(np.float64) for name, array in state.arrays.items()}
    save_state(replace(state, arrays=wide), path)
    with pytest.raises(TrainingError, match=r"'\w+' is float64 .* and float32 .* in this run"):
        trainer.load(path)
    monkeypatch.setattr("onnxgc.training.state.SCHEMA", 2)
    with pytest.raises(TrainingError, match="has schema 1 of a state, and this version reads 2"):
        trainer.load(path)


def test_untied_parameters_cannot_be_exported():
    source = chain(2)
    source.graph.node[2].input[1] = "w0"
    trainer = make_trainer(source, batch=64, untie=True)
    with pytest.raises(TrainingError, match="untied parameters cannot be exported"):
        trainer.export()
