"""Which rule differentiates which operator: the whole of it on one page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from onnxgc.gradients import (
    convolution,
    elementwise,
    linear,
    normalization,
    pooling,
    reductions,
    shape_ops,
)
from onnxgc.gradients.engine import Differentiated, Rule
from onnxgc.gradients.engine import differentiate as _differentiate
from onnxgc.model.ir import Node, TensorType, TrainableModel

RULES: Mapping[str, Rule] = {
    # sums and products
    "Add": elementwise.add,
    "Sub": elementwise.sub,
    "Mul": elementwise.mul,
    "Div": elementwise.div,
    "Sum": elementwise.sum_,
    # elementwise
    "Abs": elementwise.abs_,
    "Cast": elementwise.cast,
    "Clip": elementwise.clip,
    "Dropout": elementwise.dropout,
    "Exp": elementwise.exp,
    "Identity": elementwise.identity,
    "Log": elementwise.log,
    "Neg": elementwise.neg,
    "Relu": elementwise.relu,
    "Sigmoid": elementwise.sigmoid,
    "Softplus": elementwise.softplus,
    "Sqrt": elementwise.sqrt,
    "Tanh": elementwise.tanh,
    # matrix products and convolution
    "Conv": convolution.conv,
    "Gemm": linear.gemm,
    "MatMul": linear.matmul,
    # pooling
    "AveragePool": pooling.average_pool,
    "GlobalAveragePool": pooling.global_average_pool,
    "MaxPool": pooling.max_pool,
    # normalisation
    "BatchNormalization": normalization.batch_normalization,
    "BatchNormalization.batch": normalization.batch_normalization_of_batch,
    "LRN": normalization.lrn,
    # reductions
    "LogSoftmax": reductions.log_softmax,
    "ReduceMean": reductions.reduce_mean,
    "ReduceSum": reductions.reduce_sum_rule,
    "Softmax": reductions.softmax,
    # moving elements
    "Concat": shape_ops.concat,
    "Flatten": shape_ops.view,
    "GatherElements": shape_ops.gather_elements,
    "Pad": shape_ops.pad,
    "Reshape": shape_ops.view,
    "Slice": shape_ops.slice_,
    "Split": shape_ops.split,
    "Squeeze": shape_ops.view,
    "Transpose": shape_ops.transpose,
    "Unsqueeze": shape_ops.view,
}

# Floating results through which no gradient flows: their derivative is zero almost everywhere.
STOPS = frozenset(
    {
        "Ceil", "ConstantOfShape", "EyeLike", "Floor", "Multinomial", "OneHot", "RandomNormal",
        "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Range", "Round", "Sign",
    }
)  # fmt: skip

# Outputs that a rule reads and that the source model need not have.
EXTRA_OUTPUTS: Mapping[str, Callable[[Node, TrainableModel], tuple[str, TensorType]]] = {
    "MaxPool": pooling.indices_output,
}


def differentiate(
    model: TrainableModel, *, seed: str = "loss_scale", order: Sequence[str] | None = None
) -> Differentiated:
    """Backward pass of `model` by `RULES`; see `engine.differentiate`."""
    return _differentiate(model, RULES, STOPS, extra_outputs=EXTRA_OUTPUTS, seed=seed, order=order)
