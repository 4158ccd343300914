"""Which rule differentiates which operator: the whole of it on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxgc.gradients import (
    activations,
    convolution,
    data_movement,
    einsum,
    elementwise,
    gather_scatter,
    linear,
    normalization,
    pooling,
    reductions,
    resampling,
)
from onnxgc.gradients.engine import Differentiated, ExtraOutputs, Rule
from onnxgc.gradients.engine import differentiate as _differentiate
from onnxgc.model.core.ir import TrainableModel

RULES: Mapping[str, Rule] = {
    # sums and products
    "Add": elementwise.add,
    "Sub": elementwise.sub,
    "Mul": elementwise.mul,
    "Div": elementwise.div,
    "Max": elementwise.max_,
    "Min": elementwise.min_,
    "Sum": elementwise.sum_,
    # elementwise
    "Abs": elementwise.abs_,
    "Acos": elementwise.acos,
    "Acosh": elementwise.acosh,
    "Asin": elementwise.asin,
    "Asinh": elementwise.asinh,
    "Atan": elementwise.atan,
    "Atanh": elementwise.atanh,
    "Cast": elementwise.cast,
    "Cos": elementwise.cos,
    "Cosh": elementwise.cosh,
    "CumSum": elementwise.cum_sum,
    "Erf": elementwise.erf,
    "Exp": elementwise.exp,
    "Identity": elementwise.identity,
    "Log": elementwise.log,
    "Mod": elementwise.mod,
    "Neg": elementwise.neg,
    "Pow": elementwise.pow_,
    "Reciprocal": elementwise.reciprocal,
    "Sin": elementwise.sin,
    "Sinh": elementwise.sinh,
    "Sqrt": elementwise.sqrt,
    "Tan": elementwise.tan,
    "Trilu": elementwise.trilu,
    "Where": elementwise.where,
    # activations
    "Clip": activations.clip,
    "Dropout": activations.dropout,
    "Elu": activations.elu,
    "Gelu": activations.gelu,
    "HardSigmoid": activations.hard_sigmoid,
    "HardSwish": activations.hard_swish,
    "LeakyRelu": activations.leaky_relu,
    "PRelu": activations.prelu,
    "Relu": activations.relu,
    "Selu": activations.selu,
    "Shrink": activations.shrink,
    "Sigmoid": activations.sigmoid,
    "Softplus": activations.softplus,
    "Softsign": activations.softsign,
    "Swish": activations.swish,
    "Tanh": activations.tanh,
    "ThresholdedRelu": activations.thresholded_relu,
    # matrix products and convolution
    "Conv": convolution.conv,
    "ConvTranspose": convolution.conv_transpose,
    "Einsum": einsum.einsum,
    "Gemm": linear.gemm,
    "MatMul": linear.matmul,
    # pooling
    "AveragePool": pooling.average_pool,
    "GlobalAveragePool": pooling.global_average_pool,
    "GlobalLpPool": pooling.global_lp_pool,
    "GlobalMaxPool": pooling.global_max_pool,
    "LpPool": pooling.lp_pool,
    "MaxPool": pooling.max_pool,
    "MaxUnpool": pooling.max_unpool,
    # normalisation
    "BatchNormalization": normalization.batch_normalization,
    "BatchNormalization.batch": normalization.batch_normalization_of_batch,
    "InstanceNormalization": normalization.instance_normalization,
    "LRN": normalization.lrn,
    "LayerNormalization": normalization.layer_normalization,
    "LpNormalization": normalization.lp_normalization,
    "RMSNormalization": normalization.rms_normalization,
    # reductions
    "LogSoftmax": reductions.log_softmax,
    "ReduceL1": reductions.reduce_l1,
    "ReduceL2": reductions.reduce_l2,
    "ReduceLogSum": reductions.reduce_log_sum,
    "ReduceLogSumExp": reductions.reduce_log_sum_exp,
    "ReduceMax": reductions.reduce_extreme,
    "ReduceMean": reductions.reduce_mean,
    "ReduceMin": reductions.reduce_extreme,
    "ReduceProd": reductions.reduce_prod,
    "ReduceSum": reductions.reduce_sum_rule,
    "ReduceSumSquare": reductions.reduce_sum_square,
    "Softmax": reductions.softmax,
    "Softmax.masked": reductions.masked_softmax,
    # sampling
    "GridSample": resampling.grid_sample,
    "Resize": resampling.resize,
    # moving elements
    "Col2Im": data_movement.col2im,
    "Concat": data_movement.concat,
    "DepthToSpace": data_movement.depth_to_space,
    "Expand": gather_scatter.expand,
    "Flatten": data_movement.view,
    "Gather": gather_scatter.gather,
    "GatherElements": gather_scatter.gather_elements,
    "GatherND": gather_scatter.gather_nd,
    "OneHot": gather_scatter.one_hot,
    "Pad": data_movement.pad,
    "Reshape": data_movement.view,
    "ReverseSequence": gather_scatter.reverse_sequence,
    "ScatterElements": gather_scatter.scatter_elements,
    "ScatterND": gather_scatter.scatter_nd,
    "Slice": data_movement.slice_,
    "SpaceToDepth": data_movement.space_to_depth,
    "Split": data_movement.split,
    "Squeeze": data_movement.view,
    "Tile": gather_scatter.tile,
    "TopK": gather_scatter.top_k,
    "Transpose": data_movement.transpose,
    "Unsqueeze": data_movement.view,
}

# Floating results through which no gradient flows: their derivative is zero almost everywhere.
STOPS = frozenset(
    {
        "Ceil", "ConstantOfShape", "EyeLike", "Floor", "Hardmax", "Multinomial", "RandomNormal",
        "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Range", "Round", "Sign",
    }
)  # fmt: skip

# Outputs that a rule reads and that the source model need not have.
EXTRA_OUTPUTS: Mapping[str, ExtraOutputs] = {
    "LayerNormalization": normalization.statistics_outputs,
    "MaxPool": pooling.indices_output,
}


def differentiate(
    model: TrainableModel, *, seed: str = "loss_scale", order: Sequence[str] | None = None
) -> Differentiated:
    """Backward pass of `model` by `RULES`; see `engine.differentiate`."""
    return _differentiate(model, RULES, STOPS, extra_outputs=EXTRA_OUTPUTS, seed=seed, order=order)
