"""Brings single operators of newer opsets down to an older one, where they mean the same there.

Most newer versions of an operator only add element types. The node is then the same at both opsets,
which its operator's two definitions show: known attributes, number of inputs and element types. What a
definition does not show stands in a table of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
from onnx import defs

from onnxgc.model.core.draft import ONNX_DOMAINS, Draft, attributes_of, subgraphs
from onnxgc.model.core.ir import Node


class CannotLowerError(Exception):
    """An operator that has no like at the older opset; the text says why."""


def lowered_nodes(draft: Draft, opset: int) -> tuple[Node, ...]:
    """The draft's nodes at the older opset; types must be known.

    Raises:
        CannotLowerError: naming every operator that cannot come down, with its reason and first node.
    """
    lowered: list[Node] = []
    obstacles: dict[str, str] = {}
    for node in draft.nodes:
        try:
            lowered.append(_lowered(node, draft, opset))
        except CannotLowerError as error:
            obstacles.setdefault(str(error), node.name)
    if obstacles:
        raise CannotLowerError("; ".join(f"{reason} at '{name}'" for reason, name in obstacles.items()))
    return tuple(lowered)


def is_newer_function(op: str, source_opset: int, opset: int) -> bool:
    """Whether ONNX defines an operator that the older opset lacks by other operators."""
    if defs.has(op, opset, "") or not defs.has(op, source_opset, ""):
        return False
    schema = defs.get_schema(op, source_opset, "")
    return bool(schema.has_function or schema.has_context_dependent_function)  # type: ignore[attr-defined]


def _lowered(node: Node, draft: Draft, opset: int) -> Node:
    if node.domain:
        return node
    node = _with_lowered_bodies(node, draft, opset)
    if not defs.has(node.op, draft.opset, ""):
        return node
    source = defs.get_schema(node.op, draft.opset, "")
    if source.since_version <= opset:
        return node
    if not defs.has(node.op, opset, ""):
        raise CannotLowerError(f"{node.op} is new in opset {source.since_version}")
    target = defs.get_schema(node.op, opset, "")
    if node.op in _CHANGES:
        node = _CHANGES[node.op](node, draft)
    _check_types(node, draft, target)
    return _without_newer_attributes(node, source, target)


def _without_newer_attributes(node: Node, source: defs.OpSchema, target: defs.OpSchema) -> Node:
    """The node without attributes that the older definition lacks and that say nothing."""
    kept: dict[str, Any] = {}
    for name, value in node.attributes.items():
        if name in target.attributes or name.startswith("__"):
            kept[name] = value
        elif not _is_neutral(name, value, source):
            raise CannotLowerError(f"{node.op} has the attribute {name}, which is newer")
    return node.with_changes(attributes=kept)


def _is_neutral(name: str, value: Any, source: defs.OpSchema) -> bool:
    if name == "dilations":
        return all(step == 1 for step in value)
    if name not in source.attributes:
        return False
    default = attributes_of(onnx.NodeProto(attribute=[source.attributes[name].default_value]))
    return bool(value == default.get(name))


def _check_types(node: Node, draft: Draft, target: defs.OpSchema) -> None:
    for names, formals, most in (
        (node.inputs, target.inputs, target.max_input),
        (node.outputs, target.outputs, target.max_output),
    ):
        if len(names) > most:
            raise CannotLowerError(f"{node.op} has {len(names)} inputs or outputs, more than before")
        for index, name in enumerate(names):
            kind = draft.type_of(name) if name else None
            formal = formals[min(index, len(formals) - 1)]
            if kind is not None and _type_text(kind.dtype) not in formal.types:
                raise CannotLowerError(f"{node.op} of {_element_name(kind.dtype)} is newer")


def _type_text(dtype: int) -> str:
    return f"tensor({_element_name(dtype)})"


def _element_name(dtype: int) -> str:
    return str(onnx.TensorProto.DataType.Name(dtype)).lower()


def _with_lowered_bodies(node: Node, draft: Draft, opset: int) -> Node:
    """The node with its bodies lowered too; the types of what they compute are not looked at."""
    if not any(True for _ in subgraphs(node)):
        return node
    attributes = {
        key: _lowered_body(value, draft, opset) if isinstance(value, onnx.GraphProto) else value
        for key, value in node.attributes.items()
    }
    return node.with_changes(attributes=attributes)


def _lowered_body(graph: onnx.GraphProto, draft: Draft, opset: int) -> onnx.GraphProto:
    lowered = onnx.GraphProto()
    lowered.CopyFrom(graph)
    del lowered.node[:]
    for proto in graph.node:
        domain = "" if proto.domain in ONNX_DOMAINS else proto.domain
        node = Node(
            proto.op_type,
            tuple(proto.input),
            tuple(proto.output),
            attributes_of(proto),
            name=proto.name,
            domain=domain,
        )
        lowered.node.append(_lowered(node, draft, opset).to_proto())
    return lowered


# -- what changed beside types and attributes -------------------------------------------------


def _allowed(attribute: str, values: Sequence[str]) -> Callable[[Node, Draft], Node]:
    """A change that only adds values of an attribute: others than these are newer."""

    def check(node: Node, draft: Draft) -> Node:
        value = node.attribute(attribute, values[0])
        if value not in values:
            raise CannotLowerError(f"{node.op} with {attribute} '{value}' is newer")
        return node

    return check


def _cast(node: Node, draft: Draft) -> Node:
    """`saturate` and `round_mode` only matter to types that the older form does not have."""
    kept = {key: node.attributes[key] for key in ("to",) if key in node.attributes}
    return node.with_changes(attributes=kept)


def _dft(node: Node, draft: Draft) -> Node:
    """The axis was an attribute, and counted from the front."""
    kind = draft.type_of(node.inputs[0])
    axis = -2
    if len(node.inputs) > 2 and node.inputs[2]:
        weight = draft.weights.get(node.inputs[2])
        if weight is None:
            raise CannotLowerError("DFT with a computed axis is newer")
        axis = int(weight.load().reshape(-1)[0])
    if kind is None:
        raise CannotLowerError("DFT of unknown rank")
    return node.with_changes(
        inputs=node.inputs[:2] if len(node.inputs) > 1 and node.inputs[1] else node.inputs[:1],
        attributes={**node.attributes, "axis": axis % len(kind.shape)},
    )


_GRID_SAMPLE_MODES = {"linear": "bilinear", "cubic": "bicubic", "nearest": "nearest"}


def _grid_sample(node: Node, draft: Draft) -> Node:
    """Modes had the names of two dimensions, and there were no other numbers of them."""
    kind = draft.type_of(node.inputs[0])
    mode = node.attribute("mode", "linear")
    if mode not in _GRID_SAMPLE_MODES or (kind is not None and len(kind.shape) != 4):
        raise CannotLowerError("GridSample of other than two dimensions is newer")
    return node.with_changes(attributes={**node.attributes, "mode": _GRID_SAMPLE_MODES[mode]})


def _group_normalization(node: Node, draft: Draft) -> Node:
    raise CannotLowerError("GroupNormalization with a scale for each channel is newer")


_CHANGES: Mapping[str, Callable[[Node, Draft], Node]] = {
    "Cast": _cast,
    "CastLike": _cast,
    "DFT": _dft,
    "GridSample": _grid_sample,
    "GroupNormalization": _group_normalization,
    "Pad": _allowed("mode", ("constant", "reflect", "edge")),
    "Resize": _allowed(
        "coordinate_transformation_mode",
        ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize"),
    ),
}
