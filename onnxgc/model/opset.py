"""Brings a draft to the target opset with ONNX's own version converter.

The converter sees the graph without its weights, which keeps it fast whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import defs, helper, inliner, numpy_helper, version_converter

from onnxgc.errors import ModelFileError
from onnxgc.model.draft import Draft, attributes_of
from onnxgc.model.ir import Node, TensorType, Weight
from onnxgc.model.lift import lift_constants, with_node_names
from onnxgc.model.shapes import resolved
from onnxgc.model.weights import is_external

TARGET_OPSET = 18
TARGET_IR_VERSION = 9
# Below it Add and its kind broadcast by an attribute, which no tool raises correctly.
OLDEST_OPSET = 7
# Newer operators that ONNX defines by older ones: their bodies take their place when lowering.
_EXPANDED_TO_LOWER = (
    "Gelu",
    "GroupNormalization",
    "RMSNormalization",
    "Swish",
    "Attention",
    "RotaryEmbedding",
)
# Functions without a kernel on CUDA.
_EXPANDED_ALWAYS = (
    "SoftmaxCrossEntropyLoss",
    "NegativeLogLikelihoodLoss",
    "MeanVarianceNormalization",
    "Celu",
    "Mish",
)
# The converter turns small constants from inputs into attributes and back, so it must see them.
_LARGEST_SEEN = 1024


def check_supported(draft: Draft) -> None:
    """Raises `ModelFileError` for opsets whose operators broadcast in another way."""
    if draft.opset < OLDEST_OPSET:
        raise ModelFileError(
            f"the model is of opset {draft.opset}, and {OLDEST_OPSET} is the oldest that is supported; "
            f"export it at opset {TARGET_OPSET}"
        )


def at_target_opset(draft: Draft) -> Draft:
    """The draft at opset 18 and IR 9 where its operators allow it, else at its own opset.

    Raises:
        ModelFileError: an operator of an older opset cannot be raised.
    """
    draft = _expanded(draft, _EXPANDED_ALWAYS)
    if draft.opset == TARGET_OPSET:
        return draft.with_changes(ir_version=TARGET_IR_VERSION)
    if draft.opset > TARGET_OPSET:
        return _lowered(draft)
    try:
        return _converted(draft)
    except RuntimeError as error:
        raise ModelFileError(
            f"the model cannot be raised from opset {draft.opset} to {TARGET_OPSET}: {_reason(error)}; "
            f"export it at opset {TARGET_OPSET}"
        ) from error


def _lowered(draft: Draft) -> Draft:
    present = _present(draft, _EXPANDED_TO_LOWER)
    note = f"the model was brought down from opset {draft.opset} to {TARGET_OPSET}"
    if present:
        note += f"; {', '.join(present)} became the operators that define it"
    try:
        # Bodies compute shapes with operators that cannot come down themselves, so these are folded first.
        expanded = resolved(_expanded(draft, present)) if present else draft
        return _without_newer_attributes(_converted(expanded), draft.opset).with_notes(note)
    except (RuntimeError, ModelFileError) as error:
        return draft.with_notes(
            f"the model stays at opset {draft.opset}, because it cannot be brought down to {TARGET_OPSET} "
            f"({_reason(error)}); some operators may then have no CUDA kernel"
        )


def _without_newer_attributes(lowered: Draft, source_opset: int) -> Draft:
    """The lowered draft without attributes that its opset does not know and that say nothing.

    The converter keeps them, and a runtime refuses the file.

    Raises:
        RuntimeError: such an attribute says something.
    """
    return lowered.with_changes(nodes=tuple(_without_newer(n, lowered, source_opset) for n in lowered.nodes))


def _without_newer(node: Node, lowered: Draft, source_opset: int) -> Node:
    if node.domain or not defs.has(node.op, lowered.opset, ""):
        return node
    known = defs.get_schema(node.op, lowered.opset, "").attributes
    newer = [name for name in node.attributes if name not in known]
    if not newer:
        return node
    defaults = _with_defaults(Node(node.op, (), ()), source_opset).attributes
    for name in newer:
        value = node.attributes[name]
        neutral = list(value) == [1] * len(value) if name == "dilations" else value == defaults.get(name)
        if not neutral:
            raise RuntimeError(f"{node.op} has the attribute {name}, which is newer")
    return node.with_changes(
        attributes={name: value for name, value in node.attributes.items() if name in known}
    )


def _present(draft: Draft, operators: Sequence[str]) -> list[str]:
    found = {node.op for node in draft.nodes if not node.domain}
    return [name for name in operators if name in found]


def _expanded(draft: Draft, operators: Sequence[str]) -> Draft:
    """The draft with the bodies of these operators, which ONNX defines by others, in their place."""
    if not _present(draft, operators):
        return draft
    nodes = (_with_defaults(node, draft.opset) if node.op in operators else node for node in draft.nodes)
    shell = _shell(draft.with_changes(nodes=tuple(nodes)))
    names = [("", name) for name in operators]
    graph = inliner.inline_selected_functions(shell, names, inline_schema_functions=True).graph
    return _lifted(draft, graph)


def _with_defaults(node: Node, opset: int) -> Node:
    """The node with its default attributes written out, which the inliner does not fill in."""
    if node.domain:
        return node
    schema = defs.get_schema(node.op, opset, "")
    known = {key: attribute.default_value for key, attribute in schema.attributes.items()}
    stated = onnx.NodeProto(attribute=[value for value in known.values() if value.name])
    return node.with_changes(attributes={**attributes_of(stated), **node.attributes})


def _shell(draft: Draft) -> onnx.ModelProto:
    """The draft as a ModelProto whose larger weights are inputs."""
    seen = {name: weight for name, weight in draft.weights.items() if _is_seen(weight)}
    fed = {name: weight.type for name, weight in draft.weights.items() if name not in seen}
    fed |= {name: draft.types[name] for name in draft.inputs}
    graph = helper.make_graph(
        [node.to_proto() for node in draft.nodes],
        draft.name,
        [_value_info(name, kind) for name, kind in fed.items()],
        [_output_info(name, draft) for name in draft.outputs],
        [numpy_helper.from_array(weight.load(), name) for name, weight in seen.items()],
        value_info=[
            _value_info(name, kind)
            for name, kind in draft.types.items()
            if name not in fed and name not in draft.outputs
        ],
    )
    imports = [helper.make_opsetid("", draft.opset)]
    imports += [helper.make_opsetid(domain, version) for domain, version in draft.other_domains.items()]
    return helper.make_model(graph, opset_imports=imports, ir_version=TARGET_IR_VERSION)


def _converted(draft: Draft) -> Draft:
    graph = version_converter.convert_version(_shell(draft), TARGET_OPSET).graph
    return _lifted(draft, graph).with_changes(opset=TARGET_OPSET, ir_version=TARGET_IR_VERSION)


def _lifted(draft: Draft, graph: onnx.GraphProto) -> Draft:
    """The draft with the nodes of a changed shell, and the constants that came with them."""
    added: dict[str, Weight] = {}
    for tensor in graph.initializer:
        if tensor.name not in draft.weights:
            added |= lift_constants([helper.make_node("Constant", [], [tensor.name], value=tensor)], {})[1]
    nodes, weights = lift_constants(graph.node, {**draft.weights, **added})
    before = {node.name: node for node in draft.nodes}
    return draft.with_changes(
        nodes=tuple(_with_origin(node, before) for node in with_node_names(nodes)),
        weights=weights,
        derived=draft.derived | (weights.keys() - draft.weights.keys()),
    )


def _with_origin(node: Node, before: dict[str, Node]) -> Node:
    source = before.get(node.name)
    return node if source is None else node.with_changes(origin=source.origin)


def _is_seen(weight: Weight) -> bool:
    return (
        not weight.type.is_floating and weight.type.element_count <= _LARGEST_SEEN and not is_external(weight)
    )


def _value_info(name: str, kind: TensorType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind.dtype, kind.shape)


def _output_info(name: str, draft: Draft) -> onnx.ValueInfoProto:
    kind = draft.type_of(name)
    return onnx.ValueInfoProto(name=name) if kind is None else _value_info(name, kind)


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.rpartition("failed: ")[2]
