"""Questions about the graph around a weight's use."""

from collections.abc import Callable, Mapping

import numpy as np
from onnx import TensorProto

from onnxgc.model.core.draft import Draft
from onnxgc.model.core.ir import Node, Weight
from onnxgc.model.operators.registry import facts_by_name, facts_of
from onnxgc.model.weight_roles.weight_evidence import values_of

# Positions and counts; bytes are images, and Booleans are masks.
_INTEGERS = (TensorProto.INT32, TensorProto.INT64)
_INTEGER_OUTPUTS = frozenset({"Shape", "Size", "ArgMax", "ArgMin", "NonZero"})
_AFFINE = frozenset({"Add", "Sub", "Mul", "Div"})
_MASKING = frozenset({"Add", "Sub", "Mul", "Div", "Max", "Min", "Clip", "Where", "Dropout"})
"""Operators between attention's scores, their Softmax and the product with the values."""
_PRODUCTS = ("MatMul", "Gemm", "Einsum")


class GraphContext:
    """Producers and consumers of a draft's tensors, and what follows from them."""

    def __init__(self, draft: Draft) -> None:
        self.weights: Mapping[str, Weight] = draft.weights
        self.consumers = draft.consumers()
        self.producers = draft.producers()
        self._declared = draft.declared
        self.inputs = frozenset(draft.inputs)
        # By tensor: many weights are applied to one chain.
        self._normalised = {"": ""}

    def weight_behind(
        self, name: str, passes: Callable[[Node], bool] = lambda node: facts_of(node).passes_weights
    ) -> Weight | None:
        """The weight that a tensor is after operators that pass it on."""
        while name not in self.weights:
            producer = self.producers.get(name)
            if producer is None or not passes(producer):
                return None
            name = producer.inputs[0]
        return self.weights[name]

    def normalised_input(self, name: str) -> str:
        """The model's input that a tensor is, possibly scaled and shifted by weights; else ""."""
        passed = []
        while name not in self.inputs and name not in self._normalised:
            passed.append(name)
            name = self._scaled_by_weights(name)
        found = self._normalised.get(name, name)
        self._normalised.update(dict.fromkeys(passed, found))
        return found

    def _scaled_by_weights(self, name: str) -> str:
        """The tensor that a tensor is, passed on or scaled or shifted by weights in one operator; else ""."""
        producer = self.producers.get(name)
        if producer is None or producer.domain:
            return ""
        if producer.op not in _AFFINE and not facts_of(producer).passes_weights:
            return ""
        are_weights = [self.weight_behind(operand) is not None for operand in producer.inputs]
        if producer.op in _AFFINE and not any(are_weights):
            return ""
        return producer.inputs[are_weights.index(False) if False in are_weights else 0]

    def is_attention_score(self, node: Node) -> bool:
        """Whether a Softmax reads the node's output, and a product reads the Softmax.

        Masks, scales and limits may lie between.
        """
        pending, seen = [(output, False) for output in node.outputs], set[tuple[str, bool]]()
        while pending:
            tensor, is_normalised = pending.pop()
            for reader, _ in self.consumers.get(tensor, ()):
                if is_normalised and reader.op in _PRODUCTS:
                    return True
                is_softmax = reader.op == "Softmax"
                if is_softmax or reader.op in _MASKING or facts_by_name(reader.op).passes_weights:
                    outputs = {(output, is_normalised or is_softmax) for output in reader.outputs}
                    pending += sorted(outputs - seen)
                    seen |= outputs
        return False

    def adds_epsilon(self, node: Node) -> bool:
        """Whether the node is a sum under a root or in a divisor."""
        readers = {reader.op for reader, _ in self.consumers.get(node.outputs[0], ())}
        return node.op == "Add" and not readers.isdisjoint(("Sqrt", "Reciprocal", "Pow"))

    def is_neutral_in_group_norm(self, weight: Weight, node: Node, index: int) -> bool:
        """Whether a weight is the neutral scale or bias in torch's form of GroupNormalization.

        The form is Reshape, InstanceNormalization, Reshape, followed by the true scale and bias.
        """
        producer = self.producers.get(node.inputs[0])
        if producer is None or producer.op != "Reshape" or index not in (1, 2):
            return False
        readers = self.consumers.get(node.outputs[0], [])
        if {reader.op for reader, _ in readers} != {"Reshape"}:
            return False
        return bool(np.all(values_of(weight) == (1 if index == 1 else 0)))

    def multiplies_integers(self, tensor: str, node: Node) -> bool:
        """Whether all other operands of the node are integers cast to floats, as positions are."""
        others = [name for name in node.inputs if name and name != tensor]
        return bool(others) and all(self.is_cast_integer(name) for name in others)

    def is_cast_integer(self, name: str) -> bool:
        """Whether a floating tensor is a cast, and possibly rearranged, integer."""
        while (producer := self.producers.get(name)) and facts_by_name(producer.op).passes_weights:
            if producer.op in ("Cast", "CastLike") and self._is_integer(producer.inputs[0]):
                return True
            name = producer.inputs[0]
        return producer is None and name not in self.weights and self._is_integer(name)

    def _is_integer(self, name: str) -> bool:
        seen: set[str] = set()
        while name not in seen:
            seen.add(name)
            if name in self.weights:
                return self.weights[name].type.dtype in _INTEGERS
            declared = self._declared.get(name)
            if declared is not None and declared.HasField("tensor_type"):
                return declared.tensor_type.elem_type in _INTEGERS
            producer = self.producers.get(name)
            if producer is None or producer.domain or not any(producer.inputs):
                return False
            if producer.op in _INTEGER_OUTPUTS:
                return True
            if producer.op == "Cast":
                return int(producer.attribute("to")) in _INTEGERS
            # The output of other operators has the type of their data.
            name = producer.inputs[1 if producer.op in ("Where", "CastLike") else 0]
        return False
