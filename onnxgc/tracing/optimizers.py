"""Optimizers and their settings, with the names and defaults of PyTorch.

Source: torch/optim/sgd.py and torch/optim/adamw.py.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from onnxgc.errors import OptimizerError

LEARNING_RATE, STEP, KEEP = "learning_rate", "step", "keep"


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Settings for the parameters whose names match a glob.

    `lr_scale` multiplies the learning rate. A `weight_decay` of None is the optimizer's.
    """

    pattern: str
    lr_scale: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent. `clip_norm` limits the global norm of all gradients."""

    name: ClassVar[str] = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float | None = None
    groups: tuple[ParameterGroup, ...] = ()

    def states(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()


@dataclass(frozen=True, slots=True)
class AdamW:
    """Adam with decoupled weight decay. `clip_norm` limits the global norm of all gradients."""

    name: ClassVar[str] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float | None = None
    groups: tuple[ParameterGroup, ...] = ()

    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Accumulation:
    """Sums gradients over several runs; a separate graph applies the update."""

    name: ClassVar[str] = "accumulation"

    def states(self) -> tuple[str, ...]:
        return ("accumulated",)


Optimizer: TypeAlias = SGD | AdamW | Accumulation
OPTIMIZERS: Mapping[str, type[SGD] | type[AdamW] | type[Accumulation]] = {
    kind.name: kind for kind in (SGD, AdamW, Accumulation)
}


def optimizer_of(given: Optimizer | str | None) -> Optimizer | None:
    """An optimizer, given as such or by name (then with PyTorch's defaults); `none` is None.

    Raises:
        OptimizerError: the name is unknown, or a setting is out of range.

    >>> optimizer_of("sgd")
    SGD(momentum=0.0, nesterov=False, weight_decay=0.0, clip_norm=None, groups=())
    """
    if given is None or given == "none":
        return None
    if isinstance(given, str):
        if given not in OPTIMIZERS:
            raise OptimizerError(f"unknown optimizer '{given}'; choose one of none, {', '.join(OPTIMIZERS)}")
        given = OPTIMIZERS[given]()
    _check(given)
    return given


def _check(optimizer: Optimizer) -> None:
    if isinstance(optimizer, Accumulation):
        return
    at_least_zero = {"weight_decay": optimizer.weight_decay}
    below_one: dict[str, float] = {}
    if isinstance(optimizer, SGD):
        at_least_zero["momentum"] = optimizer.momentum
        if optimizer.nesterov and not optimizer.momentum:
            raise OptimizerError("Nesterov momentum needs a momentum above 0, such as 0.9")
    else:
        at_least_zero["eps"] = optimizer.eps
        below_one = {"beta1": optimizer.beta1, "beta2": optimizer.beta2}
    for name, value in (*at_least_zero.items(), *below_one.items()):
        if not 0 <= value < (1 if name in below_one else np.inf):
            limit = " and below 1" if name in below_one else ""
            raise OptimizerError(f"{name} is {value}; it must be a number of at least 0{limit}")
    if optimizer.clip_norm is not None and not 0 < optimizer.clip_norm < np.inf:
        raise OptimizerError(f"clip_norm is {optimizer.clip_norm}; it must be a number above 0")


def optimizer_as_json(optimizer: Optimizer | None) -> dict[str, Any] | None:
    return None if optimizer is None else {"name": optimizer.name, **asdict(optimizer)}


def optimizer_from_json(value: Any) -> Optimizer | None:
    """The optimizer of a value that `optimizer_as_json` returned.

    Raises:
        KeyError, TypeError: `value` is not such a value.
    """
    if value is None:
        return None
    settings = dict(value)
    kind = OPTIMIZERS[settings.pop("name")]
    if "groups" in settings:
        settings["groups"] = tuple(ParameterGroup(**group) for group in settings["groups"])
    return kind(**settings)
