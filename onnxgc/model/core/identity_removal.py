"""Removal of Identity nodes, redundant casts and empty pads."""

from collections.abc import Mapping

from onnxgc.model.core.draft import Draft, captured_names
from onnxgc.model.core.export_marks import STOPPED
from onnxgc.model.core.ir import Node
from onnxgc.model.core.lossless_casts import keeps_all_values


def without_identities(draft: Draft) -> Draft:
    """The draft without Identity nodes, Casts to a tensor's own type, and Pads by zero.

    A Cast that follows a lossless Cast reads the first one's input.
    """
    renamed: dict[str, str] = {}
    kept: list[Node] = []
    casts: dict[str, Node] = {}
    fixed_names = {*draft.inputs, *draft.weights, *draft.outputs}
    captured = {name for node in draft.nodes for name in captured_names(node)}
    for node in draft.nodes:
        node = node.with_changes(inputs=tuple(renamed.get(name, name) for name in node.inputs))
        node = _past_cast(node, casts, draft)
        if node.attribute(STOPPED) or not _is_identity(node, draft):
            kept.append(node)
            casts |= _as_cast(node)
            continue
        source, output = node.inputs[0], node.outputs[0]
        if output in captured:
            kept.append(node)
        elif output not in fixed_names:
            renamed[output] = source
        elif source in fixed_names or source in captured:
            kept.append(node)
        else:
            # Users know the output by its name, so the node that computes it takes the name.
            renamed[source] = output
            fixed_names.add(output)
            kept = [_renamed(other, source, output) for other in kept]
            casts = {name: cast for other in kept for name, cast in _as_cast(other).items()}
            renamed = {name: output if target == source else target for name, target in renamed.items()}
    return draft.with_changes(nodes=tuple(kept))


def _as_cast(node: Node) -> dict[str, Node]:
    return {node.outputs[0]: node} if node.op == "Cast" and not node.domain else {}


def _past_cast(node: Node, casts: Mapping[str, Node], draft: Draft) -> Node:
    """A Cast that bypasses a lossless Cast in front of it."""
    first = casts.get(node.inputs[0]) if _as_cast(node) else None
    kind = None if first is None else draft.type_of(first.inputs[0])
    if first is None or kind is None or not keeps_all_values(kind.dtype, int(first.attribute("to"))):
        return node
    return node.with_changes(inputs=first.inputs)


def _is_identity(node: Node, draft: Draft) -> bool:
    if node.domain:
        return False
    if node.op == "Identity":
        return True
    if node.op == "Cast":
        kind = draft.type_of(node.inputs[0])
        return kind is not None and kind.dtype == node.attribute("to")
    if node.op == "Pad" and len(node.inputs) > 1 and node.inputs[1] in draft.weights:
        return not draft.weights[node.inputs[1]].load().any()
    return False


def _renamed(node: Node, old: str, new: str) -> Node:
    return node.with_changes(
        inputs=tuple(new if name == old else name for name in node.inputs),
        outputs=tuple(new if name == old else name for name in node.outputs),
    )
