"""A loss from a second model, as a function of the first model's outputs."""

import os

import onnx
from onnx import helper

from onnxgc.errors import LossError
from onnxgc.model.core.draft import fresh_name
from onnxgc.model.files.load import load_proto

_DOMAIN, _NAME = "onnxgc.loss", "loss"


def read_loss_model(source: str | os.PathLike[str] | onnx.ModelProto) -> bytes:
    """A loss model as one message without external data.

    Raises:
        LossError: it does not have one output.
        ModelFileError: the file is missing, or not a valid ONNX model.
    """
    loss, folder = load_proto(source)
    if len(loss.graph.output) != 1:
        raise LossError(
            f"the loss model '{loss.graph.name}' has {len(loss.graph.output)} outputs; give one whose only output is "
            "the loss, a scalar"
        )
    copy = onnx.ModelProto()
    copy.CopyFrom(loss)
    onnx.external_data_helper.load_external_data_for_model(copy, folder)
    contents: bytes = copy.SerializeToString()
    return contents


def with_loss_model(model: onnx.ModelProto, loss: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """The model with the loss as its first output, and the name of that output.

    An input of the loss with the name of an output or input of the model reads it; if none has the name of an
    output, the first input reads the model's only output. All others are inputs of the result. If their first
    dimension is symbolic, it is that of the model's first input.

    Raises:
        LossError: the inputs of the loss have no such names, and the model has several outputs.
    """
    stored = {tensor.name for tensor in (*model.graph.initializer, *loss.graph.initializer)}
    outputs = [value.name for value in model.graph.output]
    inputs = [value for value in model.graph.input if value.name not in stored]
    fed = [value for value in loss.graph.input if value.name not in stored]
    read = {value.name: value.name for value in fed}
    if not read.keys() & set(outputs):
        if len(outputs) > 1 or not fed:
            raise LossError(
                f"no input of the loss model ({', '.join(map(repr, read)) or 'none'}) is an output of the model "
                f"({', '.join(map(repr, outputs))}); rename one"
            )
        read[fed[0].name] = outputs[0]
    merged = onnx.ModelProto()
    merged.CopyFrom(model)
    known = {*outputs, *(value.name for value in inputs)}
    for value in fed:
        if read[value.name] not in known:
            _declare(value, inputs[:1], merged.graph)
    graph = model.graph
    taken = {value.name for value in merged.graph.input} | {tensor.name for tensor in graph.initializer}
    taken |= {name for node in graph.node for name in (*node.input, *node.output)}
    name = fresh_name(loss.graph.output[0].name, taken)
    call = helper.make_node(_NAME, [read[value.name] for value in fed], [name], name=_NAME, domain=_DOMAIN)
    merged.graph.node.append(call)
    result = onnx.ValueInfoProto()
    result.CopyFrom(loss.graph.output[0])
    result.name = name
    merged.graph.output.insert(0, result)
    merged.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    merged.functions.append(_as_function(loss, [value.name for value in fed]))
    imported = {entry.domain for entry in merged.opset_import}
    merged.opset_import.extend(entry for entry in loss.opset_import if entry.domain not in imported)
    merged.ir_version = max(merged.ir_version, loss.ir_version)
    return load_proto(merged)[0], name


def _declare(value: onnx.ValueInfoProto, first: list[onnx.ValueInfoProto], graph: onnx.GraphProto) -> None:
    """Adds an input of the loss to the model's."""
    declared = graph.input.add()
    declared.CopyFrom(value)
    shape = declared.type.tensor_type.shape.dim
    samples = first[0].type.tensor_type.shape.dim if first else ()
    if shape and samples and not shape[0].dim_value:
        shape[0].CopyFrom(samples[0])


def _as_function(loss: onnx.ModelProto, inputs: list[str]) -> onnx.FunctionProto:
    """The graph as a function: names in it cannot clash with the model's, and it keeps its opset."""
    constants = [
        helper.make_node("Constant", [], [tensor.name], name=tensor.name, value=tensor)
        for tensor in loss.graph.initializer
    ]
    nodes = [*constants, *loss.graph.node]
    outputs = [loss.graph.output[0].name]
    return helper.make_function(_DOMAIN, _NAME, inputs, outputs, nodes, loss.opset_import)
