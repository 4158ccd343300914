"""BatchNormalization in training: batch statistics, and updates of the running statistics."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from onnx import TensorProto, helper

from onnxgc.model.core.draft import Draft
from onnxgc.model.core.export_marks import EVALUATED
from onnxgc.model.core.graph_writer import GraphWriter
from onnxgc.model.core.ir import Node, Statistic, TensorType

_DEFAULT_MOMENTUM = 0.9
_SIXTEEN_BIT_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def with_separate_statistics(draft: Draft) -> Draft:
    """The draft with a separate weight for each running statistic that shares one with other uses.

    Some exporters store equal weights once: the zeros of an untrained bias are then also the running mean.
    """
    kinds: defaultdict[str, set[str]] = defaultdict(set)
    for node in draft.nodes:
        for index, name in enumerate(node.inputs):
            if name in draft.weights:
                kinds[name].add(_statistic_kind(node, index))
    writer = GraphWriter(draft)
    for node in draft.nodes:
        inputs = list(node.inputs)
        for index, name in enumerate(node.inputs):
            kind = _statistic_kind(node, index)
            if kind and len(kinds[name]) > 1:
                inputs[index] = writer.names.fresh(f"{node.name}_{kind}")
                writer.weights[inputs[index]] = draft.weights[name]
                writer.notes.append(
                    f"weight '{name}' is stored once for several uses; the {kind} of '{node.name}' is now "
                    f"'{inputs[index]}'"
                )
        writer.nodes.append(node.with_changes(inputs=tuple(inputs)))
    return writer.result()


def _statistic_kind(node: Node, index: int) -> str:
    if node.op != "BatchNormalization" or node.domain:
        return ""
    return {3: "running_mean", 4: "running_variance"}.get(index, "")


def with_batch_statistics(draft: Draft, *, freeze_bn: bool = False) -> tuple[Draft, tuple[Statistic, ...]]:
    """The draft with BatchNormalization on batch statistics, and its running statistics.

    Mean and variance are computed by standard operators (ReduceMean; Sub, Mul, ReduceMean) and passed to
    BatchNormalization in inference form, because the training form has no CUDA kernel. They run once a
    step. Running statistics follow ONNX, `running * momentum + batch * (1 - momentum)`, with the unbiased
    variance of torch. Nodes that share a running statistic update it one after the other, as in torch.
    With `freeze_bn` all nodes normalise by the file's running statistics.
    """
    if freeze_bn:
        count = sum(node.op == "BatchNormalization" and not node.domain for node in draft.nodes)
        note = f"{count} BatchNormalization nodes keep the file's running statistics (--freeze-bn)"
        nodes = tuple(_without_mark(node) for node in draft.nodes)
        return draft.with_changes(nodes=nodes).with_notes(*[note] * bool(count)), ()
    lowering = _BatchStatistics(draft)
    for node in draft.nodes:
        if node.attribute(EVALUATED):
            lowering.nodes.append(_without_mark(node))
            lowering.notes.append(
                f"BatchNormalization '{node.name}' keeps its running statistics: "
                "the file marks it as in evaluation mode"
            )
        elif node.op == "BatchNormalization" and not node.domain:
            lowering.lower(node)
        else:
            lowering.nodes.append(node)
    return lowering.result(), tuple(Statistic(*names) for names in lowering.updated.items())


def _without_mark(node: Node) -> Node:
    if not node.attribute(EVALUATED):
        return node
    return node.with_changes(attributes={k: v for k, v in node.attributes.items() if k != EVALUATED})


class _BatchStatistics(GraphWriter):
    """Replaces BatchNormalization nodes.

    Attributes:
        updated: the newest value of each running statistic.
    """

    def __init__(self, draft: Draft) -> None:
        super().__init__(draft)
        self.updated: dict[str, str] = {}

    def lower(self, node: Node) -> None:
        if any(node.outputs[1:]):
            self.notes.append(
                f"BatchNormalization '{node.name}' is unchanged, because other nodes read its statistics"
            )
            self.nodes.append(node)
            return
        source, scale, bias, running_mean, running_variance = node.inputs
        kind, channels = self.draft.required_type(source), self.draft.required_type(running_mean)
        mean, variance = self._batch_moments(node, kind, channels.dtype)
        self.nodes.append(
            node.with_changes(
                inputs=(source, scale, bias, mean, variance),
                outputs=node.outputs[:1],
                attributes={key: value for key, value in node.attributes.items() if key == "epsilon"},
                rule="BatchNormalization.batch",
            )
        )
        momentum = float(node.attribute("momentum", _DEFAULT_MOMENTUM))
        count = kind.element_count // kind.shape[1]
        if count == 1:
            self.notes.append(
                f"BatchNormalization '{node.name}' reads one value per channel, so its variance is 0; "
                "use a larger batch"
            )
        unbiased = count / (count - 1) if count > 1 else 1.0
        self._update(node, running_mean, mean, momentum, 1.0 - momentum, channels)
        self._update(node, running_variance, variance, momentum, (1.0 - momentum) * unbiased, channels)

    def _batch_moments(self, node: Node, kind: TensorType, dtype: int) -> tuple[str, str]:
        """Mean and biased variance of each channel, in the element type `dtype` of the running ones."""
        source, output = node.inputs[0], node.outputs[0]
        axis_numbers = np.asarray([0, *range(2, len(kind.shape))], np.int64)
        axes = self.shared_constant("onnxgc_batch_axes", axis_numbers)
        computed_dtype = kind.dtype
        if kind.dtype in _SIXTEEN_BIT_TYPES:
            # Squares of float16 overflow, and sums of many bfloat16 numbers lose the small ones.
            computed_dtype = TensorProto.FLOAT
            source = self._statistic(node, "Cast", (source,), f"{output}_wide", to=computed_dtype)
        kept = self._statistic(node, "ReduceMean", (source, axes), f"{output}_batch_mean_kept", keepdims=1)
        centred = self._statistic(node, "Sub", (source, kept), f"{output}_centred")
        squared = self._statistic(node, "Mul", (centred, centred), f"{output}_squared")
        variance = self._statistic(
            node, "ReduceMean", (squared, axes), f"{output}_batch_variance", keepdims=0
        )
        mean = self._statistic(node, "Squeeze", (kept, axes), f"{output}_batch_mean")
        if computed_dtype != dtype:
            mean = self._statistic(node, "Cast", (mean,), f"{output}_batch_mean_cast", to=dtype)
            variance = self._statistic(node, "Cast", (variance,), f"{output}_batch_variance_cast", to=dtype)
        return mean, variance

    def _update(
        self, node: Node, running: str, batch: str, momentum: float, share: float, kind: TensorType
    ) -> None:
        """Adds `running * momentum + batch * share`."""
        if running not in self.draft.weights:
            return
        current = self.updated.get(running, running)
        if current != running:
            self.notes.append(
                f"running statistic '{running}' is shared; node '{node.name}' updates it after earlier ones"
            )
        dtype = helper.tensor_dtype_to_np_dtype(kind.dtype)
        decay = self.shared_constant("onnxgc_momentum", np.asarray(momentum, dtype), "momentum")
        gain = self.shared_constant("onnxgc_batch_share", np.asarray(share, dtype), "share")
        old = self._statistic(node, "Mul", (current, decay), f"{running}_decayed")
        new = self._statistic(node, "Mul", (batch, gain), f"{running}_gained")
        self.updated[running] = self._statistic(node, "Add", (old, new), f"{running}_new")

    def _statistic(self, node: Node, op: str, inputs: tuple[str, ...], wanted: str, **attributes: int) -> str:
        output = self.names.fresh(wanted)
        self.nodes.append(
            node.with_changes(
                op=op,
                inputs=inputs,
                outputs=(output,),
                attributes=attributes,
                name=self.node_names.fresh(f"{node.name}_{op}_{output}"),
                rule="",
                once=True,
            )
        )
        return output
