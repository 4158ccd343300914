"""Optimizers as nodes of the training step: each parameter is replaced once nobody reads it any more.

Settings and formulas are those of PyTorch's optimizers of the same names.
Source: torch/optim/sgd.py and torch/optim/adamw.py (single tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import onnx

from onnxgc.errors import OptimizerError
from onnxgc.gradients.engine import BackwardChunk, ConstantPool, Differentiated, fresh_name
from onnxgc.model.core.draft import reads_of
from onnxgc.model.core.ir import Array, Node, TensorType, TrainableModel
from onnxgc.model.core.name_globs import matches
from onnxgc.tracing.runtime_costs import VIEW_OPERATORS

LEARNING_RATE, STEP, KEEP = "learning_rate", "step", "keep"
_FLOAT, _DOUBLE = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE
_NORM_EPSILON = 1e-6
"""What PyTorch's `clip_grad_norm_` adds to a norm before it divides by it."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Settings of the parameters whose names match a glob; `lr_scale` multiplies the learning rate."""

    pattern: str
    lr_scale: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent. `clip_norm` limits the norm of all gradients together."""

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
    """Adam with weight decay apart from the gradient."""

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
    """Adds gradients up over several runs; what becomes of the sums is up to another graph."""

    name: ClassVar[str] = "accumulation"

    def states(self) -> tuple[str, ...]:
        return ("accumulated",)


Optimizer: TypeAlias = SGD | AdamW | Accumulation
OPTIMIZERS: Mapping[str, type[SGD] | type[AdamW] | type[Accumulation]] = {
    kind.name: kind for kind in (SGD, AdamW, Accumulation)
}


def optimizer_of(given: Optimizer | str | None) -> Optimizer | None:
    """An optimizer by its name, with PyTorch's settings, or as it is; `none` is None.

    Raises:
        OptimizerError: there is none of that name, or a setting is out of range.
    """
    if given is None or given == "none":
        return None
    if isinstance(given, str):
        if given not in OPTIMIZERS:
            raise OptimizerError(
                f"there is no optimizer '{given}'; choose one of none, {', '.join(OPTIMIZERS)}"
            )
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
            raise OptimizerError("Nesterov's momentum needs a momentum above 0, such as 0.9")
    else:
        at_least_zero["eps"] = optimizer.eps
        below_one = {"beta1": optimizer.beta1, "beta2": optimizer.beta2}
    for name, value in (*at_least_zero.items(), *below_one.items()):
        if not 0 <= value < (1 if name in below_one else np.inf):
            most = " and below 1" if name in below_one else ""
            raise OptimizerError(f"{name} is {value}; it must be a number of at least 0{most}")
    if optimizer.clip_norm is not None and not 0 < optimizer.clip_norm < np.inf:
        raise OptimizerError(f"clip_norm is {optimizer.clip_norm}; it must be a number above 0")


def optimizer_as_json(optimizer: Optimizer | None) -> dict[str, Any] | None:
    return None if optimizer is None else {"name": optimizer.name, **asdict(optimizer)}


def optimizer_from_json(value: Any) -> Optimizer | None:
    """What `optimizer_as_json` wrote.

    Raises:
        KeyError, TypeError: it is something else.
    """
    if value is None:
        return None
    settings = dict(value)
    kind = OPTIMIZERS[settings.pop("name")]
    if "groups" in settings:
        settings["groups"] = tuple(ParameterGroup(**group) for group in settings["groups"])
    return kind(**settings)


@dataclass(frozen=True, slots=True)
class Updates:
    """What an optimizer adds to a step.

    `replaced` maps what the step writes to the parameter or state whose memory it goes to, `states` each
    parameter's states. `scalars` are inputs that change from step to step, with their types, by the names of
    `LEARNING_RATE`, `STEP` and `KEEP`. `norm` is the norm of all gradients where they are clipped.
    `nodes` are names of all nodes.
    """

    optimizer: Optimizer
    replaced: Mapping[str, str]
    states: Mapping[str, tuple[str, ...]]
    scalars: Mapping[str, str]
    types: Mapping[str, TensorType]
    norm: str = ""
    nodes: frozenset[str] = frozenset()

    @property
    def new_of(self) -> dict[str, str]:
        """What each parameter and state becomes."""
        return {old: new for new, old in self.replaced.items()}

    @property
    def returned(self) -> tuple[str, ...]:
        """New parameters, then new states, in the order of the parameters."""
        new_of = self.new_of
        return tuple(new_of[name] for name in (*self.states, *self.state_names) if name in new_of)

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(name for names in self.states.values() for name in names)

    @property
    def state_bytes(self) -> int:
        return sum(self.types[name].size_bytes for name in self.state_names)


def with_updates(
    model: TrainableModel, differentiated: Differentiated, optimizer: Optimizer
) -> tuple[Differentiated, Updates]:
    """The step with the updates of its parameters, each behind the last that reads the old value.

    Raises:
        OptimizerError: a group matches no parameter.
    """
    gradients = {
        name: differentiated.gradient_of[name]
        for name in model.parameters
        if name in differentiated.gradient_of
    }
    taken = {
        *model.types,
        *model.weights,
        *differentiated.constants,
        differentiated.seed,
        *(name for node in (*differentiated.forward, *differentiated.backward) for name in node.outputs),
    }
    constants = ConstantPool(taken)
    writer = _Writer(
        optimizer, {name: model.weights[name].type for name in gradients}, gradients, constants, taken
    )
    ready = _last_readers(differentiated, gradients)
    is_clipped = not isinstance(optimizer, Accumulation) and optimizer.clip_norm is not None
    behind: dict[int, list[Node]] = {}
    last = len(differentiated.chunks) - 1
    if is_clipped:
        behind.setdefault(last, []).extend(writer.clipping())
    for name in sorted(gradients, key=lambda name: ready[name]):
        behind.setdefault(last if is_clipped else ready[name], []).extend(writer.update(name))
    chunks: list[BackwardChunk] = []
    for index, chunk in enumerate(differentiated.chunks):
        chunks.append(chunk)
        if index in behind:
            nodes = tuple(behind[index])
            chunks.append(BackwardChunk(chunk.source, nodes, tuple(node.outputs[0] for node in nodes[-1:])))
    added = replace(
        differentiated,
        chunks=tuple(chunks),
        constants={**differentiated.constants, **constants.values},
    )
    return added, writer.updates()


def _last_readers(differentiated: Differentiated, gradients: Mapping[str, str]) -> dict[str, int]:
    """For each parameter the chunk behind which its gradient is there and its value is not read any more."""
    shown: dict[str, str] = {name: name for name in gradients}
    """By view the parameter that it shows."""
    for node in differentiated.forward:
        if node.op in VIEW_OPERATORS and node.inputs[0] in shown:
            shown[node.outputs[0]] = shown[node.inputs[0]]
    by_gradient = {gradient: name for name, gradient in gradients.items()}
    ready = dict.fromkeys(gradients, 0)
    for index, chunk in enumerate(differentiated.chunks):
        for node in chunk.nodes:
            for name in reads_of(node):
                if name in shown:
                    ready[shown[name]] = index
            if node.op in VIEW_OPERATORS and node.inputs[0] in shown:
                shown[node.outputs[0]] = shown[node.inputs[0]]
            for name in node.outputs:
                if name in by_gradient:
                    ready[by_gradient[name]] = index
    return ready


def update_nodes(
    optimizer: SGD | AdamW,
    parameters: Mapping[str, TensorType],
    gradients: Mapping[str, str],
    taken: Iterable[str] = (),
) -> tuple[tuple[Node, ...], Mapping[str, Array], Updates]:
    """Nodes and constants that update parameters by gradients in float32 that are there, by parameter.

    No new tensor has a name that is `taken`.
    """
    taken = {*parameters, *gradients.values(), *taken}
    constants = ConstantPool(taken)
    writer = _Writer(optimizer, parameters, gradients, constants, taken, has_float_gradients=True)
    nodes = [*(writer.clipping() if optimizer.clip_norm is not None else ())]
    for name in parameters:
        nodes.extend(writer.update(name))
    return tuple(nodes), constants.values, writer.updates()


class _Writer:
    """Writes the nodes of each update; numbers that several share are computed with the first."""

    def __init__(
        self,
        optimizer: Optimizer,
        types: Mapping[str, TensorType],
        gradients: Mapping[str, str],
        constants: ConstantPool,
        taken: set[str],
        *,
        has_float_gradients: bool = False,
    ) -> None:
        self._has_float_gradients = has_float_gradients
        self._optimizer = optimizer
        self._types = types
        self._gradients = gradients
        self._constants = constants
        self._taken = taken
        self._nodes: list[Node] = []
        self._written: set[str] = set()
        self._scope = ""
        self._shared: dict[tuple[Any, ...], str] = {}
        self._replaced: dict[str, str] = {}
        self._states: dict[str, tuple[str, ...]] = {}
        self._scalars: dict[str, str] = {}
        self._state_types: dict[str, TensorType] = {}
        self._factor = ""
        """What gradients are multiplied by where they are clipped."""
        self._norm = ""
        self._group_of = self._grouped()

    def updates(self) -> Updates:
        return Updates(
            self._optimizer,
            self._replaced,
            {name: self._states[name] for name in self._types},
            self._scalars,
            self._state_types,
            self._norm,
            frozenset(self._written),
        )

    def update(self, parameter: str) -> list[Node]:
        self._scope = parameter
        states = tuple(self._state(parameter, kind) for kind in self._optimizer.states())
        self._states[parameter] = states
        gradient = self._gradient(parameter)
        if self._factor:
            gradient = self._emit("Mul", gradient, self._factor)
        _RULES[type(self._optimizer)](self, parameter, gradient, states)
        return self._taken_nodes()

    def clipping(self) -> list[Node]:
        """The factor that brings the norm of all gradients down to the limit, 1 where it is below."""
        assert not isinstance(self._optimizer, Accumulation)
        self._scope = "clip"
        squares = []
        for parameter in self._gradients:
            value = self._gradient(parameter)
            square = self._emit("Mul", value, value)
            squares.append(self._emit("ReduceSum", square, keepdims=0))
        total = self._emit("Sum", *squares) if len(squares) > 1 else squares[0]
        self._norm = self._emit("Sqrt", total, out="gradient_norm")
        limit = self._number(self._optimizer.clip_norm or 0.0)
        room = self._emit("Div", limit, self._emit("Add", self._norm, self._number(_NORM_EPSILON)))
        self._factor = self._emit("Min", room, self._number(1.0))
        return self._taken_nodes()

    # -- what rules use ----------------------------------------------------------------------------

    def _emit(self, op: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        name = fresh_name(out or f"{self._scope}/update/{op}", self._taken)
        node = Node(op, inputs, (name,), attributes, f"{self._scope}/update/{name}", f"{self._scope}/update")
        self._nodes.append(node)
        self._written.add(node.name)
        return name

    def _number(self, value: float, dtype: Any = np.float32) -> str:
        return self._constants.add(np.asarray(value, dtype))

    def _scaled(self, tensor: str, factor: float) -> str:
        return tensor if factor == 1 else self._emit("Mul", tensor, self._number(factor))

    def _replace(self, old: str, op: str, *inputs: str) -> str:
        """The operator whose result takes the place of a parameter or state."""
        new = self._emit(op, *inputs, out=f"{old}_new")
        self._replaced[new] = old
        return new

    def _replace_parameter(self, parameter: str, op: str, *inputs: str) -> None:
        dtype = self._types[parameter].dtype
        if dtype == _FLOAT:
            self._replace(parameter, op, *inputs)
            return
        self._replaced[self._emit("Cast", self._emit(op, *inputs), out=f"{parameter}_new", to=dtype)] = (
            parameter
        )

    def _gradient(self, parameter: str) -> str:
        gradient = self._gradients[parameter]
        return gradient if self._has_float_gradients else self._as_float(gradient, parameter)

    def _as_float(self, tensor: str, like: str) -> str:
        return tensor if self._types[like].dtype == _FLOAT else self._emit("Cast", tensor, to=_FLOAT)

    def _state(self, parameter: str, kind: str) -> str:
        name = fresh_name(f"{parameter}_{kind}", self._taken)
        self._state_types[name] = TensorType(_FLOAT, self._types[parameter].shape)
        return name

    def _scalar(self, name: str, dtype: int) -> str:
        """An input that is another number in each step."""
        if name not in self._scalars:
            self._scalars[name] = fresh_name(name, self._taken)
            self._state_types[self._scalars[name]] = TensorType(dtype, ())
        return self._scalars[name]

    def _once(self, key: tuple[Any, ...], make: Callable[[], str]) -> str:
        if key not in self._shared:
            scope, self._scope = self._scope, "optimizer"
            self._shared[key] = make()
            self._scope = scope
        return self._shared[key]

    def learning_rate(self, parameter: str) -> str:
        """The rate of the parameter's group."""
        scale = self._group_of[parameter].lr_scale
        rate = self._scalar(LEARNING_RATE, _FLOAT)
        return self._once(("rate", scale), lambda: self._scaled(rate, scale))

    def weight_decay(self, parameter: str) -> float:
        assert not isinstance(self._optimizer, Accumulation)
        own = self._group_of[parameter].weight_decay
        return self._optimizer.weight_decay if own is None else own

    def _taken_nodes(self) -> list[Node]:
        nodes, self._nodes = self._nodes, []
        return nodes

    def _grouped(self) -> dict[str, ParameterGroup]:
        """The first group that matches each parameter."""
        groups = () if isinstance(self._optimizer, Accumulation) else self._optimizer.groups
        for group in groups:
            if not any(matches(name, group.pattern) for name in self._types):
                raise OptimizerError(
                    f"the parameter group '{group.pattern}' matches none of the {len(self._types)} "
                    "parameters; `onnxgc inspect` lists them"
                )
        other = ParameterGroup("*")
        return {
            name: next((group for group in groups if matches(name, group.pattern)), other)
            for name in self._types
        }

    # -- rules -------------------------------------------------------------------------------------

    def sgd(self, parameter: str, gradient: str, states: Sequence[str]) -> None:
        optimizer = self._optimizer
        assert isinstance(optimizer, SGD)
        value = self._as_float(parameter, parameter)
        decay = self.weight_decay(parameter)
        if decay:
            gradient = self._emit("Add", gradient, self._scaled(value, decay))
        if states:
            buffer = self._replace(states[0], "Add", self._scaled(states[0], optimizer.momentum), gradient)
            gradient = (
                self._emit("Add", gradient, self._scaled(buffer, optimizer.momentum))
                if optimizer.nesterov
                else buffer
            )
        change = self._emit("Mul", gradient, self.learning_rate(parameter))
        self._replace_parameter(parameter, "Sub", value, change)

    def adamw(self, parameter: str, gradient: str, states: Sequence[str]) -> None:
        optimizer = self._optimizer
        assert isinstance(optimizer, AdamW)
        average, squares = states
        rate = self.learning_rate(parameter)
        step_size, root = self._corrections(optimizer, rate)
        towards = self._scaled(self._emit("Sub", gradient, average), 1 - optimizer.beta1)
        new_average = self._replace(average, "Add", average, towards)
        square = self._scaled(self._emit("Mul", gradient, gradient), 1 - optimizer.beta2)
        new_squares = self._replace(squares, "Add", self._scaled(squares, optimizer.beta2), square)
        size = self._emit("Div", self._emit("Sqrt", new_squares), root)
        ratio = self._emit("Div", new_average, self._emit("Add", size, self._number(optimizer.eps)))
        change = self._emit("Mul", ratio, step_size)
        value = self._as_float(parameter, parameter)
        decay = self.weight_decay(parameter)
        if decay:
            value = self._emit("Mul", value, self._kept_share(rate, decay))
        self._replace_parameter(parameter, "Sub", value, change)

    def accumulation(self, parameter: str, gradient: str, states: Sequence[str]) -> None:
        keep = self._scalar(KEEP, _FLOAT)
        self._replace(states[0], "Add", self._emit("Mul", states[0], keep), gradient)

    def _corrections(self, optimizer: AdamW, rate: str) -> tuple[str, str]:
        """The rate over the first bias correction, and the root of the second.

        In float64: 1 - beta ** step of float32 is off by some 1e-5 in the first steps.
        """

        def exactly(beta: float) -> str:
            number = self._emit("Cast", self._scalar(STEP, onnx.TensorProto.INT64), to=_DOUBLE)
            power = self._emit("Pow", self._number(beta, np.float64), number)
            return self._emit("Sub", self._number(1.0, np.float64), power)

        def step_size() -> str:
            correction = self._once(("correction", 1), lambda: exactly(optimizer.beta1))
            exact = self._emit("Div", self._emit("Cast", rate, to=_DOUBLE), correction)
            return self._emit("Cast", exact, to=_FLOAT)

        def root() -> str:
            return self._emit("Cast", self._emit("Sqrt", exactly(optimizer.beta2)), to=_FLOAT)

        return self._once(("step size", rate), step_size), self._once(("root",), root)

    def _kept_share(self, rate: str, decay: float) -> str:
        def share() -> str:
            return self._emit("Sub", self._number(1.0), self._scaled(rate, decay))

        return self._once(("kept", rate, decay), share)


_RULES: Mapping[type[Optimizer], Callable[[_Writer, str, str, Sequence[str]], None]] = {
    SGD: _Writer.sgd,
    AdamW: _Writer.adamw,
    Accumulation: _Writer.accumulation,
}
