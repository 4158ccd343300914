"""Follows each weight to the operators that use it, and infers its role from each use."""

from dataclasses import dataclass

from onnxgc.model.core.draft import INITIAL_STATE, Draft, operator_name
from onnxgc.model.core.ir import Array, Node, TensorType, Weight
from onnxgc.model.core.stored_weights import FilledWeight
from onnxgc.model.operators.registry import facts_by_name, facts_of
from onnxgc.model.weight_roles.decomposed_normalization import running_statistics
from onnxgc.model.weight_roles.graph_context import GraphContext
from onnxgc.model.weight_roles.roles import Role
from onnxgc.model.weight_roles.value_patterns import (
    counts_up,
    has_several_axes,
    holds_distances,
    is_additive_mask,
    is_binary_mask,
    is_geometric,
    is_of_a_formula,
)
from onnxgc.model.weight_roles.weight_evidence import (
    has_descriptive_name,
    has_exported_name,
    is_initializer,
    is_mask,
    is_zero,
    values_of,
)

_ATTENTION_MASK = 3
"""The input of Attention that is a mask, or a learned bias."""
_REPEATING = ("Expand", "Tile")
_SCATTERING = ("ScatterND", "ScatterElements", "Scatter")
_MULTIPLYING = ("MatMul", "Mul", "Div")
_WEIGHING = frozenset({"Conv", "MatMul", "Gemm", "Einsum", "Mul"})
_BOUNDING = frozenset({"Exp", "Softplus", "Sigmoid", "Tanh"})
"""Operators that keep a number positive or within limits; their argument is usually learned."""

# NAME is literal: one line covers several weights.
_IF_LEARNED = "if it is learned, pass --trainable +NAME"
_SINGLE_NUMBER = f"classified as a constant, like all single numbers; {_IF_LEARNED}"
_ZERO_MASK = f"classified as a mask without effect, since it is zero; {_IF_LEARNED}"
_OF_DATA = f"classified as the mean or deviation of the data; {_IF_LEARNED}"
_RUNNING = (
    "classified as a running statistic, which is not updated; the scale and shift of its layer train unless "
    "--freeze names them"
)


@dataclass(frozen=True, slots=True)
class WeightUse:
    """A use of a weight by an operator that does more than rearrange it."""

    node: Node
    index: int
    role: Role
    reason: str
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class _Operand:
    """A weight as input `index` of a node (-1: in a subgraph), read as `tensor`."""

    name: str
    weight: Weight
    tensor: str
    node: Node
    index: int

    @property
    def position(self) -> str:
        operator = f"{operator_name(self.node)} '{self.node.name}'"
        return f"a subgraph of {operator}" if self.index < 0 else f"input {self.index} of {operator}"

    @property
    def other(self) -> str:
        """The other operand of a binary operator."""
        return self.node.inputs[1 - self.index]

    def constant(self, reason: str = "", doubt: str = "") -> WeightUse:
        return self.use(Role.CONSTANT, reason, doubt)

    def parameter(self, reason: str = "", doubt: str = "") -> WeightUse:
        return self.use(Role.PARAMETER, reason, doubt)

    def use(self, role: Role, reason: str, doubt: str) -> WeightUse:
        text = f"{reason}: {self.position}" if reason else self.position
        return WeightUse(self.node, self.index, role, text, doubt)


class WeightUses:
    """Finds and classifies the uses of the weights of one draft."""

    def __init__(self, draft: Draft) -> None:
        self._graph = GraphContext(draft)
        # Outputs that are weights are ignored: no loss can be computed on them.
        self._outputs = tuple(name for name in draft.outputs if name not in draft.weights)
        self._running = running_statistics(draft)
        self._masks: dict[str, bool] = {}

    def uses_of(self, name: str) -> list[WeightUse]:
        """Every use of a weight in node order, including the uses of its rearrangements."""
        weight = self._graph.weights[name]
        uses: list[WeightUse] = []
        pending, seen = [name], {name}
        while pending:
            tensor = pending.pop(0)
            for node, index in self._graph.consumers.get(tensor, ()):
                operand = _Operand(name, weight, tensor, node, index)
                use = _use_as_shape_or_state(operand)
                if use is None and _passes_weight(node, index):
                    fresh = [output for output in node.outputs if output and output not in seen]
                    seen.update(fresh)
                    pending += fresh
                else:
                    uses.append(use or self._classify(operand))
        return uses or [self._as_output(weight, name) for name in self._outputs if name in seen][:1]

    def _as_output(self, weight: Weight, output: str) -> WeightUse:
        """The use of a weight that reaches an output without any other operator."""
        node = self._graph.producers.get(output, Node("Identity", (output,), (output,), name=output))
        reason = f"part of output '{output}'"
        if weight.type.element_count <= 1 or (not is_initializer(weight) and is_zero(weight)):
            return WeightUse(node, 0, Role.CONSTANT, reason)
        doubt = f"is copied into output '{output}'; if it is not learned"
        return WeightUse(node, 0, Role.PARAMETER, reason, doubt)

    def _classify(self, operand: _Operand) -> WeightUse:
        return (
            _use_outside_rules(operand)
            or self._use_as_statistic(operand)
            or self._use_as_known_values(operand)
            or self._use_by_operator(operand)
        )

    def _use_as_statistic(self, operand: _Operand) -> WeightUse | None:
        node, index = operand.node, operand.index
        if index in facts_by_name(node.op).statistics:
            return operand.use(Role.STATISTIC, "running statistic", "")
        statistic = self._running.get((node.outputs[0], index)) if node.outputs else None
        if statistic is None:
            return None
        if statistic.is_of_data:
            return operand.constant(str(statistic), _OF_DATA)
        return operand.constant(f"{statistic} of a decomposed normalisation", _RUNNING)

    def _use_as_known_values(self, operand: _Operand) -> WeightUse | None:
        """The use of a weight with values of a formula: frequencies, indices, neutral values."""
        weight, node, index = operand.weight, operand.node, operand.index
        if node.op in _MULTIPLYING and _is_outer_product(weight, node):
            if self._graph.multiplies_integers(operand.tensor, node):
                reason = f"frequency table: {operand.position}, whose other operand is an integer"
                return WeightUse(node, index, Role.CONSTANT, reason)
            if is_geometric(values_of(weight)):
                return operand.constant("frequency table, a geometric sequence")
        if node.op in _WEIGHING and index < 2 and counts_up(values_of(weight)):
            return operand.constant("consecutive integers")
        if node.op == "InstanceNormalization" and self._graph.is_neutral_in_group_norm(weight, node, index):
            return operand.constant("neutral value in a group normalisation")
        return None

    def _use_by_operator(self, operand: _Operand) -> WeightUse:
        """The use of a weight according to the table of operators."""
        weight, node, index = operand.weight, operand.node, operand.index
        facts = facts_by_name(node.op)
        if index in facts.parameters:
            if not weight.type.shape and not has_exported_name(weight):
                return operand.constant("single number")
            return operand.parameter()
        if index in facts.initial_states:
            return operand.constant("initial state") if is_zero(weight) else operand.parameter("initial state")
        if index in facts.operands:
            return self._use_in_arithmetic(operand)
        if node.op in _SCATTERING and not is_initializer(weight):
            return operand.constant("target of a scatter")
        if index in facts.settings.inputs:
            return operand.constant(facts.settings.meaning)
        if not facts.has_gradient:
            return operand.constant("operator without a gradient")
        if node.op == "Attention" and index == _ATTENTION_MASK and is_mask(weight):
            return operand.constant("mask of attention")
        if weight.type.element_count == 1 and not has_exported_name(weight):
            return operand.constant("single number")
        # The data of an operator: a class token after its concatenation, learned keys.
        return operand.parameter()

    def _use_in_arithmetic(self, operand: _Operand) -> WeightUse:
        weight, node = operand.weight, operand.node
        if weight.type.element_count <= 1 and not self._is_learned_number(operand):
            return operand.constant("single number", _SINGLE_NUMBER if self._may_be_learned(operand) else "")
        values = values_of(weight)
        if node.op in ("Add", "Where", "Sub") and self._is_additive_mask(operand.name, values):
            return operand.constant("mask of zeros and large negative values")
        if self._may_be_binary_mask(operand) and is_binary_mask(values):
            return operand.constant("mask of zeros and ones")
        if node.op in ("Add", "Where") and has_several_axes(weight.type.shape) and is_zero(weight):
            # Exporters compute some masks at export; such a weight is no initializer.
            is_computed = not is_initializer(weight) and not isinstance(weight, FilledWeight)
            if is_computed or node.op == "Where" or self._graph.is_attention_score(node):
                return operand.constant("mask without effect", "" if is_computed else _ZERO_MASK)
        if node.op == "Add" and holds_distances(values) and self._graph.is_attention_score(node):
            return operand.constant("distances of positions")
        source = next(filter(None, map(self._graph.normalised_input, node.inputs)), "")
        doubt = f"is applied directly to input '{source}'; if it normalises the data" if source else ""
        return operand.parameter(doubt=doubt)

    def _is_additive_mask(self, name: str, values: Array) -> bool:
        """Whether a weight is a mask; each layer may read the same large one."""
        if name not in self._masks:
            self._masks[name] = is_additive_mask(values)
        return self._masks[name]

    def _may_be_binary_mask(self, operand: _Operand) -> bool:
        """Whether the operand selects values, or is inverted by a number, as in 1 - mask."""
        if operand.node.op in ("Mul", "Where"):
            return True
        if operand.node.op not in ("Add", "Sub"):
            return False
        other = self._graph.weight_behind(operand.other)
        return other is not None and other.type.element_count == 1

    def _may_be_learned(self, operand: _Operand) -> bool:
        """Whether a number that scales or shifts data may be a weight, by its value or its name."""
        weight, node = operand.weight, operand.node
        if node.op == "Pow" and operand.index == 1:
            return has_exported_name(weight)
        if node.op not in ("Mul", "Div", "Add", "Sub") or self._graph.adds_epsilon(node):
            return False
        if self._graph.weight_behind(operand.other) is not None or self._graph.is_cast_integer(operand.other):
            return False
        source = self._graph.producers.get(operand.tensor)
        if source is not None and source.op in _BOUNDING:
            return True
        if is_initializer(weight) and not weight.type.shape and has_descriptive_name(operand.name):
            return True
        number = float(values_of(weight).reshape(-1)[0])
        is_neutral = number == 1 and node.op == "Mul"
        return (is_neutral and is_initializer(weight)) or not is_of_a_formula(number)

    def _is_learned_number(self, operand: _Operand) -> bool:
        """Whether a number is a weight: the exporter kept its name, or it is the bias of one unit.

        Exponents and summands under a root never are.
        """
        weight, node = operand.weight, operand.node
        if node.op == "Pow" and operand.index == 1:
            return False
        if has_exported_name(weight):
            return True
        is_bias = node.op == "Add" and is_initializer(weight) and weight.type.shape == (1,)
        return is_bias and not self._graph.adds_epsilon(node)


def _use_as_shape_or_state(operand: _Operand) -> WeightUse | None:
    """The use of a weight that is repeated, cast to integers, or a first state of zeros."""
    weight, node = operand.weight, operand.node
    if node.op in _REPEATING and weight.type.element_count <= 1:
        # A computed zero bias, which exporters add to convolutions without one.
        reason = f"single number: repeated by {node.op} '{node.name}'"
    elif node.op == INITIAL_STATE and is_zero(weight):
        reason = "initial state of zeros"
    elif _casts_to_integer(node):
        reason = f"cast to integers or Booleans by '{node.name}'"
    else:
        return None
    return WeightUse(node, operand.index, Role.CONSTANT, reason)


def _use_outside_rules(operand: _Operand) -> WeightUse | None:
    """The use of an empty or quantised weight, or by an unknown operator."""
    weight, node, index = operand.weight, operand.node, operand.index
    if not weight.type.element_count:
        return operand.constant("no elements")
    if _is_quantisation_setting(node, index):
        return operand.constant("scale of a quantised weight")
    if not node.domain and index >= 0:
        return None
    # Operands of unknown operators and of subgraphs train, so that a missing gradient rule is reported.
    is_constant = weight.type.element_count <= 1 or is_additive_mask(values_of(weight))
    return operand.constant() if is_constant else operand.parameter()


def _passes_weight(node: Node, index: int) -> bool:
    return facts_of(node).passes_weights and (index == 0 or node.op == "Concat")


def _casts_to_integer(node: Node) -> bool:
    if node.op != "Cast" or node.domain:
        return False
    return not TensorType(int(node.attribute("to")), ()).is_floating


def _is_quantisation_setting(node: Node, index: int) -> bool:
    biases = facts_by_name(node.op).quantised_bias
    if biases is None and not node.op.startswith("QLinear"):
        return False
    return index > 0 and index not in (biases or ())


def _is_outer_product(weight: Weight, node: Node) -> bool:
    """Whether the product has no sum, as of positions and frequencies."""
    return node.op != "MatMul" or 1 in weight.type.shape[-2:]
