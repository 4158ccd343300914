"""Turns the operators of an inference graph into those of training.

Removes unread optional outputs, turns Dropout on, and seeds random operators.
`onnxgc.model.training_mode.batch_statistics` does the same for BatchNormalization.
"""

import itertools
import math

import numpy as np

from onnxgc.errors import ShapeError, UnsupportedOperatorError
from onnxgc.model.core.constant_folding import RANDOM
from onnxgc.model.core.draft import Draft
from onnxgc.model.core.export_marks import EVALUATED, STOPPED
from onnxgc.model.core.graph_writer import GraphWriter
from onnxgc.model.core.ir import Node
from onnxgc.model.core.stored_weights import ArrayWeight

_DEFAULT_RATIO = 0.5
_OPTIONAL_OUTPUTS = frozenset(
    ["BatchNormalization", "Dropout", "LayerNormalization", "MaxPool", "SoftmaxCrossEntropyLoss", "Unique"]
)


def in_current_form(draft: Draft) -> Draft:
    """The draft without unread optional outputs and without obsolete forms of BatchNormalization.

    An unread output (a mask, indices) would allocate memory. Older forms of BatchNormalization have
    attributes and outputs that the version converter rejects; `with_batch_statistics` needs neither.

    Raises:
        UnsupportedOperatorError: a BatchNormalization has `spatial=0`.
    """
    draft = _without_updated_statistics(draft)
    read = {*draft.consumers(), *draft.outputs}
    # If some nodes are marked as training, the others are in evaluation mode.
    has_training_marks = any(n.op == "BatchNormalization" and n.attribute("training_mode", 0) for n in draft.nodes)
    nodes: list[Node] = []
    for node in draft.nodes:
        if node.domain or node.op not in _OPTIONAL_OUTPUTS:
            nodes.append(node)
            continue
        outputs = [name if index == 0 or name in read else "" for index, name in enumerate(node.outputs)]
        while len(outputs) > 1 and not outputs[-1]:
            outputs.pop()
        attributes = node.attributes
        if attributes.get("spatial", 1) == 0:
            raise UnsupportedOperatorError(
                f"node {node.label} is a BatchNormalization with statistics per position (spatial=0), which "
                "opset 9 removed; export the model at opset 9 or later"
            )
        if node.op == "BatchNormalization" and len(outputs) == 1:
            is_evaluated = has_training_marks and not attributes.get("training_mode", 0)
            attributes = {key: attributes[key] for key in ("epsilon", "momentum") if key in attributes}
            attributes |= {EVALUATED: 1} if is_evaluated or node.attribute(EVALUATED) else {}
        nodes.append(node.with_changes(outputs=tuple(outputs), attributes=attributes))
    return draft.with_changes(nodes=tuple(nodes))


def _without_updated_statistics(draft: Draft) -> Draft:
    """The draft without outputs that are updated running statistics, which every training file has."""
    read = frozenset(draft.consumers())
    updated = {
        output: running
        for node in draft.nodes
        if node.op == "BatchNormalization" and not node.domain and read.isdisjoint(node.outputs[1:])
        for output, running in zip(node.outputs[1:], node.inputs[3:], strict=False)
        if output in draft.outputs
    }
    notes = (
        f"output '{output}' is the running statistic '{running}' after a step; in the training file it is "
        f"'{running}_new'"
        for output, running in updated.items()
    )
    kept = tuple(name for name in draft.outputs if name not in updated)
    return draft.with_changes(outputs=kept).with_notes(*notes) if updated else draft


def with_dropout_on(draft: Draft) -> Draft:
    """The draft with every Dropout in training mode, each with its own seed."""
    writer = GraphWriter(draft)
    training_mode = writer.names.fresh("onnxgc_training_mode")
    seeds = itertools.count(1)
    for node in draft.nodes:
        is_dropout = node.op == "Dropout" and not node.domain
        ratio = _ratio(node, draft) if is_dropout else None
        if is_dropout and ratio is None:
            writer.notes.append(f"Dropout {node.label} is unchanged, because its ratio is computed in the graph")
        elif ratio == 0.0 and not any(node.outputs[1:]):
            node = node.as_operator("Identity", node.inputs[:1], node.outputs[:1])
        elif ratio is not None:
            ratio_name = _optional(node.inputs, 1) or writer.names.fresh(f"{node.outputs[0]}_ratio")
            writer.weights.setdefault(ratio_name, ArrayWeight(np.asarray(ratio, dtype=np.float32)))
            writer.weights.setdefault(training_mode, ArrayWeight(np.asarray(True)))
            mask = _optional(node.outputs, 1) or writer.names.fresh(f"{node.outputs[0]}_mask")
            node = node.with_changes(
                inputs=(node.inputs[0], ratio_name, training_mode),
                outputs=(node.outputs[0], mask),
                attributes={"seed": next(seeds)},
            )
        writer.nodes.append(node)
    return writer.result()


def _optional(names: tuple[str, ...], index: int) -> str:
    return names[index] if len(names) > index else ""


def _ratio(node: Node, draft: Draft) -> float | None:
    if name := _optional(node.inputs, 1):
        weight = draft.weights.get(name)
        return None if weight is None else float(weight.load().reshape(-1)[0])
    ratio = float(node.attribute("ratio", _DEFAULT_RATIO))
    if not 0.0 <= ratio < 1.0 or math.isnan(ratio):
        raise ShapeError(f"{node.location} has the ratio {ratio}; it must be at least 0 and below 1")
    return ratio


def with_seeded_random(draft: Draft) -> Draft:
    """The draft with a seed for each random node without one, and with each run once a step.

    A recomputed node would draw other numbers. With a seed two sessions draw the same ones.
    """
    seeds = itertools.count(1)
    return draft.with_changes(
        nodes=tuple(
            node.with_changes(once=True, attributes={"seed": float(next(seeds)), **node.attributes})
            if node.op in RANDOM and node.op != "Dropout" and not node.domain
            else node
            for node in draft.nodes
        )
    )


def with_masked_softmax(draft: Draft) -> Draft:
    """The draft with a separate gradient rule for each Softmax whose NaN the model replaces, as in attention.

    The softmax of a row of minus infinity is NaN. The model replaces it by zeros, and backward must not
    read it.
    """
    consumers = draft.consumers()

    def replaces_nan(tensor: str) -> bool:
        return any(
            reader.op == "IsNaN"
            or (reader.op == "Where" and index > 0)
            or (reader.op == "Cast" and replaces_nan(reader.outputs[0]))
            for reader, index in consumers.get(tensor, ())
        )

    return draft.with_changes(
        nodes=tuple(
            node.with_changes(rule="Softmax.masked")
            if node.op == "Softmax" and not node.domain and replaces_nan(node.outputs[0])
            else node
            for node in draft.nodes
        )
    )


def with_stopped_gradients(draft: Draft) -> Draft:
    """The draft with Identity nodes that stop the gradient if they are marked so."""
    return draft.with_changes(
        nodes=tuple(
            node.with_changes(attributes={}, rule="") if node.attribute(STOPPED) else node for node in draft.nodes
        )
    )
