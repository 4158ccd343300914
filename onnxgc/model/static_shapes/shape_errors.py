"""Messages for nodes and tensors without static shapes: the reason, and what to do."""

from collections import Counter
from collections.abc import Sequence

import onnx
from onnx import defs

from onnxgc.model.core.draft import Draft, operator_name, reads_of, subgraphs
from onnxgc.model.core.ir import Node, TensorType, dtype_name
from onnxgc.model.rebatch.shape_pair import ShapeWalk
from onnxgc.model.static_shapes.contrib_ops import is_contrib

REPLACEMENTS = {
    "NonZero": "a mask (Where, or a product) in place of indices, as `x[mask]` and `nonzero` make them",
    "Compress": "a mask (Where, or a product) in place of a choice of elements",
    "Unique": "counts over a fixed number of classes (OneHot, ReduceSum) in place of `unique` or `bincount`",
    "NonMaxSuppression": "the inputs of NonMaxSuppression as outputs, and the loss computed from them",
    "Range": "a constant length, or a mask over the longest one, in place of a length from the data",
    "StringSplit": "numbers as inputs in place of texts",
}
"""Replacements for operators whose output sizes depend on the data."""

_UNSUPPORTED_TYPE = "has unsupported type"
"""ONNX's inference writes this where an operator is not defined for a type."""


class UnresolvedShapeError(Exception):
    """A node whose output types cannot be inferred; the text gives the reason."""


class ShapeMessages:
    """Writes the messages of one shape walk.

    `made_for` states the file's own sizes, if the walk is for others.
    """

    def __init__(self, walk: ShapeWalk, draft: Draft) -> None:
        self._walk = walk
        self._draft = draft
        self.made_for = ""

    def inconsistent(self, node: Node, reason: str) -> str:
        """The inputs of a node contradict its operator's definition."""
        reads = [(name, self._walk.type_of(name)) for name in node.inputs if name]
        if _UNSUPPORTED_TYPE in reason:
            return self._unsupported_type(node, reads)
        shapes = ", ".join(f"'{name}' {list(kind.shape)}" for name, kind in reads if kind is not None)
        message = (
            f"node {node.label} ({operator_name(node)}) does not fit its inputs: {reason}; "
            f"it reads {shapes or 'nothing'}; check the input shapes ({self._input_shapes()})"
        )
        if not self.made_for:
            return message
        return f"{message}, or export the model with dynamic dimensions: {self.made_for}"

    def not_static(self, tensor: str, node: Node) -> str:
        """The shape of a node's output depends on the data."""
        subject = f"tensor '{tensor}' (node {node.label}, {operator_name(node)}) has no static shape"
        if any(True for _ in subgraphs(node)):
            decision = "which branch runs" if node.op == "If" else "the number of iterations"
            return f"{subject}: {self._deciding_values(node)} {decision}; export the model without this control flow"
        computed = [read for read in node.inputs if read and read not in self._walk.weights]
        values = ", ".join(f"'{read}'" for read in computed) or "nothing"
        replacement = REPLACEMENTS.get(operator_name(node))
        advice = (
            f"export the model with {replacement}"
            if replacement
            else (f"export the model with static shapes, or pass other --input-shapes (now {self._input_shapes()})")
        )
        return f"{subject}: it depends on the values of {values}, which are known only at run time; {advice}"

    def outside_onnx(self, node: Node, tensor: str) -> str:
        """An operator of another domain has no inference, and the file declares no shape."""
        others = (other for other in self._draft.nodes if other.domain and not is_contrib(other))
        counts = Counter(operator_name(other) for other in others if other.op != node.op)
        listed = ", ".join(f"{count} {operator}" for operator, count in sorted(counts.items()))
        return (
            f"the shape of tensor '{tensor}' cannot be inferred: node {node.label} is "
            f"{operator_name(node)}, an operator outside of ONNX{f' (as are {listed})' if listed else ''}; "
            "export the model with standard operators"
        )

    def _unsupported_type(self, node: Node, reads: Sequence[tuple[str, TensorType | None]]) -> str:
        types = ", ".join(f"'{name}' {dtype_name(kind.dtype)}" for name, kind in reads if kind is not None)
        opset = self._draft.opset
        later = _first_opset_with_types(node, opset, [kind for _, kind in reads])
        way = f"export the model at opset {later}, or" if later else "export the model"
        return (
            f"node {node.label} ({operator_name(node)}) is not defined for its input types at opset {opset}: "
            f"{types}; {way} with this operator in float32 (by a Cast before and after it)"
        )

    def _deciding_values(self, node: Node) -> str:
        """The model's inputs from which an If's condition is computed, as the subject of a sentence."""
        producers = {output: other for other in self._walk.nodes for output in other.outputs if output}
        pending, seen = list(node.inputs[:1]) if node.op == "If" else [], set()
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                pending += reads_of(producers[name]) if name in producers else ()
        inputs = [f"'{name}'" for name in self._draft.inputs if name in seen]
        return f"the values of {', '.join(inputs)} decide" if inputs else "the data decide"

    def _input_shapes(self) -> str:
        texts = (f"{name}:{','.join(map(str, self._walk.types[name].shape))}" for name in self._draft.inputs)
        return " ".join(texts) or "the model has no inputs"


def inference_reason(error: Exception) -> str:
    """The first line of an error of ONNX's inference, without its tags."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    for tag in ("[ShapeInferenceError]", "[TypeInferenceError]"):
        line = line.rpartition(tag)[2].strip()
    return line[0].lower() + line[1:].rstrip(".") if line else type(error).__name__


def _first_opset_with_types(node: Node, opset: int, kinds: Sequence[TensorType | None]) -> int | None:
    """The first later opset at which an operator takes all of these types, or None."""
    if node.domain:
        return None
    for later in range(opset + 1, defs.onnx_opset_version() + 1):
        schema = defs.get_schema(node.op, later, "")
        allowed = {text for entry in schema.inputs for text in entry.types}
        wanted = (onnx.TensorProto.DataType.Name(kind.dtype).lower() for kind in kinds if kind is not None)
        if all(f"tensor({name})" in allowed for name in wanted):
            return later
    return None
