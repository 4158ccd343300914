"""ONNX Runtime's own operators in files that omit their domain."""

import onnx
from onnx import helper

from onnxgc.model.core.draft import ONNX_DOMAINS, Draft

LAYER_NORMALIZATION_OPSET = 17

RUNTIME_DOMAIN = "com.microsoft"
# GroupNormalization-18, deprecated: a scale for each group instead of each channel.
_DEPRECATED_GROUP_NORMALIZATION_OPSETS = range(18, 21)


def move_to_runtime_domain(shell: onnx.ModelProto) -> None:
    """Moves, in place, supported operators that ONNX's checker refuses to the runtime's operator set.

    These are ONNX Runtime's additions to ONNX's own set, and the deprecated first GroupNormalization.
    """
    opset = max((entry.version for entry in shell.opset_import if entry.domain in ONNX_DOMAINS), default=1)
    moved = [
        node
        for node in shell.graph.node
        if _is_added(node.op_type, node.domain, opset)
        or (node.op_type == "GroupNormalization" and opset in _DEPRECATED_GROUP_NORMALIZATION_OPSETS)
    ]
    for node in moved:
        node.domain = RUNTIME_DOMAIN
    if moved and not any(entry.domain == RUNTIME_DOMAIN for entry in shell.opset_import):
        shell.opset_import.append(helper.make_opsetid(RUNTIME_DOMAIN, 1))


def in_runtime_domain(draft: Draft) -> Draft:
    """The draft with ONNX Runtime's additions to ONNX's own set in the runtime's set."""
    added = [_is_added(node.op, node.domain, draft.opset) for node in draft.nodes]
    if not any(added):
        return draft
    nodes = tuple(
        node.with_changes(domain=RUNTIME_DOMAIN, rule=f"{RUNTIME_DOMAIN}::{node.op}") if is_added else node
        for node, is_added in zip(draft.nodes, added, strict=True)
    )
    return draft.with_changes(nodes=nodes, other_domains={RUNTIME_DOMAIN: 1, **draft.other_domains})


def _is_added(op: str, domain: str, opset: int) -> bool:
    if domain not in ONNX_DOMAINS:
        return False
    is_early = op == "LayerNormalization" and opset < LAYER_NORMALIZATION_OPSET
    return is_early or op == "SimplifiedLayerNormalization"
