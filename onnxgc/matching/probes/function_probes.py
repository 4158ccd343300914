"""Functions of one tensor, known by their values where two files spell them apart.

Normal forms know how most exporters write an activation or a normalisation. What they do not know is a
function of one number, or of one row of numbers, all the same, whose values say which: two that agree on
all samples are one, whatever they are made of.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxgc.matching.normal_form.builder import Along, number_of
from onnxgc.matching.normal_form.structure import OfAxis, OfValue, Structure, leaves, rendered
from onnxgc.matching.probes.float64_operators import OF_NUMBERS, OF_ROWS, REDUCTIONS, Operand, Rule
from onnxgc.model.core.ir import Array, Node, TrainableModel

_INNER = np.linspace(-16.0, 16.0, 641)
# Where one of two spellings may already overflow.
_OUTER = np.concatenate([sign * np.logspace(1.5, 6, 10) for sign in (-1, 1)])
# Where thresholds and the like lie close to each other.
_NEAR = np.linspace(-1.0, 1.0, 1999)
_NUMBERS = np.concatenate([_INNER, _OUTER, _NEAR])
# Deviations and means of rows: usual ones, large ones, those where what is added to a deviation counts, and
# those where a first activation leaves little or all.
_ROWS = ((1.0, 0.0), (1.0, 0.0), (20.0, 0.0), (0.003, 0.0), (1e-6, 0.0), (1.0, -12.0), (1.0, 12.0))
_LONGEST_ROW = 8192
# So many elements of a row are compared.
_COMPARED = 64
# Exporters round constants to float32; the nearest approximations in use are 30 times as far apart.
_TOLERANCE = 1e-6
# What an operator may be off by, so that differences of numbers that nearly cancel say nothing.
_ROUNDED = 1e-9
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True, slots=True)
class Function:
    """What a tensor is of another one, the first of which it is: its values on all samples.

    It is so element by element, or of rows: of all elements along the axes `over`. Of rows it has as many
    elements, or one of each. `errors` are what the values may be off by.
    """

    of: str
    values: Array
    errors: Array
    over: tuple[int, ...] = ()


def functions_of(model: TrainableModel) -> dict[str, Function]:
    """The tensors that are a function of one other tensor and of numbers, element by element or of rows."""
    with np.errstate(all="ignore"):
        found = _of_numbers(model)
        return found | _Rows(model, found).functions()


def _of_numbers(model: TrainableModel) -> dict[str, Function]:
    found: dict[str, Function] = {}
    for node in model.nodes:
        function = _function(model, node, found)
        if function is not None:
            found[node.outputs[0]] = function
    return found


def _rule(node: Node) -> Any:
    """The values of an operator that works element by element, None for others."""
    if node.domain or node.once or not all(node.inputs):
        return None
    if node.op == "Cast" and node.attribute("to") in _FLOATS:
        return OF_NUMBERS["Identity"]
    return OF_NUMBERS.get(node.op)


def _function(model: TrainableModel, node: Node, known: Mapping[str, Function]) -> Function | None:
    rule = _rule(node)
    if rule is None:
        return None
    operands: list[Operand] = []
    errors: list[Array | None] = []
    sources: set[str] = set()
    for name in node.inputs:
        number = number_of(model, name)
        if number is not None:
            operands.append(number)
            errors.append(_error_of(number))
            continue
        if name in model.weights or model.types[name].shape != model.types[node.outputs[0]].shape:
            return None
        if name not in known and not model.types[name].is_floating:
            return None
        function = known.get(name)
        operands.append(_NUMBERS if function is None else function.values)
        errors.append(None if function is None else function.errors)
        sources.add(name if function is None else function.of)
    if len(sources) != 1:
        return None
    values = np.asarray(rule(node, operands), np.float64)
    return Function(sources.pop(), values, _errors(node, rule, operands, errors, values))


def _error_of(number: float) -> Array | None:
    """What a constant is off by; not at all where it is whole or a simple fraction."""
    is_exact = not math.isfinite(number) or float(256 * number).is_integer()
    return None if is_exact else np.asarray(2.0**-24 * abs(number))


def _errors(
    node: Node, rule: Rule, operands: Sequence[Operand], errors: Sequence[Array | None], values: Array
) -> Array:
    """What values may be off by: as much as they change when each operand is off by its own error."""
    total = _ROUNDED * np.abs(values)
    for place, error in enumerate(errors):
        if error is None:
            continue
        changes = []
        for sign in (-1, 1):
            moved = [*operands[:place], operands[place] + sign * error, *operands[place + 1 :]]
            changes.append(np.abs(np.asarray(rule(node, moved), np.float64) - values))
        total = total + np.maximum(*changes)
    return np.where(np.isnan(total), np.inf, total)


@dataclass(slots=True)
class _Row:
    """A tensor as a function of rows: an array of the rows of samples, or of one number of each."""

    of: str
    over: tuple[int, ...]
    values: Array


@dataclass(slots=True)
class _Rows:
    """The functions of rows of a model, by those of numbers that they are made of."""

    model: TrainableModel
    of_numbers: Mapping[str, Function]
    known: dict[str, _Row] = field(default_factory=dict)
    producers: dict[str, Node] = field(default_factory=dict)

    def functions(self) -> dict[str, Function]:
        found: dict[str, Function] = {}
        unread = Counter(name for node in self.model.nodes for name in node.inputs)
        self.producers = {node.outputs[0]: node for node in self.model.nodes if node.outputs}
        for node in self.model.nodes:
            row = self._row(node)
            if row is not None:
                name = node.outputs[0]
                self.known[name] = row
                shape, full = self.model.types[name].shape, self.model.types[row.of].shape
                if shape in (full, _kept(full, row.over)):
                    width = math.prod(full[axis] for axis in row.over) if shape == full else 1
                    values = np.broadcast_to(row.values, (len(row.values), width))[:, :_COMPARED]
                    # What is small beside the rest of a row comes of numbers that cancel.
                    finite = np.where(np.isfinite(values), values, 0.0)
                    errors = _TOLERANCE * np.abs(finite).max(axis=1, keepdims=True)
                    found[name] = Function(row.of, values.copy(), errors, row.over)
            unread.subtract(node.inputs)
            for name in node.inputs:
                if not unread[name]:
                    self.known.pop(name, None)
        return found

    def _row(self, node: Node) -> _Row | None:
        if node.op in REDUCTIONS or node.op in OF_ROWS:
            return self._along(node)
        if node.op in ("Reshape", "Squeeze", "Unsqueeze", "Expand"):
            return self._reshaped(node)
        rule = _rule(node)
        rows = [self.known[name] for name in node.inputs if name in self.known]
        if rule is None or not rows:
            return None
        of, over = rows[0].of, rows[0].over
        full = self.model.types[of].shape
        out = self.model.types[node.outputs[0]].shape
        operands: list[Operand] = []
        for name in node.inputs:
            operand = self._operand(name, of, over)
            if operand is None:
                return None
            shape = self.model.types[name].shape
            if not isinstance(operand, float) and shape != out and (shape, out) != (_kept(full, over), full):
                return None
            operands.append(operand)
        return _Row(of, over, np.asarray(rule(node, operands), np.float64))

    def _operand(self, name: str, of: str, over: tuple[int, ...]) -> Operand | None:
        """A number, or what a tensor is on the rows of another one; None where it is no function of that."""
        number = number_of(self.model, name)
        if number is not None:
            return number
        row = self.known.get(name)
        if row is not None:
            return row.values if (row.of, row.over) == (of, over) else None
        if name == of or (name in self.of_numbers and self.of_numbers[name].of == of):
            return self._on_rows(name, of, over)
        return None

    def _on_rows(self, name: str, of: str, over: tuple[int, ...]) -> Array:
        """A function of numbers on the samples of rows."""
        pending, made = [name], {of: _samples(self.model.types[of].shape, over)}
        while pending:
            node = self.producers[pending[-1]] if pending[-1] not in made else None
            missing = [n for n in node.inputs if n in self.of_numbers and n not in made] if node else []
            if node is None:
                pending.pop()
            elif missing:
                pending += missing
            else:
                operands: list[Operand] = []
                for operand in node.inputs:
                    number = number_of(self.model, operand)
                    operands.append(made[operand] if number is None else number)
                made[pending.pop()] = np.asarray(_rule(node)(node, operands), np.float64)
        return made[name]

    def _along(self, node: Node) -> _Row | None:
        axes = self._axes(node)
        name = node.inputs[0]
        if not axes or name in self.model.weights or not self.model.types[name].is_floating:
            return None
        row, function = self.known.get(name), self.of_numbers.get(name)
        of = row.of if row is not None else function.of if function is not None else name
        shape = self.model.types[of].shape
        if shape != self.model.types[name].shape or math.prod(shape[axis] for axis in axes) > _LONGEST_ROW:
            return None
        values = self._operand(name, of, axes)
        if values is None or isinstance(values, float) or values.shape[1] == 1:
            return None
        rule = REDUCTIONS.get(node.op) or OF_ROWS[node.op]
        return _Row(of, axes, np.asarray(rule(node, values), np.float64))

    def _axes(self, node: Node) -> tuple[int, ...]:
        rank = len(self.model.types[node.inputs[0]].shape)
        if node.op in OF_ROWS:
            given = node.attribute("axes", [0, 2, 3]) if node.op[0] == "M" else [node.attribute("axis", -1)]
        elif node.attribute("axes") is not None:
            given = node.attribute("axes")
        elif len(node.inputs) > 1 and node.inputs[1]:
            weight = self.model.weights.get(node.inputs[1])
            given = [] if weight is None else np.asarray(weight.load()).reshape(-1)
        else:
            given = [] if node.attribute("noop_with_empty_axes", 0) else range(rank)
        return tuple(sorted(int(axis) % rank for axis in given))

    def _reshaped(self, node: Node) -> _Row | None:
        """One number of each row, in dimensions of size 1 or without them, or beside all of the row."""
        row = self.known.get(node.inputs[0])
        if row is None or row.values.shape[1] != 1:
            return None
        full = self.model.types[row.of].shape
        kept = _kept(full, row.over)
        dropped = tuple(size for axis, size in enumerate(full) if axis not in row.over)
        before, after = (self.model.types[name].shape for name in (node.inputs[0], node.outputs[0]))
        is_moved = before in (kept, dropped) and after in (kept, dropped) and node.op != "Expand"
        is_spread = before == kept and after in (kept, full) and node.op == "Expand"
        return row if is_moved or is_spread else None


def _kept(shape: tuple[int, ...], over: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with one element along some axes."""
    return tuple(1 if axis in over else size for axis, size in enumerate(shape))


def _samples(shape: tuple[int, ...], over: tuple[int, ...]) -> Array:
    length = math.prod(shape[axis] for axis in over)
    draw = np.random.default_rng(0).standard_normal((len(_ROWS), length))
    deviations, means = np.transpose(_ROWS)
    return np.asarray(draw * deviations[:, None] + means[:, None])


def spelled_apart(
    a: tuple[TrainableModel, Structure], b: tuple[TrainableModel, Structure]
) -> tuple[dict[str, Along], dict[str, Along]]:
    """The functions that both models have in different normal forms.

    For each side: the tensors that are one of them, with what they are a function of, along which axes, and a
    number for the function, the same on both sides.
    """
    kinds: list[Function] = []
    sides: list[dict[str, Along]] = []
    forms: list[dict[int, set[Any]]] = []
    for model, structure in (a, b):
        found: dict[str, Along] = {}
        of_kind: dict[int, set[Any]] = {}
        known_forms = _Forms(structure)
        for name, function in functions_of(model).items():
            is_known = {name, function.of} <= structure.views.keys()
            if not is_known or (not function.over and _is_affine(function.values)):
                continue
            kind = next((k for k, known in enumerate(kinds) if _agree(known, function)), len(kinds))
            if kind == len(kinds):
                kinds.append(function)
            found[name] = Along(function.of, kind, function.over)
            of_kind.setdefault(kind, set()).add(known_forms.of(name, function.of))
        sides.append(found)
        forms.append(of_kind)
    shared = forms[0].keys() & forms[1].keys()
    apart = {kind for kind in shared if forms[0][kind] != forms[1][kind]}
    inside = [_inside_of_others(model, side, shared) for side, (model, _) in zip(sides, (a, b), strict=True)]
    first, second = (
        {name: along for name, along in side.items() if along.kind in apart and name not in others}
        for side, others in zip(sides, inside, strict=True)
    )
    return first, second


def _inside_of_others(model: TrainableModel, side: Mapping[str, Along], shared: Set[int]) -> set[str]:
    """The functions of which, in the end, one is made that the other model has not."""
    made: dict[str, list[str]] = {name: [] for name in side}
    found: set[str] = set()
    for node in model.nodes:
        result = side.get(node.outputs[0]) if node.outputs else None
        for name in node.inputs:
            along = side.get(name)
            if along and result and (along.of, along.axes) == (result.of, result.axes):
                made[name].append(node.outputs[0])
    for name in reversed(list(side)):
        is_other = not made[name] and side[name].kind not in shared
        if is_other or not found.isdisjoint(made[name]):
            found.add(name)
    return found


def _is_affine(values: Array) -> bool:
    """Whether it is a line, or hardly defined: what scales and shifts is known without values."""
    inner = values[: len(_INNER)]
    if not np.isfinite(inner).all():
        # Roots and logarithms have half of the line.
        return 2 * int(np.isfinite(inner).sum()) < len(inner) - 1
    return bool(np.abs(np.diff(inner, 2)).max() <= 1e-9 * (np.abs(inner).max() or 1.0))


def _agree(one: Function, other: Function) -> bool:
    if one.values.shape != other.values.shape or len(one.over) != len(other.over):
        return False
    inner = len(_INNER) if not one.over else len(one.values)
    is_finite, is_other_finite = np.isfinite(one.values), np.isfinite(other.values)
    if (is_finite != is_other_finite)[:inner].any():
        return False
    both = is_finite & is_other_finite
    here, there = np.where(both, one.values, 0.0), np.where(both, other.values, 0.0)
    errors = np.maximum(one.errors, other.errors)
    return bool((np.abs(here - there) <= _TOLERANCE * np.abs(here) + errors).all())


class _Forms:
    """The normal forms of tensors as of others; what is none of their parts shows as such."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._known: dict[int, dict[int, str]] = {}

    def of(self, tensor: str, start_tensor: str) -> tuple[str, ...]:
        start, end = self._structure.views[start_tensor], self._structure.views[tensor]
        known = self._known.setdefault(start.value, {start.value: "x"})
        pending = [end.value]
        while pending:
            value = pending[-1]
            entity = self._structure.entities[value]
            parts = [leaf for _, leaf in leaves(entity.term)] if value > start.value else []
            missing = [p.value for p in parts if isinstance(p, OfValue) and p.value not in known]
            if value in known or not missing:
                pending.pop()
                known.setdefault(value, self._form(value, known) if value > start.value else "other")
            pending += missing
        return (known[end.value], f"{end.scale:.5g}", f"{start.scale:.5g}")

    def _form(self, value: int, known: Mapping[int, str]) -> str:
        entity = self._structure.entities[value]
        parts = [leaf for _, leaf in leaves(entity.term)]
        named = {p.axis: "axis" for p in parts if isinstance(p, OfAxis)}
        named |= {p.value: known[p.value] for p in parts if isinstance(p, OfValue)}
        content = repr((entity.op, rendered(entity.term, named)))
        return hashlib.blake2b(content.encode(), digest_size=12).hexdigest()
