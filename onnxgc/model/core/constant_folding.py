"""Evaluation of operators on constants, so that shapes computed in the graph become static."""

import logging
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from onnxgc.model.core.draft import captured_names
from onnxgc.model.core.ir import Array, Node, TensorType

logger = logging.getLogger(__name__)

# In elements. Folding serves shapes, masks and index tables; it does not compute the network.
MAX_FOLDED_INPUT = 1 << 16
MAX_FOLDED_OUTPUT = 1 << 20
# Operators that draw random numbers.
# fmt: off
RANDOM = frozenset({
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial",
    "Dropout",
})
# fmt: on


def shape_value(node: Node, shape: tuple[int, ...]) -> Array | None:
    """The result of Shape or Size for an input of this shape; None for any other operator."""
    if node.domain or node.op not in ("Shape", "Size"):
        return None
    if node.op == "Size":
        return np.asarray(np.prod(shape, dtype=np.int64))
    return np.asarray(shape[node.attribute("start", 0) : node.attribute("end", len(shape))], dtype=np.int64)


def may_fold(node: Node) -> bool:
    """Whether the operator is deterministic and depends on its inputs only."""
    return not node.domain and node.op not in RANDOM and not captured_names(node)


def evaluate(
    node: Node, values: Mapping[str, Array], outputs: Mapping[str, TensorType], opset: int
) -> dict[str, Array] | None:
    """The node's outputs; None if evaluation fails or contradicts their inferred shapes."""
    feeds = {name: values[name] for name in node.inputs if name}
    names = [name for name in node.outputs if name]
    try:
        # Runtimes divide by zero without a warning, and so does folding.
        with np.errstate(all="ignore"):
            computed = ReferenceEvaluator(_one_node(node, names, opset)).run(names, feeds)
    except Exception as error:  # Each operator of the evaluator has its own exceptions.
        logger.debug("node %s (%s) is not folded: %s", node.name, node.op, error)
        return None
    results: dict[str, Array] = {}
    for name, value in zip(names, computed, strict=True):
        array = np.asarray(value)
        expected = outputs.get(name)
        if expected is None or array.shape != expected.shape:
            return None
        results[name] = array.astype(helper.tensor_dtype_to_np_dtype(expected.dtype), copy=False)
    return results


def _one_node(node: Node, names: list[str], opset: int) -> onnx.ModelProto:
    """A model of the node alone; the evaluator takes a bare node for its operator's newest version."""
    graph = helper.make_graph(
        [node.to_proto()],
        "one_node",
        [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(filter(None, node.inputs))],
        [onnx.ValueInfoProto(name=name) for name in names],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
