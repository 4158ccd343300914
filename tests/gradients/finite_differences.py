"""Reference gradients independent of autograd: finite differences of the loss in float64.

ONNX's reference evaluator runs the source graph with every floating tensor in float64.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxgc.model.core.ir import Array
from tests.gradients.gradient_case import FED, MIN_NORM, Case, Outcome

STEP = 1e-5
TOLERANCE = 1e-4
_FLOATING = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
# Rules of operators that the evaluator of onnx 1.23 computes differently from all runtimes, or not at all.
BEYOND_THE_EVALUATOR: Mapping[str, str] = {
    "LRN": "its window goes over the wrong axis",
    "Dropout": "it draws other masks",
    "Erf": "it rounds to float32",
    "Gelu": "it rounds Erf to float32",
    "GroupNormalization": "its statistics are float32",
    "GlobalLpPool": "it lacks the operator",
    "RMSNormalization": "the cases change the model after reading",
    "BatchNormalization": "the cases change the model after reading",
    "GridSample": "it supports only the later names of the modes",
    "OneHot": "it fails on float64 values",
}


def has_differences(case: Case) -> bool:
    """Whether the evaluator can compute the loss from the source graph."""
    return case.smooth and case.rule not in BEYOND_THE_EVALUATOR and case.loss in (*_LOSSES, *case.outputs)


def in_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose floating inputs, weights, constants and casts are all float64."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    graph = wide.graph
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in _FLOATING:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in graph.initializer:
        _widen(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _widen(attribute.t)
            elif attribute.name == "to" and attribute.i in _FLOATING:
                attribute.i = TensorProto.DOUBLE
    return wide


def _widen(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in _FLOATING:
        value = numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


def difference_error(case: Case, found: Outcome) -> float | None:
    """The error of the directional derivative along one random direction, relative to the gradients' norm.

    Every entry moves by a step up or down, so that each parameter contributes about the norm of its gradient.
    None if the evaluator fails or computes another loss: it computes some operators differently from the
    runtimes.
    """
    model = _in_training(in_float64(case.model()))
    weights = {name: value.astype(np.float64) for name, value in case.weights().items()}
    generator = np.random.default_rng(zlib.crc32(str(case).encode()))
    direction = {name: generator.choice([-1.0, 1.0], size=weights[name].shape) for name in case.parameters}

    def loss(distance: float) -> float:
        moved = {name: weights[name] + distance * direction[name] for name in case.parameters}
        return _loss(case, _outputs(case, model, {**weights, **moved}), found.target)

    try:
        agrees = abs(loss(0.0) - found.loss) <= TOLERANCE * max(abs(found.loss), MIN_NORM)
    except Exception:  # The evaluator's operators raise all kinds of errors.
        return None
    if not agrees:
        return None
    change = (loss(STEP) - loss(-STEP)) / (2 * STEP)
    gradients = {name: found.gradients[name].astype(np.float64) for name in case.parameters}
    expected = sum(float(np.sum(gradients[name] * direction[name])) for name in case.parameters)
    norm = float(np.sqrt(sum(float(np.sum(np.square(value))) for value in gradients.values())))
    return abs(change - expected) / max(norm, MIN_NORM)


def _in_training(model: onnx.ModelProto) -> onnx.ModelProto:
    for node in model.graph.node:
        if node.op_type == "BatchNormalization" and model.opset_import[0].version >= 14:
            node.attribute.append(helper.make_attribute("training_mode", 1))
            node.output.extend([f"{node.output[0]}_mean", f"{node.output[0]}_variance"])
    return model


def _outputs(case: Case, model: onnx.ModelProto, weights: Mapping[str, Array]) -> dict[str, Array]:
    shell = onnx.ModelProto()
    shell.CopyFrom(model)
    kept = [tensor for tensor in shell.graph.initializer if tensor.name not in weights]
    del shell.graph.initializer[:]
    shell.graph.initializer.extend(kept)
    shell.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    fed = {FED: case.fed()[FED].astype(np.float64)}
    with np.errstate(all="ignore"):
        found = ReferenceEvaluator(shell).run(None, fed)
    return dict(zip(case.outputs, found, strict=True))


def _loss(case: Case, outputs: Mapping[str, Array], target: Array) -> float:
    y = np.asarray(outputs[case.outputs[0]], np.float64)
    if case.loss in case.outputs:
        return float(np.asarray(outputs[case.loss]).reshape(()))
    return float(_LOSSES[case.loss](y - target))


_LOSSES: Mapping[str, Callable[[Array], Any]] = {
    "mse": lambda difference: np.mean(np.square(difference)),
    "l1": lambda difference: np.mean(np.abs(difference)),
}
