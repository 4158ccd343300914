"""From a checked ModelProto to a draft: weights lifted out of the graph, every node named."""

from collections.abc import Iterable

import onnx

from onnxgc.model.core.draft import ONNX_DOMAINS, Draft, NameSource, attributes_of, operator_name, topologically_sorted
from onnxgc.model.core.export_marks import MARK, MARKS
from onnxgc.model.core.ir import Node, Weight
from onnxgc.model.core.stored_weights import constant_value, filled_value, initializers
from onnxgc.model.files.contrib_domain import in_runtime_domain
from onnxgc.model.files.lift_body_weights import with_lifted_bodies
from onnxgc.model.files.module_paths import module_of
from onnxgc.model.files.pytorch_metadata import folding_notes, with_exported_roles

# Of a model that imports other operator sets only, so that a loss can be appended.
DEFAULT_OPSET = 18


def draft_of(model: onnx.ModelProto, folder: str) -> Draft:
    """The model as a draft.

    Initializers (also those that are graph inputs), Constant nodes and ConstantOfShape nodes of
    constant shape become weights, in bodies and branches too; no contents are read. Nodes are sorted
    topologically and have unique names.
    """
    graph = model.graph
    weights = initializers(graph, folder)
    nodes, weights = lift_constants(graph.node, weights, folder)
    weights = with_exported_roles(model, weights)
    available = (*(value.name for value in graph.input), *weights)
    nodes = with_node_names(topologically_sorted(nodes, available))
    domains = {entry.domain: entry.version for entry in model.opset_import}
    versions = [version for domain, version in domains.items() if domain in ONNX_DOMAINS]
    draft = Draft(
        name=graph.name or "model",
        opset=max(versions, default=DEFAULT_OPSET if domains else 1),
        ir_version=model.ir_version,
        other_domains={name: version for name, version in domains.items() if name not in ONNX_DOMAINS},
        nodes=nodes,
        inputs=tuple(value.name for value in graph.input if value.name not in weights),
        outputs=tuple(value.name for value in graph.output),
        weights=weights,
        declared={value.name: value.type for value in (*graph.value_info, *graph.input)},
        metadata={entry.key: entry.value for entry in model.metadata_props},
        notes=folding_notes(model),
    )
    return in_runtime_domain(with_lifted_bodies(draft, folder))


def lift_constants(
    protos: Iterable[onnx.NodeProto], weights: dict[str, Weight], folder: str = ""
) -> tuple[tuple[Node, ...], dict[str, Weight]]:
    """The nodes that compute something, and `weights` with the values of constant nodes."""
    lifted = dict(weights)
    computing: list[Node] = []
    for proto in protos:
        domain = "" if proto.domain in ONNX_DOMAINS else proto.domain
        if proto.op_type == "Constant" and not domain:
            lifted[proto.output[0]] = constant_value(proto, folder)
            continue
        node = Node(
            proto.op_type,
            tuple(proto.input),
            tuple(proto.output),
            attributes_of(proto) | _marks_of(proto),
            name=proto.name,
            origin=proto.name,
            module=module_of(proto),
            domain=domain,
        )
        filled = filled_value(node, lifted) if node.op == "ConstantOfShape" and not domain else None
        if filled is None:
            computing.append(node)
        else:
            lifted[node.outputs[0]] = filled
    return tuple(computing), lifted


def _marks_of(proto: onnx.NodeProto) -> dict[str, int]:
    """The marks that `export_training` wrote into a node's metadata."""
    return {entry.value: 1 for entry in proto.metadata_props if entry.key == MARK and entry.value in MARKS}


def with_node_names(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes with unique names; a unique name of the file stays."""
    nodes = tuple(nodes)
    names = NameSource(node.name for node in nodes)
    seen: set[str] = set()
    named: list[Node] = []
    for node in nodes:
        name = node.name
        if not name:
            name = names.fresh(f"{node.op}_{next(filter(None, node.outputs), 'node')}")
        elif name in seen:
            name = names.fresh(name)
        seen.add(name)
        named.append(node.with_changes(name=name, origin=node.origin or name, rule=node.rule or operator_name(node)))
    return tuple(named)
