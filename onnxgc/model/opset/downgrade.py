"""Conversion of single operators from a newer opset to an older one, where both have the same meaning.

Most newer versions of an operator only add element types. A node is then equal at both opsets if the older
definition has its attributes, number of inputs and element types. `_CHANGES` handles the operators whose
definitions hide a difference.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
from onnx import defs

from onnxgc.model.core.draft import Draft, attributes_of, subgraphs
from onnxgc.model.core.ir import Node
from onnxgc.model.operators.facts import has_input
from onnxgc.model.static_shapes.control_flow import outer_node


class CannotDowngradeError(Exception):
    """An operator has no equivalent at the older opset; the text states the reason."""


def downgraded_nodes(draft: Draft, opset: int) -> tuple[Node, ...]:
    """The draft's nodes at the older opset; types must be inferred.

    Raises:
        CannotDowngradeError: lists every operator without an equivalent, its reason and first node.
    """
    downgraded: list[Node] = []
    obstacles: dict[str, str] = {}
    for node in draft.nodes:
        try:
            downgraded.append(_downgraded(node, draft, opset))
        except CannotDowngradeError as error:
            obstacles.setdefault(str(error), node.name)
    if obstacles:
        raise CannotDowngradeError("; ".join(f"{reason} at '{name}'" for reason, name in obstacles.items()))
    return tuple(downgraded)


def _downgraded(node: Node, draft: Draft, opset: int) -> Node:
    if node.domain:
        return node
    node = _with_downgraded_bodies(node, draft, opset)
    if not defs.has(node.op, draft.opset, ""):
        return node
    source = defs.get_schema(node.op, draft.opset, "")
    if source.since_version <= opset:
        return node
    if not defs.has(node.op, opset, ""):
        raise CannotDowngradeError(f"{node.op} is new in opset {source.since_version}")
    target = defs.get_schema(node.op, opset, "")
    if node.op in _CHANGES:
        node = _CHANGES[node.op](node, draft)
    _check_types(node, draft, target)
    return _without_newer_attributes(node, source, target)


def _without_newer_attributes(node: Node, source: defs.OpSchema, target: defs.OpSchema) -> Node:
    """The node without newer attributes, which must have neutral values."""
    kept: dict[str, Any] = {}
    for name, value in node.attributes.items():
        if name in target.attributes or name.startswith("__"):
            kept[name] = value
        elif not _is_neutral(name, value, source):
            raise CannotDowngradeError(f"{node.op} has the attribute {name}, which needs a newer opset")
    return node.with_changes(attributes=kept)


def _is_neutral(name: str, value: Any, source: defs.OpSchema) -> bool:
    if name == "dilations":
        return all(step == 1 for step in value)
    if name not in source.attributes:
        return False
    default = attributes_of(onnx.NodeProto(attribute=[source.attributes[name].default_value]))
    return bool(value == default.get(name))


def _check_types(node: Node, draft: Draft, target: defs.OpSchema) -> None:
    for names, formals, max_count in (
        (node.inputs, target.inputs, target.max_input),
        (node.outputs, target.outputs, target.max_output),
    ):
        if len(names) > max_count:
            raise CannotDowngradeError(f"{node.op} with {len(names)} inputs or outputs needs a newer opset")
        for index, name in enumerate(names):
            kind = draft.type_of(name) if name else None
            formal = formals[min(index, len(formals) - 1)]
            element = "" if kind is None else onnx.TensorProto.DataType.Name(kind.dtype).lower()
            if element and f"tensor({element})" not in formal.types:
                raise CannotDowngradeError(f"{node.op} of {element} needs a newer opset")


def _with_downgraded_bodies(node: Node, draft: Draft, opset: int) -> Node:
    """The node with its bodies at the older opset; element types inside bodies are not checked."""
    if not any(True for _ in subgraphs(node)):
        return node
    attributes = {
        key: _downgraded_body(value, draft, opset) if isinstance(value, onnx.GraphProto) else value
        for key, value in node.attributes.items()
    }
    return node.with_changes(attributes=attributes)


def _downgraded_body(graph: onnx.GraphProto, draft: Draft, opset: int) -> onnx.GraphProto:
    downgraded = onnx.GraphProto()
    downgraded.CopyFrom(graph)
    del downgraded.node[:]
    for proto in graph.node:
        downgraded.node.append(_downgraded(outer_node(proto, {}), draft, opset).to_proto())
    return downgraded


# -- changes other than types and attributes --


def _with_values(attribute: str, values: Sequence[str]) -> Callable[[Node, Draft], Node]:
    """Accepts only these values of an attribute; newer versions add others."""

    def check(node: Node, draft: Draft) -> Node:
        value = node.attribute(attribute, values[0])
        if value not in values:
            raise CannotDowngradeError(f"{node.op} with {attribute} '{value}' needs a newer opset")
        return node

    return check


def _cast(node: Node, draft: Draft) -> Node:
    """`saturate` and `round_mode` affect only types that the older version lacks."""
    return node.with_changes(attributes={key: node.attributes[key] for key in node.attributes if key == "to"})


def _dft(node: Node, draft: Draft) -> Node:
    """The older version has the axis as a nonnegative attribute."""
    kind = draft.type_of(node.inputs[0])
    axis = -2
    if has_input(node, 2):
        weight = draft.weights.get(node.inputs[2])
        if weight is None:
            raise CannotDowngradeError("DFT with a computed axis needs a newer opset")
        axis = int(weight.load().reshape(-1)[0])
    if kind is None:
        raise CannotDowngradeError("DFT of unknown rank needs a newer opset")
    return node.with_changes(
        inputs=node.inputs[:2] if has_input(node, 1) else node.inputs[:1],
        attributes={**node.attributes, "axis": axis % len(kind.shape)},
    )


_GRID_SAMPLE_MODES = {"linear": "bilinear", "cubic": "bicubic", "nearest": "nearest"}


def _grid_sample(node: Node, draft: Draft) -> Node:
    """The older version has two dimensions only, and names modes accordingly."""
    kind = draft.type_of(node.inputs[0])
    mode = node.attribute("mode", "linear")
    if mode not in _GRID_SAMPLE_MODES or (kind is not None and len(kind.shape) != 4):
        raise CannotDowngradeError("GridSample of other than two dimensions needs a newer opset")
    return node.with_changes(attributes={**node.attributes, "mode": _GRID_SAMPLE_MODES[mode]})


def _group_normalization(node: Node, draft: Draft) -> Node:
    raise CannotDowngradeError("GroupNormalization with a scale for each channel needs a newer opset")


_CHANGES: Mapping[str, Callable[[Node, Draft], Node]] = {
    "Cast": _cast,
    "CastLike": _cast,
    "DFT": _dft,
    "GridSample": _grid_sample,
    "GroupNormalization": _group_normalization,
    "Pad": _with_values("mode", ("constant", "reflect", "edge")),
    "Resize": _with_values(
        "coordinate_transformation_mode",
        ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize"),
    ),
}
