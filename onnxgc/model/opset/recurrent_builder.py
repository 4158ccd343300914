"""Builder of the standard operators that replace one LSTM, GRU or RNN node."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import helper

from onnxgc.model.core.graph_writer import GraphWriter
from onnxgc.model.core.ir import Node
from onnxgc.model.opset.recurrent_settings import Activation, Direction, RecurrentSettings

# A product of fewer rows takes about the same time, so chunks of steps have at least this many.
_MIN_ROWS = 8
_MAX_INPUTS = 8


class RecurrentBuilder:
    """Emits the operators of one node's steps into a graph.

    `inputs` contains "" for absent ones, also for those after the node's last.
    """

    def __init__(self, writer: GraphWriter, node: Node) -> None:
        self.writer = writer
        self.constant = writer.shared_constant
        self.node = node
        self.inputs = (*node.inputs, *[""] * _MAX_INPUTS)
        self.settings = settings = RecurrentSettings.from_node(node, writer.draft)
        self.dtype = helper.tensor_dtype_to_np_dtype(settings.dtype)
        self._steps_per_chunk = max(math.isqrt(settings.steps - 1) + 1, -(-_MIN_ROWS // settings.batch))
        self._chunks: dict[int, str] = {}
        self._rows: dict[int, str] = {}
        self._parts: dict[tuple[int, int], tuple[str, ...]] = {}

    def emit(self, op: str, inputs: Sequence[str], wanted: str, **attributes: Any) -> str:
        """Adds a node with one output, and returns that output's name."""
        return self.emit_many(op, inputs, (wanted,), **attributes)[0]

    def emit_many(self, op: str, inputs: Sequence[str], wanted: Sequence[str], **attributes: Any) -> tuple[str, ...]:
        outputs = tuple(self.writer.names.fresh(name) for name in wanted)
        self.add(op, inputs, outputs, **attributes)
        return outputs

    def add(self, op: str, inputs: Sequence[str], outputs: tuple[str, ...], **attributes: Any) -> None:
        name = self.writer.node_names.fresh(outputs[0])
        self.writer.nodes.append(self.node.as_operator(op, inputs, outputs, name, **attributes))

    def number(self, wanted: str, value: float) -> str:
        return self.constant(wanted, np.asarray(value, self.dtype))

    def ints(self, *values: int) -> str:
        return self.constant(f"{self.node.name}/sizes", np.asarray(values, np.int64))

    def split(self, tensor: str, wanted: Sequence[str], sizes: Sequence[int], axis: int) -> tuple[str, ...]:
        if len(sizes) == 1:
            return (tensor,)
        return self.emit_many("Split", (tensor, self.ints(*sizes)), wanted, axis=axis)

    def reshape(self, tensor: str, wanted: str, *shape: int) -> str:
        return self.emit("Reshape", (tensor, self.ints(*shape)), wanted)

    def part(self, index: int, direction: Direction, axis: int) -> str:
        """One direction's slice of input `index`, whose directions lie along `axis`."""
        tensor, directions = self.node.inputs[index], self.settings.directions
        if len(directions) == 1:
            return tensor
        key = (index, axis)
        if key not in self._parts:
            wanted = [f"{each.prefix}/input{index}" for each in directions]
            self._parts[key] = self.split(tensor, wanted, [1] * len(wanted), axis)
        return self._parts[key][direction.index]

    def weight(self, index: int, direction: Direction, name: str, *shape: int) -> str:
        part = self.part(index, direction, axis=0)
        return self.reshape(part, f"{direction.prefix}/{name}", *shape)

    def summed_bias(self, direction: Direction) -> str | None:
        """Wb + Rb of an LSTM or RNN, whose equations contain only the sum."""
        if not self.inputs[3]:
            return None
        both = self.weight(3, direction, "b", 2, self.settings.gates * self.settings.hidden)
        return self.emit("ReduceSum", (both, self.ints(0)), f"{direction.prefix}/wb_rb", keepdims=0)

    def projected(
        self, direction: Direction, name: str, weight: str, bias: str | None, rows: int
    ) -> Callable[[int], str]:
        """X W^T + b of each step, [B, rows]: one product for a chunk of steps, emitted on first use."""
        projections: dict[int, str] = {}
        settings = self.settings

        def of_step(time: int) -> str:
            if time not in projections:
                start = time - time % self._steps_per_chunk
                steps = range(start, min(start + self._steps_per_chunk, settings.steps))
                operands = (self._chunk_of_x(start), weight, *([bias] if bias is not None else []))
                product = self.emit("Gemm", operands, f"{direction.prefix}/step{start}/{name}", transB=1)
                wanted = [f"{direction.prefix}/step{step}/{name}" for step in steps]
                axis, size = 0, settings.batch
                if settings.is_batch_first and len(steps) > 1:
                    axis, size = 1, rows
                    product = self.reshape(product, f"{product}_wide", settings.batch, len(steps) * rows)
                parts = self.split(product, wanted, [size] * len(steps), axis)
                projections.update(zip(steps, parts, strict=True))
            return projections[time]

        return of_step

    def _chunk_of_x(self, start: int) -> str:
        """The input of a chunk of steps, [steps * B, I]."""
        settings, chunk = self.settings, self._steps_per_chunk
        if not self._chunks:
            starts = range(0, settings.steps, chunk)
            sizes = [min(chunk, settings.steps - first) for first in starts]
            wanted = [f"{self.node.name}/x{first}" for first in starts]
            parts = self.split(self.node.inputs[0], wanted, sizes, 1 if settings.is_batch_first else 0)
            self._chunks = dict(zip(starts, parts, strict=True))
        if start not in self._rows:
            count = min(chunk, settings.steps - start) * settings.batch
            self._rows[start] = self.reshape(
                self._chunks[start], f"{self.node.name}/x{start}_rows", count, settings.features
            )
        return self._rows[start]

    def clipped(self, tensor: str, wanted: str) -> str:
        clip = self.settings.clip
        if not clip:
            return tensor
        low = self.number(f"{self.node.name}/low", -clip)
        high = self.number(f"{self.node.name}/high", clip)
        return self.emit("Clip", (tensor, low, high), wanted)

    def activated(self, activation: Activation, tensor: str, wanted: str) -> str:
        function, settings = activation.function, activation.settings
        if function == "Affine":
            scaled = self._scaled(tensor, settings[0], wanted)
            return self.emit("Add", (scaled, self.number(f"{wanted}_shift", settings[1])), wanted)
        if function == "ScaledTanh":
            inner = self._scaled(tensor, settings[1], wanted)
            return self._scaled(self.emit("Tanh", (inner,), wanted), settings[0], wanted)
        attributes = dict(zip(("alpha", "beta"), settings, strict=False))
        return self.emit(function, (tensor,), wanted, **attributes)

    def _scaled(self, tensor: str, factor: float, wanted: str) -> str:
        return self.emit("Mul", (tensor, self.number(f"{wanted}_factor", factor)), f"{wanted}_scaled")
