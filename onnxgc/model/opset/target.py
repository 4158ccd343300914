"""Brings a draft to the target opset: up with ONNX's own version converter, down by `lowering`.

The converter sees the graph without its weights, which keeps it fast whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
import onnx
from onnx import defs, helper, inliner, numpy_helper, version_converter

from onnxgc.errors import ModelFileError
from onnxgc.model.core.draft import Draft, NameSource, attributes_of
from onnxgc.model.core.ir import Array, Node, TensorType, Weight
from onnxgc.model.core.stored_weights import ArrayWeight, is_external
from onnxgc.model.files.lift_weights import lift_constants, with_node_names
from onnxgc.model.opset.downgrade import CannotLowerError, is_newer_function, lowered_nodes
from onnxgc.model.static_shapes.shape_walk import resolved

TARGET_OPSET = 18
TARGET_IR_VERSION = 9
_FIRST_OPSET_OF_AXES_AS_INPUT = 18
# Below it Add and its kind broadcast by an attribute, which no tool raises correctly.
OLDEST_OPSET = 7
# Up to it Resize and Upsample count from the first element, and nearest rounds towards it or away from it.
_LAST_OPSET_OF_OLDER_RESIZING = 10
# Up to it Hardmax finds one maximum in all dimensions from its axis on together.
_LAST_OPSET_OF_FLATTENING_HARDMAX = 12
# Below it Scan has a batch of sequences of given lengths, and the converter takes the one for the other.
_OLDEST_SCAN = 9
# Functions without a kernel on CUDA, at any opset.
EXPANDED_ALWAYS = (
    "CenterCropPad",
    "MeanVarianceNormalization",
    "Mish",
    "NegativeLogLikelihoodLoss",
    "SoftmaxCrossEntropyLoss",
)
# The converter turns small constants from inputs into attributes and back, so it must see them.
_LARGEST_SEEN = 1024


def check_supported(draft: Draft) -> None:
    """Raises `ModelFileError` for opsets whose operators broadcast or scan in another way."""
    if draft.opset < OLDEST_OPSET:
        raise ModelFileError(
            f"the model is of opset {draft.opset}, and {OLDEST_OPSET} is the oldest that is supported; "
            f"export it at opset {TARGET_OPSET}"
        )
    for node in draft.nodes:
        if node.op == "Scan" and not node.domain and draft.opset < _OLDEST_SCAN:
            raise ModelFileError(
                f"{node.place} has the form of opset {draft.opset}, which is not supported; "
                f"export the model at opset {_OLDEST_SCAN} or later"
            )


def at_target_opset(draft: Draft, kept: Container[str] = ()) -> Draft:
    """The draft at opset 18 and IR 9 where its operators allow it, else at its own opset.

    `kept` are operators that stay as they are, though most users want what defines them.

    Raises:
        ModelFileError: an operator of an older opset cannot be raised.
    """
    draft = draft if "MeanVarianceNormalization" in kept else _centred(draft)
    draft = _expanded(draft, [op for op in EXPANDED_ALWAYS if op not in kept])
    if draft.opset > TARGET_OPSET:
        return _lowered(resolved(draft))
    if draft.opset == TARGET_OPSET:
        return draft.with_changes(ir_version=TARGET_IR_VERSION)
    try:
        return _converted(draft)
    except (RuntimeError, version_converter.ConvertError) as error:
        raise ModelFileError(
            f"the model cannot be raised from opset {draft.opset} to {TARGET_OPSET}: {_reason(error)}; "
            f"export it at opset {TARGET_OPSET}"
        ) from error


def in_known_operators(draft: Draft, known: Container[str]) -> Draft:
    """The draft at opset 18, or at its own where that is newer, in operators that are known.

    Operators that are not known become the ones that define them, where ONNX does so. Types must be known.

    Raises:
        ModelFileError: an operator of an older opset cannot be raised.
    """
    while present := _unknown_functions(draft, known):
        draft = resolved(_expanded(draft, present))
    return draft if draft.opset > TARGET_OPSET else at_target_opset(draft, known)


def _unknown_functions(draft: Draft, known: Container[str]) -> list[str]:
    found = sorted({node.op for node in draft.nodes if not node.domain and node.op not in known})
    return [op for op in found if defs.has(op, draft.opset, "") and _is_function(op, draft.opset)]


def _is_function(op: str, opset: int) -> bool:
    schema = defs.get_schema(op, opset, "")
    return bool(schema.has_function or schema.has_context_dependent_function)  # type: ignore[attr-defined]


def _lowered(draft: Draft) -> Draft:
    expanded, present = draft, _newer_functions(draft)
    note = f"the model was brought down from opset {draft.opset} to {TARGET_OPSET}"
    if present:
        note += f"; {', '.join(present)} became the operators that define it"
    try:
        while present:
            # Bodies compute shapes with operators that cannot come down themselves, so these are folded.
            expanded = resolved(_expanded(expanded, present))
            present = _newer_functions(expanded)
        nodes = lowered_nodes(expanded, TARGET_OPSET)
    except (CannotLowerError, RuntimeError) as error:
        return draft.with_notes(
            f"the model stays at opset {draft.opset}, because it cannot be brought down to {TARGET_OPSET} "
            f"({_reason(error)}); some operators may then have no CUDA kernel"
        )
    return expanded.with_changes(nodes=nodes, opset=TARGET_OPSET, ir_version=TARGET_IR_VERSION).with_notes(
        note
    )


def _newer_functions(draft: Draft) -> list[str]:
    """Operators that ONNX defines by others and that the target opset lacks."""
    found = {node.op for node in draft.nodes if not node.domain}
    return sorted(op for op in found if is_newer_function(op, draft.opset, TARGET_OPSET))


def _present(draft: Draft, operators: Sequence[str]) -> list[str]:
    found = {node.op for node in draft.nodes if not node.domain}
    return [name for name in operators if name in found]


def _expanded(draft: Draft, operators: Sequence[str]) -> Draft:
    """The draft with the bodies of these operators, which ONNX defines by others, in their place."""
    if not _present(draft, operators):
        return draft
    nodes = (_with_defaults(node, draft.opset) if node.op in operators else node for node in draft.nodes)
    shell = _shell(draft.with_changes(nodes=tuple(nodes)), frozenset())
    # Bodies ask for the type of an optional input that is absent between others.
    shell.graph.value_info.append(onnx.ValueInfoProto(name="", type=onnx.TypeProto()))
    names = [("", name) for name in operators]
    graph = inliner.inline_selected_functions(shell, names, inline_schema_functions=True).graph
    return _lifted(draft, graph)


def _centred(draft: Draft) -> Draft:
    """The draft with MeanVarianceNormalization by the deviations' own mean square.

    ONNX defines it by the difference of two mean squares, which for a constant channel is zero or, by
    rounding, below: NaN either way, in forward or by the derivative of the root. Here the variance has the
    smallest number for its least, so that the derivative there is that of the mean alone.
    """
    names, weights, nodes = NameSource(draft.tensor_names()), dict(draft.weights), list[Node]()
    for node in draft.nodes:
        kind = draft.type_of(node.inputs[0]) if node.inputs else None
        if node.op != "MeanVarianceNormalization" or node.domain or kind is None:
            nodes.append(node)
            continue
        dtype = helper.tensor_dtype_to_np_dtype(kind.dtype)
        axes = list(node.attribute("axes") or (0, 2, 3))
        limits = np.finfo(dtype) if dtype.kind == "f" else np.finfo(np.float32)
        least = limits.smallest_subnormal if dtype == np.float16 else limits.tiny
        given: dict[str, Array] = {
            "axes": np.asarray(axes, np.int64),
            "least": np.asarray(least).astype(dtype),
            "epsilon": np.asarray(1e-9).astype(dtype),
        }
        constant = {part: names.fresh(f"{node.outputs[0]}_{part}") for part in given}
        by_input = draft.opset >= _FIRST_OPSET_OF_AXES_AS_INPUT
        reduced = (constant.pop("axes"),) if by_input else ()
        axes_attribute = {} if by_input else {"axes": axes}
        weights |= {name: ArrayWeight(given[part]) for part, name in constant.items()}
        weights |= {name: ArrayWeight(given["axes"]) for name in reduced}
        x, y = node.inputs[0], node.outputs[0]
        mean, centred, square, variance, bounded, root, divisor = (
            names.fresh(f"{y}_{part}")
            for part in ("mean", "centred", "square", "variance", "bounded", "root", "divisor")
        )
        for op, inputs, output, more in (
            ("ReduceMean", (x, *reduced), mean, axes_attribute),
            ("Sub", (x, mean), centred, {}),
            ("Mul", (centred, centred), square, {}),
            ("ReduceMean", (square, *reduced), variance, axes_attribute),
            ("Max", (variance, constant["least"]), bounded, {}),
            ("Sqrt", (bounded,), root, {}),
            ("Add", (root, constant["epsilon"]), divisor, {}),
            ("Div", (centred, divisor), y, {}),
        ):
            name = f"{node.name}/{output}"
            nodes.append(
                Node(op, inputs, (output,), more, name, node.origin or node.name, op, module=node.module)
            )
    if len(nodes) == len(draft.nodes):
        return draft
    return resolved(draft.with_changes(nodes=tuple(nodes), weights=weights))


def _with_defaults(node: Node, opset: int) -> Node:
    """The node with its default attributes written out, which the inliner does not fill in."""
    if node.domain:
        return node
    schema = defs.get_schema(node.op, opset, "")
    known = {key: attribute.default_value for key, attribute in schema.attributes.items()}
    stated = onnx.NodeProto(attribute=[value for value in known.values() if value.name])
    return node.with_changes(attributes={**attributes_of(stated), **node.attributes})


def _shell(draft: Draft, shown: Container[str]) -> onnx.ModelProto:
    """The draft as a ModelProto whose weights are inputs, but for those that are shown."""
    seen = {name: weight for name, weight in draft.weights.items() if name in shown}
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
    shown = {name for name, weight in draft.weights.items() if _is_seen(weight)}
    graph = version_converter.convert_version(_shell(draft, shown), TARGET_OPSET).graph
    raised = _lifted(draft, graph).with_changes(opset=TARGET_OPSET, ir_version=TARGET_IR_VERSION)
    raised = _with_limits_of_their_type(raised)
    if draft.opset <= _LAST_OPSET_OF_FLATTENING_HARDMAX:
        raised = _with_flattening_hardmax(raised)
    return _with_older_resizing(raised) if draft.opset <= _LAST_OPSET_OF_OLDER_RESIZING else raised


def _with_limits_of_their_type(draft: Draft) -> Draft:
    """The draft with Clip's limits in the type of what they limit; the converter makes them float32."""
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
    """A raised draft whose Hardmax nodes do what they did before: the converter leaves them as they are.

    Raises:
        RuntimeError: the shape of what a node reads is not known.
    """
    names, nodes, weights = NameSource(draft.tensor_names()), list[Node](), dict(draft.weights)
    for node in draft.nodes:
        if node.domain or node.op != "Hardmax":
            nodes.append(node)
            continue
        kind = draft.type_of(node.inputs[0])
        if kind is None:
            raise RuntimeError(f"{node.place} of an older opset needs a static shape")
        axis, rank = int(node.attribute("axis", 1)), len(kind.shape)
        over_last = node.with_changes(attributes={"axis": -1})
        if axis in (-1, rank - 1):
            nodes.append(over_last)
            continue
        output = node.outputs[0]
        flat, found, shape = (names.fresh(f"{output}/{part}") for part in ("flat", "found", "shape"))
        weights[shape] = ArrayWeight(np.asarray(kind.shape, np.int64))
        nodes += [
            Node(
                "Flatten",
                node.inputs,
                (flat,),
                {"axis": axis},
                f"{node.name}/flat",
                node.origin,
                "Flatten",
                module=node.module,
            ),
            over_last.with_changes(inputs=(flat,), outputs=(found,), name=f"{node.name}/found"),
            Node(
                "Reshape",
                (found, shape),
                node.outputs,
                {},
                node.name,
                node.origin,
                "Reshape",
                module=node.module,
            ),
        ]
    return draft.with_changes(nodes=tuple(nodes), weights=weights)


def _with_older_resizing(draft: Draft) -> Draft:
    """A raised draft whose Resize nodes do what they did before: the converter gives them newer defaults.

    Raises:
        RuntimeError: a node enlarges along one axis and shrinks along another, which rounded otherwise each.
    """
    return draft.with_changes(nodes=tuple(_with_older_modes(node, draft) for node in draft.nodes))


def _with_older_modes(node: Node, draft: Draft) -> Node:
    if node.domain or node.op != "Resize":
        return node
    modes = {"coordinate_transformation_mode": "asymmetric"}
    if node.attribute("mode", "nearest") == "nearest":
        scales = draft.weights[node.inputs[2]].load() if node.inputs[2] in draft.weights else None
        if scales is None or (scales.min() < 1 < scales.max()):
            raise RuntimeError(f"{node.place} of an older opset needs constant scales of one direction")
        modes["nearest_mode"] = "ceil" if scales.min() < 1 else "floor"
    return node.with_changes(attributes={**node.attributes, **modes})


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
    return node if source is None else node.with_changes(origin=source.origin, module=source.module)


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
