"""The file that a model came from, with other values for its weights."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import torch
from onnx import external_data_helper

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.forward import ForwardModel
from onnxgc.torch.calls import DTYPES

_CONSTANTS = ("Constant", "ConstantOfShape")
# Before it every initializer is a graph input too.
_INITIALIZERS_ALONE = 4


class Deployment:
    """What was read, in evaluation mode and without the contents of the weights that a module holds."""

    def __init__(self, model: ForwardModel, held: Mapping[str, int]) -> None:
        """`held` are the weights that a module holds, with their element types in the file."""
        self._held = dict(held)
        self._file = _without(model, held)

    def filled(self, values: Mapping[str, torch.Tensor]) -> onnx.ModelProto:
        """The file with these values, in the element types that it has.

        Raises:
            UnsupportedOperatorError: a weight lies inside of control flow.
        """
        proto = onnx.ModelProto()
        proto.CopyFrom(self._file)
        graph = proto.graph
        missing = {name: _tensor(name, values[name], dtype) for name, dtype in self._held.items()}
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
        kept = [node for node in graph.node if not (node.op_type in _CONSTANTS and node.output[0] in missing)]
        if missing:
            del graph.node[:]
            graph.node.extend(kept)
            graph.initializer.extend(missing.values())
            proto.ir_version = max(proto.ir_version, _INITIALIZERS_ALONE)
        return proto


def _tensor(name: str, value: torch.Tensor, dtype: int) -> onnx.TensorProto:
    contents = value.detach().to("cpu", DTYPES[dtype]).contiguous().reshape(-1).view(torch.uint8)
    return onnx.TensorProto(name=name, data_type=dtype, dims=value.shape, raw_data=contents.numpy().tobytes())


def _without(model: ForwardModel, held: Mapping[str, int]) -> onnx.ModelProto:
    """A copy of the file in which held weights are empty and all others inside."""
    source = model.proto
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
            graph.initializer.extend(_emptied(tensor, held, model.folder) for tensor in value)
        elif descriptor.is_repeated:
            getattr(graph, descriptor.name).extend(value)
        else:
            setattr(graph, descriptor.name, value)
    _read_own_statistics(graph, model)
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


def _read_own_statistics(graph: onnx.GraphProto, model: ForwardModel) -> None:
    """Nodes whose running statistics a file stores together with others read the ones that they got."""
    read = {node.outputs[0]: node.inputs[3:5] for node in model.nodes if node.op == "BatchNormalization"}
    for node in graph.node:
        own = read.get(node.output[0]) if node.op_type == "BatchNormalization" else None
        for index, name in enumerate(own or (), 3):
            if node.input[index] != name and name in model.roles:
                node.input[index] = name
