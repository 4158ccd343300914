"""Barriers that delay each update until every reader of the old value has run."""

from collections.abc import Mapping, Sequence

from onnxgc.emission.annotated_node import AnnotatedNode
from onnxgc.emission.barriers import BarrierWriter
from onnxgc.model.core.draft import reads_of
from onnxgc.model.operators.registry import VIEW_OPERATORS


def delay_updates(
    nodes: Sequence[AnnotatedNode], replaced: Mapping[str, str], barriers: BarrierWriter
) -> list[AnnotatedNode]:
    """The nodes, with a barrier between each reader of a replaced tensor and the update that overwrites it.

    There is none where the update already depends on the reader. `replaced` maps each new value to the
    parameter or state whose memory it takes. Barriers of groups are not enough: a group waits for the last
    tensor of the previous one, not for each of its nodes, and a recomputed node may read a parameter although
    no later node depends on it.
    """
    viewed = {old: old for old in replaced.values()}
    readers: dict[str, list[int]] = {old: [] for old in replaced.values()}
    # Readers of replaced tensors by number; a set of readers is an integer with one bit for each.
    reader_places: list[int] = []
    ancestors_of: dict[str, int] = {}
    after: dict[int, list[AnnotatedNode]] = {}
    before: dict[int, list[AnnotatedNode]] = {}
    delayed: list[AnnotatedNode] = []
    for index, annotated in enumerate(nodes):
        node = annotated.node
        ancestors = 0
        for name in reads_of(node):
            ancestors |= ancestors_of.get(name, 0)
        for name in node.outputs:
            for reader in readers.get(replaced.get(name, ""), ()):
                if ancestors >> reader & 1:
                    continue
                place = reader_places[reader]
                opening, barrier, node = barriers.delay_until(node, nodes[place].node.outputs[0])
                after.setdefault(place, []).extend(AnnotatedNode(new, annotated.role) for new in opening)
                before.setdefault(index, []).extend(AnnotatedNode(new, annotated.role) for new in barrier)
                ancestors |= 1 << reader
        delayed.append(AnnotatedNode(node, annotated.role, annotated.segment))
        for old in dict.fromkeys(viewed[name] for name in reads_of(node) if name in viewed):
            ancestors |= 1 << len(reader_places)
            readers[old].append(len(reader_places))
            reader_places.append(index)
        if node.op in VIEW_OPERATORS and node.inputs[0] in viewed:
            viewed[node.outputs[0]] = viewed[node.inputs[0]]
        ancestors_of.update(dict.fromkeys(node.outputs, ancestors))
    return [
        new
        for index, annotated in enumerate(delayed)
        for new in (*before.get(index, ()), annotated, *after.get(index, ()))
    ]
