"""Types of the tensors that the backward pass adds."""

from collections.abc import Mapping, Sequence

import onnx
from onnx import helper, numpy_helper

from onnxgc.errors import ShapeError
from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.model.files.contrib_domain import RUNTIME_DOMAIN


def type_of_array(value: Array) -> TensorType:
    """The ONNX type of a numpy value."""
    return TensorType(helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


def infer_types(
    nodes: Sequence[Node], known: Mapping[str, TensorType], constants: Mapping[str, Array], opset: int
) -> dict[str, TensorType]:
    """Types of all outputs of `nodes`, by one pass of ONNX's shape inference.

    `known` are the types of all other tensors that the nodes read, except for `constants`.

    Raises:
        ShapeError: a tensor's shape is not inferred, or a rule emitted an invalid node (a bug).
    """
    computed = {name for node in nodes for name in node.outputs}
    outside = dict.fromkeys(
        name for node in nodes for name in node.inputs if name and name not in computed and name not in constants
    )
    graph = helper.make_graph(
        [_in_standard_form(node).to_proto() for node in nodes],
        "backward",
        [helper.make_tensor_value_info(name, known[name].dtype, known[name].shape) for name in outside],
        [],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    try:
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError as error:
        raise ShapeError(f"the backward graph is not valid: {error}") from error
    types: dict[str, TensorType] = {}
    for info in inferred.graph.value_info:
        tensor = info.type.tensor_type
        if all(dim.HasField("dim_value") for dim in tensor.shape.dim):
            shape = tuple(dim.dim_value for dim in tensor.shape.dim)
            types[info.name] = TensorType(tensor.elem_type, shape)
    for node in nodes:
        for name in node.outputs:
            if name and name not in types:
                raise ShapeError(f"no shape for tensor '{name}' of {node.location} in backward")
    return types


def _in_standard_form(node: Node) -> Node:
    """A node with the same types as a node of ONNX Runtime's domain, which ONNX's inference does not know."""
    if (node.domain, node.op) != (RUNTIME_DOMAIN, "FusedMatMul"):
        return node
    left = "km" if node.attribute("transA", 0) else "mk"
    right = "nk" if node.attribute("transB", 0) else "kn"
    equation = f"...{left},...{right}->...mn"
    return node.with_changes(op="Einsum", domain="", attributes={"equation": equation})
