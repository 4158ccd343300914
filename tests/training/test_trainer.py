import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from onnxgc.api.pipeline import optimize
from onnxgc.errors import OnnxgcError, OutputFileError, TrainingError
from onnxgc.training import SGD, AdamW, Event, Trainer, cosine, one_cycle, step, with_warm_up
from tests.api.chains import chain
from tests.model.model_helpers import normal, text_model, with_weights
from tests.training.networks import digits, digits_network
from tests.training.samples import losses_of, make_trainer, samples, unstored

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def data() -> Any:
    return digits()


def few(data: Any, samples: int) -> dict[str, Any]:
    return {name: array[:samples] for name, array in data[0].items()}


def test_digits_are_learnt_and_the_planned_run_equals_the_baseline(data: Any):
    rate = cosine(3e-3, 6 * 23)
    planned, baseline = (
        make_trainer(digits_network(), learning_rate=rate, batch=64, **how)
        for how in ({"budget": 0.9, "step_limit": 1}, {"solver": "store-all"})
    )
    losses = losses_of(planned, data[0], 6)
    # The rest of an epoch, 30 samples, is a step as well.
    assert len(losses) == 6 * 23
    assert losses_of(baseline, data[0], 2) == losses[: 2 * 23]
    peak = baseline.report["planned"]["simulated_peak_bytes"]
    assert peak == baseline.report["regular"]["simulated_peak_bytes"] == baseline.simulated_peak_bytes
    assert planned.evaluate(data[1])["accuracy"] >= 0.98


def test_trained_arrays_keep_their_addresses(data: Any):
    trainer = make_trainer(digits_network(), optimizer=SGD(momentum=0.9), batch=32)
    before = trainer.addresses()
    assert {"conv1.weight", "head.bias", "conv1.weight_momentum_buffer"} <= before.keys()
    losses_of(trainer, few(data, 200), 2)
    assert trainer.addresses() == before
    assert not np.array_equal(trainer.array("bn1.mean"), np.zeros(16))


@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), AdamW(clip_norm=0.5)])
def test_accumulated_batches_equal_one_larger_batch(optimizer: Any):
    found = []
    for batch, accumulate in ((64, 1), (16, 4)):
        trainer = make_trainer(chain(3), optimizer=optimizer, learning_rate=0.05, batch=batch, accumulate=accumulate)
        losses = [losses_of(trainer, samples(seed), shuffle=False) for seed in range(3)]
        assert trainer.updates == 3
        found.append((losses, trainer.parameters()))
    (losses, one), (other_losses, other) = found
    np.testing.assert_allclose(np.ravel(losses), np.ravel(other_losses), rtol=1e-5)
    for name, value in one.items():
        assert np.linalg.norm(other[name] - value) <= 1e-5 * np.linalg.norm(value)


def test_an_incomplete_update_is_weighted_by_samples():
    """Of 72 samples in batches of 16, four to an update, the second update has 8 samples."""
    found = []
    for batch, accumulate in ((64, 1), (16, 4)):
        trainer = make_trainer(chain(2), optimizer="sgd", batch=batch, accumulate=accumulate)
        losses_of(trainer, samples(0, 72), shuffle=False)
        assert trainer.updates == 2
        found.append(trainer.parameters())
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, atol=1e-7)


SCRIPT = """
import sys
from onnxgc.api import step_planning
from tests.training.networks import digits, digits_network
from onnxgc.training import Trainer
step_planning.DEFAULT_SECONDS = 0.3
trainer = Trainer(digits_network(), learning_rate=3e-3, batch=64, threads=1, check=False, seed=5)
path = sys.argv[1]
def tell(event):
    print(event.updates, flush=True)
trainer.fit(digits()[0], 2, state=path, save_every=7, resume=True, callbacks=[tell])
"""


def test_a_killed_and_resumed_run_ends_with_the_same_weights(tmp_path: Path, data: Any):
    whole = tmp_path / "whole.safetensors"
    reference = make_trainer(digits_network(), learning_rate=3e-3, batch=64, seed=5)
    started = time.perf_counter()
    history = reference.fit(data[0], 2, state=whole)
    assert [entry["updates"] for entry in history] == [23, 46]
    assert 0 < sum(entry["seconds"] for entry in history) < time.perf_counter() - started
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "killed.safetensors")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        stop_at = int(np.random.default_rng().integers(8, 40))
        for line in process.stdout:
            if int(line) >= stop_at:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    resumed = make_trainer(digits_network(), learning_rate=3e-3, batch=64, seed=5)
    again = resumed.fit(data[0], 2, state=tmp_path / "killed.safetensors", resume=True)
    for name, value in reference.parameters().items():
        np.testing.assert_array_equal(resumed.array(name), value, err_msg=f"{name}, killed at {stop_at}")
    for name in ("bn2.mean", "bn2.variance", "head.weight_exp_avg_sq"):
        np.testing.assert_array_equal(resumed.array(name), reference.array(name))
    assert [entry["loss"] for entry in again] == [entry["loss"] for entry in history]
    # The last file written is the complete run.
    last = make_trainer(digits_network(), batch=64)
    last.load(whole)
    np.testing.assert_array_equal(last.array("head.weight"), reference.array("head.weight"))


def test_a_full_disk_keeps_the_old_state_and_the_run(tmp_path: Path, data: Any, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "run.safetensors"
    trainer = make_trainer(digits_network(), batch=32)
    trainer.fit(few(data, 64), 1, state=path)
    old = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    events: list[Event] = []
    trainer.fit(few(data, 64), 2, state=path, callbacks=[events.append])
    assert trainer.updates == 6
    assert ["No space left" in event.message for event in events if event.kind == "unsaved"] == [True] * 2
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OutputFileError, match="No space left"):
        trainer.save(path)


def test_export_is_the_models_file_with_new_weights(tmp_path: Path, data: Any):
    source = digits_network(batch=1)
    trainer = make_trainer(source, batch=32)
    trainer.fit(few(data, 320), 1)
    trainer.export(tmp_path / "trained.onnx")
    deployed = onnx.load(tmp_path / "trained.onnx")
    assert [node.name for node in deployed.graph.node] == [node.name for node in source.graph.node]
    assert [t.name for t in deployed.graph.initializer] == [t.name for t in source.graph.initializer]
    assert deployed.opset_import == source.opset_import
    assert deployed.metadata_props == source.metadata_props
    assert deployed.producer_name == "somebody"
    session = onnxruntime.InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    scores = np.concatenate([session.run(None, {"image": image[None]})[0] for image in data[1]["image"][:100]])
    found = trainer.evaluate(few((data[1],), 100))
    assert found["accuracy"] == (scores.argmax(1) == data[1]["labels"][:100]).mean()
    shifted = scores - scores.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    mean = -logs[np.arange(100), data[1]["labels"][:100]].mean()
    assert found["loss"] == pytest.approx(float(mean), rel=1e-4)


def test_missing_weights_are_drawn():
    one, again, other = (make_trainer(unstored(), seed=seed) for seed in (1, 1, 2))
    assert 0.2 < one.array("w0").std() < 0.5
    np.testing.assert_array_equal(one.array("w0"), again.array("w0"))
    assert not np.array_equal(one.array("w0"), other.array("w0"))
    one.fit(samples(0), 1)
    deployed = one.export()
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in deployed.graph.initializer}
    np.testing.assert_array_equal(held["w0"], one.array("w0"))


def test_a_training_file_and_its_model(tmp_path: Path, data: Any):
    onnx.save(digits_network(), tmp_path / "model.onnx")
    optimize(
        tmp_path / "model.onnx",
        tmp_path / "training.onnx",
        optimizer=SGD(momentum=0.9),
        input_shapes={"image": (32, 1, 8, 8)},
        check=False,
    )
    alone = Trainer(tmp_path / "training.onnx", learning_rate=0.01, threads=1)
    # 70 samples: the last 6 fit no step of the file's.
    assert len(losses_of(alone, few(data, 70))) == 2
    for ask in (lambda: alone.evaluate(data[1]), alone.export, lambda: alone.step(few(data, 6))):
        with pytest.raises(TrainingError, match=r"(pass its|needs the) forward model"):
            ask()
    both = Trainer(tmp_path / "training.onnx", model=tmp_path / "model.onnx", learning_rate=0.01, threads=1)
    assert len(losses_of(both, few(data, 70))) == 3
    whole = make_trainer(tmp_path / "model.onnx", optimizer=SGD(momentum=0.9), learning_rate=0.01, batch=32)
    losses_of(whole, few(data, 70))
    np.testing.assert_array_equal(whole.array("head.weight"), both.array("head.weight"))
    assert both.evaluate(data[1]) == whole.evaluate(data[1])


def test_samples_are_shuffled_by_the_seed():
    curves = [losses_of(make_trainer(chain(2), batch=64, seed=seed), samples(0, 256)) for seed in (1, 1, 2)]
    assert curves[0] == curves[1] != curves[2]


def test_learning_rates():
    assert [step(1.0, 2, 0.5)(done) for done in range(5)] == [1, 1, 0.5, 0.5, 0.25]
    torch = pytest.importorskip("torch")
    for total in (1, 4, 30):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=total)
        for done in range(total):
            assert one_cycle(0.5, total)(done) == pytest.approx(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if done < total - 1:
                schedule.step()
    rates = [cosine(1.0, 4, 0.2)(done) for done in range(6)]
    np.testing.assert_allclose(rates, [1, 0.2 + 0.8 * (2 + 2**0.5) / 4, 0.6, 0.2 + 0.8 * (2 - 2**0.5) / 4, 0.2, 0.2])
    warm = with_warm_up(lambda _: 1.0, 4)
    assert [warm(done) for done in range(5)] == [0.25, 0.5, 0.75, 1, 1]
    seen: list[int] = []

    def rate(done: int) -> float:
        seen.append(done)
        return 0.0

    trainer = make_trainer(chain(2), optimizer="sgd", learning_rate=rate, batch=32)
    before = trainer.parameters()
    trainer.fit(samples(0, 128), 1)
    assert sorted(set(seen)) == [0, 1, 2, 3]
    np.testing.assert_array_equal(trainer.array("w0"), before["w0"])


@pytest.mark.parametrize(
    "how, words",
    [
        ({"optimizer": "none"}, "training needs an optimizer"),
        ({"optimizer": "adan"}, "unknown optimizer 'adan'"),
        ({"accumulate": 0}, "give at least 1"),
        ({"learning_rate": -1.0}, "the learning rate is -1.0"),
        ({"provider": "abacus"}, "choose cpu or cuda"),
        ({"batch": 0}, "a batch of 0 samples"),
        ({"model": chain(2)}, "two forward models are given"),
    ],
)
def test_wrong_arguments_are_rejected_in_one_line(how: dict[str, Any], words: str):
    with pytest.raises(OnnxgcError, match=words):
        make_trainer(chain(2), **how)


def sequences() -> onnx.ModelProto:
    model = text_model("(float[8,5,6] x) => (float[8,5,4] y) { a = MatMul(x, w) y = Mul(a, temperature) }")
    return with_weights(model, w=normal(6, 4), temperature=np.array(1.5))


def test_accuracy_follows_the_class_axis_and_scalars_are_saved(tmp_path: Path):
    draw = np.random.default_rng(1)
    data: dict[str, Any] = {"x": draw.standard_normal((16, 5, 6)).astype(np.float32)}
    data["labels"] = draw.integers(0, 4, (16, 5))
    how: dict[str, Any] = {"loss": "cross-entropy", "trainable": ("w", "temperature"), "threads": 1}
    trainer = make_trainer(sequences(), learning_rate=0.1, **how)
    metrics: dict[str, Any] = {"of all": lambda output, labels: (output.argmax(2) == labels).mean()}
    history = trainer.fit(data, 2, state=tmp_path / "a.safetensors", validation=data, metrics=metrics)
    assert history[-1]["validation_of all"] == history[-1]["validation_accuracy"]
    # Ignored labels do not count.
    ignored = {**data, "labels": np.where(data["labels"] == 0, -100, data["labels"])}
    found = trainer.evaluate(ignored, {"error": lambda output, labels: len(output)})
    assert found["error"] == 16
    scores = data["x"] @ trainer.array("w") * trainer.array("temperature")
    right = scores.argmax(2) == data["labels"]
    assert trainer.evaluate(data)["accuracy"] == right.mean()
    assert found["accuracy"] == right[data["labels"] != 0].mean()
    again = make_trainer(sequences(), learning_rate=0.1, **how)
    again.load(tmp_path / "a.safetensors")
    assert again.array("temperature").shape == ()
    assert again.evaluate(data) == trainer.evaluate(data)


def test_a_loss_that_is_not_finite_keeps_parameters_and_resets_sums():
    trainer = make_trainer(chain(2), batch=64, accumulate=2)
    spoilt = {"x": np.full((64, 16), np.nan, np.float32), "labels": np.zeros(64, np.int64)}
    before = trainer.parameters()
    with pytest.raises(TrainingError, match=r"the loss is nan .*the parameters are unchanged"):
        trainer.step([samples(0), spoilt])
    np.testing.assert_array_equal(trainer.array("w0"), before["w0"])
    trainer.step([samples(1), samples(2)])
    assert all(np.isfinite(value).all() for value in trainer.parameters().values())


def test_files_of_the_model_are_not_overwritten(tmp_path: Path):
    onnx.save(
        chain(2, width=64),
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="out.onnx.data",
        size_threshold=0,
    )
    trainer = make_trainer(tmp_path / "model.onnx", batch=64)
    for name in ("model.onnx", "out.onnx"):
        with pytest.raises(OutputFileError, match="belongs to the source model"):
            trainer.export(tmp_path / name)


def test_export_into_another_model_is_rejected(tmp_path: Path):
    training = optimize(chain(2), optimizer="sgd", check=False).training_graph.model
    other = chain(2)
    for node in other.graph.node:
        node.input[:] = ["q" if name == "w1" else name for name in node.input]
    other.graph.initializer[1].name = "q"
    with pytest.raises(TrainingError, match="the model has no weight 'w1'"):
        Trainer(training, model=other, threads=1).export()
    with pytest.raises(TrainingError, match="optimizer cannot be changed in a training file"):
        Trainer(optimize(chain(2), optimizer="sgd", check=False).training_graph.model, optimizer="adamw")


def test_the_number_of_batches_of_an_update_is_checked():
    trainer = make_trainer(chain(2), batch=64, accumulate=2)
    for parts in ([], [samples(0)] * 3):
        with pytest.raises(TrainingError, match="an update takes 2"):
            trainer.step(parts)


def test_a_removed_tensor_frees_its_name_for_the_loss():
    """Removing an Identity renames its input, whose type differs from the loss's."""
    source = chain(1)
    source.graph.node[-1].output[0] = "loss"
    source.graph.node.append(onnx.helper.make_node("Identity", ["loss"], ["y"]))
    model = optimize(source, check=False).training_graph.model
    onnx.checker.check_model(model, full_check=True)
    assert np.isfinite(make_trainer(source, batch=64).step(samples(0)))


def test_a_schedule_without_a_rate_is_rejected_in_one_line():
    trainer = make_trainer(chain(2), learning_rate=lambda _: 1e39, batch=64)
    for ask in (lambda: trainer.fit(samples(0), 1), lambda: trainer.step(samples(0))):
        with pytest.raises(TrainingError, match="the learning rate"):
            ask()


def test_each_step_draws_new_masks_and_each_epoch_a_new_order():
    trainer = make_trainer(digits_network(dropout=0.9), optimizer="sgd", learning_rate=0.0, batch=64)
    train, _ = digits()
    batch = {name: array[:64] for name, array in train.items()}
    assert len({trainer.step(batch) for _ in range(4)}) == 4
    plain = make_trainer(chain(2), optimizer="sgd", learning_rate=0.0, batch=64)
    first, second = np.split(np.array(losses_of(plain, samples(0, 256), 2)), 2)
    assert not np.array_equal(first, second)
    # The same samples all the same.
    assert first.mean() == pytest.approx(second.mean(), rel=1e-5)
