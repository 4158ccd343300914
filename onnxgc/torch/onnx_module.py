"""An ONNX model as a trainable `torch.nn.Module`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import onnx
import torch
from onnx import helper
from torch import Tensor, nn

from onnxgc.budget.search import SearchOptions
from onnxgc.emission.atomic_files import check_model_writable, write_model
from onnxgc.emission.plan_files import plan_of
from onnxgc.errors import PlanError, ShapeError
from onnxgc.model.core.ir import Array, Weight
from onnxgc.model.core.stored_weights import ArrayWeight
from onnxgc.model.draw_weights import draw_weights
from onnxgc.model.files.evaluation_file import EvaluationFile
from onnxgc.model.files.load import source_of
from onnxgc.model.read_forward import ForwardModel, PerSampleConstant, read_forward
from onnxgc.model.weight_roles.roles import Role
from onnxgc.planning.memory_budget import parse_budget
from onnxgc.torch.checkpointing import DEFAULT_TIME_LIMIT_SECONDS, planned_module
from onnxgc.torch.function_calls import DTYPES, TorchCall, Value, calls_of, module_dtype, tensor_of
from onnxgc.torch.fx_program import Program
from onnxgc.torch.onnx_plan import PlanFollower
from onnxgc.torch.operator_timing import MeasuredCosts
from onnxgc.torch.operators.registry import OPERATORS
from onnxgc.torch.plan_search import BudgetPlanner, Planner

_STATE_ROLES = (Role.PARAMETER, Role.FROZEN, Role.STATISTIC)
_LIKE = "onnxgc_like"


def from_onnx(
    model: Any,
    plan: Any = None,
    budget: str | float | None = None,
    *,
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
    freeze_bn: bool = False,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    seed: int = 0,
) -> OnnxModule:
    """An ONNX model as a module that computes the model's own outputs.

    `model` is a path, an `onnx.ModelProto`, an `onnx_ir.Model` or a `torch.onnx.ONNXProgram`. `trainable` and
    `freeze` are globs of weight names that override inferred roles; with `freeze_bn` BatchNormalization keeps
    its running statistics in training, too. `input_shapes` maps inputs to shapes. Weights that the file does
    not contain are drawn from `seed`.

    A `plan` is a result or file of `onnxgc.optimize` for this model, or the names of tensors to keep; other
    activations are recomputed in backward. With a `budget` the module is planned as by `checkpoint`,
    immediately if the batch is known.

    Raises:
        OnnxgcError: the model, plan or budget is invalid or unsupported; the message has one line.

    >>> text = "double (float[2] x) => (float[2] y) { y = Add(x, x) }"
    >>> model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> {text}')
    >>> from_onnx(model)(torch.tensor([1.0, 2.0]))
    tensor([2., 4.])
    """
    if plan is not None and budget is not None:
        raise PlanError("a plan and a budget exclude each other; give one of them, not both")
    planner: Planner | None = None
    if plan is not None:
        planner = PlanFollower(plan_of(plan))
    elif budget is not None:
        planner = BudgetPlanner(parse_budget(budget), SearchOptions(time_limit_seconds=DEFAULT_TIME_LIMIT_SECONDS))
    read = read_forward(
        source_of(model),
        known=OPERATORS,
        input_shapes=input_shapes,
        trainable=trainable,
        freeze=freeze,
        freeze_bn=freeze_bn,
    )
    module = OnnxModule(read, draw_weights(read, seed, only_constant_filled=True))
    if planner is None:
        return module
    knows_batch = set(module.batched_inputs) <= set(input_shapes or {})
    examples = module.example_inputs(input_shapes or {}) if knows_batch else None
    return planned_module(module, planner, MeasuredCosts(), examples)


class OnnxModule(nn.Module):
    """An ONNX model in torch's own operators, which autograd differentiates.

    Inputs are passed by position, in the graph's order, or by name. The result is one tensor, or a tuple if
    the model has several outputs. Parameters have their ONNX names, also in `state_dict`, where dots separate
    nested modules; frozen weights are parameters that require no gradient, running statistics are buffers,
    and constants are buffers that `state_dict` omits. In training mode BatchNormalization uses the batch's
    statistics and updates the running ones, and Dropout is on.

    Shapes are those for which the model was read, except for the first dimension of the inputs in
    `batched_inputs`.
    """

    program: Program

    def __init__(self, model: ForwardModel, values: Mapping[str, Any] | None = None) -> None:
        """`values` replaces the contents of weights by name."""
        super().__init__()
        given = {name: ArrayWeight(value) for name, value in (values or {}).items()}
        weights = {**model.weights, **given}
        calls = calls_of(model)
        read = _weights_read(calls, model, weights)
        self.program = Program(
            calls,
            model.inputs,
            read,
            model.outputs,
            {name: part for name, part in _parts(model).items() if name in read},
            next(iter(model.batched), ""),
        )
        self.batched_inputs = model.batched
        self.output_names = model.outputs
        self._shapes = {name: model.types[name].shape for name in model.inputs}
        self._types = {name: DTYPES[model.types[name].dtype] for name in model.inputs}
        self.register_buffer(_LIKE, torch.zeros((), dtype=DTYPES[module_dtype(model)]), persistent=False)
        self._keys = state_keys(read, self)
        stored = {name: weights[name].type.dtype for name in read if model.roles.get(name) in _STATE_ROLES}
        self._evaluation_file = EvaluationFile(model.proto, model.folder, model.nodes, model.roles, stored)
        self._stored_names = tuple(stored)
        for name in read:
            self._register(self._keys[name], weights[name], model.roles.get(name, Role.CONSTANT))

    @property
    def graph_module(self) -> torch.fx.GraphModule:
        """The graph as a function of training mode, a tensor like the module's, inputs and weights."""
        return self.program.graph_module

    @property
    def input_names(self) -> tuple[str, ...]:
        return self.program.inputs

    def onnx_names(self) -> dict[str, str]:
        """The ONNX name of each key of `state_dict`."""
        return {self._keys[name]: name for name in self._stored_names}

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        fed = self._in_order(inputs, named)
        for name, value in zip(self.program.inputs, fed, strict=True):
            self._check_shape(name, tuple(value.shape))
        return self.program(self.training, self._value(_LIKE), *fed, *self.weights())

    def weights(self) -> tuple[Tensor, ...]:
        """The weights in the order of the program."""
        return tuple(self._value(self._keys[name]) for name in self.program.weights)

    def example_inputs(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Tensor, ...]:
        """Zeros in the inputs' types and the given shapes, or those for which the model was read."""
        device = self._value(_LIKE).device
        return tuple(
            torch.zeros(shapes.get(name, known), dtype=self._types[name], device=device)
            for name, known in self._shapes.items()
        )

    def _value(self, key: str) -> Tensor:
        value: Tensor = attrgetter(key)(self)
        return value

    def to_onnx(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto:
        """The model's source file with the present weights and statistics, written to `path` if one is given.

        Names, opset and metadata stay the same; functions are inlined, and all weights become initializers.

        Raises:
            OutputFileError: the file cannot be written.
            UnsupportedOperatorError: a weight is inside of control flow.
        """
        if path is not None:
            check_model_writable(path)
        proto = self._evaluation_file.filled(self._array)
        if path is not None:
            write_model(proto, path)
        return proto

    def _array(self, name: str, dtype: int) -> Array:
        """The present value of a weight in an element type of ONNX."""
        value = self._value(self._keys[name])
        contents = value.detach().to("cpu", DTYPES[dtype]).contiguous().reshape(-1).view(torch.uint8)
        array: Array = contents.numpy().view(helper.tensor_dtype_to_np_dtype(dtype)).reshape(value.shape)
        return array

    def _register(self, key: str, weight: Weight, role: Role) -> None:
        *scopes, leaf = key.split(".")
        owner: nn.Module = self
        for scope in scopes:
            if scope not in owner._modules:
                owner.add_module(scope, nn.Module())
            owner = owner.get_submodule(scope)
        value = tensor_of(weight)
        if role in (Role.PARAMETER, Role.FROZEN):
            owner.register_parameter(leaf, nn.Parameter(value, requires_grad=role is Role.PARAMETER))
        else:
            owner.register_buffer(leaf, value, persistent=role is Role.STATISTIC)

    def _in_order(self, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> list[Tensor]:
        names = self.program.inputs
        if len(inputs) > len(names):
            raise TypeError(f"{len(inputs)} inputs are given, and the model has {len(names)}: {list(names)}")
        fed = dict(zip(names, inputs, strict=False))
        for name, value in named.items():
            if name not in names or name in fed:
                reason = "is given twice" if name in fed else f"is not among the model's inputs {list(names)}"
                raise TypeError(f"'{name}' {reason}")
            fed[name] = value
        missing = [name for name in names if name not in fed]
        if missing:
            raise TypeError(f"inputs {missing} are missing")
        return [fed[name] for name in names]

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        wanted = self._shapes[name]
        free = 1 if name in self.batched_inputs else 0
        if len(wanted) == len(shape) and wanted[free:] == shape[free:]:
            return
        expected = ", ".join(["any"] * free + [str(size) for size in wanted[free:]])
        raise ShapeError(
            f"input '{name}' has the shape {list(shape)}, and the model was read for [{expected}]; "
            "read it again with input_shapes"
        )


def state_keys(names: Iterable[str], module: nn.Module) -> dict[str, str]:
    """A key of `state_dict` for each name: the name itself if torch can nest it by its dots.

    An underscore is appended to parts that are empty, are attributes of every module, or would be both a
    tensor and a module.
    """
    keys: dict[str, str] = {}
    tensors: set[str] = set()
    scopes: set[str] = set()
    for name in names:
        parts = [part if part and not hasattr(module, part) else f"{part}_" for part in name.split(".")]
        for depth in range(1, len(parts)):
            while ".".join(parts[:depth]) in tensors:
                parts[depth - 1] += "_"
        while ".".join(parts) in tensors | scopes:
            parts[-1] += "_"
        tensors.add(".".join(parts))
        scopes.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
        keys[name] = ".".join(parts)
    return keys


def _parts(model: ForwardModel) -> dict[str, PerSampleConstant]:
    return {name: change for name, change in model.batch_dependent.items() if isinstance(change, PerSampleConstant)}


def _weights_read(calls: Iterable[TorchCall], model: ForwardModel, weights: Mapping[str, Weight]) -> tuple[str, ...]:
    """The weights that calls read as tensors or that are outputs, in the order of the file."""
    read = {argument.name for call in calls for argument in call.arguments if isinstance(argument, Value)}
    read.update(model.outputs)
    read.difference_update(name for call in calls for name in call.outputs)
    read.update(part.step for name, part in _parts(model).items() if name in read)
    return tuple(name for name in weights if name in read)
