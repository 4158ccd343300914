"""Forward models with weights in float32 that compute in a half precision, as in mixed precision."""

import onnx
from onnx import TensorProto, helper

HALF_TYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
_FILLED = ("Constant", "ConstantOfShape")


def computed_in(model: onnx.ModelProto, kind: str) -> onnx.ModelProto:
    """The model with its float32 inputs and weights cast to `kind`, and its outputs cast back."""
    half, graph = HALF_TYPES[kind], model.graph
    shapes = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*shapes.value_info, *graph.input)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    stored = [value.name for value in graph.input] + [tensor.name for tensor in graph.initializer]
    filled = [node.output[0] for node in graph.node if node.op_type in _FILLED]
    inner = {name: f"{name}__{kind}" for name in (*stored, *filled) if types.get(name) == TensorProto.FLOAT}
    results = {value.name: f"{value.name}__{kind}" for value in graph.output}

    def cast(name: str, new: str, to: int) -> onnx.NodeProto:
        return helper.make_node("Cast", [name], [new], f"{inner.get(name, name)}/Cast", to=to)

    nodes = [cast(name, inner[name], half) for name in stored if name in inner]
    for node in graph.node:
        if node.op_type not in _FILLED:
            nodes.append(_renamed(node, inner | results, half))
            continue
        nodes.append(node)
        if node.output[0] in inner:
            nodes.append(cast(node.output[0], inner[node.output[0]], half))
    nodes += [cast(new, name, TensorProto.FLOAT) for name, new in results.items()]
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.node[:], changed.graph.value_info[:]
    changed.graph.node.extend(nodes)
    return changed


def _renamed(node: onnx.NodeProto, names: dict[str, str], half: int) -> onnx.NodeProto:
    """The node on other tensors; a cast to float32 becomes one to half precision."""
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    del changed.input[:], changed.output[:]
    changed.input.extend(names.get(name, name) for name in node.input)
    changed.output.extend(names.get(name, name) for name in node.output)
    for attribute in changed.attribute:
        if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
            attribute.i = half
    return changed
