"""The file that a model came from, in evaluation mode and with other values for its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import onnx
from onnx import external_data_helper, helper

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.core.ir import Array, Node

_CONSTANTS = ("Constant", "ConstantOfShape")
# Before it every initializer is a graph input too.
_INITIALIZERS_ALONE = 4
ValueOf = Callable[[str, int], Array]
"""The value of a weight, in an element type."""


class Deployment:
    """What was read, in evaluation mode and without the contents of the weights that are held elsewhere."""

    def __init__(
        self,
        proto: onnx.ModelProto,
        folder: str,
        nodes: Iterable[Node],
        weights: Iterable[str],
        held: Mapping[str, int],
    ) -> None:
        """`held` are the weights that are held elsewhere, with their element types in the file.

        `nodes` and `weights` are those that were read: a file may store running statistics together with
        other weights, and then they have names of their own.
        """
        self._held = dict(held)
        stored = {tensor.name for tensor in proto.graph.initializer}
        self._fed = frozenset(value.name for value in proto.graph.input if value.name not in stored)
        self._file = _without(proto, folder, nodes, frozenset(weights), held)

    def filled(self, value_of: ValueOf) -> onnx.ModelProto:
        """The file with these values, in the element types that it has.

        Raises:
            UnsupportedOperatorError: a weight lies inside of control flow.
        """
        proto = onnx.ModelProto()
        proto.CopyFrom(self._file)
        graph = proto.graph
        missing = {name: _tensor(name, value_of(name, dtype), dtype) for name, dtype in self._held.items()}
        for tensor in graph.initializer:
            if tensor.name in missing:
                tensor.raw_data = missing.pop(tensor.name).raw_data
        read = {name for node in graph.node for name in node.input} | {v.name for v in graph.output}
        lost = [name for name in missing if name not in read]
        if lost:
            raise UnsupportedOperatorError(
                f"weight '{lost[0]}' lies inside of control flow, where it cannot be written back; "
                "export the model without it"
            )
        makes_missing = [node.op_type in _CONSTANTS and node.output[0] in missing for node in graph.node]
        kept = [node for node, goes in zip(graph.node, makes_missing, strict=True) if not goes]
        if missing:
            made = [node for node, goes in zip(graph.node, makes_missing, strict=True) if goes]
            removed = {name for node in made for name in node.input}
            del graph.node[:]
            graph.node.extend(kept)
            idle = removed.difference(name for node in kept for name in node.input)
            stored = [tensor for tensor in graph.initializer if tensor.name not in idle]
            inputs = [value for value in graph.input if value.name not in idle.difference(self._fed)]
            del graph.input[:]
            graph.input.extend(inputs)
            del graph.initializer[:]
            graph.initializer.extend([*stored, *missing.values()])
            proto.ir_version = max(proto.ir_version, _INITIALIZERS_ALONE)
        return proto


def _tensor(name: str, value: Array, dtype: int) -> onnx.TensorProto:
    assert value.dtype == helper.tensor_dtype_to_np_dtype(dtype), "values come in the file's types"
    return onnx.TensorProto(name=name, data_type=dtype, dims=value.shape, raw_data=value.tobytes())


def _without(
    source: onnx.ModelProto,
    folder: str,
    nodes: Iterable[Node],
    weights: frozenset[str],
    held: Mapping[str, int],
) -> onnx.ModelProto:
    """A copy of the file in which held weights are empty and all others inside."""
    shell = onnx.ModelProto()
    for descriptor, value in source.ListFields():
        if descriptor.name == "graph":
            continue
        if descriptor.is_repeated:
            getattr(shell, descriptor.name).extend(value)
        else:
            setattr(shell, descriptor.name, value)
    graph = shell.graph
    for descriptor, value in source.graph.ListFields():
        if descriptor.name == "initializer":
            graph.initializer.extend(_emptied(tensor, held, folder) for tensor in value)
        elif descriptor.is_repeated:
            getattr(graph, descriptor.name).extend(value)
        else:
            setattr(graph, descriptor.name, value)
    _read_own_statistics(graph, nodes, weights)
    _evaluate(graph)
    return shell


def _emptied(tensor: onnx.TensorProto, held: Mapping[str, int], folder: str) -> onnx.TensorProto:
    if tensor.name in held:
        return onnx.TensorProto(
            name=tensor.name,
            data_type=tensor.data_type,
            dims=tensor.dims,
            doc_string=tensor.doc_string,
            metadata_props=tensor.metadata_props,
        )
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    if copy.data_location == onnx.TensorProto.EXTERNAL:
        external_data_helper.load_external_data_for_tensor(copy, folder)
        copy.data_location = onnx.TensorProto.DEFAULT
        del copy.external_data[:]
    return copy


def _evaluate(graph: onnx.GraphProto) -> None:
    """Turns, in place, what an export in training mode left on to evaluation."""
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for node in graph.node:
        if node.op_type == "Dropout":
            del node.input[2:]
        elif node.op_type == "BatchNormalization" and not read.intersection(node.output[1:]):
            del node.output[1:]
            kept = [attribute for attribute in node.attribute if attribute.name != "training_mode"]
            del node.attribute[:]
            node.attribute.extend(kept)


def _read_own_statistics(graph: onnx.GraphProto, nodes: Iterable[Node], weights: frozenset[str]) -> None:
    """Nodes whose running statistics a file stores together with others read the ones that they got."""
    read = {node.outputs[0]: node.inputs[3:5] for node in nodes if node.op == "BatchNormalization"}
    for node in graph.node:
        own = read.get(node.output[0]) if node.op_type == "BatchNormalization" else None
        for index, name in enumerate(own or (), 3):
            if node.input[index] != name and name in weights:
                node.input[index] = name
