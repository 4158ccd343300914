"""Makes an inference graph behave as in training.

BatchNormalization gets the statistics of the batch and updates its running ones, Dropout is on and
seeded, and Identity nodes go.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
from onnx import TensorProto, helper

from onnxgc.errors import ShapeError, UnsupportedOperatorError
from onnxgc.model.core.constant_folding import RANDOM
from onnxgc.model.core.draft import Draft, NameSource
from onnxgc.model.core.ir import Array, Node, Statistic, TensorType
from onnxgc.model.core.marks import EVALUATED, STOPPED
from onnxgc.model.core.stored_weights import ArrayWeight

_DEFAULT_MOMENTUM = 0.9
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_DEFAULT_RATIO = 0.5
_OPTIONAL_OUTPUTS = frozenset(
    ["BatchNormalization", "Dropout", "LayerNormalization", "MaxPool", "SoftmaxCrossEntropyLoss", "Unique"]
)


def in_current_form(draft: Draft) -> Draft:
    """The draft without optional outputs that nobody reads, and BatchNormalization in its lasting form.

    An unread output (a mask, indices) would hold memory. Older forms of BatchNormalization have
    attributes and outputs that the version converter refuses; `with_batch_statistics` needs neither.
    """
    draft = _without_updated_statistics(draft)
    read = {*draft.consumers(), *draft.outputs}
    # A file that says of some that they train says of the others that they do not.
    trains = any(n.op == "BatchNormalization" and n.attribute("training_mode", 0) for n in draft.nodes)
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
                f"node {node.named} is a BatchNormalization with a statistic for each position (spatial=0), "
                "which no opset from 9 on has; export the model at opset 9 or later"
            )
        if node.op == "BatchNormalization" and len(outputs) == 1:
            evaluated = trains and not attributes.get("training_mode", 0)
            attributes = {key: attributes[key] for key in ("epsilon", "momentum") if key in attributes}
            attributes |= {EVALUATED: 1} if evaluated or node.attribute(EVALUATED) else {}
        nodes.append(node.with_changes(outputs=tuple(outputs), attributes=attributes))
    return draft.with_changes(nodes=tuple(nodes))


def _without_updated_statistics(draft: Draft) -> Draft:
    """The draft without outputs that are updated running statistics, which a training file has itself."""
    read = frozenset(draft.consumers())
    updated = {
        output: running
        for node in draft.nodes
        if node.op == "BatchNormalization" and not node.domain and read.isdisjoint(node.outputs[1:])
        for output, running in zip(node.outputs[1:], node.inputs[3:], strict=False)
        if output in draft.outputs
    }
    notes = (
        f"output '{output}' is the running statistic '{running}' after a step; the training file has it as "
        f"'{running}_new'"
        for output, running in updated.items()
    )
    kept = tuple(name for name in draft.outputs if name not in updated)
    return draft.with_changes(outputs=kept).with_notes(*notes) if updated else draft


def with_own_statistics(draft: Draft) -> Draft:
    """The draft with a running statistic of its own wherever a file stores it together with others.

    Some exporters keep equal weights once: the zeros of a fresh bias are then its running mean too.
    """
    kinds: dict[str, set[str]] = {}
    for node in draft.nodes:
        for index, name in enumerate(node.inputs):
            if name in draft.weights:
                kinds.setdefault(name, set()).add(_statistic_kind(node, index))
    names = NameSource(draft.tensor_names())
    weights = dict(draft.weights)
    nodes: list[Node] = []
    notes: list[str] = []
    for node in draft.nodes:
        inputs = list(node.inputs)
        for index, name in enumerate(node.inputs):
            kind = _statistic_kind(node, index)
            if kind and len(kinds.get(name, ())) > 1:
                inputs[index] = names.fresh(f"{node.name}_{kind}")
                weights[inputs[index]] = draft.weights[name]
                notes.append(
                    f"weight '{name}' is stored once for several uses; '{node.name}' gets the {kind} "
                    f"'{inputs[index]}' of its own"
                )
        nodes.append(node.with_changes(inputs=tuple(inputs)))
    return draft.with_changes(nodes=tuple(nodes), weights=weights).with_notes(*notes)


def _statistic_kind(node: Node, index: int) -> str:
    if node.op != "BatchNormalization" or node.domain:
        return ""
    return {3: "running_mean", 4: "running_variance"}.get(index, "")


def with_dropout_on(draft: Draft) -> Draft:
    """The draft with every Dropout in training mode, each with a seed of its own."""
    names = NameSource(draft.tensor_names())
    weights = dict(draft.weights)
    nodes: list[Node] = []
    always = names.fresh("onnxgc_training_mode")
    seed = 0
    notes: list[str] = []
    for node in draft.nodes:
        if node.op != "Dropout" or node.domain:
            nodes.append(node)
            continue
        ratio = _ratio(node, draft)
        if ratio is None:
            notes.append(
                f"Dropout '{node.name}' is left as it is, because its ratio is computed in the graph"
            )
            nodes.append(node)
        elif ratio == 0.0 and not any(node.outputs[1:]):
            nodes.append(
                Node(
                    "Identity",
                    node.inputs[:1],
                    node.outputs[:1],
                    name=node.name,
                    origin=node.origin,
                    module=node.module,
                    rule="Identity",
                )
            )
        else:
            seed += 1
            ratio_name = (
                node.inputs[1]
                if len(node.inputs) > 1 and node.inputs[1]
                else names.fresh(f"{node.outputs[0]}_ratio")
            )
            weights.setdefault(ratio_name, ArrayWeight(np.asarray(ratio, dtype=np.float32)))
            weights.setdefault(always, ArrayWeight(np.asarray(True)))
            mask = (
                node.outputs[1]
                if len(node.outputs) > 1 and node.outputs[1]
                else names.fresh(f"{node.outputs[0]}_mask")
            )
            nodes.append(
                node.with_changes(
                    inputs=(node.inputs[0], ratio_name, always),
                    outputs=(node.outputs[0], mask),
                    attributes={"seed": seed},
                )
            )
    return draft.with_changes(nodes=tuple(nodes), weights=weights).with_notes(*notes)


def with_seeded_random(draft: Draft) -> Draft:
    """The draft with a seed for each random node that has none, whose numbers are drawn once a step.

    Drawn again they would be others. A seed makes two sessions draw alike.
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
    """The draft with a rule of its own for each Softmax whose NaN are replaced, as attention does.

    A row whose logits are all minus infinity has no softmax. The model reads zeros there, and backward
    must not read the NaN.
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


def with_batch_statistics(draft: Draft, *, freeze_bn: bool = False) -> tuple[Draft, tuple[Statistic, ...]]:
    """The draft with BatchNormalization on batch statistics, and its running statistics.

    Mean and variance are computed by standard operators (ReduceMean; Sub, Mul, ReduceMean) and fed
    to BatchNormalization in inference form, because the training form has no CUDA kernel. They run
    once a step. Running statistics follow ONNX, `running * momentum + batch * (1 - momentum)`, with
    the unbiased variance as torch has it. Where several nodes share a running statistic they update
    it one after the other, as torch does. With `freeze_bn` all of them stay as they are.
    """
    if freeze_bn:
        count = sum(node.op == "BatchNormalization" and not node.domain for node in draft.nodes)
        note = f"{count} BatchNormalization nodes keep the file's running statistics (--freeze-bn)"
        nodes = tuple(_without_mark(node) for node in draft.nodes)
        return draft.with_changes(nodes=nodes).with_notes(*[note] * bool(count)), ()
    lowering = _BatchStatistics(
        draft, NameSource(draft.tensor_names()), NameSource(n.name for n in draft.nodes)
    )
    for node in draft.nodes:
        if node.attribute(EVALUATED):
            lowering.nodes.append(_without_mark(node))
            lowering.notes.append(
                f"BatchNormalization '{node.name}' keeps its running statistics: "
                "the file says that it is in evaluation mode"
            )
        elif node.op == "BatchNormalization" and not node.domain:
            lowering.lower(node)
        else:
            lowering.nodes.append(node)
    changed = draft.with_changes(nodes=tuple(lowering.nodes), weights={**draft.weights, **lowering.constants})
    statistics = tuple(Statistic(name, updated) for name, updated in lowering.updated.items())
    return changed.with_notes(*lowering.notes), statistics


def with_stopped_gradients(draft: Draft) -> Draft:
    """The draft whose marked Identity nodes stop the gradient."""
    nodes = (
        node.with_changes(attributes={}, rule="") if node.attribute(STOPPED) else node for node in draft.nodes
    )
    return draft.with_changes(nodes=tuple(nodes))


def _without_mark(node: Node) -> Node:
    if not node.attribute(EVALUATED):
        return node
    return node.with_changes(attributes={k: v for k, v in node.attributes.items() if k != EVALUATED})


@dataclass(slots=True)
class _BatchStatistics:
    draft: Draft
    tensors: NameSource
    node_names: NameSource
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, ArrayWeight] = field(default_factory=dict)
    shared: dict[tuple[str, object], str] = field(default_factory=dict)
    updated: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lower(self, node: Node) -> None:
        if any(node.outputs[1:]):
            self.notes.append(
                f"BatchNormalization '{node.name}' is left as it is, because other nodes read its statistics"
            )
            self.nodes.append(node)
            return
        source, scale, bias, running_mean, running_variance = node.inputs
        output = node.outputs[0]
        kind, channels = self.draft.type_of(source), self.draft.type_of(running_mean)
        if kind is None or channels is None:
            raise ShapeError(self.draft.problems.get(source, f"tensor '{source}' has no static shape"))
        axes = self._axes(len(kind.shape))
        if kind.dtype in _HALVES:
            # Squares of float16 overflow, and a mean of many bfloat16 is none.
            source = self._statistic(node, "Cast", (source,), f"{output}_wide", to=TensorProto.FLOAT)
            kind = TensorType(TensorProto.FLOAT, kind.shape)
        kept = self._statistic(node, "ReduceMean", (source, axes), f"{output}_batch_mean_kept", keepdims=1)
        centred = self._statistic(node, "Sub", (source, kept), f"{output}_centred")
        squared = self._statistic(node, "Mul", (centred, centred), f"{output}_squared")
        variance = self._statistic(
            node, "ReduceMean", (squared, axes), f"{output}_batch_variance", keepdims=0
        )
        mean = self._statistic(node, "Squeeze", (kept, axes), f"{output}_batch_mean")
        if kind.dtype != channels.dtype:
            mean = self._statistic(node, "Cast", (mean,), f"{output}_batch_mean_cast", to=channels.dtype)
            variance = self._statistic(
                node, "Cast", (variance,), f"{output}_batch_variance_cast", to=channels.dtype
            )
        epsilon = {key: value for key, value in node.attributes.items() if key == "epsilon"}
        self.nodes.append(
            node.with_changes(
                inputs=(node.inputs[0], scale, bias, mean, variance),
                outputs=(output,),
                attributes=epsilon,
                rule="BatchNormalization.batch",
            )
        )
        momentum = float(node.attribute("momentum", _DEFAULT_MOMENTUM))
        count = kind.element_count // kind.shape[1]
        if count == 1:
            self.notes.append(
                f"BatchNormalization '{node.name}' sees one value a channel, so its variance is 0; "
                "use a larger batch"
            )
        unbiased = count / (count - 1) if count > 1 else 1.0
        self._update(node, running_mean, mean, momentum, 1.0 - momentum, channels)
        self._update(node, running_variance, variance, momentum, (1.0 - momentum) * unbiased, channels)

    def _update(
        self, node: Node, running: str, batch: str, momentum: float, share: float, kind: TensorType
    ) -> None:
        """Adds `running * momentum + batch * share`."""
        if running not in self.draft.weights:
            return
        current = self.updated.get(running, running)
        if current != running:
            self.notes.append(
                f"running statistic '{running}' is shared; node '{node.name}' updates it in its turn"
            )
        dtype = helper.tensor_dtype_to_np_dtype(kind.dtype)
        decay = self._constant("onnxgc_momentum", np.asarray(momentum, dtype))
        gain = self._constant("onnxgc_batch_share", np.asarray(share, dtype))
        old = self._statistic(node, "Mul", (current, decay), f"{running}_decayed")
        new = self._statistic(node, "Mul", (batch, gain), f"{running}_gained")
        self.updated[running] = self._statistic(node, "Add", (old, new), f"{running}_new")

    def _statistic(self, node: Node, op: str, inputs: tuple[str, ...], wanted: str, **attributes: int) -> str:
        output = self.tensors.fresh(wanted)
        name = self.node_names.fresh(f"{node.name}_{op}_{output}")
        self.nodes.append(
            Node(
                op,
                inputs,
                (output,),
                attributes,
                name=name,
                origin=node.origin,
                module=node.module,
                rule="",
                once=True,
            )
        )
        return output

    def _axes(self, rank: int) -> str:
        return self._constant("onnxgc_batch_axes", np.asarray([0, *range(2, rank)], dtype=np.int64))

    def _constant(self, wanted: str, value: Array) -> str:
        key = (wanted, (str(value.dtype), value.tobytes()))
        if key not in self.shared:
            self.shared[key] = self.tensors.fresh(wanted)
            self.constants[self.shared[key]] = ArrayWeight(value)
        return self.shared[key]


def _ratio(node: Node, draft: Draft) -> float | None:
    if len(node.inputs) > 1 and node.inputs[1]:
        weight = draft.weights.get(node.inputs[1])
        return None if weight is None else float(weight.load().reshape(-1)[0])
    ratio = float(node.attribute("ratio", _DEFAULT_RATIO))
    if not 0.0 <= ratio < 1.0 or math.isnan(ratio):
        raise ShapeError(f"{node.place} has the ratio {ratio}; it must be at least 0 and below 1")
    return ratio
