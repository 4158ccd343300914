from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from onnx import TensorProto
from torch import Tensor

from tests.gradients.gradient_case import Case, Draw, call, case, normal, operator, positive

# Both signs, and values beyond all thresholds.
_WIDE = (5, 8)


def _of(rule: str, name: str, attributes: str = "", x: Draw | None = None, **settings: Any) -> Case:
    return call(rule, name, attributes, x=x or normal(3, 4), **settings)


def _wide(rule: str, name: str, attributes: str = "", **settings: Any) -> Case:
    """On values with a standard deviation of four."""
    body = f"z = Mul(x, four) y = {operator(rule, attributes)}(z)"
    return case(rule, name, body, x=_WIDE, four=4.0, **settings)


def _in_float64(rule: str, attributes: str = "") -> Case:
    body = f"d = Cast<to=11>(x) r = {operator(rule, attributes)}(d) y = Cast<to=1>(r)"
    return case(rule, f"in float64, {attributes}" if attributes else "in float64", body, x=(3, 4))


def _clip(name: str, body: str, **settings: Any) -> Case:
    return case("Clip", name, body, x=(4, 6), **settings)


def _prelu(name: str, x: tuple[int, ...], slope: tuple[int, ...], **settings: Any) -> Case:
    return case("PRelu", name, "y = PRelu(x, s)", x=x, s=slope, **settings)


def _at_own_opset(rule: str, name: str, opset: int, formula: Callable[[Tensor], Tensor], attributes: str = "") -> Case:
    """In a model that reading cannot lower to another opset: its AveragePool has dilations."""
    return case(
        rule,
        name,
        f"z = AveragePool<kernel_shape=[1,1], dilations=[2,2]>(x) y = {operator(rule, attributes)}(z)",
        x=(1, 2, 4, 5),
        opset=opset,
        formula=lambda operands: formula(operands["x"]),
    )


def _limited(operands: Any) -> Tensor:
    return torch.minimum(torch.maximum(operands["x"], operands["low"]), operands["high"])


_LOW, _HIGH = np.float32(-0.6), np.float32(0.8)

ACTIVATION_CASES = (
    _of("Relu", "values of both signs"),
    case("Relu", "scalar", "s = Relu(x) y = Mul(s, spread)", x=positive(), spread=(2,)),
    _in_float64("Relu"),
    _of("LeakyRelu", "by default", x=normal(3, 4)),
    *(
        _of("LeakyRelu", f"alpha {alpha:g}, opset {opset}", f"alpha={alpha:f}", opset=opset)
        for alpha, opset in ((0.0, 18), (1.0, 18), (2.5, 18), (-0.3, 18), (0.1, 7))
    ),
    _of("LeakyRelu", "negative values alone", "alpha=0.001", x=normal(3, 4, mean=-5.0)),
    _in_float64("LeakyRelu", "alpha=-0.3"),
    _prelu("scalar slope", (2, 3, 4), ()),
    _prelu("slope of a channel", (2, 3, 4, 5), (3, 1, 1)),
    _prelu("slope frozen", (2, 3, 4), (3, 1), frozen=("s",)),
    case(
        "PRelu",
        "small slope, negative values alone",
        "y = PRelu(x, s)",
        x=normal(3, 4, mean=-5.0),
        s=np.float32(1e-3),
        frozen=("s",),
    ),
    case("PRelu", "scalars", "s = PRelu(a, b) y = Mul(s, spread)", a=normal(mean=-2.0), b=positive(), spread=(2,)),
    case("PRelu", "of a computed slope", "s = Exp(a) y = PRelu(x, s)", x=(3, 4), a=(4,)),
    case(
        "PRelu",
        "in float64",
        "d = Cast<to=11>(x) e = Cast<to=11>(s) p = PRelu(d, e) y = Cast<to=1>(p)",
        x=(3, 4),
        s=(4,),
    ),
    _of("Elu", "by default"),
    *(_of("Elu", f"alpha {alpha:g}", f"alpha={alpha:f}") for alpha in (2.0, 0.0, -0.7)),
    _wide("Elu", "wide", "alpha=1.5"),
    _in_float64("Elu", "alpha=0.4"),
    case("Elu", "Celu by default", "y = Celu(x)", x=(3, 4)),
    case("Elu", "Celu of a scalar", "s = Celu<alpha=2.0>(x) y = Mul(s, spread)", x=(), spread=(2,)),
    _of("Selu", "by default"),
    *(
        _of("Selu", f"alpha {alpha:g}, gamma {gamma:g}", f"alpha={alpha:f}, gamma={gamma:f}")
        for alpha, gamma in ((0.4, 1.3), (-0.5, 1.5), (1.2, -0.8))
    ),
    _wide("HardSigmoid", "by default"),
    _wide("HardSigmoid", "falling", "alpha=-0.3, beta=0.4"),
    _of("HardSigmoid", "nowhere limited", "alpha=0.1, beta=0.5"),
    _in_float64("HardSigmoid", "alpha=0.6"),
    _wide("HardSwish", "wide"),
    *(_of("ThresholdedRelu", f"alpha {alpha:g}", f"alpha={alpha:f}") for alpha in (0.3, -0.4)),
    _wide("ThresholdedRelu", "by default"),
    _in_float64("ThresholdedRelu", "alpha=-0.3"),
    _of("Softsign", "values of both signs"),
    _in_float64("Softsign"),
    _wide("Shrink", "by default"),
    *(
        _wide("Shrink", f"lambd {limit:g}, bias {bias:g}", f"lambd={limit:f}, bias={bias:f}")
        for limit, bias in ((1.5, 1.5), (1.0, -0.5), (-1.0, 0.3), (0.0, 0.4))
    ),
    _in_float64("Shrink", "lambd=0.3"),
    _of("Sigmoid", "values of both signs"),
    _in_float64("Sigmoid"),
    _of("Softplus", "values of both signs"),
    _of("Softplus", "large values", x=normal(3, 4, mean=25.0)),
    _of(
        "Softplus",
        "beyond the largest power in float16",
        x=normal(3, 4, mean=25.0, dtype=np.float16),
        tolerance=5e-3,
        output_type=TensorProto.FLOAT16,
        smooth=False,
    ),
    case("Softplus", "Mish", "y = Mish(x)", x=(3, 4)),
    _of("Tanh", "values of both signs"),
    _in_float64("Tanh"),
    _at_own_opset("Gelu", "exact", 20, F.gelu),
    _at_own_opset("Gelu", "by tanh", 20, lambda x: F.gelu(x, approximate="tanh"), 'approximate="tanh"'),
    _at_own_opset("Swish", "by default", 24, F.silu),
    _at_own_opset("Swish", "alpha 1.7", 24, lambda x: x * torch.sigmoid(1.7 * x), "alpha=1.7"),
    case("Erf", "Gelu brought down", "y = Gelu(x)", x=(3, 4), opset=20),
    case("Tanh", "Gelu by tanh brought down", 'y = Gelu<approximate="tanh">(x)', x=(3, 4), opset=20),
    case("Sigmoid", "Swish brought down", "y = Swish<alpha=1.7>(x)", x=(3, 4), opset=24),
    _clip("lower limit", "y = Clip(x, low)", low=_LOW),
    _clip("upper limit", "y = Clip(x, , high)", high=_HIGH),
    _clip("no limit", "y = Clip(x)"),
    _clip("opset 6, minimum only", "y = Clip<min=-0.6>(x)", opset=10),
    case(
        "Clip",
        "limits with a gradient",
        "y = Clip(x, low, high)",
        x=(4, 6),
        low=normal(mean=-0.7),
        high=normal(mean=2.0),
        formula=_limited,
    ),
    case(
        "Clip",
        "computed limits",
        "h = Exp(high) y = Clip(x, low, h)",
        x=(4, 6),
        low=_LOW,
        high=normal(mean=-1.0),
        frozen=("high",),
        formula=lambda o: torch.clamp(o["x"], float(_LOW), float(o["high"].exp())),
    ),
    case(
        "Clip",
        "limits crossed",
        "c = Clip(x, low, high) s = Add(c, x) y = Add(s, low)",
        x=(4, 6),
        low=positive(),
        high=normal(mean=-4.0),
        formula=lambda o: _limited(o) + o["x"] + o["low"],
    ),
    case(
        "Clip",
        "in float64",
        "d = Cast<to=11>(x) l = Cast<to=11>(low) c = Clip(d, l) y = Cast<to=1>(c)",
        x=(4, 6),
        low=(),
        formula=lambda o: torch.maximum(o["x"], o["low"]),
    ),
    case("Dropout", "ratio by default", "y = Dropout(x)", x=(6, 7)),
    case("Dropout", "twice", "z = Dropout(x, r) y = Dropout(z, s)", x=(9, 8), r=0.2, s=0.4),
    case("Dropout", "opset 10 attribute", "y = Dropout<ratio=0.6>(x)", x=(6, 7), opset=10),
)
