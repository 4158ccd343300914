from typing import Any

import numpy as np

from tests.gradients.gradient_case import Case, case, normal


def _labels(*shape: int, classes: int, ignored: int = 0) -> np.ndarray:
    generator = np.random.default_rng([classes, *shape])
    labels = generator.integers(0, classes, shape)
    labels.reshape(-1)[:ignored] = -100
    return labels


def _head(name: str, body: str, *shapes: tuple[int, ...], rule: str = "LogSoftmax", **settings: Any) -> Case:
    operands = {key: normal(*shape) for key, shape in zip("xw", shapes, strict=False)}
    return case(rule, f"loss {name}", body, **operands, **settings)


def _classes(name: str, x: tuple[int, ...], w: tuple[int, ...], labels: np.ndarray, **settings: Any) -> Case:
    body = settings.pop("body", "y = Mul(x, w)")
    return _head(f"cross-entropy{name}", body, x, w, loss="cross-entropy", target=labels, **settings)


_GATHERED = "GatherElements"
LOSS_CASES = (
    _classes(", ignored labels", (4, 5), (5,), _labels(4, classes=5, ignored=2)),
    _classes(" behind Softmax", (4, 5), (5,), _labels(4, classes=5), body="z = Mul(x, w) y = Softmax(z)"),
    _classes(" [N, C, d]", (3, 5, 4), (5, 1), _labels(3, 4, classes=5, ignored=3), rule=_GATHERED),
    _classes(" [N, C, d, e]", (2, 4, 3, 2), (4, 1, 1), _labels(2, 3, 2, classes=4), rule=_GATHERED),
    _classes(" [N, C, 1, 1]", (3, 5, 1, 1), (5, 1, 1), _labels(3, classes=5), rule=_GATHERED),
    _head("mse", "y = Exp(x)", (3, 4), rule="ReduceMean"),
    _head(
        "mse of a scalar",
        "y = ReduceSum<keepdims=0>(x)",
        (3, 4),
        rule="ReduceSum",
        formula=lambda operands: operands["x"].sum(),
    ),
    _head("l1", "y = Exp(x)", (3, 4), loss="l1", rule="Abs"),
    _head("bce", "y = Mul(x, w)", (3, 4), (4,), loss="bce", rule="Softplus"),
    _head("bce behind Sigmoid", "z = Mul(x, w) y = Sigmoid(z)", (3, 4), (4,), loss="bce", rule="Softplus"),
    _head("own output", "z = Mul(x, x) y = ReduceMean<keepdims=0>(z)", (3, 4), loss="y", rule="ReduceMean"),
    _head("own output [1]", "z = Mul(x, x) y = ReduceMean(z)", (3, 4), loss="y", rule="ReduceMean"),
)
