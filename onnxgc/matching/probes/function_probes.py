"""Functions of one number, identified by their values on samples."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgc.matching.normal_form.builder import number_of
from onnxgc.matching.probes.float64_operators import OF_NUMBERS, Operand, Rule
from onnxgc.model.core.ir import Array, Node, TensorType, TrainableModel

INNER_SAMPLES = np.linspace(-16.0, 16.0, 641)
# One of two spellings may overflow here.
_OUTER_SAMPLES = np.concatenate([sign * np.logspace(1.5, 6, 10) for sign in (-1, 1)])
# Dense, for thresholds that are close to each other.
_DENSE_SAMPLES = np.linspace(-1.0, 1.0, 1999)
_SAMPLES = np.concatenate([INNER_SAMPLES, _OUTER_SAMPLES, _DENSE_SAMPLES])
# The rounding error of an operator; differences of nearly equal numbers amplify it.
_ROUNDING_ERROR = 1e-9


@dataclass(frozen=True, slots=True)
class Function:
    """A tensor as a function of the tensor `of`, by its values on all samples.

    A function of numbers is elementwise: `values` and `errors` are [samples]. A function of rows maps all
    elements along the axes `over` to a row or to one number: [samples, length] or [samples, 1]. `errors` are
    the possible errors of the values.
    """

    of: str
    values: Array
    errors: Array
    over: tuple[int, ...] = ()


def number_functions(model: TrainableModel) -> dict[str, Function]:
    """The tensors that are an elementwise function of one other tensor and of constants."""
    functions: dict[str, Function] = {}
    for node in model.nodes:
        function = _function(model, node, functions)
        if function is not None:
            functions[node.outputs[0]] = function
    return functions


def elementwise_rule(node: Node) -> Rule | None:
    """The rule of an elementwise operator; None for other operators."""
    if node.domain or node.once or not all(node.inputs):
        return None
    if node.op == "Cast" and TensorType(node.attribute("to"), ()).is_floating:
        return OF_NUMBERS["Identity"]
    return OF_NUMBERS.get(node.op)


def _function(model: TrainableModel, node: Node, known: Mapping[str, Function]) -> Function | None:
    rule = elementwise_rule(node)
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
        operands.append(_SAMPLES if function is None else function.values)
        errors.append(None if function is None else function.errors)
        sources.add(name if function is None else function.of)
    if len(sources) != 1:
        return None
    values = np.asarray(rule(node, operands), np.float64)
    return Function(sources.pop(), values, _errors(node, rule, operands, errors, values))


def _error_of(number: float) -> Array | None:
    """The rounding error of a constant in float32; None for whole numbers and simple fractions."""
    is_exact = not math.isfinite(number) or float(256 * number).is_integer()
    return None if is_exact else np.asarray(2.0**-24 * abs(number))


def _errors(
    node: Node, rule: Rule, operands: Sequence[Operand], errors: Sequence[Array | None], values: Array
) -> Array:
    """Errors of values: their changes when each operand changes by its own error."""
    total = _ROUNDING_ERROR * np.abs(values)
    for index, error in enumerate(errors):
        if error is None:
            continue
        changes = []
        for sign in (-1, 1):
            moved = [*operands[:index], operands[index] + sign * error, *operands[index + 1 :]]
            changes.append(np.abs(np.asarray(rule(node, moved), np.float64) - values))
        total = total + np.maximum(*changes)
    return np.where(np.isnan(total), np.inf, total)
