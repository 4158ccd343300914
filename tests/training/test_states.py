import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from onnxgc.errors import TrainingError
from onnxgc.training import AdamW, Event, StopTraining
from onnxgc.training.state import Position, RunState, load_state, save_state
from onnxgc.training.state_lock import held_alone
from tests.api.chains import chain
from tests.training.networks import digits_network
from tests.training.samples import make_trainer, samples

ROOT = Path(__file__).resolve().parent.parent.parent
HOLDER = """
import sys, time
from onnxgc.training.state_lock import held_alone
with held_alone(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_every_name_survives_saving(tmp_path: Path):
    """Also the one that the format keeps for itself."""
    names = ["__metadata__", "___metadata__", "_metadata__", "metadata__", "____metadata__", "w"]
    arrays = {name: np.full(2, number, np.float32) for number, name in enumerate(names)}
    save_state(RunState(Position(updates=3), arrays), tmp_path / "a.safetensors")
    found = load_state(tmp_path / "a.safetensors")
    assert {name: array[0] for name, array in found.arrays.items()} == {
        name: number for number, name in enumerate(names)
    }
    assert found.position.updates == 3


def test_a_state_is_locked_until_its_run_ends_or_is_killed(tmp_path: Path):
    state = tmp_path / "run.safetensors"
    trainer = make_trainer(chain(1), batch=64)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", HOLDER, str(state)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(TrainingError, match="another run uses the state") as caught:
            trainer.fit(samples(0), state=state)
        process.send_signal(signal.SIGKILL)
    assert "\n" not in str(caught.value)
    assert trainer.updates == 0
    assert not state.exists()
    trainer.fit(samples(0), state=state)
    # Files of the killed run are removed.
    assert list(tmp_path.iterdir()) == [state]


def test_the_lock_follows_the_resolved_path(tmp_path: Path):
    state, link = tmp_path / "a", tmp_path / "link"
    link.symlink_to(state)
    with held_alone(state):
        with held_alone(tmp_path / "b"):
            pass
        with pytest.raises(TrainingError), held_alone(link):
            pass
        # Who was refused has not let go of it.
        with pytest.raises(TrainingError), held_alone(state):
            pass
    with pytest.raises(ZeroDivisionError), held_alone(state):
        raise ZeroDivisionError
    with held_alone(state), held_alone(tmp_path / "no folder" / "a"):
        pass
    assert list(tmp_path.iterdir()) == [link]


def test_a_removed_lock_file_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run ends between the opening and the locking of the file by another."""
    fcntl = pytest.importorskip("fcntl")
    lock, left = fcntl.flock, [tmp_path / ".a.lock"]

    def late(descriptor: int, how: int) -> None:
        if left:
            left.pop().unlink()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with held_alone(tmp_path / "a"):
        assert not left
        with pytest.raises(TrainingError), held_alone(tmp_path / "a"):
            pass


def test_states_that_do_not_fit_are_rejected_in_one_line(tmp_path: Path):
    trainer = make_trainer(chain(2), batch=64)
    path = tmp_path / "run.safetensors"
    trainer.save(path)
    for other, words in (
        (make_trainer(chain(3), batch=64), "lacks 'w2'"),
        (make_trainer(chain(2), optimizer="sgd", batch=64), "saved with another optimizer or model"),
        (make_trainer(chain(2, width=8), batch=64), "in this run"),
    ):
        with pytest.raises(TrainingError, match=words):
            other.load(path)
    for contents, words in ((b"nothing", "is not the state of a run"), (None, "state file .* does not exist")):
        path.unlink()
        if contents is not None:
            path.write_bytes(contents)
        with pytest.raises(TrainingError, match=words) as caught:
            trainer.load(path)
        assert "\n" not in str(caught.value)
        if contents is None:
            break
        path.touch()


def test_a_state_with_other_settings_is_rejected(tmp_path: Path):
    path = tmp_path / "run.safetensors"
    trainer = make_trainer(chain(2), batch=32)

    def stop(event: Event) -> None:
        if event.updates == 1:
            raise StopTraining

    trainer.fit(samples(0, 128), 1, state=path, callbacks=[stop])
    with pytest.raises(TrainingError, match=r"with the optimizer adamw .* weight_decay 0.01.* has adamw"):
        make_trainer(chain(2), optimizer=AdamW(weight_decay=0.1), batch=32).load(path)
    again = make_trainer(chain(2), batch=32)
    assert again.fit(samples(0, 128), 1, state=path, resume=True)[-1]["samples"] == 128


def test_parameters_that_are_not_finite_overwrite_no_file(tmp_path: Path):
    trainer = make_trainer(chain(2), optimizer="sgd", batch=64)
    path = tmp_path / "run.safetensors"
    trainer.fit(samples(0), 1, state=path)
    good = path.read_bytes()
    trainer._engine.arrays.put("w1", np.full((16, 16), np.inf, np.float32))
    for ask in (lambda: trainer.save(path), lambda: trainer.export(tmp_path / "trained.onnx")):
        with pytest.raises(TrainingError, match="parameter 'w1' is not finite after 1 updates"):
            ask()
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]


def test_states_of_sums_have_distinct_names():
    """Running statistics may be called as an optimizer's state would be."""
    model = digits_network()
    for old, new in (("bn1.mean", "conv1.weight_exp_avg"), ("bn1.variance", "conv1.weight_exp_avg_sq")):
        for node in model.graph.node:
            node.input[:] = [new if name == old else name for name in node.input]
        for tensor in model.graph.initializer:
            tensor.name = new if tensor.name == old else tensor.name
    trainer = make_trainer(model, batch=16, accumulate=2)
    np.testing.assert_array_equal(trainer.array("conv1.weight_exp_avg_sq"), np.ones(16))
