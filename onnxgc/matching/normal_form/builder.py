"""Translation of a model's nodes into the values and axes of a structure."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxgc.matching.normal_form.constant_tables import is_learned, table_of
from onnxgc.matching.normal_form.dimensions import Dim, atoms_at, extent
from onnxgc.matching.normal_form.entities import View, WeightTensor
from onnxgc.matching.normal_form.terms import OfValue, in_terms, set_in_terms
from onnxgc.matching.normal_form.value_graph import Structure
from onnxgc.model.core.draft import captured_names, subgraphs
from onnxgc.model.core.ir import Array, Node, TrainableModel
from onnxgc.model.core.stored_weights import FilledWeight, is_external
from onnxgc.model.operators.facts import has_input

Ref = View | WeightTensor
Result = View | Sequence[View] | None
"""Views of a node's first output, or of all outputs; None if a rule does not apply."""
Rule = Callable[["Builder", Node], Result]
# Numbers, settings and indices are small.
_MAX_READ_ELEMENTS = 4096
_SUMS = ("Add", "Sub", "Sum")
_REARRANGING = ("Cast", "Concat", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_INDEXING = ("Gather", "GatherElements", "GatherND")


@dataclass(frozen=True, slots=True)
class IdentifiedFunction:
    """A tensor that is function number `kind` of `of`, by rows along `axes` or by elements."""

    of: str
    kind: int
    axes: tuple[int, ...] = ()


def of_view(rule: "Callable[[Builder, Node, View], Result]") -> Rule:
    """The rule of an operator on a view; a node whose first input is a weight has none."""

    def rule_of_node(builder: Builder, node: Node) -> Result:
        x = builder.view(node)
        return None if x is None else rule(builder, node, x)

    return rule_of_node


class Builder:
    """Builds the structure of a model by the `rules` of operators.

    `identified` has tensors that are identified as functions of other tensors. `flags` are values that are
    zero or one in every data type.
    """

    def __init__(
        self,
        model: TrainableModel,
        rules: Mapping[str, Rule],
        identified: Mapping[str, IdentifiedFunction] | None = None,
    ) -> None:
        self.structure = Structure()
        self._model = model
        self._rules = rules
        self._identified = identified or {}
        self.flags: set[int] = set()
        self._weights: dict[str, WeightTensor] = {}
        self._learned = frozenset(model.parameters) | {statistic.name for statistic in model.statistics}
        self._of_statistics = {name for node in model.nodes if node.once for name in node.outputs}
        self._readers: dict[str, list[Node]] = {}
        for node in model.nodes:
            for name in node.inputs:
                self._readers.setdefault(name, []).append(node)
        reads = Counter(name for node in model.nodes for name in (*node.inputs, *captured_names(node)))
        in_sums = (name for node in model.nodes if node.op in _SUMS for name in node.inputs)
        read_once = {name for name in in_sums if reads[name] == 1}
        self._partial_sums = read_once.difference(model.outputs, {model.loss})

    def add_input(self, name: str) -> None:
        """Adds an input, whose axes are distinguished by their sizes, and equal ones by their order."""
        shape = self._model.types[name].shape
        is_integer = not self._model.types[name].is_floating
        term = (name in self._model.targets, is_integer, tuple(sorted(shape)))
        value = self.structure.value("input", *term, weights=(name,))
        dims = tuple(
            self.structure.axis("input", size, OfValue(value), size, shape[:axis].count(size))
            for axis, size in enumerate(shape)
        )
        self.structure.views[name] = View(value, dims)

    def visit(self, node: Node) -> None:
        has_weights_only = not any(isinstance(ref, View) for ref in self.refs(node))
        if has_weights_only and self._of_statistics.isdisjoint(node.inputs):
            for name in filter(None, node.outputs):
                self._weights[name] = WeightTensor(name, self.shape(name))
            return
        if self._visit_function(node.outputs[0]):
            return
        rule = None if node.domain else self._rules.get(node.op)
        result = rule(self, node) if rule is not None else None
        views = (result,) if isinstance(result, View) else result or ()
        for name, view in zip(node.outputs, views, strict=False):
            # A view of another shape means that the rule does not cover this case.
            if name and self.shape(name) == tuple(map(extent, view.dims)):
                self.structure.views[name] = view
        for index, name in enumerate(node.outputs):
            if name and name not in self.structure.views:
                self._visit_opaque(node, index)

    def _visit_function(self, name: str) -> bool:
        """Adds a tensor that is an identified function; False for other tensors."""
        function = self._identified.get(name)
        x = None if function is None else self.structure.views.get(function.of)
        if function is None or x is None:
            return False
        over = set_in_terms(atoms_at(x.dims, function.axes))
        value = self.structure.value("function", function.kind, OfValue(x.value), x.scale, over)
        dims = tuple(() if size == 1 else dim for size, dim in zip(self.shape(name), x.dims, strict=True))
        self.structure.views[name] = View(value, dims)
        return True

    def ref(self, name: str) -> Ref | None:
        """A tensor as view or weight; None for batch statistics."""
        if name in self.structure.views:
            return self.structure.views[name]
        if name in self._of_statistics:
            return None
        if name not in self._weights:
            number = number_of(self._model, name)
            table = table_of(self._model, name) if number is None else None
            self._weights[name] = WeightTensor(name, self.shape(name), number, table=table)
        return self._weights[name]

    def is_partial_sum(self, name: str) -> bool:
        """Whether the only consumer of a tensor is a sum."""
        return name in self._partial_sums

    def refs(self, node: Node) -> list[Ref | None]:
        return [self.ref(name) if name else None for name in node.inputs]

    def view(self, node: Node, index: int = 0) -> View | None:
        ref = self._input(node, index)
        return ref if isinstance(ref, View) else None

    def weight(self, node: Node, index: int) -> WeightTensor | None:
        ref = self._input(node, index)
        return ref if isinstance(ref, WeightTensor) else None

    def _input(self, node: Node, index: int) -> Ref | None:
        return self.ref(node.inputs[index]) if has_input(node, index) else None

    def number(self, node: Node, index: int, default: float) -> float | None:
        """The number at an input, the default without one; None if it is computed or learned."""
        if not has_input(node, index):
            return default
        weight = self.weight(node, index)
        return None if weight is None else weight.number

    def shape(self, name: str) -> tuple[int, ...]:
        return self._model.types[name].shape

    def is_floating(self, name: str) -> bool:
        return self._model.types[name].is_floating

    def is_boolean(self, name: str) -> bool:
        return self._model.types[name].dtype == TensorProto.BOOL

    def extents_indexed(self, name: str) -> set[int]:
        """The extents of the dimensions that a tensor of indices, or a rearrangement of it, indexes."""
        pending = [name]
        extents: set[int] = set()
        while pending:
            read = pending.pop()
            for node in self._readers.get(read, ()):
                if node.op in _REARRANGING:
                    pending.append(node.outputs[0])
                elif node.op in _INDEXING and node.inputs[1] == read:
                    shape = self.shape(node.inputs[0])
                    has_axis = node.op != "GatherND"
                    extents.update([shape[int(node.attribute("axis", 0))]] if has_axis else shape)
        return extents

    def array(self, name: str) -> Array | None:
        """The contents of a small constant; None for others."""
        weight = self._model.weights.get(name)
        if weight is None or name in self._learned or weight.type.element_count > _MAX_READ_ELEMENTS:
            return None
        return weight.load()

    def ints(self, node: Node, index: int) -> list[int] | None:
        """The integers at an input; None if it is absent or computed."""
        array = self.array(node.inputs[index]) if has_input(node, index) else None
        return None if array is None else [int(item) for item in array.reshape(-1)]

    def _visit_opaque(self, node: Node, output: int) -> None:
        """Adds the output of an operator without a rule: a term of operands with layout, and attributes."""
        reads = (*node.inputs, *captured_names(node))
        refs = [self.ref(name) if name else None for name in reads]
        operands = tuple(self._operand(name, ref) for name, ref in zip(reads, refs, strict=True))
        attributes = tuple(sorted((k, repr(v)) for k, v in node.attributes.items() if _is_plain(v)))
        bodies = tuple(tuple(sorted(n.op_type for n in graph.node)) for graph in subgraphs(node))
        weights = [name for name, ref in zip(reads, refs, strict=True) if not isinstance(ref, View)]
        # Bodies are not compared: each node with a body is a separate value.
        weights += [node.name] if bodies else []
        term = (f"{node.domain}:{node.op}", output, attributes, bodies, operands)
        value = self.structure.value("opaque", *term, weights=tuple(weights))
        name, views = node.outputs[output], [ref for ref in refs if isinstance(ref, View)]
        shape = self.shape(name)
        dims = tuple(
            _dim_of_operand(views, axis, shape) or self.structure.axis("opaque", size, OfValue(value), axis)
            for axis, size in enumerate(shape)
        )
        self.structure.views[name] = View(value, dims)

    def _operand(self, name: str, ref: Ref | None) -> tuple[Any, ...]:
        if isinstance(ref, View):
            return (OfValue(ref.value), ref.scale, tuple(in_terms(dim) for dim in ref.dims))
        if ref is None:
            return ()
        values = self.array(name)
        content: Any = ref.number
        if values is not None and values.dtype.kind in "iub":
            content = tuple(np.asarray(values).reshape(-1).tolist())
        elif ref.table is not None:
            content = ref.table.contents_by_axis()
        return (ref.shape, content)


def number_of(model: TrainableModel, name: str) -> float | None:
    """The number that all elements of a constant equal; None for other constants, and other tensors."""
    weight = model.weights.get(name)
    if weight is None or is_learned(model, name):
        return None
    if isinstance(weight, FilledWeight):
        return float(weight.value)
    if weight.type.element_count > _MAX_READ_ELEMENTS or is_external(weight):
        return None
    values = np.asarray(weight.load()).reshape(-1)
    if values.size == 0 or values.dtype.kind not in "fiub" or (values != values[0]).any():
        return None
    return float(values[0])


def _dim_of_operand(views: Sequence[View], axis: int, shape: tuple[int, ...]) -> Dim:
    """The dimension of the first operand with the same rank and the same size along an axis."""
    dims = (view.dims[axis] for view in views if len(view.dims) == len(shape))
    return next((dim for dim in dims if extent(dim) == shape[axis]), ())


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | bytes) or (isinstance(value, list) and all(map(_is_plain, value)))
