"""Drawn samples for chains of products, and quick trainers."""

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from onnxgc.training import Trainer
from tests.api.chains import chain


def samples(seed: int, size: int = 64) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {"x": draw.standard_normal((size, 16)).astype(np.float32), "labels": draw.integers(0, 4, size)}


def make_trainer(source: Any, /, **how: Any) -> Trainer:
    """A trainer on one thread, which does not run the forward model before planning."""
    return Trainer(source, **{"threads": 1, "check": False, **how})


def losses_of(trainer: Trainer, data: Any, epochs: int = 1, **how: Any) -> list[float]:
    losses: list[float] = []
    trainer.fit(data, epochs, callbacks=[lambda e: losses.append(e.loss) if e.kind == "update" else None], **how)
    return losses


def unstored(batch: int = 64) -> onnx.ModelProto:
    """A chain whose file stores only shapes of weights."""
    source = chain(2, batch=batch)
    del source.graph.initializer[:]
    for number, (name, shape) in enumerate({"w0": (16, 16), "w1": (16, 16), "v": (16, 4)}.items()):
        source.graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), f"shape{number}"))
        fill = onnx.helper.make_node("ConstantOfShape", [f"shape{number}"], [name])
        source.graph.node.insert(0, fill)
    return source
