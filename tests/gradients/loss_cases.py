"""Cases of loss heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.gradients.gradient_case import Case, case, normal


def _labels(*shape: int, classes: int, ignored: int = 0) -> np.ndarray:
    generator = np.random.default_rng([classes, *shape])
    labels = generator.integers(0, classes, shape)
    labels.reshape(-1)[:ignored] = -100
    return labels


def _head(name: str, body: str, **settings: Any) -> Case:
    """A loss head; `rule` is an operator that the head adds."""
    return case(settings.pop("rule", "LogSoftmax"), f"loss {name}", body, **settings)


LOSS_CASES = (
    _head(
        "cross-entropy",
        "y = Mul(x, w)",
        x=normal(4, 5),
        w=normal(5),
        loss="cross-entropy",
        target=_labels(4, classes=5),
    ),
    _head(
        "cross-entropy, ignored labels",
        "y = Mul(x, w)",
        x=normal(4, 5),
        w=normal(5),
        loss="cross-entropy",
        target=_labels(4, classes=5, ignored=2),
    ),
    _head(
        "cross-entropy behind Softmax",
        "z = Mul(x, w) y = Softmax(z)",
        x=normal(4, 5),
        w=normal(5),
        loss="cross-entropy",
        target=_labels(4, classes=5),
    ),
    _head(
        "cross-entropy [N, C, d]",
        "y = Mul(x, w)",
        x=normal(3, 5, 4),
        w=normal(5, 1),
        loss="cross-entropy",
        target=_labels(3, 4, classes=5, ignored=3),
        rule="GatherElements",
    ),
    _head(
        "cross-entropy [N, C, d, e]",
        "y = Mul(x, w)",
        x=normal(2, 4, 3, 2),
        w=normal(4, 1, 1),
        loss="cross-entropy",
        target=_labels(2, 3, 2, classes=4),
        rule="GatherElements",
    ),
    _head(
        "cross-entropy [N, C, 1, 1]",
        "y = Mul(x, w)",
        x=normal(3, 5, 1, 1),
        w=normal(5, 1, 1),
        loss="cross-entropy",
        target=_labels(3, classes=5),
        rule="GatherElements",
    ),
    _head("mse", "y = Exp(x)", x=normal(3, 4), rule="ReduceMean"),
    _head(
        "mse of a scalar",
        "y = ReduceSum<keepdims=0>(x)",
        x=normal(3, 4),
        rule="ReduceSum",
        formula=lambda operands: operands["x"].sum(),
    ),
    _head("l1", "y = Exp(x)", x=normal(3, 4), loss="l1", rule="Abs"),
    _head("bce", "y = Mul(x, w)", x=normal(3, 4), w=normal(4), loss="bce", rule="Softplus"),
    _head(
        "bce behind Sigmoid", "z = Mul(x, w) y = Sigmoid(z)", x=normal(3, 4), w=normal(4), loss="bce", rule="Softplus"
    ),
    _head("own output", "z = Mul(x, x) y = ReduceMean<keepdims=0>(z)", x=normal(3, 4), loss="y", rule="ReduceMean"),
    _head("own output [1]", "z = Mul(x, x) y = ReduceMean(z)", x=normal(3, 4), loss="y", rule="ReduceMean"),
)
