"""Planned modules under distributed engines, `torch.compile`, and gradient scaling."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from onnxgc.torch import checkpoint  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def test_two_ranks_train_to_equal_weights() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.torch.two_ranks"],
            env={**common, "RANK": str(rank), "WORLD_SIZE": "2"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    for rank, text in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, text
        assert text.count("26 parameters are equal") == 2


def test_gradients_under_compile_are_equal() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())))
    data = torch.randn(32, 16)
    planned = checkpoint(copy.deepcopy(plain), data, budget="90%", device="a100", time_limit=None, step_limit=2)
    compiled = torch.compile(planned, backend="eager")
    for module in (plain, compiled):
        module(data).square().mean().backward()
    for one, other in zip(plain.parameters(), planned.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_scaled_and_accumulated_gradients_are_equal() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())))
    data = torch.randn(64, 16)
    planned = checkpoint(copy.deepcopy(plain), data[:32], budget="90%", device="a100", time_limit=None, step_limit=2)
    for module in (plain, planned):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(2):
            for part in data.chunk(2):
                scaler.scale(module(part).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    for one, other in zip(plain.parameters(), planned.parameters(), strict=True):
        assert torch.equal(one, other)
