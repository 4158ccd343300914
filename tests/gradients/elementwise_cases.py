"""Cases of elementwise operators, of sums and products with broadcasting, and of loss heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.gradients.gradient_case import Case, Draw, case, normal, positive

_BROADCASTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "shapes alike": ((2, 3), (2, 3)),
    "scalar on the right": ((2, 3), ()),
    "scalar on the left": ((), (2, 3)),
    "one element of rank 1": ((2, 3), (1,)),
    "one element of higher rank": ((2, 3), (1, 1, 1)),
    "vector along the last axis": ((2, 3, 4), (4,)),
    "vector along channels": ((2, 3, 4, 5), (3, 1, 1)),
    "rows against columns": ((3, 1), (1, 4)),
    "both broadcast, ranks differ": ((2, 1, 4), (3, 1)),
    "left lower in rank": ((4,), (2, 3, 4)),
    "inner axis": ((2, 3, 4), (2, 1, 4)),
    "leading axes of one": ((2, 3), (1, 1, 2, 3)),
    "axes of one on both": ((1, 3, 1), (1, 1, 1)),
}


def _binary(rule: str) -> tuple[Case, ...]:
    body = f"y = {rule}(a, b)"
    # A scalar is spread over two elements: the reference compares with a target of at least one axis.
    scalars = {"a": normal(), "b": positive(), "spread": normal(2)}

    def operand(shape: tuple[int, ...]) -> Draw:
        return positive(*shape) if rule == "Div" else normal(*shape)

    return (
        *(case(rule, name, body, a=normal(*a), b=operand(b)) for name, (a, b) in _BROADCASTS.items()),
        case(rule, "constant on the right", body, a=normal(2, 3), b=np.float32(0.7)),
        case(rule, "constant on the left", f"y = {rule}(c, a)", a=operand((2, 3)), c=np.float32(0.7)),
        case(rule, "two scalars", f"s = {rule}(a, b) y = Mul(s, spread)", **scalars),
        # Alone, a - a and a / a would have gradients of zero.
        case(rule, "with itself", f"z = {rule}(a, a) y = {rule}(z, a)", a=positive(2, 3)),
        case(rule, "frozen on the right", body, a=normal(2, 3), b=operand((3,)), frozen=("b",)),
    )


def _unary(rule: str, name: str = "values of both signs", x: Draw | None = None) -> Case:
    return case(rule, name, f"y = {rule}(x)", x=x or normal(3, 4))


def _clip(name: str, body: str, **settings: Any) -> Case:
    return case("Clip", name, body, x=normal(4, 6), **settings)


_LOW, _HIGH = np.float32(-0.6), np.float32(0.8)

ELEMENTWISE_CASES = (
    *(entry for rule in ("Add", "Sub", "Mul", "Div") for entry in _binary(rule)),
    case("Sum", "one input", "y = Sum(a)", a=normal(2, 3)),
    case("Sum", "two inputs", "y = Sum(a, b)", a=normal(2, 3), b=normal(2, 3)),
    case(
        "Sum", "three inputs, broadcast", "y = Sum(a, b, c)", a=normal(2, 1, 4), b=normal(3, 1), c=normal(4)
    ),
    case("Sum", "scalar among them", "y = Sum(a, b, c)", a=normal(2, 3), b=normal(), c=normal(1, 3)),
    case("Sum", "with itself", "y = Sum(a, a, b)", a=normal(2, 3), b=normal(3)),
    _unary("Abs"),
    _unary("Exp"),
    _unary("Log", "positive values", positive(3, 4)),
    _unary("Neg"),
    _unary("Relu"),
    _unary("Relu", "three axes", normal(2, 3, 4)),
    case("Relu", "scalar", "s = Relu(x) y = Mul(s, spread)", x=positive(), spread=normal(2)),
    _unary("Sigmoid"),
    _unary("Sigmoid", "large values", normal(3, 4, mean=3.0)),
    _unary("Softplus"),
    _unary("Softplus", "large values", normal(3, 4, mean=25.0)),
    _unary("Sqrt", "positive values", positive(3, 4)),
    _unary("Tanh"),
    case("Relu", "in float64", "d = Cast<to=11>(x) r = Relu(d) y = Cast<to=1>(r)", x=normal(3, 4)),
    # A copy of one output under the name of another is all that reading leaves of Identity.
    case("Identity", "between two outputs", "z = Exp(x) y = Identity(z)", x=normal(2, 3), outputs=("y", "z")),
    case("Cast", "to float64 and back", "d = Cast<to=11>(x) e = Exp(d) y = Cast<to=1>(e)", x=normal(2, 3)),
    case("Cast", "from a float64 parameter", "y = Cast<to=1>(x)", x=normal(2, 3, dtype=np.float64)),
    _clip("both limits", "y = Clip(x, low, high)", low=_LOW, high=_HIGH),
    _clip("lower limit", "y = Clip(x, low)", low=_LOW),
    _clip("upper limit", "y = Clip(x, , high)", high=_HIGH),
    _clip("no limit", "y = Clip(x)"),
    _clip(
        "ReLU6",
        "z = Mul(x, four) y = Clip(z, low, high)",
        four=np.float32(4),
        low=np.float32(0),
        high=np.float32(6),
    ),
    _clip("opset 6 attributes", "y = Clip<min=-0.6, max=0.8>(x)", opset=10),
    _clip("opset 6, minimum only", "y = Clip<min=-0.6>(x)", opset=10),
    _clip("opset 11 inputs", "y = Clip(x, low, high)", low=_LOW, high=_HIGH, opset=11),
    case("Dropout", "ratio given", "y = Dropout(x, ratio)", x=normal(6, 7), ratio=np.float32(0.3)),
    case("Dropout", "ratio by default", "y = Dropout(x)", x=normal(6, 7)),
    case(
        "Dropout",
        "twice",
        "z = Dropout(x, r) y = Dropout(z, s)",
        x=normal(9, 8),
        r=np.float32(0.2),
        s=np.float32(0.4),
    ),
    case("Dropout", "opset 7 attribute", "y = Dropout<ratio=0.25>(x)", x=normal(6, 7), opset=7),
    case("Dropout", "opset 10 attribute", "y = Dropout<ratio=0.6>(x)", x=normal(6, 7), opset=10),
    case(
        "Exp",
        "behind a Dropout of ratio zero",
        "z = Dropout(x, ratio) y = Exp(z)",
        x=normal(6, 7),
        ratio=np.float32(0),
    ),
)


def _labels(*shape: int, classes: int, ignored: int = 0) -> np.ndarray:
    generator = np.random.default_rng([classes, *shape])
    labels = generator.integers(0, classes, shape)
    labels.reshape(-1)[:ignored] = -100
    return labels


def _head(name: str, body: str, **settings: Any) -> Case:
    """A loss head; the rule named is the one that only heads bring in, or the commonest."""
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
        "bce behind Sigmoid",
        "z = Mul(x, w) y = Sigmoid(z)",
        x=normal(3, 4),
        w=normal(4),
        loss="bce",
        rule="Softplus",
    ),
    _head(
        "own output",
        "z = Mul(x, x) y = ReduceMean<keepdims=0>(z)",
        x=normal(3, 4),
        loss="y",
        rule="ReduceMean",
    ),
    _head("own output [1]", "z = Mul(x, x) y = ReduceMean(z)", x=normal(3, 4), loss="y", rule="ReduceMean"),
)
