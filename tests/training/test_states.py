"""States on the disk: of every name, and of one run at a time."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from onnxgc.errors import TrainingError
from onnxgc.training import Trainer
from onnxgc.training.state import Position, RunState, load_state, save_state
from onnxgc.training.state_lock import held_alone
from tests.api.chains import chain
from tests.training.samples import samples

ROOT = Path(__file__).resolve().parent.parent.parent
HOLDER = """
import sys, time
from onnxgc.training.state_lock import held_alone
with held_alone(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_every_name_survives_saving(tmp_path: Path) -> None:
    """Also the one that the format keeps for itself."""
    names = ["__metadata__", "___metadata__", "_metadata__", "metadata__", "____metadata__", "w"]
    arrays = {name: np.full(2, number, np.float32) for number, name in enumerate(names)}
    save_state(RunState(Position(updates=3), arrays), tmp_path / "a.safetensors")
    found = load_state(tmp_path / "a.safetensors")
    assert {name: array[0] for name, array in found.arrays.items()} == {
        name: number for number, name in enumerate(names)
    }
    assert found.position.updates == 3


def test_a_state_is_locked_until_its_run_ends_or_is_killed(tmp_path: Path) -> None:
    state = tmp_path / "run.safetensors"
    trainer = Trainer(chain(1), batch=64, threads=1, check=False)
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


def test_the_lock_follows_the_resolved_path(tmp_path: Path) -> None:
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


def test_a_removed_lock_file_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends between the opening and the locking of the file by another."""
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
