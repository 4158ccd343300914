"""Optimizers and their settings, with the names and defaults of PyTorch.

Source: torch/optim; for Lion, Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.
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
class Adam:
    """Adam; weight decay is added to the gradient. `clip_norm` limits the global norm of all gradients."""

    name: ClassVar[str] = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = None
    groups: tuple[ParameterGroup, ...] = ()

    def states(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class RMSprop:
    """Gradients divided by the root of their mean square, which decays by `alpha`."""

    name: ClassVar[str] = "rmsprop"
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    groups: tuple[ParameterGroup, ...] = ()

    def states(self) -> tuple[str, ...]:
        return ("square_avg", "momentum_buffer") if self.momentum else ("square_avg",)


@dataclass(frozen=True, slots=True)
class Adagrad:
    """Gradients divided by the root of the sum of all their squares."""

    name: ClassVar[str] = "adagrad"
    eps: float = 1e-10
    weight_decay: float = 0.0
    clip_norm: float | None = None
    groups: tuple[ParameterGroup, ...] = ()

    def states(self) -> tuple[str, ...]:
        return ("sum",)


@dataclass(frozen=True, slots=True)
class Lion:
    """The sign of a mean of gradients, with decoupled weight decay; one state a parameter."""

    name: ClassVar[str] = "lion"
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    clip_norm: float | None = None
    groups: tuple[ParameterGroup, ...] = ()

    def states(self) -> tuple[str, ...]:
        return ("exp_avg",)


@dataclass(frozen=True, slots=True)
class Accumulation:
    """Sums gradients over several runs; a separate graph applies the update."""

    name: ClassVar[str] = "accumulation"

    def states(self) -> tuple[str, ...]:
        return ("accumulated",)


UpdateRule: TypeAlias = SGD | AdamW | Adam | RMSprop | Adagrad | Lion
Optimizer: TypeAlias = UpdateRule | Accumulation
UPDATE_RULES: Mapping[str, type[UpdateRule]] = {kind.name: kind for kind in (SGD, AdamW, Adam, RMSprop, Adagrad, Lion)}
OPTIMIZERS: Mapping[str, type[Optimizer]] = {**UPDATE_RULES, Accumulation.name: Accumulation}


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
            raise OptimizerError(f"unknown optimizer '{given}'; choose one of none, {', '.join(UPDATE_RULES)}")
        given = OPTIMIZERS[given]()
    _check(given)
    return given


def _check(optimizer: Optimizer) -> None:
    if isinstance(optimizer, Accumulation):
        return
    if isinstance(optimizer, SGD) and optimizer.nesterov and not optimizer.momentum:
        raise OptimizerError("Nesterov momentum needs a momentum above 0, such as 0.9")
    shares = ("alpha", "beta1", "beta2")
    for name in ("weight_decay", "momentum", "eps", *shares):
        value = getattr(optimizer, name, 0)
        if not 0 <= value < (1 if name in shares else np.inf):
            limit = " and below 1" if name in shares else ""
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
