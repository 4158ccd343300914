"""Functions of numbers or rows that two models spell differently.

The normal form covers most spellings of activations and normalisations. Another function of one number, or of
one row, is identified by its values: two functions that agree on all samples are equal.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from onnxgc.matching.normal_form.builder import IdentifiedFunction
from onnxgc.matching.normal_form.terms import OfAxis, OfValue, leaves, rendered
from onnxgc.matching.normal_form.value_graph import Structure
from onnxgc.matching.probes.function_probes import INNER_SAMPLES, Function, number_functions
from onnxgc.matching.probes.row_probes import TOLERANCE, RowFunctions
from onnxgc.model.core.ir import Array, TrainableModel


def differently_spelled(
    a: tuple[TrainableModel, Structure], b: tuple[TrainableModel, Structure]
) -> tuple[dict[str, IdentifiedFunction], dict[str, IdentifiedFunction]]:
    """Functions that both models compute in different normal forms: for each model, numbers by tensor.

    Equal functions of the two models have the same number.
    """
    kinds: list[Function] = []
    functions_a, forms_a = _identified(*a, kinds)
    functions_b, forms_b = _identified(*b, kinds)
    shared = forms_a.keys() & forms_b.keys()
    different = {kind for kind in shared if forms_a[kind] != forms_b[kind]}
    inside_a = _inside_unshared(a[0], functions_a, shared)
    inside_b = _inside_unshared(b[0], functions_b, shared)
    return (
        {name: f for name, f in functions_a.items() if f.kind in different and name not in inside_a},
        {name: f for name, f in functions_b.items() if f.kind in different and name not in inside_b},
    )


def _identified(
    model: TrainableModel, structure: Structure, kinds: list[Function]
) -> tuple[dict[str, IdentifiedFunction], dict[int, set[Any]]]:
    """The functions by tensor, and the normal forms of each kind; appends new functions to `kinds`."""
    identified: dict[str, IdentifiedFunction] = {}
    forms: dict[int, set[Any]] = defaultdict(set)
    normal_forms = _NormalForms(structure)
    for name, function in functions_of(model).items():
        is_known = {name, function.of} <= structure.views.keys()
        if not is_known or (not function.over and _is_affine(function.values)):
            continue
        kind = next((k for k, known in enumerate(kinds) if _agree(known, function)), len(kinds))
        if kind == len(kinds):
            kinds.append(function)
        identified[name] = IdentifiedFunction(function.of, kind, function.over)
        forms[kind].add(normal_forms.form_of(name, function.of))
    return identified, forms


def functions_of(model: TrainableModel) -> dict[str, Function]:
    """The tensors that are a function of one other tensor and of constants, elementwise or of rows."""
    with np.errstate(all="ignore"):
        of_numbers = number_functions(model)
        return of_numbers | RowFunctions(model, of_numbers).find()


def _inside_unshared(model: TrainableModel, side: Mapping[str, IdentifiedFunction], shared: Set[int]) -> set[str]:
    """The functions inside a larger function that the other model does not have."""
    results: dict[str, list[str]] = {name: [] for name in side}
    inside: set[str] = set()
    for node in model.nodes:
        result = side.get(node.outputs[0]) if node.outputs else None
        for name in node.inputs:
            function = side.get(name)
            if function and result and (function.of, function.axes) == (result.of, result.axes):
                results[name].append(node.outputs[0])
    for name in reversed(list(side)):
        is_unshared = not results[name] and side[name].kind not in shared
        if is_unshared or not inside.isdisjoint(results[name]):
            inside.add(name)
    return inside


def _is_affine(values: Array) -> bool:
    """Whether a function is a line, which the normal form covers, or mostly undefined."""
    inner = values[: len(INNER_SAMPLES)]
    if not np.isfinite(inner).all():
        # Roots and logarithms are defined on half of the samples.
        return 2 * int(np.isfinite(inner).sum()) < len(inner) - 1
    return bool(np.abs(np.diff(inner, 2)).max() <= 1e-9 * (np.abs(inner).max() or 1.0))


def _agree(one: Function, other: Function) -> bool:
    if one.values.shape != other.values.shape or len(one.over) != len(other.over):
        return False
    inner = len(INNER_SAMPLES) if not one.over else len(one.values)
    is_finite, is_other_finite = np.isfinite(one.values), np.isfinite(other.values)
    if (is_finite != is_other_finite)[:inner].any():
        return False
    both = is_finite & is_other_finite
    here, there = np.where(both, one.values, 0.0), np.where(both, other.values, 0.0)
    errors = np.maximum(one.errors, other.errors)
    return bool((np.abs(here - there) <= TOLERANCE * np.abs(here) + errors).all())


class _NormalForms:
    """Normal forms of tensors as functions of other tensors; unrelated parts are "other"."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._known: dict[int, dict[int, str]] = {}

    def form_of(self, tensor: str, start_tensor: str) -> tuple[str, ...]:
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
