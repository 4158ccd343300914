from typing import Any

import numpy as np

from tests.gradients.gradient_case import Case, Draw, case, normal, positive

_BROADCASTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "shapes alike": ((2, 3), (2, 3)),
    "scalar on the left": ((), (2, 3)),
    "one element of higher rank": ((2, 3), (1, 1, 1)),
    "vector along channels": ((2, 3, 4, 5), (3, 1, 1)),
    "rows against columns": ((3, 1), (1, 4)),
    "both broadcast, ranks differ": ((2, 1, 4), (3, 1)),
    "inner axis": ((2, 3, 4), (2, 1, 4)),
    "axes of one on both": ((1, 3, 1), (1, 1, 1)),
}


def _binary(rule: str) -> tuple[Case, ...]:
    body = f"y = {rule}(a, b)"
    # A scalar is multiplied by two elements: the reference needs a target with at least one axis.
    scalars = {"a": normal(), "b": positive(), "spread": normal(2)}

    def operand(shape: tuple[int, ...]) -> Draw:
        return positive(*shape) if rule == "Div" else normal(*shape)

    return (
        *(case(rule, name, body, a=a, b=operand(b)) for name, (a, b) in _BROADCASTS.items()),
        case(rule, "constant on the left", f"y = {rule}(c, a)", a=operand((2, 3)), c=0.7),
        case(rule, "two scalars", f"s = {rule}(a, b) y = Mul(s, spread)", **scalars),
        # Alone, a - a and a / a would have gradients of zero.
        case(rule, "with itself", f"z = {rule}(a, a) y = {rule}(z, a)", a=positive(2, 3)),
        case(rule, "frozen on the right", body, a=(2, 3), b=operand((3,)), frozen=("b",)),
    )


def _unary(rule: str, name: str = "values of both signs", x: Draw | None = None) -> Case:
    return case(rule, name, f"y = {rule}(x)", x=x or normal(3, 4))


def _pow(name: str, exponent: Any, x: Draw | None = None, **settings: Any) -> Case:
    constant = exponent if isinstance(exponent, np.ndarray) else np.float32(exponent)
    return case("Pow", name, "y = Pow(x, p)", x=x or positive(3, 4), p=constant, **settings)


def _moved(rule: str, name: str, shift: float, scale: float = 1.0) -> Case:
    """A function of shift + scale x, which is inside the function's domain."""
    numbers = {"shift": np.float32(shift), "scale": np.float32(scale)}
    body = f"s = Mul(x, scale) z = Add(s, shift) y = {rule}(z)"
    return case(rule, name, body, x=(3, 4), **numbers)


def _extremes(rule: str) -> tuple[Case, ...]:
    other = {"Max": "Min", "Min": "Max"}[rule]
    low = np.float32(-6e4)
    return (
        *(
            # Plus the sum, since one operand may be greater everywhere.
            case(rule, name, f"m = {rule}(a, b) s = Add(a, b) y = Add(m, s)", a=a, b=b)
            for name, (a, b) in _BROADCASTS.items()
        ),
        case(rule, "one operand", f"y = {rule}(a)", a=(2, 3)),
        case(rule, "four, broadcast", f"y = {rule}(a, b, c, d)", a=(4,), b=(2, 3, 1), c=(3, 4), d=()),
        case(rule, "frozen on the right", f"y = {rule}(a, b)", a=(3, 4), b=(4,), frozen=("b",)),
        case(rule, "second alone", f"y = {rule}(b, a, c)", a=(3, 4), b=(4,), c=(3, 1), frozen=("b", "c")),
        case(rule, "constant on the left", f"y = {rule}(c, a)", a=(3, 4), c=0.1),
        case(
            rule,
            "constant without effect",
            "y = Max(a, c)" if rule == "Max" else "y = Min(c, a)",
            a=(3, 4),
            c=low if rule == "Max" else -low,
        ),
        case(rule, "equal operands", f"m = {other}(a, b) y = {rule}(a, m)", a=(4, 5), b=(4, 5), frozen=("b",)),
        case(
            rule, "equal operands of three", f"m = {other}(a, b) n = Mul(b, b) y = {rule}(m, a, n)", a=(4, 5), b=(4, 5)
        ),
        case(rule, "opset 8", f"y = {rule}(a, b)", a=(3, 4), b=(4,), opset=8),
        case(
            rule,
            "in float64",
            f"d = Cast<to=11>(a) e = Cast<to=11>(b) m = {rule}(d, e) y = Cast<to=1>(m)",
            a=(3, 4),
            b=(4,),
        ),
    )


_MASK = np.random.default_rng(0).random((3, 4)) < 0.5


ELEMENTWISE_CASES = (
    *(entry for rule in ("Add", "Sub", "Mul", "Div") for entry in _binary(rule)),
    *(
        entry
        for op in ("Sum", "Mean")
        for entry in (
            case("Sum", f"{op}, one input", f"y = {op}(a)", a=(2, 3)),
            case("Sum", f"{op}, broadcast", f"y = {op}(a, b, c)", a=(2, 1, 4), b=(3, 1), c=(4,)),
            case("Sum", f"{op}, a scalar", f"y = {op}(a, b, c)", a=(2, 3), b=(), c=(1, 3)),
            case("Sum", f"{op}, with itself", f"y = {op}(a, a, b)", a=(2, 3), b=(3,)),
        )
    ),
    *_extremes("Max"),
    *_extremes("Min"),
    *(_unary(rule, "positive values", positive(3, 4)) for rule in ("Log", "Sqrt", "Reciprocal")),
    _unary("Reciprocal", "negative values", normal(3, 4, mean=-5.0)),
    *(_unary(rule) for rule in ("Abs", "Exp", "Neg", "Erf", "Sin", "Cos", "Atan", "Sinh", "Cosh", "Asinh")),
    _moved("Tan", "inside its domain", 0.1, 0.3),
    _moved("Asin", "inside its domain", 0.1, 0.2),
    _moved("Acos", "inside its domain", -0.1, 0.2),
    _moved("Acosh", "inside its domain", 2.0, 0.2),
    _moved("Atanh", "inside its domain", 0.1, 0.2),
    *(_pow(f"exponent {exponent:g}", exponent) for exponent in (2, 3, 1, 0.5, -0.5, -1, 1.7)),
    *(_pow(f"negative base, exponent {exponent:g}", exponent, normal(3, 4, mean=-3.0)) for exponent in (2, 3, 4, -3)),
    _pow("whole exponent", np.asarray(3), normal(3, 4)),
    _pow("whole exponents", np.asarray([0, 1, 2, 5]), normal(3, 4)),
    _pow("exponents", np.asarray([0.0, 1.0, 2.0, 0.5], np.float32), frozen=("p",)),
    _pow("exponents that broadcast the base", np.asarray([[2], [3]]), normal(4)),
    _pow("equal exponents -1/2 that broadcast the base", np.full((2, 1), -0.5, np.float32), positive(4), frozen=("p",)),
    *(case("Pow", f"powers, {name}", "y = Pow(a, b)", a=positive(*a), b=b) for name, (a, b) in _BROADCASTS.items()),
    case(
        "Pow",
        "constant bases, some not positive",
        "y = Pow(c, x)",
        x=positive(3, 4),
        c=np.asarray([0, 1, 2, 0.3], np.float32),
        frozen=("c",),
    ),
    case(
        "Pow",
        "computed whole exponents",
        "i = Cast<to=6>(b) e = Cast<to=1>(i) y = Pow(a, e)",
        a=normal(3, 4, mean=-2.0),
        b=(3, 4),
        frozen=("b",),
    ),
    case("Pow", "opset 7", "y = Pow(a, b)", a=positive(3, 4), b=(4,), opset=7),
    case("Pow", "scalars", "s = Pow(a, b) y = Mul(s, spread)", a=positive(), b=(), spread=(2,)),
    case("Where", "computed condition", "c = Greater(a, b) y = Where(c, a, b)", a=(3, 4), b=(4,)),
    case("Where", "condition broadcast", "y = Where(c, a, b)", c=_MASK[:1], a=(3, 4), b=(3, 1)),
    case("Where", "scalar condition", "y = Where(c, a, b)", c=np.asarray(True), a=(3, 4), b=(4,), frozen=("b",)),
    case("Where", "with itself", "n = Neg(a) m = Where(c, a, n) y = Where(c, m, m)", c=_MASK, a=(3, 4)),
    case(
        "Where",
        "in float64",
        "d = Cast<to=11>(a) e = Cast<to=11>(b) w = Where(c, d, e) y = Cast<to=1>(w)",
        c=_MASK,
        a=(3, 4),
        b=(4,),
    ),
    case("Where", "opset 9", "y = Where(c, a, b)", c=_MASK, a=(3, 4), b=(4,), opset=9),
    case("Mod", "shapes alike", "y = Mod<fmod=1>(a, b)", a=normal(4, 5, mean=4.0), b=positive(4, 5)),
    case("Mod", "negative divisor", "n = Neg(b) y = Mod<fmod=1>(a, n)", a=normal(5, mean=4.0), b=positive(3, 1)),
    *(
        case("CumSum", name, f"y = CumSum{attributes}(x, axis)", x=shape, axis=np.asarray(axis, kind), opset=opset)
        for name, attributes, shape, axis, kind, opset in (
            ("last axis", "", (2, 3, 4), -1, np.int64, 18),
            ("axis of int32", "", (2, 3, 4), 1, np.int32, 18),
            ("reverse", "<reverse=1>", (3, 4), -2, np.int64, 18),
            ("exclusive, reverse", "<exclusive=1, reverse=1>", (3, 4), 1, np.int64, 18),
            ("exclusive, opset 11", "<exclusive=1>", (3, 4), 1, np.int64, 11),
        )
    ),
    case("Trilu", "upper", "y = Trilu(x)", x=(4, 5)),
    *(
        case("Trilu", f"{side}, diagonal {k}", f"y = Trilu<upper={upper}>(x, k)", x=(2, 4, 5), k=np.asarray(k))
        for side, upper in (("upper", 1), ("lower", 0))
        for k in (-2, 1)
    ),
    # Reading removes every other Identity; this one copies an output under another name.
    case("Identity", "between two outputs", "z = Exp(x) y = Identity(z)", x=(2, 3), outputs=("y", "z")),
    case("Cast", "to float64 and back", "d = Cast<to=11>(x) e = Exp(d) y = Cast<to=1>(e)", x=(2, 3)),
    case("Cast", "from a float64 parameter", "y = Cast<to=1>(x)", x=normal(2, 3, dtype=np.float64)),
    case("Exp", "behind a Dropout of ratio zero", "z = Dropout(x, ratio) y = Exp(z)", x=(6, 7), ratio=0.0),
)
