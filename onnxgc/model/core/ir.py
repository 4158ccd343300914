"""The in-memory form of a model between reading and emission.

A `TrainableModel` is a forward graph that ends in a scalar loss. It is flat, static in every
shape, at the target opset, and in topological order. It knows nothing of checkpoints.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

Array = npt.NDArray[Any]
EMPTY_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})
SUB_BYTE_BITS: dict[int, int] = {onnx.TensorProto.INT4: 4, onnx.TensorProto.UINT4: 4, onnx.TensorProto.FLOAT4E2M1: 4}
MAX_TENSOR_BYTES = 1 << 42
"""Of one tensor; sums over all tensors of a step stay below 2^63."""
MAX_RANK = 64


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
        bits = SUB_BYTE_BITS.get(self.dtype)
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

    `inputs` contains "" if an optional input is absent. `origin` is the name of the source model's node
    from which this one was lowered, `module` the path of its module if the file records it. `rule` is the
    key of its gradient rule, normally the operator's name; the empty rule stops the gradient. `once` marks
    a node that runs exactly once a step (batch statistics, running statistics): its results are kept and
    it is never recomputed.
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
    def label(self) -> str:
        """The node's name in the source model, and its module's path."""
        return f"'{self.origin or self.name}'" + (f" in module '{self.module}'" if self.module else "")

    @property
    def location(self) -> str:
        """The operator and `label`, as in: Conv 'node_conv2d_3' in module 'layer1.0.conv1'."""
        return f"{self.domain}::{self.op} {self.label}" if self.domain else f"{self.op} {self.label}"

    def attribute(self, name: str, default: Any = None) -> Any:
        """Value of an attribute as a Python value (int, float, str, list, TensorProto, ...)."""
        return self.attributes.get(name, default)

    def with_changes(self, **changes: Any) -> "Node":
        return replace(self, **changes)

    def as_operator(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str] = (), name: str = "", **attributes: Any
    ) -> "Node":
        """One of ONNX's own operators in place of this node, by default with its outputs and its name."""
        made = (tuple(outputs) or self.outputs, attributes, name or self.name)
        return Node(op, tuple(inputs), *made, self.origin, op, self.once, "", self.module)

    def to_proto(self) -> onnx.NodeProto:
        """The node as ONNX, without `rule` and `once`, which exist in memory only."""
        return helper.make_node(
            self.op,
            list(self.inputs),
            list(self.outputs),
            name=self.name,
            domain=self.domain or None,
            **self.attributes,
        )


class Weight(Protocol):
    """A parameter, constant or statistic, whose value is read from disk on demand."""

    @property
    def type(self) -> TensorType: ...

    def load(self) -> Array: ...


@dataclass(frozen=True, slots=True)
class Statistic:
    """A running mean or variance: the stored tensor, and the tensor that contains its next value."""

    name: str
    updated: str
    is_variance: bool = False


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A forward graph with its loss.

    `weights` contains every parameter, statistic and constant by name; `parameters` and `statistics` list
    the first two kinds, and all other weights are constants. `inputs` are the source model's inputs,
    `targets` the loss's (`labels` or `target`), each in `types`. `outputs` are the source model's outputs;
    if the loss absorbed a trailing Softmax, the tensor before it. `loss` is the scalar to minimise.
    `notes` report to the user the changes and assumptions made while reading. `domains` are the versions
    of operator sets other than ONNX's own. `draw` names an additional int64 input, the step counter that
    seeds random numbers; it is empty if there are none. `provider` is the execution provider for which
    gradients take their forms, `cpu` or `cuda`. `column_bytes` limits the temporary memory of the gradient of
    a convolution's weight, by node. With `is_portable` the step avoids what runtimes other than ONNX Runtime
    lack or compute wrongly.
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
    provider: str = "cpu"
    column_bytes: Mapping[str, int] = field(default_factory=lambda: EMPTY_ATTRIBUTES)
    is_portable: bool = False
    parameter_set: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameter_set", frozenset(self.parameters))

    def constant(self, name: str) -> Array | None:
        """Value of a constant; None for a tensor that is computed, fed or trained."""
        if name in self.weights and name not in self.parameter_set:
            return self.weights[name].load()
        return None


def dtype_name(dtype: int) -> str:
    """The numpy name of an ONNX element type, such as `float32`."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(dtype)).name
