"""Corrections of graphs that ONNX's version converter raised to a newer opset.

The converter keeps the spelling of Clip, Hardmax and Resize where the newer opset gives it another meaning.
"""

from onnx import helper

from onnxgc.model.core.draft import Draft
from onnxgc.model.core.graph_writer import GraphWriter
from onnxgc.model.core.ir import Node
from onnxgc.model.core.stored_weights import ArrayWeight

# Up to this opset Resize and Upsample use asymmetric coordinates, and nearest rounds down or up.
_LAST_OPSET_OF_OLDER_RESIZING = 10
# Up to this opset Hardmax flattens all dimensions from its axis on.
_LAST_OPSET_OF_FLATTENING_HARDMAX = 12


def with_converter_fixes(draft: Draft, source_opset: int) -> Draft:
    """The converted draft with the meaning of its source opset.

    Raises:
        RuntimeError: a node has no equivalent at the newer opset.
    """
    draft = _with_clip_limits_in_input_type(draft)
    if source_opset <= _LAST_OPSET_OF_FLATTENING_HARDMAX:
        draft = _with_flattening_hardmax(draft)
    if source_opset <= _LAST_OPSET_OF_OLDER_RESIZING:
        draft = draft.with_changes(nodes=tuple(_with_older_resizing(node, draft) for node in draft.nodes))
    return draft


def _with_clip_limits_in_input_type(draft: Draft) -> Draft:
    """The draft with Clip's limits in the type of its input; the converter makes them float32."""
    weights = dict(draft.weights)
    for node in draft.nodes:
        kind = draft.type_of(node.inputs[0]) if node.op == "Clip" and not node.domain else None
        for name in node.inputs[1:]:
            limit = weights.get(name)
            if kind is not None and limit is not None and limit.type.dtype != kind.dtype:
                dtype = helper.tensor_dtype_to_np_dtype(kind.dtype)
                weights[name] = ArrayWeight(limit.load().astype(dtype))
    return draft.with_changes(weights=weights)


def _with_flattening_hardmax(draft: Draft) -> Draft:
    """The draft with Hardmax on flattened inputs; the converter leaves the nodes unchanged."""
    writer = GraphWriter(draft)
    for node in draft.nodes:
        if node.domain or node.op != "Hardmax":
            writer.nodes.append(node)
            continue
        kind = draft.type_of(node.inputs[0])
        if kind is None:
            raise RuntimeError(f"{node.location} of an older opset needs a static shape")
        axis, rank = int(node.attribute("axis", 1)), len(kind.shape)
        over_last = node.with_changes(attributes={"axis": -1})
        if axis in (-1, rank - 1):
            writer.nodes.append(over_last)
            continue
        flat, maxima = (writer.names.fresh(f"{node.outputs[0]}/{part}") for part in ("flat", "found"))
        shape = writer.int_constant(f"{node.outputs[0]}/shape", kind.shape)
        writer.nodes += [
            node.as_operator("Flatten", node.inputs, (flat,), f"{node.name}/flat", axis=axis),
            over_last.with_changes(inputs=(flat,), outputs=(maxima,), name=f"{node.name}/found"),
            node.as_operator("Reshape", (maxima, shape)),
        ]
    return writer.result()


def _with_older_resizing(node: Node, draft: Draft) -> Node:
    """A Resize with the coordinates and rounding of older opsets; the converter sets newer defaults.

    A node that enlarges along one axis and shrinks along another rounds each in its own way.
    """
    if node.domain or node.op != "Resize":
        return node
    modes = {"coordinate_transformation_mode": "asymmetric"}
    if node.attribute("mode", "nearest") == "nearest":
        scales = draft.weights[node.inputs[2]].load() if node.inputs[2] in draft.weights else None
        if scales is None or (scales.min() < 1 < scales.max()):
            raise RuntimeError(
                f"{node.location} of an older opset needs constant scales that all enlarge or all shrink"
            )
        modes["nearest_mode"] = "ceil" if scales.min() < 1 else "floor"
    return node.with_changes(attributes={**node.attributes, **modes})
