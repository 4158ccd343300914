"""Which weights train: told by how they are used, never by what they are called."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from onnx import TensorProto

from onnxgc.errors import NoParametersError
from onnxgc.model.core.draft import INITIAL_STATE, Draft, operator_name
from onnxgc.model.core.ir import Array, Node, TensorType, Weight
from onnxgc.model.core.name_globs import matches
from onnxgc.model.core.stored_weights import ExportedAs, FilledWeight, StoredWeight, peek
from onnxgc.model.weight_roles.decomposed_normalization import running_statistics
from onnxgc.model.weight_roles.value_patterns import (
    are_sine_and_cosine,
    counts_up,
    has_several_axes,
    holds_distances,
    holds_sines_and_cosines,
    is_additive_mask,
    is_binary_mask,
    is_geometric,
    is_of_a_formula,
    likely_sine_and_cosine,
    sample,
)


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
# Floating inputs that are no parameters, by operator, and why; all others of more than one element are.
# What reads its first input alone hands on no gradient, and is named below.
_ALL = tuple(range(1, 16))
SETTINGS: Mapping[str, tuple[tuple[int, ...], str]] = {
    "BatchNormalization": ((3, 4), "running statistic"),
    "CastLike": ((1,), "tells a type alone"),
    "Clip": ((1, 2), "limit"),
    "Dropout": ((1,), "rate"),
    "GatherBlockQuantized": (_ALL, "scale of a quantised weight"),
    "Mod": ((1,), "divisor"),
    "NegativeLogLikelihoodLoss": ((1, 2), "weights of classes"),
    "Pad": ((2,), "value of the padding"),
    "Resize": ((1, 2), "region and scales"),
    "RotaryEmbedding": ((1, 2), "table of sines and cosines"),
    "STFT": ((2,), "window"),
    "SoftmaxCrossEntropyLoss": ((1, 2), "weights of classes"),
    "Upsample": ((1,), "scales"),
}
# Their floating inputs behind the data are scales and zero points; the bias of the first two is learned.
_QUANTISED: Mapping[str, tuple[int, ...]] = {
    "MatMulNBits": (5,),
    "MatMulBnb4": (),
    "DequantizeLinear": (),
    "QuantizeLinear": (),
    "DynamicQuantizeMatMul": (4,),
}
# Names made of these alone are those of constants.
_WORDS_OF_CONSTANTS = frozenset(
    {
        *("add", "clone", "const", "constant", "cst", "default", "dim", "div", "eps", "epsilon", "exponent"),
        *("float", "full", "half", "in", "input", "lifted", "like", "literal", "max", "min", "mul", "number"),
        *("one", "two", "three", "four", "five", "six", "zero", "out", "output", "pow", "scalar", "size"),
        *("sqrt", "sub", "tensor", "to", "val", "value", *"abckmnpqstxyz"),
    }
)
# Of an attention's operator: a mask, which may be a learned bias.
_ATTENTION_MASK = 3
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
_MULTIPLYING = ("MatMul", "Mul", "Div")
_WEIGHING = frozenset({"Conv", "MatMul", "Gemm", "Einsum", "Mul"})
_SHIFTING = frozenset({"Add", "Sub", "Mul", "Div"})
# Operators that keep a number positive, or within limits: what they are applied to is learned.
_BOUNDING = frozenset({"Exp", "Softplus", "Sigmoid", "Tanh"})
# What may lie between attention's scores, their Softmax and the product with the values.
_MASKING = frozenset({"Add", "Sub", "Mul", "Div", "Max", "Min", "Clip", "Where", "Dropout"})
_SUMMING = ("MatMul", "Gemm", "Einsum")
# How tables of positions are used: as factors, as summands, and looked up.
_USES_OF_TABLES = frozenset({"Mul", "Add", "Gather"})
# Masks of attention over a few thousand tokens.
_LARGEST_LOOKED_AT = 1 << 24
# In front of a glob that trains in addition to what is found by use.
_ADDED = "+"
NOT_FLOATING = "not a floating-point tensor"

# What to look at in constants. A name is to be put in by the reader: one line tells of many.
_IF_LEARNED = "if it is learned, pass --trainable +NAME"
_SINGLE_NUMBER = f"taken for a constant, as single numbers are; {_IF_LEARNED}"
_NOTHING_MASKED = f"taken for a mask of zeros that masks nothing; {_IF_LEARNED}"
_OF_DATA = f"taken for the mean or deviation of the data; {_IF_LEARNED}"
_RUNNING = (
    "taken for a running statistic, which stays as it is; scale and shift beside it train unless "
    "--freeze names them"
)


def classify_weights(
    draft: Draft, trainable: Sequence[str] = (), freeze: Sequence[str] = ()
) -> tuple[ParameterDecision, ...]:
    """What each weight is taken for; `trainable` and `freeze` are globs that overrule it.

    `trainable` alone means that nothing else trains; a glob with a plus in front, as in `+scale`, trains in
    addition to what is found by use. Where both match, `trainable` wins.

    Raises:
        NoParametersError: a glob matches no float weight, or is to train running statistics alone.
    """
    for option, globs in (("trainable", trainable), ("freeze", freeze)):
        if isinstance(globs, str):
            raise NoParametersError(f"{option} takes a list of globs, such as ['{globs}']")
    finder = _Uses(draft)
    uses = {name: finder.of(name) for name, weight in draft.weights.items() if weight.type.is_floating}
    decisions = [_decide(name, weight, uses.get(name)) for name, weight in draft.weights.items()]
    decisions = _without_tables_of_angles(decisions, draft, uses)
    floating = [decision.name for decision in decisions if decision.type.is_floating]
    for option, globs in (("--trainable", trainable), ("--freeze", freeze)):
        for given in globs:
            glob = given.removeprefix(_ADDED) if option == "--trainable" else given
            matched = [d for d in decisions if d.type.is_floating and matches(d.name, glob)]
            if not matched:
                raise _unmatched(option, glob, floating)
            if option == "--trainable" and all(d.role is Role.STATISTIC for d in matched):
                raise _of_statistics(glob, matched[0])
    added = [glob.removeprefix(_ADDED) for glob in trainable]
    is_alone = bool(added) and not freeze and not all(glob.startswith(_ADDED) for glob in trainable)
    return tuple(_overruled(decision, added, freeze, is_alone) for decision in decisions)


def parameter_notes(decisions: Iterable[ParameterDecision]) -> tuple[str, ...]:
    """One line for each parameter that several nodes use, or that may be none, and for doubtful constants."""
    decisions = tuple(decisions)
    parameters = [decision for decision in decisions if decision.role is Role.PARAMETER]
    tied = tuple(
        f"parameter '{decision.name}' is used by {len(decision.used_by)} nodes ({_listed(decision.used_by)}) "
        "and is trained as one"
        for decision in parameters
        if len(decision.used_by) > 1
    )
    doubtful: dict[str, list[str]] = {}
    for decision in decisions:
        if decision.role is Role.CONSTANT and decision.doubt:
            doubtful.setdefault(decision.doubt, []).append(decision.name)
    constants = (f"{_counted(names)}: {doubt}" for doubt, names in doubtful.items())
    doubts = (decision.doubt for decision in parameters if decision.doubt)
    return (*tied, *doubts, *constants, *_fixed(decisions))


def _fixed(decisions: Iterable[ParameterDecision]) -> Iterator[str]:
    """One line for all floating tensors that are constants by their use, single numbers counted apart."""
    fixed = [
        decision
        for decision in decisions
        if decision.role is Role.CONSTANT and decision.type.is_floating and not decision.doubt
    ]
    tensors = [decision.name for decision in fixed if decision.type.element_count > 1]
    numbers = [decision.name for decision in fixed if decision.type.element_count == 1]
    if tensors:
        more = f", and {len(numbers)} single numbers" if numbers else ""
        yield (
            f"floating tensors that are no parameters: {_counted(tensors)}{more}; `onnxgc inspect` has the "
            "reasons, and --trainable +NAME trains one"
        )


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
    doubt: str = ""


class _Uses:
    """Follows weights to the operators that use them."""

    def __init__(self, draft: Draft) -> None:
        self._weights = draft.weights
        self._consumers = draft.consumers()
        self._producers = draft.producers()
        self._declared = draft.declared
        self._inputs = frozenset(draft.inputs)
        # A weight that is an output itself is no result to train on.
        self._outputs = tuple(name for name in draft.outputs if name not in draft.weights)
        self._running = running_statistics(draft)

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
                elif _ends_being_floating(node):
                    reason = f"cast to integers or Booleans by '{node.name}'"
                    found.append(_Use(node, index, Role.CONSTANT, reason))
                elif self._hands_on(node, index):
                    fresh = [output for output in node.outputs if output and output not in seen]
                    seen.update(fresh)
                    pending += fresh
                else:
                    found.append(self._judge(name, weight, tensor, node, index))
        return found or [self._as_output(weight, name) for name in self._outputs if name in seen][:1]

    def _as_output(self, weight: Weight, output: str) -> _Use:
        """The use of a weight that is only handed on until it is, or is part of, an output."""
        node = self._producers.get(output, Node("Identity", (output,), (output,), name=output))
        where = f"part of output '{output}'"
        if weight.type.element_count <= 1 or (not _is_initializer(weight) and _is_zero(weight)):
            return _Use(node, 0, Role.CONSTANT, where)
        return _Use(node, 0, Role.PARAMETER, where, f"is {where} as it is; if it is not learned")

    def _hands_on(self, node: Node, index: int) -> bool:
        return not node.domain and node.op in HANDED_ON and (index == 0 or node.op == "Concat")

    def _judge(self, name: str, weight: Weight, tensor: str, node: Node, index: int) -> _Use:
        where = f"input {index} of {operator_name(node)} '{node.name}'"
        if index < 0:
            where = f"a subgraph of {operator_name(node)} '{node.name}'"
        if not weight.type.element_count:
            return _Use(node, index, Role.CONSTANT, f"without elements: {where}")
        if _is_of_quantised(node, index):
            return _Use(node, index, Role.CONSTANT, f"scale of a quantised weight: {where}")
        if node.domain or index < 0:
            # Operands of unknown operators and of subgraphs train, so that a missing rule is told and not
            # passed over.
            is_constant = weight.type.element_count <= 1 or is_additive_mask(_values(weight))
            role = Role.CONSTANT if is_constant else Role.PARAMETER
            return _Use(node, index, role, where)
        if index in STATISTIC_INPUTS.get(node.op, ()):
            return _Use(node, index, Role.STATISTIC, f"running statistic: {where}")
        statistic = self._running.get((node.outputs[0], index)) if node.outputs else None
        if statistic is not None:
            if statistic.is_of_data:
                return _Use(node, index, Role.CONSTANT, f"{statistic}: {where}", _OF_DATA)
            reason = f"{statistic} of a normalisation that is written out: {where}"
            return _Use(node, index, Role.CONSTANT, reason, _RUNNING)
        if node.op in _MULTIPLYING and self._is_outer(weight, node):
            if self._is_beside_integers(tensor, node):
                reason = f"frequency table: {where}, whose other operand is an integer"
                return _Use(node, index, Role.CONSTANT, reason)
            if is_geometric(_values(weight)):
                return _Use(node, index, Role.CONSTANT, f"frequency table, a geometric sequence: {where}")
        if node.op in _WEIGHING and index < 2 and counts_up(_values(weight)):
            return _Use(node, index, Role.CONSTANT, f"numbers that count up: {where}")
        if node.op == "InstanceNormalization" and self._is_neutral(weight, node, index):
            return _Use(node, index, Role.CONSTANT, f"neutral value in a group normalisation: {where}")
        if index in PARAMETER_INPUTS.get(node.op, ()):
            if not weight.type.shape and not _is_named(weight):
                return _Use(node, index, Role.CONSTANT, f"single number: {where}")
            return _Use(node, index, Role.PARAMETER, where)
        if index in INITIAL_STATES.get(node.op, ()):
            role = Role.CONSTANT if _is_zero(weight) else Role.PARAMETER
            return _Use(node, index, role, f"initial state: {where}")
        if index in ARITHMETIC.get(node.op, ()):
            return self._judge_operand(name, weight, tensor, node, index, where)
        if node.op in _SCATTERING and not _is_initializer(weight):
            return _Use(node, index, Role.CONSTANT, f"what is written to: {where}")
        settings, why = SETTINGS.get(node.op, ((), ""))
        if index in settings:
            return _Use(node, index, Role.CONSTANT, f"{why}: {where}")
        if node.op in _NOT_DIFFERENTIABLE:
            return _Use(node, index, Role.CONSTANT, f"without influence on a gradient: {where}")
        if node.op == "Attention" and index == _ATTENTION_MASK and _is_mask(weight):
            return _Use(node, index, Role.CONSTANT, f"mask of attention: {where}")
        if weight.type.element_count == 1 and not _is_named(weight):
            return _Use(node, index, Role.CONSTANT, f"single number: {where}")
        # The data of an operator, as a class token is once it was concatenated, or learned keys.
        return _Use(node, index, Role.PARAMETER, where)

    def _judge_operand(
        self, name: str, weight: Weight, tensor: str, node: Node, index: int, where: str
    ) -> _Use:
        if weight.type.element_count <= 1 and not self._is_learned_number(weight, node, index):
            doubt = _SINGLE_NUMBER if self._may_be_learned(weight, name, tensor, node, index) else ""
            return _Use(node, index, Role.CONSTANT, f"single number: {where}", doubt)
        values = _values(weight)
        if node.op in ("Add", "Where", "Sub") and is_additive_mask(values):
            return _Use(node, index, Role.CONSTANT, f"mask of zeros and large negative values: {where}")
        if self._takes_binary_mask(node, index) and is_binary_mask(values):
            return _Use(node, index, Role.CONSTANT, f"mask of zeros and ones: {where}")
        if node.op in ("Add", "Where") and has_several_axes(weight.type.shape) and _is_zero(weight):
            # An exporter computed what it does not store as an initializer.
            is_computed = not _is_initializer(weight) and not isinstance(weight, FilledWeight)
            if is_computed or node.op == "Where" or self._is_score(node):
                doubt = "" if is_computed else _NOTHING_MASKED
                return _Use(node, index, Role.CONSTANT, f"mask that masks nothing: {where}", doubt)
        if node.op == "Add" and holds_distances(values) and self._is_score(node):
            return _Use(node, index, Role.CONSTANT, f"distances of positions: {where}")
        beside = next(filter(None, map(self._shifted_input, node.inputs)), "")
        doubt = f"is applied to input '{beside}' itself; if it normalises the data" if beside else ""
        return _Use(node, index, Role.PARAMETER, where, doubt)

    def _shifted_input(self, name: str) -> str:
        """The graph's input that a tensor is, perhaps scaled and shifted by weights; empty if it is none."""
        while name not in self._inputs:
            producer = self._producers.get(name)
            if producer is None or producer.domain or producer.op not in HANDED_ON | _SHIFTING:
                return ""
            weights = [self._weight_behind(operand) is not None for operand in producer.inputs]
            if producer.op in _SHIFTING and not any(weights):
                return ""
            name = producer.inputs[weights.index(False) if False in weights else 0]
        return name

    def _takes_binary_mask(self, node: Node, index: int) -> bool:
        """Whether the operand chooses what goes on, or is turned round by a number, as 1 - mask is."""
        if node.op in ("Mul", "Where"):
            return True
        other = self._weight_behind(node.inputs[1 - index]) if node.op in ("Add", "Sub") else None
        return other is not None and other.type.element_count == 1

    def _weight_behind(self, name: str) -> Weight | None:
        """The weight that a tensor is, perhaps handed on."""
        while name not in self._weights:
            producer = self._producers.get(name)
            if producer is None or producer.domain or producer.op not in HANDED_ON:
                return None
            name = producer.inputs[0]
        return self._weights[name]

    def _is_score(self, node: Node) -> bool:
        """Whether what the node gives are scores of attention: a Softmax reads them, a product what it gives.

        Further masks, scales and limits may lie between.
        """
        pending, seen = [(output, False) for output in node.outputs], set[tuple[str, bool]]()
        while pending:
            tensor, is_weight = pending.pop()
            for reader, _ in self._consumers.get(tensor, ()):
                if is_weight and reader.op in _SUMMING:
                    return True
                if reader.op in HANDED_ON or reader.op in _MASKING or reader.op == "Softmax":
                    found = {(output, is_weight or reader.op == "Softmax") for output in reader.outputs}
                    pending += sorted(found - seen)
                    seen |= found
        return False

    def _may_be_learned(self, weight: Weight, name: str, tensor: str, node: Node, index: int) -> bool:
        """Whether one number that scales or shifts data could be a weight, by its value or its name."""
        if node.op == "Pow" and index == 1:
            return _is_named(weight)
        if node.op not in ("Mul", "Div", "Add", "Sub") or self._is_epsilon(node):
            return False
        other = node.inputs[1 - index]
        if self._weight_behind(other) is not None or self._is_cast_integer(other):
            return False
        source = self._producers.get(tensor)
        if source is not None and source.op in _BOUNDING:
            return True
        if _is_initializer(weight) and not weight.type.shape and _is_called_as_learned(name):
            return True
        number = float(_values(weight).reshape(-1)[0])
        is_neutral = number == 1 and node.op == "Mul"
        return (is_neutral and _is_initializer(weight)) or not is_of_a_formula(number)

    def _is_learned_number(self, weight: Weight, node: Node, index: int) -> bool:
        """Whether one number is a weight all the same: kept under a name of its own, or a bias of one unit.

        An exponent never is, nor what is added in front of a root.
        """
        if node.op == "Pow" and index == 1:
            return False
        if _is_named(weight):
            return True
        is_bias = node.op == "Add" and _is_initializer(weight) and weight.type.shape == (1,)
        return is_bias and not self._is_epsilon(node)

    def _is_epsilon(self, node: Node) -> bool:
        """Whether the node adds what keeps a root or a divisor away from zero."""
        readers = {reader.op for reader, _ in self._consumers.get(node.outputs[0], ())}
        return node.op == "Add" and not readers.isdisjoint(("Sqrt", "Reciprocal", "Pow"))

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

    def _is_outer(self, weight: Weight, node: Node) -> bool:
        """Whether nothing is summed, as in a product of positions and frequencies."""
        return node.op != "MatMul" or 1 in weight.type.shape[-2:]

    def _is_beside_integers(self, tensor: str, node: Node) -> bool:
        """Whether all other operands are integers that were cast, as positions are."""
        others = [name for name in node.inputs if name and name != tensor]
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


def _decide(name: str, weight: Weight, found: Sequence[_Use] | None) -> ParameterDecision:
    if found is None:
        return ParameterDecision(name, weight.type, Role.CONSTANT, NOT_FLOATING)
    told = _as_the_exporter_says(name, weight, found)
    if told is not None:
        return told
    if not found:
        return ParameterDecision(name, weight.type, Role.CONSTANT, "not used by any operator")
    for role in (Role.PARAMETER, Role.STATISTIC, Role.CONSTANT):
        of_role = [use for use in found if use.role is role]
        if of_role:
            used_by = _reading(of_role)
            return ParameterDecision(
                name, weight.type, role, of_role[0].reason, used_by, _doubt(name, of_role)
            )
    raise AssertionError(name)


def _reading(uses: Sequence[_Use]) -> tuple[str, ...]:
    """The nodes that read a weight's values, where there are some: a shape is none."""
    names = dict.fromkeys(use.node.name for use in uses if use.node.op not in ("Shape", "Size"))
    return tuple(names or dict.fromkeys(use.node.name for use in uses))


def _as_the_exporter_says(name: str, weight: Weight, uses: Sequence[_Use]) -> ParameterDecision | None:
    exported = weight.exported_as if isinstance(weight, StoredWeight) else ExportedAs.UNKNOWN
    if exported not in _ROLES_OF_EXPORTED or any(use.role is Role.STATISTIC for use in uses):
        return None
    used_by = _reading(uses)
    reason = f"a {exported}, as the exporter says"
    return ParameterDecision(name, weight.type, _ROLES_OF_EXPORTED[exported], reason, used_by)


def _doubt(name: str, uses: Sequence[_Use]) -> str:
    doubt = next((use.doubt for use in uses if use.doubt), "")
    if not doubt or uses[0].role is not Role.PARAMETER:
        return doubt
    return f"parameter '{name}' {doubt}, pass --freeze '{name}'"


def _without_tables_of_angles(
    decisions: Sequence[ParameterDecision], draft: Draft, uses: Mapping[str, Sequence[_Use]]
) -> list[ParameterDecision]:
    """The decisions with constants in the place of tables of sines and cosines, in one tensor or in two."""
    alike: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    tables: dict[str, str] = {}
    for decision in decisions:
        name, weight = decision.name, draft.weights[decision.name]
        if decision.role is not Role.PARAMETER or _is_marked(weight):
            continue
        if not all(use.node.domain or use.node.op in _USES_OF_TABLES for use in uses[name]):
            continue
        values = _values(weight)
        if holds_sines_and_cosines(values):
            tables[name] = "table of sines and cosines"
        alike.setdefault((decision.type.dtype, decision.type.shape), []).append(name)
    for names in alike.values():
        for pair in likely_sine_and_cosine([sample(_values(draft.weights[name])) for name in names]):
            one, two = (names[number] for number in pair)
            if are_sine_and_cosine(_values(draft.weights[one]), _values(draft.weights[two])):
                tables |= {one: f"sines or cosines beside '{two}'", two: f"sines or cosines beside '{one}'"}
    return [
        replace(d, role=Role.CONSTANT, reason=f"{tables[d.name]}: {d.reason}", doubt="")
        if d.name in tables
        else d
        for d in decisions
    ]


def _overruled(
    decision: ParameterDecision, trainable: Sequence[str], freeze: Sequence[str], is_alone: bool
) -> ParameterDecision:
    if not decision.type.is_floating or decision.role is Role.STATISTIC:
        return decision
    for glob in trainable:
        if matches(decision.name, glob):
            return replace(decision, role=Role.PARAMETER, reason=f"--trainable {glob}", doubt="")
    if decision.role is not Role.PARAMETER:
        return decision
    if is_alone:
        return replace(decision, role=Role.FROZEN, reason="--trainable names others", doubt="")
    found = [glob for glob in freeze if matches(decision.name, glob)]
    return replace(decision, role=Role.FROZEN, reason=f"--freeze {found[0]}") if found else decision


def _is_called_as_learned(name: str) -> bool:
    """Whether a name says something of its own, as `logit_scale` does, and `val_12` does not."""
    if name.startswith(("onnx::", "/")):
        return False
    words = re.findall(r"[a-z]+", re.split(r"[/.:]", name.rstrip("/"))[-1].lower())
    return bool(words) and not _WORDS_OF_CONSTANTS.issuperset(words)


def _is_of_quantised(node: Node, index: int) -> bool:
    learned = _QUANTISED.get(node.op)
    if learned is None and not node.op.startswith("QLinear"):
        return False
    return index > 0 and index not in (learned or ())


def _is_mask(weight: Weight) -> bool:
    values = _values(weight)
    return is_additive_mask(values) or is_binary_mask(values) or holds_distances(values) or _is_zero(weight)


def _is_named(weight: Weight) -> bool:
    return isinstance(weight, StoredWeight) and weight.exported_as is ExportedAs.NAMED


def _is_marked(weight: Weight) -> bool:
    return isinstance(weight, StoredWeight) and weight.exported_as is ExportedAs.PARAMETER


def _ends_being_floating(node: Node) -> bool:
    if node.op != "Cast" or node.domain:
        return False
    return not TensorType(int(node.attribute("to")), ()).is_floating


def _values(weight: Weight) -> Array:
    """A weight's values where looking at them is cheap, else one that is nothing special."""
    found = peek(weight) if weight.type.element_count <= _LARGEST_LOOKED_AT else None
    return np.full((1,), np.nan) if found is None else found


def _is_initializer(weight: Weight) -> bool:
    return isinstance(weight, StoredWeight) and weight.is_initializer


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


def _of_statistics(glob: str, statistic: ParameterDecision) -> NoParametersError:
    return NoParametersError(
        f"--trainable '{glob}' matches running statistics alone, such as '{statistic.name}' of "
        f"{_listed(statistic.used_by)}: no gradient trains them, the step updates them from the batch "
        "(or keeps them, with --freeze-bn)"
    )


def _counted(names: Sequence[str]) -> str:
    return f"'{names[0]}'" if len(names) == 1 else f"{_listed(names)} ({len(names)} weights)"


def _listed(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown}, ..."
