"""A forward model as calls of functions on torch tensors; `fx_program` assembles them."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.core.draft import operator_name
from onnxgc.model.core.export_marks import MARKS
from onnxgc.model.core.ir import Node, Weight
from onnxgc.model.read_forward import ForwardModel, LinearInBatch, PerSampleConstant
from onnxgc.torch.operators.registry import INDICES, OPERATORS, SETTINGS

_TYPE_NAMES = (
    *("float", "double", "float16", "bfloat16", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
DTYPES: Mapping[int, torch.dtype] = {
    onnx.TensorProto.DataType.Value(name.upper()): getattr(torch, name) for name in _TYPE_NAMES
}
_TYPE_ATTRIBUTES = ("to", "dtype")
_CREATES_FLOATS = ("ConstantOfShape", "RandomNormal", "RandomUniform")
"""Operators whose result is float32 by default."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph as an argument."""

    name: str


@dataclass(frozen=True, slots=True)
class BatchDependent:
    """Integers `per_sample * batch + offset` as an argument: a list, an integer, or with `dtype` a tensor."""

    per_sample: list[Any] | int
    offset: list[Any] | int
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class ModuleDtype:
    """The module's floating type as an argument; users may change it."""


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A node: the key of its function, the arguments, and the names of further parameters."""

    node: str
    operator: str
    arguments: tuple[Any, ...]
    settings: Mapping[str, Any]
    outputs: tuple[str, ...]
    context: tuple[str, ...] = ()

    @property
    def function(self) -> Callable[..., Any]:
        return OPERATORS[self.operator]


def calls_of(model: ForwardModel) -> tuple[TorchCall, ...]:
    """One call for each node.

    Raises:
        UnsupportedOperatorError: operators are not supported in torch; the message names all of them.
    """
    refused: dict[str, list[str]] = {}
    for node in model.nodes:
        reason = _refusal(node)
        if reason:
            refused.setdefault(reason, []).append(node.origin or node.name)
    if refused:
        operators = "; ".join(f"{reason} ({', '.join(map(repr, names))})" for reason, names in refused.items())
        raise UnsupportedOperatorError(f"the model has operators that are not supported in torch: {operators}")
    own = module_dtype(model)
    calls = [_call(node, model, own) for node in model.nodes]
    # An output may be a size only.
    calls += [
        TorchCall(name, "Identity", (_as_tensor(name, model),), {}, (name,))
        for name in dict.fromkeys(model.outputs)
        if isinstance(model.batch_dependent.get(name), LinearInBatch)
    ]
    return tuple(calls)


def module_dtype(model: ForwardModel) -> int:
    """The floating type of most of the model's weights; in the graph it follows the module's type."""
    types = [model.weights[name].type.dtype for name in model.roles if model.weights[name].type.is_floating]
    types += [kind.dtype for kind in map(model.types.get, model.inputs) if kind and kind.is_floating]
    return max(dict.fromkeys(types), key=types.count, default=int(onnx.TensorProto.FLOAT))


def _refusal(node: Node) -> str:
    """The reason why a node is not supported in torch; empty if it is."""
    if node.domain or node.op not in OPERATORS:
        return operator_name(node)
    known = _parameters(_key(node))
    if known is None:
        return ""
    unknown = sorted(name for name in node.attributes if name not in MARKS and name not in known)
    return f"{node.op} with the attribute {', '.join(unknown)}" if unknown else ""


def _key(node: Node) -> str:
    return node.rule if node.rule in OPERATORS else node.op


@cache
def _parameters(operator: str) -> frozenset[str] | None:
    """The attributes that a function supports; None if it supports any."""
    try:
        parameters = inspect.signature(OPERATORS[operator]).parameters
    except ValueError:  # torch's own functions have no signature, and need no attributes.
        return frozenset()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY)


def _call(node: Node, model: ForwardModel, own: int) -> TorchCall:
    operator = _key(node)
    outputs = list(node.outputs)
    while len(outputs) > 1 and not outputs[-1]:
        outputs.pop()
    arguments = [_argument(node, index, model) for index in range(len(node.inputs))]
    while arguments and arguments[-1] is None:
        arguments.pop()
    known = _parameters(operator) or frozenset()
    return TorchCall(
        node.name,
        operator,
        tuple(arguments),
        _settings(node, own),
        tuple(outputs),
        tuple(name for name in ("training", "outputs", "like") if name in known),
    )


def _argument(node: Node, index: int, model: ForwardModel) -> Any:
    name = node.inputs[index]
    if not name:
        return None
    weight = model.weights.get(name)
    if weight is None or name in model.parameters:
        return Value(name)
    is_setting = index in SETTINGS.get(node.op, ())
    is_index = INDICES.get(node.op) == index and not weight.type.shape
    if not (is_setting or is_index) or isinstance(model.batch_dependent.get(name), PerSampleConstant):
        return _as_tensor(name, model)
    change = model.batch_dependent.get(name)
    if isinstance(change, LinearInBatch):
        return BatchDependent(change.per_sample.tolist(), change.offset.tolist())
    return weight.load().tolist()


def _as_tensor(name: str, model: ForwardModel) -> Value | BatchDependent:
    change = model.batch_dependent.get(name)
    if not isinstance(change, LinearInBatch):
        return Value(name)
    dtype = DTYPES[model.weights[name].type.dtype]
    return BatchDependent(change.per_sample.tolist(), change.offset.tolist(), dtype)


def _settings(node: Node, own: int) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    types = {"dtype": onnx.TensorProto.FLOAT} if node.op in _CREATES_FLOATS else {}
    for name, value in {**types, **node.attributes}.items():
        if name in MARKS:
            settings[name.lstrip("_")] = value
        elif name in _TYPE_ATTRIBUTES:
            settings[name] = ModuleDtype() if value == own else DTYPES[value]
        elif isinstance(value, onnx.TensorProto):
            settings[name] = numpy_helper.to_array(value).reshape(-1)[0].item()
            settings["dtype"] = ModuleDtype() if value.data_type == own else DTYPES[value.data_type]
        else:
            settings[name] = _as_written(value)
    return settings


def _as_written(value: Any) -> Any:
    """The shortest decimal of a float32 attribute: the number that the exporter wrote."""
    if isinstance(value, float):
        return float(str(np.float32(value)))
    return [_as_written(item) for item in value] if isinstance(value, list) else value


def tensor_of(weight: Weight) -> torch.Tensor:
    """A weight's value as a new tensor."""
    array = np.array(weight.load(), order="C")
    if weight.type.dtype == onnx.TensorProto.BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.astype(helper.tensor_dtype_to_np_dtype(weight.type.dtype), copy=False))
