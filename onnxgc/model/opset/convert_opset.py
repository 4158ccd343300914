"""Conversion of a draft to the target opset: up by ONNX's version converter, down by `downgrade`.

The converter gets the graph without its weights, so its time does not depend on the model's size.
"""

from collections.abc import Callable, Container, Sequence

import onnx
from onnx import defs, helper, inliner, numpy_helper, version_converter

from onnxgc.errors import ModelFileError
from onnxgc.model.core.draft import Draft, attributes_of
from onnxgc.model.core.ir import Node, TensorType, Weight
from onnxgc.model.core.stored_weights import StoredWeight, is_external
from onnxgc.model.files.proto_to_draft import lift_constants, with_node_names
from onnxgc.model.opset.converter_fixes import with_converter_fixes
from onnxgc.model.opset.downgrade import CannotDowngradeError, downgraded_nodes
from onnxgc.model.opset.stable_mean_variance import with_stable_mean_variance
from onnxgc.model.static_shapes.shape_walk import infer_shapes

TARGET_OPSET = 18
TARGET_IR_VERSION = 9
# Below this opset Add and similar operators broadcast by an attribute, which no tool converts correctly.
MIN_OPSET = 7
# Below this opset Scan takes a batch of sequences with lengths, which the converter misinterprets.
_MIN_OPSET_OF_SCAN = 9
# Functions without a CUDA kernel at any opset.
EXPANDED_ALWAYS = (
    "CenterCropPad",
    "MeanVarianceNormalization",
    "Mish",
    "NegativeLogLikelihoodLoss",
    "SoftmaxCrossEntropyLoss",
)
# In elements. The converter moves small constants between inputs and attributes, so it needs their values.
_MAX_SHOWN_ELEMENTS = 1024


def check_supported(draft: Draft) -> None:
    """Refuses opsets whose broadcasting or Scan cannot be converted.

    Raises:
        ModelFileError: the opset is too old.
    """
    if draft.opset < MIN_OPSET:
        raise ModelFileError(
            f"the model has opset {draft.opset}, but the oldest supported opset is {MIN_OPSET}; "
            f"export it at opset {TARGET_OPSET}"
        )
    for node in draft.nodes:
        if node.op == "Scan" and not node.domain and draft.opset < _MIN_OPSET_OF_SCAN:
            raise ModelFileError(
                f"{node.location} has the form of opset {draft.opset}, which is not supported; "
                f"export the model at opset {_MIN_OPSET_OF_SCAN} or later"
            )


def at_target_opset(draft: Draft, kept: Container[str] = ()) -> Draft:
    """The draft at opset 18 and IR 9 where its operators allow it, else at its own opset.

    Functions without a CUDA kernel are replaced by their definitions, except those in `kept`.

    Raises:
        ModelFileError: an operator of an older opset cannot be converted.
    """
    draft = draft if "MeanVarianceNormalization" in kept else with_stable_mean_variance(draft)
    draft = _expanded(draft, [op for op in EXPANDED_ALWAYS if op not in kept])
    if draft.opset > TARGET_OPSET:
        return _downgraded(infer_shapes(draft))
    if draft.opset == TARGET_OPSET:
        return draft.with_changes(ir_version=TARGET_IR_VERSION)
    try:
        return _upgraded(draft)
    except (RuntimeError, version_converter.ConvertError) as error:
        raise ModelFileError(
            f"the model cannot be converted from opset {draft.opset} to {TARGET_OPSET}: {_reason(error)}; "
            f"export it at opset {TARGET_OPSET}"
        ) from error


def in_known_operators(draft: Draft, known: Container[str]) -> Draft:
    """The draft at opset 18, or at its own where that is newer, in `known` operators where possible.

    Unknown functions are replaced by their definitions in ONNX. Types must be inferred.

    Raises:
        ModelFileError: an operator of an older opset cannot be converted.
    """
    while present := _functions(draft, lambda op: op in known):
        draft = infer_shapes(_expanded(draft, present))
    return draft if draft.opset > TARGET_OPSET else at_target_opset(draft, known)


def _downgraded(draft: Draft) -> Draft:
    def is_old(op: str) -> bool:
        return defs.has(op, TARGET_OPSET, "")

    expanded, present = draft, _functions(draft, is_old)
    note = f"the model was converted from opset {draft.opset} to {TARGET_OPSET}"
    if present:
        note += f"; {', '.join(present)} became the operators of its definition"
    try:
        while present:
            # Definitions compute shapes by newer operators, which inference folds.
            expanded = infer_shapes(_expanded(expanded, present))
            present = _functions(expanded, is_old)
        nodes = downgraded_nodes(expanded, TARGET_OPSET)
    except (CannotDowngradeError, RuntimeError) as error:
        return draft.with_notes(
            f"the model stays at opset {draft.opset}, because it cannot be converted to {TARGET_OPSET} "
            f"({_reason(error)}); some of its operators may have no CUDA kernel"
        )
    changed = expanded.with_changes(nodes=nodes, opset=TARGET_OPSET, ir_version=TARGET_IR_VERSION)
    return changed.with_notes(note)


def _functions(draft: Draft, is_kept: Callable[[str], bool]) -> list[str]:
    """The operators that ONNX defines by other operators, without those to keep."""
    return sorted(op for op in _operators(draft) if not is_kept(op) and _is_function(op, draft.opset))


def _is_function(op: str, opset: int) -> bool:
    if not defs.has(op, opset, ""):
        return False
    schema = defs.get_schema(op, opset, "")
    return bool(schema.has_function or schema.has_context_dependent_function)  # type: ignore[attr-defined]


def _operators(draft: Draft) -> set[str]:
    return {node.op for node in draft.nodes if not node.domain}


def _expanded(draft: Draft, operators: Sequence[str]) -> Draft:
    """The draft with these functions replaced by their definitions."""
    if _operators(draft).isdisjoint(operators):
        return draft
    nodes = (_with_defaults(node, draft.opset) if node.op in operators else node for node in draft.nodes)
    shell = _shell(draft.with_changes(nodes=tuple(nodes)), ())
    # Definitions request the type even of an absent optional input between others.
    shell.graph.value_info.append(onnx.ValueInfoProto(name="", type=onnx.TypeProto()))
    names = [("", name) for name in operators]
    graph = inliner.inline_selected_functions(shell, names, inline_schema_functions=True).graph
    return _lifted(draft, graph)


def _with_defaults(node: Node, opset: int) -> Node:
    """The node with its default attributes, which the inliner does not add."""
    if node.domain:
        return node
    schema = defs.get_schema(node.op, opset, "")
    defaults = (attribute.default_value for attribute in schema.attributes.values())
    stated = onnx.NodeProto(attribute=[default for default in defaults if default.name])
    return node.with_changes(attributes={**attributes_of(stated), **node.attributes})


def _shell(draft: Draft, shown: Sequence[str]) -> onnx.ModelProto:
    """The draft as a ModelProto; weights are inputs, except those in `shown`."""
    fed = {name: weight.type for name, weight in draft.weights.items() if name not in shown}
    fed |= {name: draft.types[name] for name in draft.inputs}
    graph = helper.make_graph(
        [node.to_proto() for node in draft.nodes],
        draft.name,
        [_value_info(name, kind) for name, kind in fed.items()],
        [_output_info(name, draft) for name in draft.outputs],
        [numpy_helper.from_array(draft.weights[name].load(), name) for name in shown],
        value_info=[
            _value_info(name, kind)
            for name, kind in draft.types.items()
            if name not in fed and name not in draft.outputs
        ],
    )
    imports = [helper.make_opsetid(*entry) for entry in (("", draft.opset), *draft.other_domains.items())]
    return helper.make_model(graph, opset_imports=imports, ir_version=TARGET_IR_VERSION)


def _upgraded(draft: Draft) -> Draft:
    shown = [name for name, weight in draft.weights.items() if _is_shown(weight)]
    graph = version_converter.convert_version(_shell(draft, shown), TARGET_OPSET).graph
    upgraded = _lifted(draft, graph).with_changes(opset=TARGET_OPSET, ir_version=TARGET_IR_VERSION)
    return with_converter_fixes(upgraded, draft.opset)


def _lifted(draft: Draft, graph: onnx.GraphProto) -> Draft:
    """The draft with the nodes and new constants of a changed shell."""
    known = draft.weights
    added = {tensor.name: StoredWeight(tensor) for tensor in graph.initializer if tensor.name not in known}
    nodes, weights = lift_constants(graph.node, {**known, **added})
    before = {node.name: node for node in draft.nodes}
    return draft.with_changes(
        nodes=tuple(_with_origin(node, before.get(node.name)) for node in with_node_names(nodes)),
        weights=weights,
        derived=draft.derived | (weights.keys() - known.keys()),
    )


def _with_origin(node: Node, source: Node | None) -> Node:
    return node if source is None else node.with_changes(origin=source.origin, module=source.module)


def _is_shown(weight: Weight) -> bool:
    return not weight.type.is_floating and weight.type.element_count <= _MAX_SHOWN_ELEMENTS and not is_external(weight)


def _value_info(name: str, kind: TensorType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind.dtype, kind.shape)


def _output_info(name: str, draft: Draft) -> onnx.ValueInfoProto:
    kind = draft.type_of(name)
    return onnx.ValueInfoProto(name=name) if kind is None else _value_info(name, kind)


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.rpartition("failed: ")[2]
