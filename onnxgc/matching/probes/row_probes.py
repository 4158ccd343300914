"""Functions of one row of numbers, identified by their values on samples."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxgc.matching.graph_helpers import reachable
from onnxgc.matching.normal_form.builder import number_of
from onnxgc.matching.probes.float64_operators import OF_ROWS, REDUCTIONS, Operand
from onnxgc.matching.probes.function_probes import Function, elementwise_rule
from onnxgc.model.core.ir import Array, Node, TrainableModel
from onnxgc.model.operators.facts import has_input
from onnxgc.model.operators.reductions import reduced_axes

# Deviations and means of samples: usual ones, large ones, those near an epsilon that is added to a deviation,
# and those of which a first activation leaves little or all.
_DISTRIBUTIONS = ((1.0, 0.0), (1.0, 0.0), (20.0, 0.0), (0.003, 0.0), (1e-6, 0.0), (1.0, -12.0), (1.0, 12.0))
_MAX_ROW_LENGTH = 8192
_MAX_COMPARED = 64
TOLERANCE = 1e-6
"""Exporters round constants to float32; the nearest approximations in use are 30 times as far apart."""


@dataclass(slots=True)
class _Row:
    """A tensor as a function of rows: its values [samples, length], or [samples, 1] for one number a row."""

    of: str
    over: tuple[int, ...]
    values: Array


@dataclass(slots=True)
class RowFunctions:
    """Finds the functions of rows of a model. `of_numbers` are its functions of numbers."""

    model: TrainableModel
    of_numbers: Mapping[str, Function]
    _known: dict[str, _Row] = field(default_factory=dict)
    _producers: dict[str, Node] = field(default_factory=dict)

    def find(self) -> dict[str, Function]:
        """The tensors that are a function of rows of one other tensor and of constants."""
        functions: dict[str, Function] = {}
        unread = Counter(name for node in self.model.nodes for name in node.inputs)
        self._producers = {node.outputs[0]: node for node in self.model.nodes if node.outputs}
        for node in self.model.nodes:
            row = self._row(node)
            if row is not None:
                self._known[node.outputs[0]] = row
                function = self._function(node.outputs[0], row)
                if function is not None:
                    functions[node.outputs[0]] = function
            unread.subtract(node.inputs)
            for name in node.inputs:
                if not unread[name]:
                    self._known.pop(name, None)
        return functions

    def _function(self, name: str, row: _Row) -> Function | None:
        """A function whose result has the shape of its operand, or of that reduced."""
        shape, full = self.model.types[name].shape, self.model.types[row.of].shape
        if shape not in (full, _reduced(full, row.over)):
            return None
        length = math.prod(full[axis] for axis in row.over) if shape == full else 1
        values = np.broadcast_to(row.values, (len(row.values), length))[:, :_MAX_COMPARED]
        # Elements that are small compared with the row may be differences of nearly equal numbers.
        finite = np.where(np.isfinite(values), values, 0.0)
        errors = TOLERANCE * np.abs(finite).max(axis=1, keepdims=True)
        return Function(row.of, values.copy(), errors, row.over)

    def _row(self, node: Node) -> _Row | None:
        if node.op in REDUCTIONS or node.op in OF_ROWS:
            return self._along(node)
        if node.op in ("Reshape", "Squeeze", "Unsqueeze", "Expand"):
            return self._reshaped(node)
        rule = elementwise_rule(node)
        rows = [self._known[name] for name in node.inputs if name in self._known]
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
            if not isinstance(operand, float) and shape != out and (shape, out) != (_reduced(full, over), full):
                return None
            operands.append(operand)
        return _Row(of, over, np.asarray(rule(node, operands), np.float64))

    def _operand(self, name: str, of: str, over: tuple[int, ...]) -> Operand | None:
        """A constant, or the values of a tensor on samples of another one; None without such a function."""
        number = number_of(self.model, name)
        if number is not None:
            return number
        row = self._known.get(name)
        if row is not None:
            return row.values if (row.of, row.over) == (of, over) else None
        if name == of or (name in self.of_numbers and self.of_numbers[name].of == of):
            return self._on_rows(name, of, over)
        return None

    def _on_rows(self, name: str, of: str, over: tuple[int, ...]) -> Array:
        """The values of a function of numbers on samples of rows."""
        values: dict[str, Operand] = {of: _samples(self.model.types[of].shape, over)}

        def operands_of(result: str) -> Sequence[str]:
            return self._producers[result].inputs if result in self.of_numbers else ()

        needed = reachable([name], operands_of) & self.of_numbers.keys()
        for result in filter(needed.__contains__, self._producers):
            for operand in operands_of(result):
                number = number_of(self.model, operand)
                if number is not None:
                    values[operand] = number
            node = self._producers[result]
            rule = elementwise_rule(node)
            assert rule is not None
            operands = [values[operand] for operand in node.inputs]
            values[result] = np.asarray(rule(node, operands), np.float64)
        return np.asarray(values[name])

    def _along(self, node: Node) -> _Row | None:
        axes = self._axes(node)
        name = node.inputs[0]
        if not axes or name in self.model.weights or not self.model.types[name].is_floating:
            return None
        row, function = self._known.get(name), self.of_numbers.get(name)
        of = row.of if row is not None else function.of if function is not None else name
        shape = self.model.types[of].shape
        if shape != self.model.types[name].shape or math.prod(shape[axis] for axis in axes) > _MAX_ROW_LENGTH:
            return None
        values = self._operand(name, of, axes)
        if values is None or isinstance(values, float) or values.shape[1] == 1:
            return None
        rule = REDUCTIONS.get(node.op) or OF_ROWS[node.op]
        return _Row(of, axes, np.asarray(rule(node, values), np.float64))

    def _axes(self, node: Node) -> tuple[int, ...]:
        rank = len(self.model.types[node.inputs[0]].shape)
        if node.op == "MeanVarianceNormalization":
            return tuple(sorted(axis % rank for axis in node.attribute("axes", [0, 2, 3])))
        if node.op in OF_ROWS:
            return (int(node.attribute("axis", -1)) % rank,)
        if has_input(node, 1) and node.inputs[1] not in self.model.weights:
            return ()
        return tuple(sorted(reduced_axes(node, rank, lambda name: self.model.weights[name].load())))

    def _reshaped(self, node: Node) -> _Row | None:
        """One number per row, after dimensions of size 1 are added or removed, or repeated along the row."""
        row = self._known.get(node.inputs[0])
        if row is None or row.values.shape[1] != 1:
            return None
        full = self.model.types[row.of].shape
        kept = _reduced(full, row.over)
        dropped = tuple(size for axis, size in enumerate(full) if axis not in row.over)
        before, after = (self.model.types[name].shape for name in (node.inputs[0], node.outputs[0]))
        is_moved = before in (kept, dropped) and after in (kept, dropped) and node.op != "Expand"
        is_repeated = before == kept and after in (kept, full) and node.op == "Expand"
        return row if is_moved or is_repeated else None


def _reduced(shape: tuple[int, ...], over: tuple[int, ...]) -> tuple[int, ...]:
    """A shape after a reduction over axes that keeps them."""
    return tuple(1 if axis in over else size for axis, size in enumerate(shape))


def _samples(shape: tuple[int, ...], over: tuple[int, ...]) -> Array:
    length = math.prod(shape[axis] for axis in over)
    draw = np.random.default_rng(0).standard_normal((len(_DISTRIBUTIONS), length))
    deviations, means = np.transpose(_DISTRIBUTIONS)
    return np.asarray(draw * deviations[:, None] + means[:, None])
