"""The in-memory form of a model between reading and emission.

A `TrainableModel` is a forward graph that ends in a scalar loss. It is flat, static in every
shape, at the target opset, and in topological order. It knows nothing of checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

Array = npt.NDArray[Any]
EMPTY_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})
_SUB_BYTE_BITS: dict[int, int] = {
    onnx.TensorProto.INT4: 4,
    onnx.TensorProto.UINT4: 4,
    onnx.TensorProto.FLOAT4E2M1: 4,
}


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type (an `onnx.TensorProto.DataType`) and static shape of a tensor."""

    dtype: int
    shape: tuple[int, ...]

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's contents, without allocator rounding."""
        bits = _SUB_BYTE_BITS.get(self.dtype)
        if bits is not None:
            return (self.element_count * bits + 7) // 8
        return self.element_count * int(helper.tensor_dtype_to_np_dtype(self.dtype).itemsize)

    @property
    def is_floating(self) -> bool:
        return self.dtype in (
            onnx.TensorProto.FLOAT,
            onnx.TensorProto.DOUBLE,
            onnx.TensorProto.FLOAT16,
            onnx.TensorProto.BFLOAT16,
        )


@dataclass(frozen=True, slots=True)
class Node:
    """One operator.

    `inputs` holds "" where an optional input is absent. `origin` names the node of the source
    model that this one stands for or was lowered from, and `module` the path of its module, where
    the file has it. `rule` is the key of its gradient rule, normally the operator's name; the empty
    rule stops the gradient. `once` marks a node that must run exactly once a step (batch statistics,
    running statistics): its results are stored and it is never recomputed.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=lambda: EMPTY_ATTRIBUTES)
    name: str = ""
    origin: str = ""
    rule: str = ""
    once: bool = False
    domain: str = ""
    module: str = ""

    @property
    def named(self) -> str:
        """The node as a user finds it: its name in the source model, and its module's path."""
        return f"'{self.origin or self.name}'" + (f" in module '{self.module}'" if self.module else "")

    @property
    def place(self) -> str:
        """The operator with `named`, as in: Conv 'node_conv2d_3' in module 'layer1.0.conv1'."""
        return f"{self.domain}::{self.op} {self.named}" if self.domain else f"{self.op} {self.named}"

    def attribute(self, name: str, default: Any = None) -> Any:
        """Value of an attribute as a Python value (int, float, str, list, TensorProto, ...)."""
        return self.attributes.get(name, default)

    def with_changes(self, **changes: Any) -> Node:
        return replace(self, **changes)

    def to_proto(self) -> onnx.NodeProto:
        """The node as ONNX, without `rule` and `once`, which only this program reads."""
        return helper.make_node(
            self.op,
            list(self.inputs),
            list(self.outputs),
            name=self.name,
            domain=self.domain or None,
            **self.attributes,
        )


class Weight(Protocol):
    """The value of a parameter, constant or statistic; read from disk only when asked for."""

    @property
    def type(self) -> TensorType: ...

    def load(self) -> Array:
        """The value as a numpy array of the weight's shape."""
        ...


@dataclass(frozen=True, slots=True)
class Statistic:
    """A running statistic: the stored tensor and the tensor that holds its next value."""

    name: str
    updated: str


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A forward graph with its loss.

    `weights` holds the value of every parameter, statistic and constant by name; `parameters`
    and `statistics` say which of them train and which are running statistics; all others are
    constants. `inputs` are the source model's inputs, `targets` the loss's (`labels` or
    `target`), each in `types`. `outputs` are the source model's outputs (or what is left of
    them once a trailing Softmax went into the loss). `loss` names the scalar to minimise.
    `notes` are the things that a user should hear about what reading changed or assumed. `domains` are
    the versions of operator sets other than ONNX's own. `draw` is one more input, the number of the run,
    an int64 scalar on which random numbers depend; empty where nothing is drawn by it.
    """

    name: str
    opset: int
    ir_version: int
    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, Weight]
    parameters: tuple[str, ...]
    statistics: tuple[Statistic, ...]
    loss: str
    loss_kind: str
    notes: tuple[str, ...] = ()
    domains: Mapping[str, int] = field(default_factory=lambda: EMPTY_ATTRIBUTES)
    metadata: Mapping[str, str] = field(default_factory=lambda: EMPTY_ATTRIBUTES)
    draw: str = ""

    def constant(self, name: str) -> Array | None:
        """Value of a constant, or None for a tensor that is computed, fed or trained."""
        if name in self.weights and name not in self.parameters:
            return self.weights[name].load()
        return None


def dtype_name(dtype: int) -> str:
    """The numpy name of an ONNX element type, such as `float32`."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(dtype)).name
