import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from onnxgc.training import SGD  # noqa: E402
from onnxgc.training.data import ArrayData  # noqa: E402
from tests.api.chains import chain  # noqa: E402
from tests.training.samples import make_trainer, samples  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent


def started(rank: int, port: int, folder: Path) -> Any:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, "-m", "tests.training.worker_rank", str(folder)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_two_workers_equal_one_with_twice_the_batch(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [started(rank, port, tmp_path) for rank in range(2)]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors[-2000:]
    one = make_trainer(chain(3), optimizer=SGD(momentum=0.9), learning_rate=0.05, batch=64)
    history = one.fit(samples(0, 192), 1, shuffle=False)
    found = [np.load(tmp_path / f"{rank}.npz") for rank in range(2)]
    for name, value in one.parameters().items():
        np.testing.assert_array_equal(found[0][name], found[1][name])
        assert np.linalg.norm(found[0][name] - value) <= 1e-5 * np.linalg.norm(value), name
    assert [int(rank["samples"]) for rank in found] == [192, 192]
    np.testing.assert_allclose([float(rank["loss"]) for rank in found], history[-1]["loss"], rtol=1e-5)
    # One of them saves, and any may go on from it.
    again = make_trainer(chain(3), optimizer=SGD(momentum=0.9), learning_rate=0.05, batch=64)
    again.load(tmp_path / "run.safetensors")
    np.testing.assert_array_equal(again.array("w0"), found[0]["w0"])


def test_workers_share_all_samples_in_equal_batches():
    arrays = {"x": np.arange(70)}
    parts = [ArrayData(arrays, 8, True, 3, worker, 2) for worker in range(2)]
    batches = [[batch["x"] for batch in part.epoch(1)] for part in parts]
    assert [len(batch) for part in batches for batch in part] == [8] * 8
    assert parts[0].updates(1) == 4
    seen = np.concatenate([batch for part in batches for batch in part])
    assert len(set(seen)) == 64
    np.testing.assert_array_equal([batch["x"] for batch in parts[0].epoch(1, 2)], batches[0][2:])
