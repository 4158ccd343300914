"""What rules need of a model while its nodes become the values and axes of a structure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxgc.matching.normal_form.constant_tables import table_of
from onnxgc.matching.normal_form.dimensions import Dim, extent
from onnxgc.matching.normal_form.structure import Fixed, OfValue, Structure, View, in_terms, set_in_terms
from onnxgc.matching.normal_form.terms import Terms, positions
from onnxgc.model.core.draft import captured_names, subgraphs
from onnxgc.model.core.ir import Array, Node, TrainableModel
from onnxgc.model.core.stored_weights import FilledWeight, is_external

Ref = View | Fixed
Result = Sequence[View | None] | None
Rule = Callable[["Builder", Node], Result]
# Larger constants are no numbers, settings or indices.
_LARGEST_READ = 4096
_SUMS = ("Add", "Sub", "Sum")
_REARRANGING = ("Cast", "Concat", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_INDEXING = ("Gather", "GatherElements", "GatherND")


@dataclass(frozen=True, slots=True)
class Along:
    """A tensor is a function, known by a number, of another one: of all that lies along some axes of it.

    Without axes it is so element by element.
    """

    of: str
    kind: int
    axes: tuple[int, ...] = ()


class Builder:
    """A structure while it is built. A rule gives views of its node's outputs, or None where it has none.

    `functions` are tensors that are known as a function of another one. `flags` are values that are zero or
    one, whatever the type of the tensors that hold them.
    """

    def __init__(
        self,
        model: TrainableModel,
        rules: Mapping[str, Rule],
        functions: Mapping[str, Along] | None = None,
    ) -> None:
        self.structure = Structure()
        self.terms = Terms(self.structure)
        self._model = model
        self._rules = rules
        self._functions = functions or {}
        self.flags: set[int] = set()
        self._fixed: dict[str, Fixed] = {}
        self._apart = frozenset(model.parameters) | {statistic.name for statistic in model.statistics}
        self._skipped = {name for node in model.nodes if node.once for name in node.outputs}
        self._readers: dict[str, list[Node]] = {}
        for node in model.nodes:
            for name in node.inputs:
                self._readers.setdefault(name, []).append(node)
        reads = Counter(name for node in model.nodes for name in (*node.inputs, *captured_names(node)))
        in_sums = (name for node in model.nodes if node.op in _SUMS for name in node.inputs)
        self._terms = {name for name in in_sums if reads[name] == 1}.difference(model.outputs, {model.loss})

    def add_input(self, name: str) -> None:
        """An input's axes are told apart by their sizes, and equal ones by their order."""
        shape = self._model.types[name].shape
        is_whole = not self._model.types[name].is_floating
        term = (name in self._model.targets, is_whole, tuple(sorted(shape)))
        value = self.structure.value("input", *term, weights=(name,))
        dims = tuple(
            self.structure.axis("input", size, OfValue(value), size, shape[:place].count(size))
            for place, size in enumerate(shape)
        )
        self.structure.views[name] = View(value, dims)

    def visit(self, node: Node) -> None:
        refs = [self.ref(name) if name else None for name in node.inputs]
        if all(ref is None or isinstance(ref, Fixed) for ref in refs) and not self._skipped.intersection(
            node.inputs
        ):
            for name in filter(None, node.outputs):
                self._fixed[name] = Fixed(name, self.shape(name))
            return
        function = self._functions.get(node.outputs[0])
        x = None if function is None else self.structure.views.get(function.of)
        if function is not None and x is not None:
            over = set_in_terms(positions(x.dims, function.axes))
            value = self.structure.value("function", function.kind, OfValue(x.value), x.scale, over)
            shape = self.shape(node.outputs[0])
            dims = tuple(() if size == 1 else dim for size, dim in zip(shape, x.dims, strict=True))
            self.structure.views[node.outputs[0]] = View(value, dims)
            return
        rule = None if node.domain else self._rules.get(node.op)
        result = rule(self, node) if rule is not None else None
        for name, view in zip(node.outputs, result or (), strict=False):
            # A rule that does not give the shape has not understood the node.
            if name and view is not None and self._fits(name, view):
                self.structure.views[name] = view
        for index, name in enumerate(node.outputs):
            if name and name not in self.structure.views:
                self._opaque(node, index)

    def ref(self, name: str) -> Ref | None:
        """A tensor, or a weight; None for batch statistics."""
        if name in self.structure.views:
            return self.structure.views[name]
        if name in self._skipped:
            return None
        if name not in self._fixed:
            number = number_of(self._model, name)
            table = table_of(self._model, name) if number is None else None
            self._fixed[name] = Fixed(name, self.shape(name), number, table=table)
        return self._fixed[name]

    def is_term(self, name: str) -> bool:
        """Whether a tensor is read by nothing but another sum."""
        return name in self._terms

    def refs(self, node: Node) -> list[Ref | None]:
        return [self.ref(name) if name else None for name in node.inputs]

    def view(self, node: Node, index: int = 0) -> View | None:
        found = self.ref(node.inputs[index]) if index < len(node.inputs) and node.inputs[index] else None
        return found if isinstance(found, View) else None

    def fixed(self, node: Node, index: int) -> Fixed | None:
        found = self.ref(node.inputs[index]) if index < len(node.inputs) and node.inputs[index] else None
        return found if isinstance(found, Fixed) else None

    def number(self, node: Node, index: int, default: float) -> float | None:
        """The number at an input, the default where that is absent; None where it is computed or learned."""
        if index >= len(node.inputs) or not node.inputs[index]:
            return default
        found = self.fixed(node, index)
        return None if found is None else found.number

    def shape(self, name: str) -> tuple[int, ...]:
        return self._model.types[name].shape

    def is_floating(self, name: str) -> bool:
        return self._model.types[name].is_floating

    def is_boolean(self, name: str) -> bool:
        return self._model.types[name].dtype == TensorProto.BOOL

    def extents_indexed(self, name: str) -> set[int]:
        """How many elements there are of which a tensor, however it is rearranged, holds indices."""
        pending = [name]
        found: set[int] = set()
        while pending:
            read = pending.pop()
            for node in self._readers.get(read, ()):
                if node.op in _REARRANGING:
                    pending.append(node.outputs[0])
                elif node.op in _INDEXING and node.inputs[1] == read:
                    shape = self.shape(node.inputs[0])
                    has_axis = node.op != "GatherND"
                    found.update([shape[int(node.attribute("axis", 0))]] if has_axis else shape)
        return found

    def array(self, name: str) -> Array | None:
        """A constant's contents, where it is small."""
        weight = self._model.weights.get(name)
        if weight is None or name in self._apart or weight.type.element_count > _LARGEST_READ:
            return None
        return weight.load()

    def ints(self, node: Node, index: int, attribute: str) -> list[int] | None:
        """Integers that are an attribute in some opsets and an input in others."""
        if node.attribute(attribute) is not None:
            return [int(item) for item in node.attribute(attribute)]
        if index < len(node.inputs) and node.inputs[index]:
            found = self.array(node.inputs[index])
            return None if found is None else [int(item) for item in np.asarray(found).reshape(-1)]
        return None

    def _fits(self, name: str, view: View) -> bool:
        return self.shape(name) == tuple(extent(dim) for dim in view.dims)

    def _opaque(self, node: Node, output: int) -> None:
        """An operator without a rule: what it reads in its order and layout, and its settings."""
        reads = (*node.inputs, *captured_names(node))
        refs = [self.ref(name) if name else None for name in reads]
        operands = tuple(self._operand(name, ref) for name, ref in zip(reads, refs, strict=True))
        settings = tuple(sorted((k, repr(v)) for k, v in node.attributes.items() if _is_plain(v)))
        bodies = tuple(tuple(sorted(n.op_type for n in graph.node)) for graph in subgraphs(node))
        apart = [name for name, ref in zip(reads, refs, strict=True) if not isinstance(ref, View)]
        # Equal bodies are not looked for: each such node is a value of its own.
        apart += [node.name] if bodies else []
        term = (f"{node.domain}:{node.op}", output, settings, bodies, operands)
        value = self.structure.value("opaque", *term, weights=tuple(apart))
        name, views = node.outputs[output], [ref for ref in refs if isinstance(ref, View)]
        shape = self.shape(name)
        dims = tuple(
            _kept(views, place, shape) or self.structure.axis("opaque", size, OfValue(value), place)
            for place, size in enumerate(shape)
        )
        self.structure.views[name] = View(value, dims)

    def _operand(self, name: str, ref: Ref | None) -> tuple[Any, ...]:
        if isinstance(ref, View):
            return (OfValue(ref.value), ref.scale, tuple(in_terms(dim) for dim in ref.dims))
        if ref is None:
            return ()
        values = self.array(name)
        is_setting = values is not None and values.dtype.kind in "iub"
        content: Any = ref.number
        if is_setting:
            content = tuple(np.asarray(values).reshape(-1).tolist())
        elif ref.table is not None:
            content = ref.table.seen_from_axes()
        return (ref.shape, content)


def number_of(model: TrainableModel, name: str) -> float | None:
    """The one number that a constant holds; None for other constants and for what is learned or computed."""
    weight = model.weights.get(name)
    if weight is None or name in model.parameters or any(name == item.name for item in model.statistics):
        return None
    if isinstance(weight, FilledWeight):
        return float(weight.value)
    if weight.type.element_count > _LARGEST_READ or is_external(weight):
        return None
    values = np.asarray(weight.load()).reshape(-1)
    if values.size == 0 or values.dtype.kind not in "fiub" or (values != values[0]).any():
        return None
    return float(values[0])


def _kept(views: Sequence[View], place: int, shape: tuple[int, ...]) -> Dim:
    """The dimension at a place of the first operand that has as many, of the same size."""
    for view in views:
        if len(view.dims) == len(shape) and extent(view.dims[place]) == shape[place]:
            return view.dims[place]
    return ()


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | bytes) or (
        isinstance(value, list) and all(map(_is_plain, value))
    )
