"""BatchNormalization in training: batch statistics, and updates of the running statistics."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from onnxgc.model.core.draft import Draft
from onnxgc.model.core.export_marks import EVALUATED
from onnxgc.model.core.graph_writer import GraphWriter
from onnxgc.model.core.ir import Node, Statistic, TensorType
from onnxgc.model.operators.reductions import MAX_ORDERED_ROWS

_DEFAULT_MOMENTUM = 0.9
# Added to the variance of each image, so that it has a reciprocal; far below BatchNormalization's epsilon.
_TINY_VARIANCE = 1e-12
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
                    f"weight '{name}' is stored once for several uses; the {kind} of {node.label} is now "
                    f"'{inputs[index]}'"
                )
        writer.nodes.append(node.with_changes(inputs=tuple(inputs)))
    return writer.result()


def _statistic_kind(node: Node, index: int) -> str:
    if node.op != "BatchNormalization" or node.domain:
        return ""
    return {3: "running_mean", 4: "running_variance"}.get(index, "")


def with_batch_statistics(
    draft: Draft, *, freeze_bn: bool = False, provider: str = "cpu"
) -> tuple[Draft, tuple[Statistic, ...]]:
    """The draft with BatchNormalization on batch statistics, and its running statistics.

    Mean and variance are computed by standard operators (ReduceMean; Sub, Mul, ReduceMean) and passed to
    BatchNormalization in inference form, because the training form has no CUDA kernel. They run once a
    step. Running statistics follow ONNX, `running * momentum + batch * (1 - momentum)`, with the unbiased
    variance of torch. Nodes that share a running statistic update it one after the other, as in torch.
    With `freeze_bn` all nodes normalise by the file's running statistics. For the provider `cuda` moments are
    those of images, averaged, and running statistics are updated together.
    """
    if freeze_bn:
        count = sum(node.op == "BatchNormalization" and not node.domain for node in draft.nodes)
        note = f"{count} BatchNormalization nodes keep the file's running statistics (--freeze-bn)"
        nodes = tuple(_without_mark(node) for node in draft.nodes)
        return draft.with_changes(nodes=nodes).with_notes(*[note] * bool(count)), ()
    lowering = _BatchStatisticsOnCuda(draft) if provider == "cuda" else _BatchStatistics(draft)
    for node in draft.nodes:
        if node.attribute(EVALUATED):
            lowering.nodes.append(_without_mark(node))
            lowering.notes.append(
                f"BatchNormalization {node.label} keeps its running statistics: the file marks it as in evaluation mode"
            )
        elif node.op == "BatchNormalization" and not node.domain:
            lowering.lower(node)
        else:
            lowering.nodes.append(node)
    lowering.finish_updates()
    return lowering.result(), tuple(
        Statistic(name, updated, name in lowering.variances) for name, updated in lowering.updated.items()
    )


def _without_mark(node: Node) -> Node:
    if not node.attribute(EVALUATED):
        return node
    return node.with_changes(attributes={k: v for k, v in node.attributes.items() if k != EVALUATED})


class _BatchStatistics(GraphWriter):
    """Replaces BatchNormalization nodes.

    Attributes:
        updated: the newest value of each running statistic.
        variances: the running variances.
    """

    def __init__(self, draft: Draft) -> None:
        super().__init__(draft)
        self.updated: dict[str, str] = {}
        self.variances: set[str] = set()

    def lower(self, node: Node) -> None:
        if any(node.outputs[1:]):
            self.notes.append(f"BatchNormalization {node.label} is unchanged, because other nodes read its statistics")
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
                f"BatchNormalization {node.label} reads one value per channel, so its variance is 0; use a larger batch"
            )
        unbiased = count / (count - 1) if count > 1 else 1.0
        self.variances.add(running_variance)
        self._update(node, running_mean, mean, momentum, 1.0 - momentum, channels)
        self._update(node, running_variance, variance, momentum, (1.0 - momentum) * unbiased, channels)

    def _batch_moments(self, node: Node, kind: TensorType, dtype: int) -> tuple[str, str]:
        """Mean and biased variance of each channel, in the element type `dtype` of the running ones."""
        source, output = node.inputs[0], node.outputs[0]
        computed_dtype = kind.dtype
        if kind.dtype in _SIXTEEN_BIT_TYPES:
            # Squares of float16 overflow, and sums of many bfloat16 numbers lose the small ones.
            computed_dtype = TensorProto.FLOAT
            source = self._statistic(node, "Cast", (source,), f"{output}_wide", to=computed_dtype)
        mean, variance = self._moments(node, source, TensorType(computed_dtype, kind.shape))
        if computed_dtype != dtype:
            mean = self._statistic(node, "Cast", (mean,), f"{output}_batch_mean_cast", to=dtype)
            variance = self._statistic(node, "Cast", (variance,), f"{output}_batch_variance_cast", to=dtype)
        return mean, variance

    def _moments(self, node: Node, source: str, kind: TensorType) -> tuple[str, str]:
        output, axes = node.outputs[0], self._ints(0, *range(2, len(kind.shape)))
        kept = self._statistic(node, "ReduceMean", (source, axes), f"{output}_batch_mean_kept", keepdims=1)
        centred = self._statistic(node, "Sub", (source, kept), f"{output}_centred")
        squared = self._statistic(node, "Mul", (centred, centred), f"{output}_squared")
        variance = self._statistic(node, "ReduceMean", (squared, axes), f"{output}_batch_variance", keepdims=0)
        return self._statistic(node, "Squeeze", (kept, axes), f"{output}_batch_mean"), variance

    def _update(self, node: Node, running: str, batch: str, momentum: float, share: float, kind: TensorType) -> None:
        """Adds `running * momentum + batch * share`."""
        if running not in self.draft.weights:
            return
        current = self.updated.get(running, running)
        if current != running:
            self.notes.append(
                f"running statistic '{running}' is shared; node {node.label} updates it after earlier ones"
            )
        self._write_update(node, running, current, batch, momentum, share, kind)

    def finish_updates(self) -> None:
        """Adds the updates that wait for the last node."""

    def _write_update(
        self, node: Node, running: str, old: str, new: str, momentum: float, share: float, kind: TensorType
    ) -> None:
        dtype = helper.tensor_dtype_to_np_dtype(kind.dtype)
        decay = self.shared_constant("onnxgc_momentum", np.asarray(momentum, dtype), "momentum")
        gain = self.shared_constant("onnxgc_batch_share", np.asarray(share, dtype), "share")
        old = self._statistic(node, "Mul", (old, decay), f"{running}_decayed")
        new = self._statistic(node, "Mul", (new, gain), f"{running}_gained")
        self.updated[running] = self._statistic(node, "Add", (old, new), f"{running}_new")

    def _ints(self, *values: int) -> str:
        return self.shared_constant("onnxgc_batch_axes", np.asarray(values, np.int64))

    def _statistic(self, node: Node, op: str, inputs: tuple[str, ...], wanted: str, **attributes: Any) -> str:
        return self._statistics(node, op, inputs, (wanted,), **attributes)[0]

    def _statistics(
        self, node: Node, op: str, inputs: tuple[str, ...], wanted: tuple[str, ...], **attributes: Any
    ) -> tuple[str, ...]:
        """Adds a node that runs once a step; returns its outputs."""
        outputs = tuple(map(self.names.fresh, wanted))
        self.nodes.append(
            node.with_changes(
                op=op,
                inputs=inputs,
                outputs=outputs,
                attributes=attributes,
                name=self.node_names.fresh(f"{node.name}_{op}_{outputs[0]}"),
                rule="",
                once=True,
            )
        )
        return outputs


@dataclass(frozen=True, slots=True)
class _Update:
    """An update of a running statistic of type `kind`."""

    node: Node
    running: str
    batch: str
    kind: TensorType


class _BatchStatisticsOnCuda(_BatchStatistics):
    """Moments in two passes over the operand, and one update for all statistics with the same settings."""

    def __init__(self, draft: Draft) -> None:
        super().__init__(draft)
        self._uses = Counter(name for node in draft.nodes for name in node.inputs)
        self._waiting: dict[tuple[float, float, int], list[_Update]] = {}

    def _moments(self, node: Node, source: str, kind: TensorType) -> tuple[str, str]:
        """From the moments of images, which LayerNormalization computes in float32.

        The variance is the mean of the images' variances plus the variance of their means.
        """
        if kind.dtype != TensorProto.FLOAT:
            return super()._moments(node, source, kind)
        output, spatial = node.outputs[0], kind.shape[2:]
        means, variances = source, ""
        if spatial:
            ones = self.shared_constant("onnxgc_ones", np.ones(spatial, np.float32))
            wanted = tuple(f"{output}_image_{part}" for part in ("normalized", "mean", "inverse"))
            _, means, inverse = self._statistics(
                node, "LayerNormalization", (source, ones), wanted, axis=2, epsilon=_TINY_VARIANCE
            )
            exponent = self.shared_constant("onnxgc_exponent", np.asarray(-2.0, np.float32))
            variances = self._statistic(node, "Pow", (inverse, exponent), f"{output}_image_variance")
        mean = self._mean_of_images(node, means, kind.shape, f"{output}_batch_mean")
        per_channel = self._ints(1, -1, *(1 for _ in spatial))
        kept = self._statistic(node, "Reshape", (mean, per_channel), f"{output}_batch_mean_kept")
        centred = self._statistic(node, "Sub", (means, kept), f"{output}_centred")
        squared = self._statistic(node, "Mul", (centred, centred), f"{output}_squared")
        if variances:
            squared = self._statistic(node, "Add", (squared, variances), f"{output}_image_squares")
        return mean, self._mean_of_images(node, squared, kind.shape, f"{output}_batch_variance")

    def _mean_of_images(self, node: Node, tensor: str, shape: tuple[int, ...], wanted: str) -> str:
        """The mean over N of [N, C, 1, ...], with additions in a fixed order: [C]."""
        ones = range(2, len(shape))
        axes = (0, *ones)
        if shape[0] > MAX_ORDERED_ROWS:
            tensor = self._statistic(node, "Transpose", (tensor,), f"{wanted}_by_channel", perm=[1, 0, *ones])
            axes = (1, *ones)
        total = self._statistic(node, "ReduceSum", (tensor, self._ints(*axes)), f"{wanted}_sum", keepdims=0)
        share = self.shared_constant("onnxgc_image_share", np.asarray(1.0 / shape[0], np.float32), "images")
        return self._statistic(node, "Mul", (total, share), wanted)

    def _update(self, node: Node, running: str, batch: str, momentum: float, share: float, kind: TensorType) -> None:
        if self._uses[running] > 1 or running not in self.draft.weights:
            super()._update(node, running, batch, momentum, share, kind)
            return
        update = _Update(node, running, batch, kind)
        self._waiting.setdefault((momentum, share, kind.dtype), []).append(update)

    def finish_updates(self) -> None:
        for (momentum, share, _), updates in self._waiting.items():
            first = updates[0]
            if len(updates) == 1:
                self._write_update(first.node, first.running, first.running, first.batch, momentum, share, first.kind)
                continue
            old, new = (
                self._statistic(first.node, "Concat", parts, f"{first.running}_{name}", axis=0)
                for parts, name in (
                    (tuple(update.running for update in updates), "joined"),
                    (tuple(update.batch for update in updates), "batches"),
                )
            )
            joined = f"{first.running}_joined"
            self._write_update(first.node, joined, old, new, momentum, share, first.kind)
            parts = (self.updated.pop(joined), self._ints(*(update.kind.shape[0] for update in updates)))
            wanted = tuple(f"{update.running}_new" for update in updates)
            outputs = self._statistics(first.node, "Split", parts, wanted, axis=0)
            self.updated.update(zip((update.running for update in updates), outputs, strict=True))
