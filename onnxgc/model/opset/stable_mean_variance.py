"""MeanVarianceNormalization in operators whose rounding keeps the variance above zero."""

from __future__ import annotations

import numpy as np
from onnx import helper

from onnxgc.model.core.draft import Draft, NameSource
from onnxgc.model.core.ir import Array, Node
from onnxgc.model.core.stored_weights import ArrayWeight
from onnxgc.model.static_shapes.shape_walk import infer_shapes

_FIRST_OPSET_OF_AXES_AS_INPUT = 18


def with_stable_mean_variance(draft: Draft) -> Draft:
    """The draft with MeanVarianceNormalization by the mean square of the deviations.

    ONNX defines the variance as a difference of two mean squares. For a constant channel it is zero, or
    negative by rounding: forward or the derivative of the root is NaN. Here the variance is at least the
    smallest positive number, so its derivative is zero there.
    """
    names, weights, nodes = NameSource(draft.tensor_names()), dict(draft.weights), list[Node]()
    for node in draft.nodes:
        kind = draft.type_of(node.inputs[0]) if node.inputs else None
        if node.op != "MeanVarianceNormalization" or node.domain or kind is None:
            nodes.append(node)
            continue
        dtype = helper.tensor_dtype_to_np_dtype(kind.dtype)
        axes = list(node.attribute("axes") or (0, 2, 3))
        limits = np.finfo(dtype) if dtype.kind == "f" else np.finfo(np.float32)
        least = limits.smallest_subnormal if dtype == np.float16 else limits.tiny
        values: dict[str, Array] = {
            "axes": np.asarray(axes, np.int64),
            "least": np.asarray(least).astype(dtype),
            "epsilon": np.asarray(1e-9).astype(dtype),
        }
        constant = {part: names.fresh(f"{node.outputs[0]}_{part}") for part in values}
        by_input = draft.opset >= _FIRST_OPSET_OF_AXES_AS_INPUT
        reduced = (constant.pop("axes"),) if by_input else ()
        axes_attribute = {} if by_input else {"axes": axes}
        weights |= {name: ArrayWeight(values[part]) for part, name in constant.items()}
        weights |= {name: ArrayWeight(values["axes"]) for name in reduced}
        x, y = node.inputs[0], node.outputs[0]
        mean, centred, square, variance, bounded, root, divisor = (
            names.fresh(f"{y}_{part}")
            for part in ("mean", "centred", "square", "variance", "bounded", "root", "divisor")
        )
        for op, inputs, output, more in (
            ("ReduceMean", (x, *reduced), mean, axes_attribute),
            ("Sub", (x, mean), centred, {}),
            ("Mul", (centred, centred), square, {}),
            ("ReduceMean", (square, *reduced), variance, axes_attribute),
            ("Max", (variance, constant["least"]), bounded, {}),
            ("Sqrt", (bounded,), root, {}),
            ("Add", (root, constant["epsilon"]), divisor, {}),
            ("Div", (centred, divisor), y, {}),
        ):
            name = f"{node.name}/{output}"
            nodes.append(
                Node(op, inputs, (output,), more, name, node.origin or node.name, op, module=node.module)
            )
    if len(nodes) == len(draft.nodes):
        return draft
    return infer_shapes(draft.with_changes(nodes=tuple(nodes), weights=weights))
