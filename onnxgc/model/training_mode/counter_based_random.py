"""Random numbers by a number that is fed, so that training which goes on in another session draws the same.

A tensor of random bits is the product of two vectors of odd integers, one along some of its axes and
one along the others: `bits = rows * columns`, in int32, which wraps. Its upper bits are as good as
random, and it is so cheap that it may be computed again. The vectors of all tensors are parts of one, a
hash of constants and of the number of the run, that is computed once a step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnxgc.errors import ShapeError
from onnxgc.model.core.constant_folding import RANDOM
from onnxgc.model.core.draft import Draft, NameSource, subgraphs
from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.model.core.stored_weights import ArrayWeight

DRAW = "draw"
# 2 ** 32 over the golden ratio: the steps from run to run are spread over all integers.
_STRIDE = 0x9E3779B1
_ROUNDS = 2
# Of the 32 bits of a product the upper ones are random; a float32 has 24.
_UNIT = 2.0**-24
_LOWER_BITS = 256


def with_counted_draws(draft: Draft) -> tuple[Draft, str]:
    """The draft whose random numbers depend on an input and on nothing else, and that input's name.

    It is an int64 scalar, the number of the run; the name is empty where nothing is drawn. Counted are
    each Dropout that is on, RandomUniform, RandomNormal, both of another tensor's shape, and Bernoulli.
    """
    names = NameSource(draft.tensor_names())
    counting = _Counting(draft, names, NameSource(node.name for node in draft.nodes), names.fresh(DRAW))
    for node in draft.nodes:
        rule = None if node.domain else _RULES.get(node.op)
        if rule is None or not rule(counting, node):
            counting.nodes.append(node)
    notes = [
        f"{node.op} '{node.name}' draws from the runtime's own generator: a run that is resumed in another "
        "session draws other numbers"
        for node in counting.nodes
        if _draws(node, draft)
    ]
    draft = draft.with_notes(*notes)
    if not counting.parts:
        return draft, ""
    return draft.with_changes(
        nodes=(*counting.hashed(), *counting.nodes),
        weights={**draft.weights, **counting.constants},
        inputs=(*draft.inputs, counting.draw),
        types={**draft.types, counting.draw: TensorType(TensorProto.INT64, ())},
    ), counting.draw


def _draws(node: Node, draft: Draft) -> bool:
    """Whether a node's numbers are still the runtime's, those of its subgraphs included."""
    if node.op == "Dropout" and not node.domain:
        is_on = len(node.inputs) > 2 and bool(node.inputs[2])
        return is_on and _dropped_share(node, draft) is None
    inner = itertools.chain.from_iterable(map(_inner_nodes, subgraphs(node)))
    return (node.op in RANDOM and not node.domain) or any(
        other.op_type in RANDOM and (other.op_type != "Dropout" or len(other.input) > 2) for other in inner
    )


def _inner_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from itertools.chain.from_iterable(map(_inner_nodes, (attribute.g, *attribute.graphs)))


def _dropped_share(node: Node, draft: Draft) -> float | None:
    """What a Dropout in training mode drops; None where that, or whether it does, is found when it runs."""
    if len(node.inputs) < 3 or not {*node.inputs[1:]} <= draft.weights.keys():
        return None
    return float(draft.weights[node.inputs[1]].load().reshape(-1)[0])


@dataclass(frozen=True, slots=True)
class _Part:
    """A vector of the hash: `seed` tells it from others, `name` is the tensor of `shape` that it becomes."""

    seed: int
    name: str
    shape: tuple[int, ...]

    @property
    def positions(self) -> Array:
        drawn = np.random.Philox(key=self.seed).random_raw(math.prod(self.shape))
        return (drawn >> np.uint64(32)).astype(np.uint32).view(np.int32)


@dataclass(slots=True)
class _Counting:
    draft: Draft
    tensors: NameSource
    node_names: NameSource
    draw: str
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, ArrayWeight] = field(default_factory=dict)
    shared: dict[tuple[str, bytes], str] = field(default_factory=dict)
    parts: list[_Part] = field(default_factory=list)

    # -- operators ---------------------------------------------------------------------------------

    def dropout(self, node: Node) -> bool:
        """y = x kept / (1 - ratio), in two products: backward reads the mask of one byte an element."""
        dropped = _dropped_share(node, self.draft)
        if not dropped:
            return False
        kind = self._type_of(node.outputs[0])
        kept = max(0.0, 1.0 - dropped)
        limit = min(round(kept * 2**32) - 2**31, 2**31 - 1)
        mask = node.outputs[1] if len(node.outputs) > 1 else ""
        mask = mask or self.tensors.fresh(f"{node.outputs[0]}_mask")
        self._write(node, "Less", (self._bits(node, kind.shape), self._number(limit, np.int32)), mask)
        scale = self._number(1.0 / kept if kept else 1.0, helper.tensor_dtype_to_np_dtype(kind.dtype))
        masked = self.tensors.fresh(f"{node.outputs[0]}_masked")
        number = self._emit(node, "Cast", mask, to=kind.dtype)
        self._write(node, "Mul", (node.inputs[0], number), masked, rule="Mul")
        self._write(node, "Mul", (masked, scale), node.outputs[0], rule="Mul")
        return True

    def uniform(self, node: Node) -> bool:
        low, high = (float(node.attribute(key, default)) for key, default in (("low", 0.0), ("high", 1.0)))
        kind = self._type_of(node.outputs[0])
        value = self._emit(node, "Mul", self._unit(node, kind.shape), self._number(high - low))
        self._finish(node, "Add", value, self._number(low))
        return True

    def normal(self, node: Node) -> bool:
        """By Box and Muller: sqrt(-2 ln a) cos(2 pi b) of two uniform numbers."""
        mean, scale = (
            float(node.attribute(key, default)) for key, default in (("mean", 0.0), ("scale", 1.0))
        )
        kind = self._type_of(node.outputs[0])
        length = self._emit(node, "Log", self._unit(node, kind.shape, above=0.5))
        length = self._emit(node, "Sqrt", self._emit(node, "Mul", length, self._number(-2.0 * scale**2)))
        angle = self._emit(node, "Mul", self._unit(node, kind.shape), self._number(2.0 * math.pi))
        value = self._emit(node, "Mul", length, self._emit(node, "Cos", angle))
        self._finish(node, "Add", value, self._number(mean))
        return True

    def bernoulli(self, node: Node) -> bool:
        chance = node.inputs[0]
        if self._type_of(chance).dtype != TensorProto.FLOAT:
            chance = self._emit(node, "Cast", chance, to=TensorProto.FLOAT)
        shape = self._type_of(node.outputs[0]).shape
        self._finish(node, "Less", self._unit(node, shape), chance, made=TensorProto.BOOL)
        return True

    # -- random numbers ----------------------------------------------------------------------------

    def _bits(self, node: Node, shape: tuple[int, ...]) -> str:
        """Odd int32 numbers, equally often below and above any limit."""
        names = []
        for side, part in zip(("rows", "columns"), _two_parts(shape), strict=True):
            name = self.tensors.fresh(f"{node.outputs[0]}_{side}")
            self.parts.append(_Part(len(self.parts) + 1, name, part))
            names.append(name)
        return self._emit(node, "Mul", *names)

    def _unit(self, node: Node, shape: tuple[int, ...], above: float = 0.0) -> str:
        """Float32 numbers in [0, 1), or the middles of their steps with `above` 0.5: those are never 0."""
        upper = self._emit(node, "Div", self._bits(node, shape), self._number(_LOWER_BITS, np.int32))
        value = self._emit(node, "Cast", upper, to=TensorProto.FLOAT)
        if above:
            value = self._emit(node, "Add", value, self._number(above))
        return self._emit(node, "Add", self._emit(node, "Mul", value, self._number(_UNIT)), self._number(0.5))

    def hashed(self) -> list[Node]:
        """The nodes that compute all parts from the number of the run, each of them once a step."""
        nodes: list[Node] = []

        def emit(op: str, *inputs: str, outputs: tuple[str, ...] = (), **attributes: Any) -> str:
            made = outputs or (self.tensors.fresh(f"{self.draw}/{op}"),)
            name = self.node_names.fresh(f"{self.draw}/{op}")
            nodes.append(Node(op, inputs, made, attributes, name=name, origin=self.draw, once=True))
            return made[0]

        stride = np.asarray(_STRIDE, np.uint32).view(np.int32)
        run = emit("Mul", emit("Cast", self.draw, to=TensorProto.INT32), self._constant("stride", stride))
        positions = np.concatenate([part.positions for part in self.parts])
        value = emit("Add", self._constant("positions", positions), run)
        for _ in range(_ROUNDS):
            # x (2x + 1) carries lower bits upwards, the division upper ones downwards.
            factor = emit("Add", emit("Add", value, value), self._number(1, np.int32))
            value = emit("Mul", value, factor)
            value = emit("Add", value, emit("Div", value, self._number(1 << 16, np.int32)))
        odd = emit("Add", emit("Add", value, value), self._number(1, np.int32))
        sizes = [math.prod(part.shape) for part in self.parts]
        vectors = tuple(self.tensors.fresh(f"{part.name}_vector") for part in self.parts)
        emit("Split", odd, self._constant("sizes", np.asarray(sizes, np.int64)), outputs=vectors, axis=0)
        for vector, part in zip(vectors, self.parts, strict=True):
            shape = self._constant("shape", np.asarray(part.shape, np.int64))
            emit("Reshape", vector, shape, outputs=(part.name,))
        return nodes

    # -- nodes -------------------------------------------------------------------------------------

    def _emit(self, node: Node, op: str, *inputs: str, **attributes: Any) -> str:
        output = self.tensors.fresh(f"{node.outputs[0]}_{op}")
        self._write(node, op, inputs, output, **attributes)
        return output

    def _write(
        self, node: Node, op: str, inputs: tuple[str, ...], output: str, rule: str = "", **attributes: Any
    ) -> None:
        """An operator in the place of a node, which keeps the node's name if it makes its output."""
        name = node.name if output == node.outputs[0] else self.node_names.fresh(f"{node.name}_{op}")
        self.nodes.append(
            Node(
                op,
                inputs,
                (output,),
                attributes,
                name=name,
                origin=node.origin,
                module=node.module,
                rule=rule,
            )
        )

    def _finish(self, node: Node, op: str, *inputs: str, made: int = TensorProto.FLOAT) -> None:
        """The operator that makes a node's output, with a Cast behind it where that has another type."""
        to = self._type_of(node.outputs[0]).dtype
        if to == made:
            self._write(node, op, inputs, node.outputs[0])
        else:
            self._write(node, "Cast", (self._emit(node, op, *inputs),), node.outputs[0], to=to)

    def _type_of(self, name: str) -> TensorType:
        kind = self.draft.type_of(name)
        if kind is None:
            raise ShapeError(self.draft.problems.get(name, f"tensor '{name}' has no static shape"))
        return kind

    def _number(self, value: float, dtype: Any = np.float32) -> str:
        return self._constant("number", np.asarray(value, dtype))

    def _constant(self, wanted: str, value: Array) -> str:
        key = (f"{value.dtype}{value.shape}", value.tobytes())
        if key not in self.shared:
            self.shared[key] = self.tensors.fresh(f"{self.draw}/{wanted}")
            self.constants[self.shared[key]] = ArrayWeight(value)
        return self.shared[key]


_RULES: Mapping[str, Callable[[_Counting, Node], bool]] = {
    "Bernoulli": _Counting.bernoulli,
    "Dropout": _Counting.dropout,
    "RandomNormal": _Counting.normal,
    "RandomNormalLike": _Counting.normal,
    "RandomUniform": _Counting.uniform,
    "RandomUniformLike": _Counting.uniform,
}
"""Each writes a node anew, and says whether it did."""


def _two_parts(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes that are broadcast to this one, with the fewest elements together."""
    sides = itertools.product(*[((size, 1), (1, size)) for size in shape])
    choices = ((tuple(one for one, _ in axes), tuple(two for _, two in axes)) for axes in sides)
    return min(choices, key=lambda two: math.prod(two[0]) + math.prod(two[1]))
