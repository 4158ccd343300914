"""Optimizer updates as nodes that compute new parameters and states.

Formulas are those of PyTorch's optimizers of the same names.
Source: torch/optim (single tensors); for Lion, algorithm 2 of Chen et al., 2023.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from onnxgc.errors import OptimizerError
from onnxgc.gradients.differentiate import ConstantPool
from onnxgc.model.core.draft import fresh_name
from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.model.core.name_globs import matches
from onnxgc.tracing.optimizers import (
    KEEP,
    LEARNING_RATE,
    SGD,
    STEP,
    Accumulation,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    Optimizer,
    ParameterGroup,
    RMSprop,
    UpdateRule,
)  # fmt: skip

_FLOAT, _DOUBLE = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE
# PyTorch's `clip_grad_norm_` adds this to the norm before dividing by it.
_NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Updates:
    """The inputs, outputs and nodes that an optimizer adds to a step.

    `replaced` maps each new value to the parameter or state whose memory it takes, `states` a parameter to
    its states. `scalars` maps `LEARNING_RATE`, `STEP` and `KEEP` to the inputs that change from step to step.
    `types` are the types of states and scalars. `norm` is the norm of all gradients if they are clipped, else
    "". `nodes` are the names of all nodes.
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
        """The new value of each parameter and state."""
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


def update_nodes(
    optimizer: UpdateRule, parameters: Mapping[str, TensorType], gradients: Mapping[str, str], taken: Iterable[str] = ()
) -> tuple[tuple[Node, ...], Mapping[str, Array], Updates]:
    """Nodes and constants that update parameters from existing float32 gradients, by parameter.

    New tensors get names that are not in `taken`.
    """
    taken = {*parameters, *gradients.values(), *taken}
    constants = ConstantPool(taken)
    writer = UpdateWriter(optimizer, parameters, gradients, constants, taken, has_float_gradients=True)
    nodes = [] if optimizer.clip_norm is None else writer.clip(optimizer.clip_norm)
    for name in parameters:
        nodes.extend(writer.update(name))
    return tuple(nodes), constants.values, writer.updates()


class UpdateWriter:
    """Writes the nodes of each update. Numbers that updates share are computed with the first of them."""

    def __init__(
        self,
        optimizer: Optimizer,
        types: Mapping[str, TensorType],
        gradients: Mapping[str, str],
        constants: ConstantPool,
        taken: set[str],
        *,
        node_names: Iterable[str] = (),
        has_float_gradients: bool = False,
        has_float64: bool = True,
    ) -> None:
        self._has_float64 = has_float64
        self._node_names = set(node_names)
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
        self._clip_factor = ""
        self._norm = ""
        self._group_of = self._find_groups()

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
        """The nodes that update one parameter and its states."""
        self._scope = parameter
        states = tuple(self._state(parameter, kind) for kind in self._optimizer.states())
        self._states[parameter] = states
        gradient = self._gradient(parameter)
        if self._clip_factor:
            gradient = self._emit("Mul", gradient, self._clip_factor)
        match self._optimizer:
            case SGD() as sgd:
                self._update_sgd(sgd, parameter, gradient, states)
            case (AdamW() | Adam()) as adam:
                self._update_adam(adam, parameter, gradient, states)
            case RMSprop() as rmsprop:
                self._update_rmsprop(rmsprop, parameter, gradient, states)
            case Adagrad() as adagrad:
                gradient = self._with_decay(adagrad, parameter, gradient)
                total = self._replace(states[0], "Add", states[0], self._emit("Mul", gradient, gradient))
                self._step(parameter, self._by_root(gradient, total, adagrad.eps))
            case Lion() as lion:
                self._update_lion(lion, parameter, gradient, states[0])
            case Accumulation():
                keep = self._scalar(KEEP, _FLOAT)
                self._replace(states[0], "Add", self._emit("Mul", states[0], keep), gradient)
        return self._pop_nodes()

    def clip(self, max_norm: float) -> list[Node]:
        """The nodes of the factor that limits the norm of all gradients to `max_norm`."""
        self._scope = "clip"
        squares = []
        for parameter in self._gradients:
            value = self._gradient(parameter)
            square = self._emit("Mul", value, value)
            squares.append(self._emit("ReduceSum", square, keepdims=0))
        total = self._emit("Sum", *squares) if len(squares) > 1 else squares[0]
        self._norm = self._emit("Sqrt", total, out="gradient_norm")
        limit = self._number(max_norm)
        ratio = self._emit("Div", limit, self._emit("Add", self._norm, self._number(_NORM_EPSILON)))
        self._clip_factor = self._emit("Min", ratio, self._number(1.0))
        return self._pop_nodes()

    # -- nodes -------------------------------------------------------------------------------------

    def _emit(self, op: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        origin = f"{self._scope}/update"
        name = fresh_name(out or f"{origin}/{op}", self._taken)
        # `w/update/exp_avg_new` outputs `w_exp_avg_new`.
        wanted = f"{origin}/{name.removeprefix(self._scope).lstrip('_')}" if out else name
        node = Node(op, inputs, (name,), attributes, fresh_name(wanted, self._node_names), origin)
        self._nodes.append(node)
        self._written.add(node.name)
        return name

    def _number(self, value: float, dtype: Any = np.float32) -> str:
        return self._constants.add(np.asarray(value, dtype))

    def _scaled(self, tensor: str, factor: float) -> str:
        return tensor if factor == 1 else self._emit("Mul", tensor, self._number(factor))

    def _replace(self, old: str, op: str, *inputs: str) -> str:
        """Emits the operator whose result replaces a parameter or state."""
        new = self._emit(op, *inputs, out=f"{old}_new")
        self._replaced[new] = old
        return new

    def _replace_parameter(self, parameter: str, op: str, *inputs: str) -> None:
        dtype = self._types[parameter].dtype
        if dtype == _FLOAT:
            self._replace(parameter, op, *inputs)
            return
        new = self._emit("Cast", self._emit(op, *inputs), out=f"{parameter}_new", to=dtype)
        self._replaced[new] = parameter

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
        """An input that changes from step to step."""
        if name not in self._scalars:
            self._scalars[name] = fresh_name(name, self._taken)
            self._state_types[self._scalars[name]] = TensorType(dtype, ())
        return self._scalars[name]

    def _once(self, key: tuple[Any, ...], make: Callable[[], str]) -> str:
        """A number that several updates share."""
        if key not in self._shared:
            scope, self._scope = self._scope, "optimizer"
            self._shared[key] = make()
            self._scope = scope
        return self._shared[key]

    def _learning_rate(self, parameter: str) -> str:
        """The rate of the parameter's group."""
        scale = self._group_of[parameter].lr_scale
        rate = self._scalar(LEARNING_RATE, _FLOAT)
        return self._once(("rate", scale), lambda: self._scaled(rate, scale))

    def _weight_decay(self, optimizer: UpdateRule, parameter: str) -> float:
        of_group = self._group_of[parameter].weight_decay
        return optimizer.weight_decay if of_group is None else of_group

    def _pop_nodes(self) -> list[Node]:
        nodes, self._nodes = self._nodes, []
        return nodes

    def _find_groups(self) -> dict[str, ParameterGroup]:
        """The first group that matches each parameter."""
        groups = () if isinstance(self._optimizer, Accumulation) else self._optimizer.groups
        for group in groups:
            if not any(matches(name, group.pattern) for name in self._types):
                raise OptimizerError(
                    f"the parameter group '{group.pattern}' matches none of the {len(self._types)} "
                    "parameters; `onnxgc inspect` lists them"
                )
        default = ParameterGroup("*")
        return {
            name: next((group for group in groups if matches(name, group.pattern)), default) for name in self._types
        }

    # -- optimizers --------------------------------------------------------------------------------

    def _with_decay(self, optimizer: UpdateRule, parameter: str, gradient: str) -> str:
        """The gradient plus the parameter's share of weight decay."""
        decay = self._weight_decay(optimizer, parameter)
        value = self._as_float(parameter, parameter)
        return self._emit("Add", gradient, self._scaled(value, decay)) if decay else gradient

    def _step(self, parameter: str, direction: str) -> None:
        """Moves the parameter against a direction by the learning rate."""
        change = self._emit("Mul", direction, self._learning_rate(parameter))
        self._replace_parameter(parameter, "Sub", self._as_float(parameter, parameter), change)

    def _by_root(self, gradient: str, square: str, eps: float) -> str:
        root = self._emit("Sqrt", square)
        return self._emit("Div", gradient, self._emit("Add", root, self._number(eps)))

    def _mean(self, state: str, share: float, value: str) -> str:
        """Replaces a state by `share` of it plus the rest of a value."""
        return self._replace(state, "Add", self._scaled(state, share), self._scaled(value, 1 - share))

    def _update_sgd(self, optimizer: SGD, parameter: str, gradient: str, states: Sequence[str]) -> None:
        gradient = self._with_decay(optimizer, parameter, gradient)
        if states:
            buffer = self._replace(states[0], "Add", self._scaled(states[0], optimizer.momentum), gradient)
            gradient = (
                self._emit("Add", gradient, self._scaled(buffer, optimizer.momentum)) if optimizer.nesterov else buffer
            )
        self._step(parameter, gradient)

    def _update_rmsprop(self, optimizer: RMSprop, parameter: str, gradient: str, states: Sequence[str]) -> None:
        gradient = self._with_decay(optimizer, parameter, gradient)
        square = self._mean(states[0], optimizer.alpha, self._emit("Mul", gradient, gradient))
        direction = self._by_root(gradient, square, optimizer.eps)
        if optimizer.momentum:
            direction = self._replace(states[1], "Add", self._scaled(states[1], optimizer.momentum), direction)
        self._step(parameter, direction)

    def _update_lion(self, optimizer: Lion, parameter: str, gradient: str, average: str) -> None:
        shares = self._scaled(average, optimizer.beta1), self._scaled(gradient, 1 - optimizer.beta1)
        direction = self._emit("Sign", self._emit("Add", *shares))
        self._mean(average, optimizer.beta2, gradient)
        change = self._emit("Mul", direction, self._learning_rate(parameter))
        self._replace_parameter(parameter, "Sub", self._decayed(optimizer, parameter), change)

    def _update_adam(self, optimizer: AdamW | Adam, parameter: str, gradient: str, states: Sequence[str]) -> None:
        if isinstance(optimizer, Adam):
            gradient = self._with_decay(optimizer, parameter, gradient)
        average, squares = states
        rate = self._learning_rate(parameter)
        step_size, root = self._corrections(optimizer, rate)
        step_to_gradient = self._scaled(self._emit("Sub", gradient, average), 1 - optimizer.beta1)
        new_average = self._replace(average, "Add", average, step_to_gradient)
        square = self._scaled(self._emit("Mul", gradient, gradient), 1 - optimizer.beta2)
        new_squares = self._replace(squares, "Add", self._scaled(squares, optimizer.beta2), square)
        size = self._emit("Div", self._emit("Sqrt", new_squares), root)
        ratio = self._emit("Div", new_average, self._emit("Add", size, self._number(optimizer.eps)))
        change = self._emit("Mul", ratio, step_size)
        value = (
            self._as_float(parameter, parameter) if isinstance(optimizer, Adam) else self._decayed(optimizer, parameter)
        )
        self._replace_parameter(parameter, "Sub", value, change)

    def _decayed(self, optimizer: AdamW | Lion, parameter: str) -> str:
        """The parameter times 1 - rate * weight decay."""
        value = self._as_float(parameter, parameter)
        decay = self._weight_decay(optimizer, parameter)
        return self._emit("Mul", value, self._kept_share(self._learning_rate(parameter), decay)) if decay else value

    def _corrections(self, optimizer: AdamW | Adam, rate: str) -> tuple[str, str]:
        """The rate divided by the first bias correction, and the square root of the second.

        In float64: in float32, 1 - beta ** step is off by about 1e-5 in the first steps. Where runtimes lack it,
        1 - beta ** step is 2 T / (1 + T) with T = tanh(-step ln(beta) / 2), which cancels nothing.
        """
        double = _DOUBLE if self._has_float64 else _FLOAT

        def bias_correction(beta: float) -> str:
            if not self._has_float64:
                number = self._emit("Cast", self._scalar(STEP, onnx.TensorProto.INT64), to=_FLOAT)
                half = self._emit("Tanh", self._scaled(number, -math.log(beta) / 2 if beta else math.inf))
                return self._emit("Div", self._scaled(half, 2.0), self._emit("Add", half, self._number(1.0)))
            number = self._emit("Cast", self._scalar(STEP, onnx.TensorProto.INT64), to=_DOUBLE)
            power = self._emit("Pow", self._number(beta, np.float64), number)
            return self._emit("Sub", self._number(1.0, np.float64), power)

        def step_size() -> str:
            correction = self._once(("correction", 1), lambda: bias_correction(optimizer.beta1))
            exact = self._emit("Div", self._emit("Cast", rate, to=double), correction)
            return self._emit("Cast", exact, to=_FLOAT)

        def root() -> str:
            return self._emit("Cast", self._emit("Sqrt", bias_correction(optimizer.beta2)), to=_FLOAT)

        return self._once(("step size", rate), step_size), self._once(("root",), root)

    def _kept_share(self, rate: str, decay: float) -> str:
        def share() -> str:
            return self._emit("Sub", self._number(1.0), self._scaled(rate, decay))

        return self._once(("kept", rate, decay), share)
