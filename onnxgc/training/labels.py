"""Labels among the inputs of a training file, and their number of classes, inferred from its graph."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import onnx
from onnx import numpy_helper

_SAME_VALUES = frozenset(["Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Cast"])


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels with values from 0 to `classes - 1`, or `ignored` for a sample that does not count."""

    classes: int
    ignored: int | None = None


@dataclass(frozen=True, slots=True)
class _Label:
    """The values of an input, possibly replaced where they are `ignored`."""

    name: str
    ignored: int | None = None


@dataclass(frozen=True, slots=True)
class _IgnoreMask:
    """A mask of the labels that are `ignored`, or of the others."""

    label: _Label
    is_of_others: bool = False


@dataclass(frozen=True, slots=True)
class _Scores:
    """Results of a LogSoftmax over a number of classes."""

    classes: int


_Known: TypeAlias = _Label | _IgnoreMask | _Scores


def labels_of(
    graph: onnx.GraphProto, inputs: Collection[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Labels]:
    """Inputs that select, for each sample, one of the scores of a LogSoftmax.

    Labels of losses in other forms are not found.
    """
    numbers = {tensor.name: tensor for tensor in graph.initializer}
    known: dict[str, _Known] = {name: _Label(name) for name in inputs}
    labels: dict[str, Labels] = {}
    for node in graph.node:
        read = [known.get(name) for name in node.input]
        if node.op_type == "GatherElements":
            scores, label = read
            if isinstance(scores, _Scores) and isinstance(label, _Label):
                along = shapes.get(node.input[0], ())[axis_of(node, 0) :][:1]
                if along == (scores.classes,):
                    of_node = Labels(scores.classes, label.ignored)
                    labels[label.name] = _common_range(labels.get(label.name, of_node), of_node)
        elif (result := _result(node, read, numbers, shapes)) is not None:
            known[node.output[0]] = result
    return labels


def _common_range(one: Labels, other: Labels) -> Labels:
    """The common range of labels of two losses."""
    ignored = one.ignored if one.ignored == other.ignored else None
    return Labels(min(one.classes, other.classes), ignored)


def _result(
    node: onnx.NodeProto,
    read: list[_Known | None],
    numbers: Mapping[str, onnx.TensorProto],
    shapes: Mapping[str, tuple[int, ...]],
) -> _Known | None:
    match node.op_type, read:
        case op, [first, *_] if op in _SAME_VALUES:
            return first
        case "LogSoftmax", _ if node.input[0] in shapes:
            return _Scores(shapes[node.input[0]][axis_of(node, -1)])
        case "Equal", [_Label() as label, None] | [None, _Label() as label]:
            ignored = _number(numbers.get(node.input[read[0] is label]))
            return None if ignored is None else _IgnoreMask(replace(label, ignored=ignored))
        case "Not", [_IgnoreMask() as mask]:
            return replace(mask, is_of_others=not mask.is_of_others)
        case "Where", [_IgnoreMask() as mask, *branches]:
            kept = branches[not mask.is_of_others]
            return mask.label if isinstance(kept, _Label) and kept.name == mask.label.name else None
    return None


def axis_of(node: onnx.NodeProto, default: int) -> int:
    """The axis of an operator that has one."""
    return next((attribute.i for attribute in node.attribute if attribute.name == "axis"), default)


def _number(tensor: onnx.TensorProto | None) -> int | None:
    """The value of a constant of one integer, or None."""
    if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL or np.prod(tensor.dims) != 1:
        return None
    value = numpy_helper.to_array(tensor).reshape(())
    return int(value) if np.issubdtype(value.dtype, np.integer) else None
