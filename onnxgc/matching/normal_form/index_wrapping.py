"""Indices of which negative ones count from the end: where(i < 0, i + n, i) is the index i."""

from __future__ import annotations

from dataclasses import replace

from onnxgc.matching.normal_form.alignment import both_orders
from onnxgc.matching.normal_form.entities import View
from onnxgc.matching.normal_form.recognized_forms import Plus, Product
from onnxgc.matching.normal_form.terms import OfValue
from onnxgc.matching.normal_form.value_graph import Structure


def is_wrapped(structure: Structure, condition: View, moved: View, index: View) -> bool:
    """Whether `moved` is the index plus a number, and the condition that the index is negative."""
    entity = structure.entities[condition.value]
    is_sign = entity.op == "Less" and entity.term[0] == ((OfValue(index.value), 1.0), 0.0)
    match structure.facts.get(moved.value):
        case Plus(value):
            return value == index.value and is_sign
    return False


def wrapped_by_masks(structure: Structure, x: View, y: View) -> View | None:
    """The index of a wrapped index that is written as mask * (i + n) + (1 - mask) * i."""
    for one, other in both_orders(x, y):
        first, second = structure.facts.get(one.value), structure.facts.get(other.value)
        if not isinstance(first, Product) or not isinstance(second, Product):
            continue
        for mask, moved in both_orders(first.first, first.second):
            for rest, index in both_orders(second.first, second.second):
                is_complement = structure.entities[rest.value].term[:1] == (OfValue(mask.value),)
                if is_complement and is_wrapped(structure, mask, moved, index):
                    return replace(index, scale=1.0)
    return None
