"""Counter-based random numbers, reproducible across sessions: a function of the step's number, an input.

A tensor of random bits is the outer product of two vectors of odd integers, one along some of its axes and
one along the others: `bits = rows * columns` in int32, which wraps. Its upper bits are statistically random,
and it is cheap to recompute. The vectors of all tensors are parts of one hash of constants and the step's
number, which is computed once a step.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from onnxgc.model.core.constant_folding import RANDOM
from onnxgc.model.core.draft import Draft, nodes_in, subgraphs
from onnxgc.model.core.graph_writer import GraphWriter
from onnxgc.model.core.ir import Array, Node, TensorType

DRAW = "draw"
_STRIDE = 0x9E3779B1
"""2^32 over the golden ratio: multiples of it spread evenly over all integers."""
_ROUNDS = 2
# Only the upper bits of the 32 of a product are random; a float32 has 24.
_UNIT = 2.0**-24
_LOWER_BITS = 256


def with_counter_based_random(draft: Draft) -> tuple[Draft, str]:
    """The draft with random numbers that depend only on a new input, and that input's name.

    The input is an int64 scalar, the number of the step; its name is "" if nothing is random. The
    operators are Dropout in training mode, RandomUniform, RandomNormal, RandomUniformLike, RandomNormalLike
    and Bernoulli; a note lists the others.
    """
    forms = _CounterBasedForms(draft)
    for node in draft.nodes:
        rule = None if node.domain else _RULES.get(node.op)
        if rule is None or not rule(forms, node):
            forms.nodes.append(node)
    forms.notes = [
        f"{node.op} {node.label} uses the runtime's random generator: training that resumes in another "
        "session draws other numbers"
        for node in forms.nodes
        if _uses_runtime_generator(node, draft)
    ]
    if not forms.parts:
        return draft.with_notes(*forms.notes), ""
    forms.nodes = [*forms.hash_nodes(), *forms.nodes]
    draw_type = TensorType(TensorProto.INT64, ())
    changed = forms.result(inputs=(*draft.inputs, forms.draw), types={**draft.types, forms.draw: draw_type})
    return changed, forms.draw


def _uses_runtime_generator(node: Node, draft: Draft) -> bool:
    """Whether a node, or one in its subgraphs, draws random numbers at run time."""
    if node.op == "Dropout" and not node.domain:
        is_on = len(node.inputs) > 2 and bool(node.inputs[2])
        return is_on and _constant_ratio(node, draft) is None
    return (node.op in RANDOM and not node.domain) or any(
        inner.op_type in RANDOM and (inner.op_type != "Dropout" or len(inner.input) > 2)
        for graph in subgraphs(node)
        for inner in nodes_in(graph)
    )


def _constant_ratio(node: Node, draft: Draft) -> float | None:
    """The ratio of a Dropout in training mode; None if ratio or mode are not constant."""
    if len(node.inputs) < 3 or not {*node.inputs[1:]} <= draft.weights.keys():
        return None
    return float(draft.weights[node.inputs[1]].load().reshape(-1)[0])


@dataclass(frozen=True, slots=True)
class _HashPart:
    """A part of the hash with its own `seed`, which becomes the tensor `name` of `shape`."""

    seed: int
    name: str
    shape: tuple[int, ...]

    @property
    def positions(self) -> Array:
        raw = np.random.Philox(key=self.seed).random_raw(math.prod(self.shape))
        return (raw >> np.uint64(32)).astype(np.uint32).view(np.int32)


class _CounterBasedForms(GraphWriter):
    """Replaces random operators.

    Attributes:
        draw: the input that is the step's number.
        parts: the parts of the hash that the new operators read.
    """

    def __init__(self, draft: Draft) -> None:
        super().__init__(draft)
        self.draw = self.names.fresh(DRAW)
        self.parts: list[_HashPart] = []

    # -- operators --

    def dropout(self, node: Node) -> bool:
        """y = x mask / (1 - ratio), in two products: backward reads a mask of one byte per element."""
        ratio = _constant_ratio(node, self.draft)
        if not ratio:
            return False
        kind = self.draft.required_type(node.outputs[0])
        kept = max(0.0, 1.0 - ratio)
        limit = min(round(kept * 2**32) - 2**31, 2**31 - 1)
        mask = node.outputs[1] if len(node.outputs) > 1 else ""
        mask = mask or self.names.fresh(f"{node.outputs[0]}_mask")
        self._write(node, "Less", (self._bits(node, kind.shape), self._number(limit, np.int32)), mask)
        scale = self._number(1.0 / kept if kept else 1.0, helper.tensor_dtype_to_np_dtype(kind.dtype))
        masked = self.names.fresh(f"{node.outputs[0]}_masked")
        number = self._emit(node, "Cast", mask, to=kind.dtype)
        self._write(node, "Mul", (node.inputs[0], number), masked, rule="Mul")
        self._write(node, "Mul", (masked, scale), node.outputs[0], rule="Mul")
        return True

    def uniform(self, node: Node) -> bool:
        low, high = (float(node.attribute(key, default)) for key, default in (("low", 0.0), ("high", 1.0)))
        kind = self.draft.required_type(node.outputs[0])
        value = self._emit(node, "Mul", self._unit(node, kind.shape), self._number(high - low))
        self._finish(node, "Add", value, self._number(low))
        return True

    def normal(self, node: Node) -> bool:
        """sqrt(-2 ln a) cos(2 pi b) of two uniform numbers a, b. Source: Box and Muller, 1958."""
        mean, scale = (float(node.attribute(key, default)) for key, default in (("mean", 0.0), ("scale", 1.0)))
        kind = self.draft.required_type(node.outputs[0])
        length = self._emit(node, "Log", self._unit(node, kind.shape, above=0.5))
        length = self._emit(node, "Sqrt", self._emit(node, "Mul", length, self._number(-2.0 * scale**2)))
        angle = self._emit(node, "Mul", self._unit(node, kind.shape), self._number(2.0 * math.pi))
        value = self._emit(node, "Mul", length, self._emit(node, "Cos", angle))
        self._finish(node, "Add", value, self._number(mean))
        return True

    def bernoulli(self, node: Node) -> bool:
        chance = node.inputs[0]
        if self.draft.required_type(chance).dtype != TensorProto.FLOAT:
            chance = self._emit(node, "Cast", chance, to=TensorProto.FLOAT)
        shape = self.draft.required_type(node.outputs[0]).shape
        self._finish(node, "Less", self._unit(node, shape), chance, dtype=TensorProto.BOOL)
        return True

    # -- random numbers --

    def _bits(self, node: Node, shape: tuple[int, ...]) -> str:
        """Odd int32 numbers, uniform over the whole range."""
        names = []
        for side, part in zip(("rows", "columns"), _broadcast_factors(shape), strict=True):
            name = self.names.fresh(f"{node.outputs[0]}_{side}")
            self.parts.append(_HashPart(len(self.parts) + 1, name, part))
            names.append(name)
        return self._emit(node, "Mul", *names)

    def _unit(self, node: Node, shape: tuple[int, ...], above: float = 0.0) -> str:
        """Uniform float32 numbers in [0, 1); with `above` 0.5 they are shifted by half a step and never 0."""
        upper = self._emit(node, "Div", self._bits(node, shape), self._number(_LOWER_BITS, np.int32))
        value = self._emit(node, "Cast", upper, to=TensorProto.FLOAT)
        if above:
            value = self._emit(node, "Add", value, self._number(above))
        return self._emit(node, "Add", self._emit(node, "Mul", value, self._number(_UNIT)), self._number(0.5))

    def hash_nodes(self) -> list[Node]:
        """The nodes that compute all parts from the step's number; they run once a step."""
        nodes: list[Node] = []

        def emit(op: str, *inputs: str, outputs: tuple[str, ...] = (), **attributes: Any) -> str:
            results = outputs or (self.names.fresh(f"{self.draw}/{op}"),)
            name = self.node_names.fresh(f"{self.draw}/{op}")
            nodes.append(Node(op, inputs, results, attributes, name=name, origin=self.draw, once=True))
            return results[0]

        stride = np.asarray(_STRIDE, np.uint32).view(np.int32)
        run = emit("Mul", emit("Cast", self.draw, to=TensorProto.INT32), self._constant("stride", stride))
        positions = np.concatenate([part.positions for part in self.parts])
        value = emit("Add", self._constant("positions", positions), run)
        for _ in range(_ROUNDS):
            # x (2x + 1) mixes lower bits into upper ones, the division upper bits into lower ones.
            factor = emit("Add", emit("Add", value, value), self._number(1, np.int32))
            value = emit("Mul", value, factor)
            value = emit("Add", value, emit("Div", value, self._number(1 << 16, np.int32)))
        odd = emit("Add", emit("Add", value, value), self._number(1, np.int32))
        sizes = [math.prod(part.shape) for part in self.parts]
        vectors = tuple(self.names.fresh(f"{part.name}_vector") for part in self.parts)
        emit("Split", odd, self._constant("sizes", np.asarray(sizes, np.int64)), outputs=vectors, axis=0)
        for vector, part in zip(vectors, self.parts, strict=True):
            shape = self._constant("shape", np.asarray(part.shape, np.int64))
            emit("Reshape", vector, shape, outputs=(part.name,))
        return nodes

    # -- nodes --

    def _emit(self, node: Node, op: str, *inputs: str, **attributes: Any) -> str:
        output = self.names.fresh(f"{node.outputs[0]}_{op}")
        self._write(node, op, inputs, output, **attributes)
        return output

    def _write(
        self, node: Node, op: str, inputs: tuple[str, ...], output: str, rule: str = "", **attributes: Any
    ) -> None:
        """Adds an operator, which takes the name of the replaced node if it computes its output."""
        name = node.name if output == node.outputs[0] else self.node_names.fresh(f"{node.name}_{op}")
        self.nodes.append(
            node.with_changes(op=op, inputs=inputs, outputs=(output,), attributes=attributes, name=name, rule=rule)
        )

    def _finish(self, node: Node, op: str, *inputs: str, dtype: int = TensorProto.FLOAT) -> None:
        """Adds the operator that computes a node's output, and a Cast if the output has another type."""
        to = self.draft.required_type(node.outputs[0]).dtype
        if to == dtype:
            self._write(node, op, inputs, node.outputs[0])
        else:
            self._write(node, "Cast", (self._emit(node, op, *inputs),), node.outputs[0], to=to)

    def _number(self, value: float, dtype: Any = np.float32) -> str:
        return self._constant("number", np.asarray(value, dtype))

    def _constant(self, part: str, value: Array) -> str:
        return self.shared_constant(f"{self.draw}/{part}", value)


_RULES: Mapping[str, Callable[[_CounterBasedForms, Node], bool]] = {
    "Bernoulli": _CounterBasedForms.bernoulli,
    "Dropout": _CounterBasedForms.dropout,
    "RandomNormal": _CounterBasedForms.normal,
    "RandomNormalLike": _CounterBasedForms.normal,
    "RandomUniform": _CounterBasedForms.uniform,
    "RandomUniformLike": _CounterBasedForms.uniform,
}
"""Each adds the new form of a node, and returns whether it did."""


def _broadcast_factors(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes that broadcast to this one, with the smallest sum of elements.

    >>> _broadcast_factors((2, 4, 64, 64))
    ((2, 1, 64, 1), (1, 4, 1, 64))
    """
    sides = itertools.product(*[((size, 1), (1, size)) for size in shape])
    choices = ((tuple(one for one, _ in axes), tuple(two for _, two in axes)) for axes in sides)
    return min(choices, key=lambda pair: math.prod(pair[0]) + math.prod(pair[1]))
