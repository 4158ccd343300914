"""A model's source file in evaluation mode, with new values for its weights."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import onnx
from onnx import external_data_helper, helper

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.core.ir import Array, Node

_CONSTANTS = ("Constant", "ConstantOfShape")
# Before this IR version every initializer is also a graph input.
_FIRST_IR_VERSION_OF_BARE_INITIALIZERS = 4
ValueOf = Callable[[str, int], Array]
"""The value of a weight, by its name and element type."""


class EvaluationFile:
    """The source file in evaluation mode, without the contents of weights that the caller supplies."""

    def __init__(
        self,
        proto: onnx.ModelProto,
        folder: str,
        nodes: Iterable[Node],
        weights: Iterable[str],
        supplied: Mapping[str, int],
    ) -> None:
        """`supplied` maps the weights that the caller supplies to their element types in the file.

        `nodes` and `weights` are those of the draft, in which running statistics have separate names even
        where the file stores them in one tensor with other weights.
        """
        self._supplied = dict(supplied)
        stored = {tensor.name for tensor in proto.graph.initializer}
        self._fed = frozenset(value.name for value in proto.graph.input if value.name not in stored)
        self._file = _without_contents(proto, folder, nodes, frozenset(weights), supplied)

    def filled(self, value_of: ValueOf) -> onnx.ModelProto:
        """The file with these values, in its own element types.

        Raises:
            UnsupportedOperatorError: a weight is inside a body or branch.
        """
        proto = deepcopy(self._file)
        graph = proto.graph
        missing = {name: _tensor(name, value_of(name, dtype), dtype) for name, dtype in self._supplied.items()}
        for tensor in graph.initializer:
            if tensor.name in missing:
                tensor.raw_data = missing.pop(tensor.name).raw_data
        read = {name for node in graph.node for name in node.input} | {v.name for v in graph.output}
        lost = [name for name in missing if name not in read]
        if lost:
            raise UnsupportedOperatorError(
                f"weight '{lost[0]}' is inside a control-flow body, where it cannot be written back; "
                "export the model without control flow"
            )
        if missing:
            self._replace_constants(graph, missing)
            proto.ir_version = max(proto.ir_version, _FIRST_IR_VERSION_OF_BARE_INITIALIZERS)
        return proto

    def _replace_constants(self, graph: onnx.GraphProto, tensors: Mapping[str, onnx.TensorProto]) -> None:
        """Replaces, in place, the constant nodes of these weights by initializers."""
        replaced: list[onnx.NodeProto] = []
        kept: list[onnx.NodeProto] = []
        for node in graph.node:
            is_replaced = node.op_type in _CONSTANTS and node.output[0] in tensors
            (replaced if is_replaced else kept).append(node)
        released = {name for node in replaced for name in node.input}
        idle = released.difference(name for node in kept for name in node.input)
        stored = [tensor for tensor in graph.initializer if tensor.name not in idle]
        inputs = [value for value in graph.input if value.name not in idle.difference(self._fed)]
        del graph.node[:]
        graph.node.extend(kept)
        del graph.input[:]
        graph.input.extend(inputs)
        del graph.initializer[:]
        graph.initializer.extend([*stored, *tensors.values()])


def _tensor(name: str, value: Array, dtype: int) -> onnx.TensorProto:
    assert value.dtype == helper.tensor_dtype_to_np_dtype(dtype), "values come in the file's types"
    return onnx.TensorProto(name=name, data_type=dtype, dims=value.shape, raw_data=value.tobytes())


def _without_contents(
    source: onnx.ModelProto, folder: str, nodes: Iterable[Node], weights: frozenset[str], supplied: Mapping[str, int]
) -> onnx.ModelProto:
    """A copy of the file in which supplied weights are empty and all others are embedded."""
    shell = onnx.ModelProto(**_fields_except("graph", source))
    shell.graph.MergeFrom(onnx.GraphProto(**_fields_except("initializer", source.graph)))
    graph = shell.graph
    graph.initializer.extend(_emptied(tensor, supplied, folder) for tensor in source.graph.initializer)
    _separate_statistics(graph, nodes, weights)
    _set_evaluation_mode(graph)
    return shell


def _fields_except(name: str, proto: onnx.ModelProto | onnx.GraphProto) -> dict[str, Any]:
    return {descriptor.name: value for descriptor, value in proto.ListFields() if descriptor.name != name}


def _emptied(tensor: onnx.TensorProto, supplied: Mapping[str, int], folder: str) -> onnx.TensorProto:
    if tensor.name in supplied:
        return onnx.TensorProto(
            name=tensor.name,
            data_type=tensor.data_type,
            dims=tensor.dims,
            doc_string=tensor.doc_string,
            metadata_props=tensor.metadata_props,
        )
    copy = deepcopy(tensor)
    if copy.data_location == onnx.TensorProto.EXTERNAL:
        external_data_helper.load_external_data_for_tensor(copy, folder)
        copy.data_location = onnx.TensorProto.DEFAULT
        del copy.external_data[:]
    return copy


def _set_evaluation_mode(graph: onnx.GraphProto) -> None:
    """Switches Dropout and BatchNormalization from training to evaluation, in place."""
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for node in graph.node:
        if node.op_type == "Dropout":
            del node.input[2:]
        elif node.op_type == "BatchNormalization" and not read.intersection(node.output[1:]):
            del node.output[1:]
            kept = [attribute for attribute in node.attribute if attribute.name != "training_mode"]
            del node.attribute[:]
            node.attribute.extend(kept)


def _separate_statistics(graph: onnx.GraphProto, nodes: Iterable[Node], weights: frozenset[str]) -> None:
    """Gives each BatchNormalization the running statistics that it reads in the draft, in place."""
    read = {node.outputs[0]: node.inputs[3:5] for node in nodes if node.op == "BatchNormalization"}
    for node in graph.node:
        own = read.get(node.output[0]) if node.op_type == "BatchNormalization" else None
        for index, name in enumerate(own or (), 3):
            if node.input[index] != name and name in weights:
                node.input[index] = name
