"""Which weights train: told by how they are used, never by what they are called."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase

import numpy as np
from onnx import TensorProto

from onnxgc.errors import NoParametersError
from onnxgc.model.control_flow import INITIAL_STATE
from onnxgc.model.draft import Draft, operator_name
from onnxgc.model.ir import Array, Node, TensorType, Weight
from onnxgc.model.weights import ExportedAs, FilledWeight, StoredWeight, peek


class Role(StrEnum):
    """What a weight is to training."""

    PARAMETER = "parameter"
    CONSTANT = "constant"
    STATISTIC = "statistic"
    FROZEN = "frozen"


@dataclass(frozen=True, slots=True)
class ParameterDecision:
    """A weight, what it is taken for, and why.

    `doubt` says what a user should look at, where the use alone cannot tell.
    """

    name: str
    type: TensorType
    role: Role
    reason: str
    used_by: tuple[str, ...] = ()
    doubt: str = ""


# Inputs that hold parameters, by operator.
PARAMETER_INPUTS: Mapping[str, tuple[int, ...]] = {
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
    "Gemm": (0, 1, 2),
    "MatMul": (0, 1),
    "Einsum": tuple(range(8)),
    "BatchNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "GroupNormalization": (1, 2),
    "RMSNormalization": (1,),
    "PRelu": (1,),
    "Gather": (0,),
    "GatherND": (0,),
    "LSTM": (1, 2, 3, 7),
    "GRU": (1, 2, 3),
    "RNN": (1, 2, 3),
}
# Trained where they are not zero: exporters write the absent ones as zeros.
INITIAL_STATES: Mapping[str, tuple[int, ...]] = {"LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}
STATISTIC_INPUTS: Mapping[str, tuple[int, ...]] = {"BatchNormalization": (3, 4)}
# Operands with more than one element are parameters; a single number is a constant of the formula.
ARITHMETIC: Mapping[str, tuple[int, ...]] = {
    "Add": (0, 1),
    "Sub": (0, 1),
    "Mul": (0, 1),
    "Div": (0, 1),
    "Pow": (0, 1),
    "Sum": tuple(range(64)),
    "Mean": tuple(range(64)),
    "Max": tuple(range(64)),
    "Min": tuple(range(64)),
    "Where": (1, 2),
}
# Operators that hand their first input (Concat: any) on, so that its use is found behind them.
# fmt: off
HANDED_ON = frozenset({
    "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "Identity", "Expand", "Tile", "Cast",
    "CastLike", "Slice", "Concat", "Split", "Pad", "Neg", "Abs", "Exp", "Log", "Sqrt", "Reciprocal",
    "Sigmoid", "Softplus", "Tanh", "DepthToSpace", "SpaceToDepth", INITIAL_STATE,
})
# fmt: on
_NOT_DIFFERENTIABLE = frozenset(
    {"Shape", "Size", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN", "IsInf", "ArgMax"}
    | {"ArgMin", "NonZero", "DequantizeLinear", "Range", "OneHot", "Sign", "Floor", "Ceil"}
    | {"Round", "ConstantOfShape", "RandomNormalLike", "RandomUniformLike", "EyeLike", "NonMaxSuppression"}
)
# Positions and counts; bytes are images, and Booleans choose.
_INTEGERS = (TensorProto.INT32, TensorProto.INT64)
_OF_INTEGERS = frozenset({"Shape", "Size", "ArgMax", "ArgMin", "NonZero"})
_REPEATING = ("Expand", "Tile")
_SCATTERING = ("ScatterND", "ScatterElements", "Scatter")
# An additive constant of zeros and values up to this one is a mask, as in Swin and BERT.
MASK_VALUE = -100.0
# Masks of attention over a few thousand tokens.
_LARGEST_LOOKED_AT = 1 << 24
NOT_FLOATING = "not a floating-point tensor"


def classify_weights(
    draft: Draft, trainable: Sequence[str] = (), freeze: Sequence[str] = ()
) -> tuple[ParameterDecision, ...]:
    """What each weight is taken for; `trainable` and `freeze` are globs that overrule it.

    Where both match, `trainable` wins, so that everything but a head can be frozen.

    Raises:
        NoParametersError: a glob matches no float weight.
    """
    for option, globs in (("trainable", trainable), ("freeze", freeze)):
        if isinstance(globs, str):
            raise NoParametersError(f"{option} takes a list of globs, such as ['{globs}']")
    uses = _Uses(draft)
    decisions = [_decide(name, weight, uses) for name, weight in draft.weights.items()]
    floating = [decision.name for decision in decisions if decision.type.is_floating]
    for option, globs in (("--trainable", trainable), ("--freeze", freeze)):
        for glob in globs:
            if not any(fnmatchcase(name, glob) for name in floating):
                raise _unmatched(option, glob, floating)
    return tuple(_overruled(decision, trainable, freeze) for decision in decisions)


def parameter_notes(decisions: Iterable[ParameterDecision]) -> tuple[str, ...]:
    """One line for each parameter that several nodes use, or that may be none."""
    parameters = [decision for decision in decisions if decision.role is Role.PARAMETER]
    tied = tuple(
        f"parameter '{decision.name}' is used by {len(decision.used_by)} nodes ({_listed(decision.used_by)}) "
        "and is trained as one"
        for decision in parameters
        if len(decision.used_by) > 1
    )
    return tied + tuple(decision.doubt for decision in parameters if decision.doubt)


_ROLES_OF_EXPORTED = {
    ExportedAs.PARAMETER: Role.PARAMETER,
    ExportedAs.BUFFER: Role.CONSTANT,
    ExportedAs.CONSTANT: Role.CONSTANT,
}


@dataclass(frozen=True, slots=True)
class _Use:
    """A use of a weight by an operator that does more than hand it on."""

    node: Node
    index: int
    role: Role
    reason: str
    beside_input: str = ""


class _Uses:
    """Follows weights to the operators that use them."""

    def __init__(self, draft: Draft) -> None:
        self._weights = draft.weights
        self._consumers = draft.consumers()
        self._producers = draft.producers()
        self._declared = draft.declared
        self._inputs = frozenset(draft.inputs)

    def of(self, name: str) -> list[_Use]:
        """Every use of a weight, through operators that hand it on, in node order."""
        weight = self._weights[name]
        found: list[_Use] = []
        pending, seen = [name], {name}
        while pending:
            tensor = pending.pop(0)
            for node, index in self._consumers.get(tensor, ()):
                if node.op in _REPEATING and weight.type.element_count <= 1:
                    # A computed zero bias, as exporters give to convolutions without one.
                    reason = f"single number: repeated by {node.op} '{node.name}'"
                    found.append(_Use(node, index, Role.CONSTANT, reason))
                elif node.op == INITIAL_STATE and _is_zero(weight):
                    found.append(_Use(node, index, Role.CONSTANT, "zeros to begin with: a first state"))
                elif self._hands_on(node, index):
                    fresh = [output for output in node.outputs if output and output not in seen]
                    seen.update(fresh)
                    pending += fresh
                else:
                    found.append(self._judge(weight, tensor, node, index))
        return found

    def _hands_on(self, node: Node, index: int) -> bool:
        return not node.domain and node.op in HANDED_ON and (index == 0 or node.op == "Concat")

    def _judge(self, weight: Weight, tensor: str, node: Node, index: int) -> _Use:
        where = f"input {index} of {operator_name(node)} '{node.name}'"
        if index < 0:
            where = f"a subgraph of {operator_name(node)} '{node.name}'"
        if node.domain or index < 0:
            # Operands of unknown operators and of subgraphs train, so that a missing rule is told and not
            # passed over.
            is_constant = weight.type.element_count <= 1 or _is_mask(weight)
            role = Role.CONSTANT if is_constant else Role.PARAMETER
            return _Use(node, index, role, where)
        if index in STATISTIC_INPUTS.get(node.op, ()):
            return _Use(node, index, Role.STATISTIC, f"running statistic: {where}")
        if node.op in ("MatMul", "Mul", "Div") and self._is_position_table(weight, tensor, node):
            reason = f"frequency table: {where}, whose other operand is an integer"
            return _Use(node, index, Role.CONSTANT, reason)
        if node.op == "InstanceNormalization" and self._is_neutral(weight, node, index):
            return _Use(node, index, Role.CONSTANT, f"neutral value in a group normalisation: {where}")
        if index in PARAMETER_INPUTS.get(node.op, ()):
            if not weight.type.shape and not _is_named(weight):
                return _Use(node, index, Role.CONSTANT, f"single number: {where}")
            return _Use(node, index, Role.PARAMETER, where)
        if index in INITIAL_STATES.get(node.op, ()) and not _is_zero(weight):
            return _Use(node, index, Role.PARAMETER, f"initial state: {where}")
        if index in ARITHMETIC.get(node.op, ()):
            return self._judge_operand(weight, node, index, where)
        if node.op in _SCATTERING and not _is_initializer(weight):
            return _Use(node, index, Role.CONSTANT, f"what is written to: {where}")
        if index == 0 and node.op not in _NOT_DIFFERENTIABLE and weight.type.element_count > 1:
            # The data of an operator, as a class token is once it was concatenated.
            return _Use(node, index, Role.PARAMETER, where)
        return _Use(node, index, Role.CONSTANT, f"setting of the operator: {where}")

    def _judge_operand(self, weight: Weight, node: Node, index: int, where: str) -> _Use:
        if weight.type.element_count <= 1 and not self._is_learned_number(weight, node, index):
            return _Use(node, index, Role.CONSTANT, f"single number: {where}")
        if node.op in ("Add", "Where", "Sub") and _is_mask(weight):
            return _Use(node, index, Role.CONSTANT, f"mask of zeros and large negative values: {where}")
        if node.op == "Add" and _is_empty_mask(weight):
            return _Use(node, index, Role.CONSTANT, f"mask that masks nothing: {where}")
        beside = next((name for name in node.inputs if name in self._inputs), "")
        return _Use(node, index, Role.PARAMETER, where, beside)

    def _is_learned_number(self, weight: Weight, node: Node, index: int) -> bool:
        """Whether one number is a weight all the same: kept under a name of its own, or a bias of one unit.

        An exponent never is, nor what is added in front of a root.
        """
        if node.op == "Pow" and index == 1:
            return False
        if _is_named(weight):
            return True
        readers = {reader.op for reader, _ in self._consumers.get(node.outputs[0], ())}
        is_epsilon = not readers.isdisjoint(("Sqrt", "Reciprocal", "Pow"))
        return node.op == "Add" and _is_initializer(weight) and weight.type.shape == (1,) and not is_epsilon

    def _is_neutral(self, weight: Weight, node: Node, index: int) -> bool:
        """Whether a scale of ones or a bias of zeros stands in torch's form of GroupNormalization.

        The form is Reshape, InstanceNormalization, Reshape, followed by the true scale and bias.
        """
        producer = self._producers.get(node.inputs[0])
        if producer is None or producer.op != "Reshape" or index not in (1, 2):
            return False
        readers = self._consumers.get(node.outputs[0], [])
        return (
            bool(readers)
            and all(reader.op == "Reshape" for reader, _ in readers)
            and bool(np.all(_values(weight) == (1 if index == 1 else 0)))
        )

    def _is_position_table(self, weight: Weight, tensor: str, node: Node) -> bool:
        """Whether all other operands are integers that were cast, as positions are.

        A product of positions and frequencies is an outer one: nothing is summed.
        """
        others = [name for name in node.inputs if name and name != tensor]
        if node.op == "MatMul" and 1 not in weight.type.shape[-2:]:
            return False
        return bool(others) and all(self._is_cast_integer(name) for name in others)

    def _is_cast_integer(self, name: str) -> bool:
        """Whether a floating tensor is an integer that was cast, and handed on since."""
        producer = self._producers.get(name)
        while producer is not None and producer.op in HANDED_ON:
            if producer.op in ("Cast", "CastLike") and self._is_integer(producer.inputs[0]):
                return True
            name = producer.inputs[0]
            producer = self._producers.get(name)
        return producer is None and name not in self._weights and self._is_integer(name)

    def _is_integer(self, name: str) -> bool:
        """Whether a tensor is known to hold integers, by its declared type or by how it is computed."""
        seen: set[str] = set()
        while name not in seen:
            seen.add(name)
            if name in self._weights:
                return self._weights[name].type.dtype in _INTEGERS
            declared = self._declared.get(name)
            if declared is not None and declared.HasField("tensor_type"):
                return declared.tensor_type.elem_type in _INTEGERS
            producer = self._producers.get(name)
            if producer is None or producer.domain or not any(producer.inputs):
                return False
            if producer.op in _OF_INTEGERS:
                return True
            if producer.op == "Cast":
                return int(producer.attribute("to")) in _INTEGERS
            # Other operators hand on the type of their data.
            name = producer.inputs[1 if producer.op in ("Where", "CastLike") else 0]
        return False


def _decide(name: str, weight: Weight, uses: _Uses) -> ParameterDecision:
    if not weight.type.is_floating:
        return ParameterDecision(name, weight.type, Role.CONSTANT, NOT_FLOATING)
    found = uses.of(name)
    if not found:
        return ParameterDecision(name, weight.type, Role.CONSTANT, "not used by any operator")
    told = _as_the_exporter_says(name, weight, found)
    if told is not None:
        return told
    for role in (Role.PARAMETER, Role.STATISTIC, Role.CONSTANT):
        of_role = [use for use in found if use.role is role]
        if of_role:
            used_by = tuple(dict.fromkeys(use.node.name for use in of_role))
            return ParameterDecision(
                name, weight.type, role, of_role[0].reason, used_by, _doubt(name, of_role)
            )
    raise AssertionError(name)


def _as_the_exporter_says(name: str, weight: Weight, uses: Sequence[_Use]) -> ParameterDecision | None:
    exported = weight.exported_as if isinstance(weight, StoredWeight) else ExportedAs.UNKNOWN
    if exported not in _ROLES_OF_EXPORTED or any(use.role is Role.STATISTIC for use in uses):
        return None
    used_by = tuple(dict.fromkeys(use.node.name for use in uses))
    reason = f"a {exported}, as the exporter says"
    return ParameterDecision(name, weight.type, _ROLES_OF_EXPORTED[exported], reason, used_by)


def _doubt(name: str, uses: Sequence[_Use]) -> str:
    beside = next((use.beside_input for use in uses if use.beside_input), "")
    if not beside:
        return ""
    return (
        f"parameter '{name}' is applied to input '{beside}' itself; "
        f"if it normalises the data, pass --freeze '{name}'"
    )


def _overruled(
    decision: ParameterDecision, trainable: Sequence[str], freeze: Sequence[str]
) -> ParameterDecision:
    if not decision.type.is_floating or decision.role is Role.STATISTIC:
        return decision
    for glob in trainable:
        if fnmatchcase(decision.name, glob):
            return replace(decision, role=Role.PARAMETER, reason=f"--trainable {glob}", doubt="")
    for glob in freeze:
        if fnmatchcase(decision.name, glob) and decision.role is Role.PARAMETER:
            return replace(decision, role=Role.FROZEN, reason=f"--freeze {glob}")
    return decision


def _is_named(weight: Weight) -> bool:
    return isinstance(weight, StoredWeight) and weight.exported_as is ExportedAs.NAMED


def _values(weight: Weight) -> Array:
    """A weight's values where looking at them is cheap, else one that is nothing special."""
    found = peek(weight) if weight.type.element_count <= _LARGEST_LOOKED_AT else None
    return np.full((1,), np.nan) if found is None else np.asarray(found, dtype=np.float64)


def _is_initializer(weight: Weight) -> bool:
    return isinstance(weight, StoredWeight) and weight.is_initializer


def _is_empty_mask(weight: Weight) -> bool:
    """Whether it is zeros over several axes that an exporter computed, where a bias is stored and has one."""
    if isinstance(weight, FilledWeight) or _is_initializer(weight):
        return False
    return sum(size > 1 for size in weight.type.shape) > 1 and _is_zero(weight)


def _is_mask(weight: Weight) -> bool:
    """Whether the values are zeros and large negative numbers only, as attention masks are."""
    values = _values(weight)
    masking = values <= MASK_VALUE
    return bool(np.all(masking | (values == 0)) and np.any(masking))


def _is_zero(weight: Weight) -> bool:
    return not np.any(_values(weight))


def _unmatched(option: str, glob: str, names: Sequence[str]) -> NoParametersError:
    stem = glob.strip("*?")
    close = difflib.get_close_matches(stem, names, n=3, cutoff=0.3) or list(names[:3])
    known = (
        f"closest names: {', '.join(repr(name) for name in close)}"
        if close
        else "the model has no float weights"
    )
    return NoParametersError(f"{option} '{glob}' matches no weight of the model; {known}")


def _listed(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown}, ..."
