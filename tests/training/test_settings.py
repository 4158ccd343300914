from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxgc.errors import TrainingError
from onnxgc.training import Event, StopTraining, Trainer, cosine
from tests.api.chains import chain
from tests.model.model_helpers import model_of
from tests.training.samples import samples, unstored

QUICK: dict[str, Any] = {"optimizer": "sgd", "threads": 1, "check": False}


def trainer_of(**how: Any) -> Trainer:
    return Trainer(chain(2), **{**QUICK, "batch": 32, **how})


def test_an_assigned_learning_rate_applies_to_the_next_update():
    assigned, given = trainer_of(learning_rate=0.5), trainer_of(learning_rate=0.125)
    assigned.learning_rate = 0.125
    assert assigned.learning_rate == 0.125
    for trainer in (assigned, given):
        trainer.step(samples(0, 32))
    np.testing.assert_array_equal(assigned.array("w0"), given.array("w0"))
    assigned.learning_rate = cosine(0.5, total=2)
    assert assigned.learning_rate == pytest.approx(0.25)
    history = assigned.fit(samples(1, 32), 1)
    assert history[-1]["learning_rate"] == pytest.approx(0.25)


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), "fast", None])
def test_an_invalid_learning_rate_is_rejected_in_one_line(rate: Any):
    trainer = trainer_of(learning_rate=0.5)
    with pytest.raises(TrainingError, match="the learning rate is"):
        trainer.learning_rate = rate
    assert trainer.learning_rate == 0.5


@pytest.mark.parametrize("name", ["lr", "batch"])
def test_other_assignments_are_rejected(name: str):
    with pytest.raises(TrainingError, match=f"'{name}' of a Trainer cannot be changed"):
        setattr(trainer_of(), name, 3)


@pytest.mark.parametrize(
    "how, words",
    [
        ({"resume": True}, "resume needs a state file"),
        ({"save_every": 2}, "save_every needs a state file"),
        ({"epochs": 0}, "at least 1"),
        ({"save_every": 0, "state": "run.safetensors"}, "at least 1"),
    ],
)
def test_settings_of_fit_without_effect_are_rejected(how: dict[str, Any], words: str):
    with pytest.raises(TrainingError, match=words):
        trainer_of().fit(samples(0, 32), **how)


def two_inputs(first: int | str = "N", second: int | str = "N") -> onnx.ModelProto:
    declared = f"(float[{first}, 4] x, float[{second}, 4] z) => (float[{first}, 4] y)"
    return model_of(declared + "{ a = MatMul(x, w) b = MatMul(z, w) y = Sub(a, b) }", w=np.eye(4))


def test_contradicting_shapes_and_batch_are_rejected():
    for model in (two_inputs(), two_inputs(3, 3), two_inputs("N", "M")):
        with pytest.raises(TrainingError, match=r"the batch is 16, and .* for 'x' has 32 samples"):
            Trainer(model, batch=16, input_shapes={"x": (32, 4)}, loss="mse", **QUICK)


def test_a_given_shape_sets_the_batch_of_other_inputs():
    trainer = Trainer(two_inputs(), input_shapes={"z": (8, 4)}, loss="mse", **QUICK)
    assert trainer.batch == 8
    assert trainer.inputs["x"] == (8, 4)
    same = Trainer(two_inputs(), batch=8, input_shapes={"x": (8, 4)}, loss="mse", **QUICK)
    assert same.inputs == trainer.inputs
    # An input of another count holds something else.
    alone = Trainer(two_inputs("N", 1), batch=8, input_shapes={"z": (1, 4)}, loss="mse", **QUICK)
    assert (alone.inputs["x"], alone.inputs["z"]) == ((8, 4), (1, 4))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ended") / "run.safetensors"
    trainer_of(seed=3).fit(samples(0, 128), 1, state=path)
    return path


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("halfway") / "run.safetensors"

    def stop(event: Event) -> None:
        if event.updates == 1:
            raise StopTraining

    trainer_of(seed=3).fit(samples(0, 128), 1, state=path, callbacks=[stop])
    return path


@pytest.mark.parametrize(
    "how, words",
    [
        ({"batch": 64}, "saved with samples of an update 32, and this run has samples of an update 64"),
        ({"batch": 64, "accumulate": 2}, "saved with samples of an update 32"),
        ({"loss": "mse"}, "saved with loss cross-entropy, and this run has loss mse"),
        ({"seed": 4}, "saved with seed 3, and this run has seed 4"),
    ],
)
def test_a_resumed_run_has_the_same_settings(ended: Path, how: dict[str, Any], words: str):
    data = samples(0, 128)
    if how.get("loss") == "mse":
        data = {"x": data["x"], "target": np.zeros((128, 4), np.float32)}
    with pytest.raises(TrainingError, match=words):
        trainer_of(**how).fit(data, 2, state=ended, resume=True)


def test_an_omitted_seed_is_the_one_of_the_state(ended: Path):
    trainer = trainer_of()
    trainer.load(ended)
    assert trainer._position.seed == 3
    trainer_of(seed=3).load(ended)


@pytest.mark.parametrize(
    "how, fit, size, words",
    [
        ({}, {"shuffle": False}, 128, "saved with shuffle True, and this run has shuffle False"),
        ({}, {}, 96, "saved with samples 128, and this run has samples 96"),
        ({"batch": 16, "accumulate": 2}, {}, 128, "saved with batch 32, and this run has batch 16"),
    ],
)
def test_a_resumed_epoch_has_all_settings_the_same(
    halfway: Path, how: dict[str, Any], fit: dict[str, Any], size: int, words: str
):
    with pytest.raises(TrainingError, match=words):
        trainer_of(**how).fit(samples(0, size), 1, state=halfway, resume=True, **fit)


def test_data_may_change_between_epochs(ended: Path, tmp_path: Path):
    again = tmp_path / "again.safetensors"
    again.write_bytes(ended.read_bytes())
    history = trainer_of().fit(samples(1, 96), 2, state=again, resume=True, shuffle=False)
    assert [entry["samples"] for entry in history] == [128, 96]


def test_frozen_drawn_weights_need_the_seed_of_the_run(tmp_path: Path):
    how: dict[str, Any] = {**QUICK, "freeze": ("w0",)}
    path = tmp_path / "run.safetensors"
    Trainer(unstored(), seed=5, **how).save(path)
    with pytest.raises(TrainingError, match="saved with seed 5, from which the frozen weight 'w0' was drawn"):
        Trainer(unstored(), **how).load(path)
    Trainer(unstored(), seed=5, **how).load(path)
