"""Static types of all tensors in a training file, most of whose first dimensions are names."""

import math

import onnx
from onnx import helper, shape_inference

from onnxgc.errors import ModelFileError
from onnxgc.model.core.draft import attributes_of
from onnxgc.model.core.ir import TensorType

_MAX_ELEMENTS = 64
"""Elements of an initializer whose contents inference may need, at most: a shape, axes, scales."""


def static_types(model: onnx.ModelProto) -> dict[str, TensorType]:
    """Types by tensor. Barriers add zeros to shapes, which ONNX's inference computes.

    Raises:
        ModelFileError: a tensor's type cannot be inferred.
    """
    inferred = shape_inference.infer_shapes(_inferable(model), data_prop=True).graph
    found: dict[str, TensorType] = {}
    for graph in (model.graph, inferred):
        found |= {tensor.name: TensorType(tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer}
        for value in (*graph.input, *graph.value_info, *graph.output):
            dimensions = value.type.tensor_type.shape.dim
            if all(dim.HasField("dim_value") for dim in dimensions):
                shape = tuple(dim.dim_value for dim in dimensions)
                found[value.name] = TensorType(value.type.tensor_type.elem_type, shape)
    for node in model.graph.node:
        if missing := [name for name in node.output if name and name not in found]:
            raise ModelFileError(
                f"the type of tensor '{missing[0]}' of node '{node.name}' cannot be inferred; write the "
                "training file again with `onnxgc optimize`"
            )
    return found


def _inferable(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph without types and large contents, and with standard operators only."""
    graph = model.graph
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in (*graph.value_info, *graph.input)}
    small = [tensor for tensor in graph.initializer if _decides_shapes(tensor)]
    constant = {tensor.name for tensor in small}
    inputs = [value for value in graph.input if value.name not in constant]
    known = {value.name for value in inputs} | constant
    inputs += [
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in graph.initializer
        if tensor.name not in known
    ]
    nodes = [new for node in graph.node for new in _in_standard_operators(node, ranks)]
    shell = helper.make_graph(nodes, graph.name, inputs, list(graph.output), small)
    return helper.make_model(shell, opset_imports=model.opset_import, ir_version=model.ir_version)


def _decides_shapes(tensor: onnx.TensorProto) -> bool:
    is_external = tensor.data_location == onnx.TensorProto.EXTERNAL
    return not is_external and math.prod(tensor.dims) <= _MAX_ELEMENTS


def _in_standard_operators(node: onnx.NodeProto, ranks: dict[str, int]) -> list[onnx.NodeProto]:
    """The node; FusedMatMul, the only other operator of training files, as MatMul of transposed tensors."""
    if (node.domain, node.op_type) != ("com.microsoft", "FusedMatMul"):
        return [node]
    attributes = attributes_of(node)
    nodes, inputs = [], []
    for name, flag in zip(node.input, ("transA", "transB"), strict=True):
        inputs.append(name)
        if attributes.get(flag):
            rank = ranks[name]
            inputs[-1] = f"{node.output[0]}/{flag}"
            perm = [*range(rank - 2), rank - 1, rank - 2]
            nodes.append(helper.make_node("Transpose", [name], [inputs[-1]], perm=perm))
    return [*nodes, helper.make_node("MatMul", inputs, list(node.output))]
