"""Facts about all operators, by name."""

from collections.abc import Mapping
from types import MappingProxyType

from onnxgc.model.core.draft import operator_name
from onnxgc.model.core.ir import Node
from onnxgc.model.operators import data_movement, elementwise, products, reductions
from onnxgc.model.operators.facts import OperatorFacts, Place, Types

FACTS: Mapping[str, OperatorFacts] = MappingProxyType(
    {**elementwise.FACTS, **products.FACTS, **reductions.FACTS, **data_movement.FACTS}
)
POINTWISE = frozenset(op for op, facts in FACTS.items() if facts.is_pointwise)
VIEW_OPERATORS = frozenset(op for op, facts in FACTS.items() if facts.is_view)
IN_PLACE_OPERATORS = frozenset(op for op, facts in FACTS.items() if facts.runs_in_place)
_UNKNOWN = OperatorFacts()


def facts_by_name(op: str) -> OperatorFacts:
    """Facts about an operator of any domain by its bare name; the defaults for an unknown one."""
    return FACTS.get(op, _UNKNOWN)


def facts_of(node: Node) -> OperatorFacts:
    """Facts about a node's operator; the defaults for an unknown one."""
    return facts_by_name(operator_name(node))


def is_independent(place: Place) -> bool:
    """Whether the operator treats slices along this axis independently and identically.

    False for unknown operators and for those whose constants decide the result of each slice.
    """
    independent = facts_of(place.node).independent
    return independent is not None and independent(place)


def node_flops(node: Node, types: Types) -> int:
    """Floating-point operations of one run of a node; a multiplication with addition counts as 2.

    `types` holds the type of each of the node's inputs and outputs, weights included.
    """
    flops = facts_of(node).flops
    if not isinstance(flops, int):
        return flops(node, types)
    # Reductions read more than they write.
    names = (*filter(None, node.inputs), *filter(None, node.outputs))
    return flops * max((types[name].element_count for name in names if name in types), default=0)


def workspace_bytes(node: Node, types: Types, provider: str = "cpu") -> int:
    """Bytes that ONNX Runtime's kernel allocates while the node runs on one thread, and releases.

    Memory that a kernel keeps per channel is left out, and all workspaces of CUDA, where cuDNN chooses them.
    Source: kernels of ONNX Runtime's CPU provider, checked by measuring.
    """
    workspace = facts_of(node).workspace
    return 0 if workspace is None or provider != "cpu" else workspace(node, types)
