"""Drawn samples for chains of products, and quick trainers."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgc.training import Trainer


def samples(seed: int, size: int = 64) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {"x": draw.standard_normal((size, 16)).astype(np.float32), "labels": draw.integers(0, 4, size)}


def make_trainer(source: Any, /, **how: Any) -> Trainer:
    """A trainer on one thread, which does not run the forward model before planning."""
    return Trainer(source, **{"threads": 1, "check": False, **how})


def losses_of(trainer: Trainer, data: Any, epochs: int = 1, **how: Any) -> list[float]:
    """The loss of each update of a run."""
    losses: list[float] = []
    trainer.fit(data, epochs, callbacks=[lambda e: losses.append(e.loss) if e.kind == "update" else None], **how)
    return losses
