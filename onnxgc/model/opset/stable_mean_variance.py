"""MeanVarianceNormalization in operators whose rounding keeps the variance above zero."""

from typing import Any

import numpy as np
from onnx import helper

from onnxgc.model.core.draft import Draft
from onnxgc.model.core.graph_writer import GraphWriter
from onnxgc.model.core.ir import Node, TensorType
from onnxgc.model.static_shapes.opset_changes import REDUCED_AXES_AS_INPUTS
from onnxgc.model.static_shapes.shape_walk import infer_shapes


def with_stable_mean_variance(draft: Draft) -> Draft:
    """The draft with MeanVarianceNormalization by the mean square of the deviations.

    ONNX defines the variance as a difference of two mean squares. For a constant channel it is zero, or
    negative by rounding: forward or the derivative of the root is NaN. Here the variance is at least the
    smallest positive number, so its derivative is zero there.
    """
    writer = GraphWriter(draft)
    for node in draft.nodes:
        kind = draft.type_of(node.inputs[0]) if node.inputs else None
        if node.op != "MeanVarianceNormalization" or node.domain or kind is None:
            writer.nodes.append(node)
        else:
            _write_stable(node, kind, writer)
    return draft if len(writer.nodes) == len(draft.nodes) else infer_shapes(writer.result())


def _write_stable(node: Node, kind: TensorType, writer: GraphWriter) -> None:
    x, y = node.inputs[0], node.outputs[0]

    def emit(op: str, *inputs: str, part: str = "", **attributes: Any) -> str:
        output = writer.names.fresh(f"{y}_{part}") if part else y
        writer.nodes.append(node.as_operator(op, inputs, (output,), f"{node.name}/{output}", **attributes))
        return output

    dtype = helper.tensor_dtype_to_np_dtype(kind.dtype)
    limits = np.finfo(dtype) if dtype.kind == "f" else np.finfo(np.float32)
    smallest = limits.smallest_subnormal if dtype == np.float16 else limits.tiny
    least = writer.constant(f"{y}_least", np.asarray(smallest).astype(dtype))
    epsilon = writer.constant(f"{y}_epsilon", np.asarray(1e-9).astype(dtype))
    axes = list(node.attribute("axes") or (0, 2, 3))
    axes_input = writer.int_constant(f"{y}_axes", axes)
    by_input = writer.draft.opset >= REDUCED_AXES_AS_INPUTS
    more_inputs, attributes = ([axes_input], {}) if by_input else ([], {"axes": axes})
    mean = emit("ReduceMean", x, *more_inputs, part="mean", **attributes)
    centred = emit("Sub", x, mean, part="centred")
    square = emit("Mul", centred, centred, part="square")
    variance = emit("ReduceMean", square, *more_inputs, part="variance", **attributes)
    root = emit("Sqrt", emit("Max", variance, least, part="bounded"), part="root")
    emit("Div", centred, emit("Add", root, epsilon, part="divisor"))
