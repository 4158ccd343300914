"""The record of facts about one operator, and shared helpers of its families."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from onnxgc.model.core.ir import Node, TensorType
from onnxgc.model.core.node_rewrites import ValueOf

Types: TypeAlias = Mapping[str, TensorType]

MULTIPLY_ADD = 2
"""Floating-point operations of one multiplication and one addition."""


@dataclass(frozen=True, slots=True)
class Place:
    """An axis of one of a node's inputs, which has `rank` axes."""

    node: Node
    index: int
    axis: int
    rank: int
    opset: int
    value_of: ValueOf

    def own_axis(self, default: int) -> int:
        return int(self.node.attribute("axis", default)) % max(self.rank, 1)


Independence: TypeAlias = Callable[[Place], bool]


class Settings(NamedTuple):
    """Floating-point inputs that are settings and never parameters, and their meaning."""

    inputs: tuple[int, ...]
    meaning: str


_NO_SETTINGS = Settings((), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFacts:
    """Facts about one operator; the defaults hold for an unknown one.

    Attributes:
        flops: floating-point operations for each element of the node's largest tensor, or a formula
            of the node and the types of its tensors; 0 for operators that only move data.
        independent: whether slices along an axis are computed independently and identically, so that the axis
        may have any number of samples.
        is_pointwise: each element of the result depends on the elements at its own position.
        is_view: ONNX Runtime makes no copy: the output shares the input's memory.
        runs_in_place: ONNX Runtime writes the output into the first input's memory if nothing else reads it.
        workspace: bytes that ONNX Runtime's kernel allocates while it runs on one thread, and releases.
        workspace_first: the kernel allocates its workspace before its output.
        parameters: inputs that hold parameters.
        operands: inputs that are parameters with several elements, and constants with one.
        initial_states: inputs that are parameters unless they are zero.
        statistics: inputs that hold running statistics.
        settings: floating-point inputs that never train.
        quantised_bias: for operators on quantised weights, which inputs after the first are biases; the rest
        are scales and zero points. None for other operators.
        passes_weights: the output is the first input (of Concat any) rearranged or mapped element by
            element, so that a weight is classified by the use of the output.
        has_gradient: a gradient passes through the operator.
    """

    flops: int | Callable[[Node, Types], int] = 1
    independent: Independence | None = None
    is_pointwise: bool = False
    is_view: bool = False
    runs_in_place: bool = False
    workspace: Callable[[Node, Types], int] | None = None
    workspace_first: bool = False
    parameters: tuple[int, ...] = ()
    operands: tuple[int, ...] = ()
    initial_states: tuple[int, ...] = ()
    statistics: tuple[int, ...] = ()
    settings: Settings = _NO_SETTINGS
    quantised_bias: tuple[int, ...] | None = None
    passes_weights: bool = False
    has_gradient: bool = True


def pointwise(flops: int = 1, **facts: Any) -> OperatorFacts:
    """Facts about an operator on single elements."""
    return OperatorFacts(flops=flops, independent=all_axes, is_pointwise=True, **facts)


def all_axes(place: Place) -> bool:
    """Slices are independent along every axis; constants of the node are checked elsewhere."""
    return True


def first_axis(place: Place) -> bool:
    """Slices are independent along the first axis of every input."""
    return place.axis == 0


def axes_of_data(*axes: int) -> Independence:
    """Slices are independent along these axes of the first input."""
    return lambda place: place.index == 0 and place.axis in axes


def all_but_named_axis(default: int, *inputs: int) -> Independence:
    """Slices are independent along all axes of these inputs but the one in the node's attribute."""
    return lambda place: place.index in inputs and place.axis != place.own_axis(default)


def shape_of(node: Node, types: Types, index: int) -> tuple[int, ...]:
    return types[node.inputs[index]].shape


def output_of(node: Node, types: Types) -> TensorType:
    return types[next(filter(None, node.outputs))]


def has_input(node: Node, index: int) -> bool:
    return len(node.inputs) > index and bool(node.inputs[index])


def itemsize(tensor: TensorType) -> int:
    return tensor.size_bytes // max(tensor.element_count, 1)
