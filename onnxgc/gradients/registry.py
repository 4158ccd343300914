"""The gradient rule of each operator."""

from collections.abc import Mapping, Sequence

from onnxgc.gradients import (
    activations,
    convolution,
    data_movement,
    einsum,
    elementwise,
    gather,
    grid_sample,
    normalization,
    padding,
    pooling,
    products,
    reductions,
    resize,
    scatter,
    slicing,
)
from onnxgc.gradients.differentiate import DifferentiatedModel, ExtraOutputs, Rule
from onnxgc.gradients.differentiate import differentiate as _differentiate
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
    "Gemm": products.gemm,
    "MatMul": products.matmul,
    # pooling
    "AveragePool": pooling.average_pool,
    "GlobalAveragePool": pooling.global_average_pool,
    "GlobalLpPool": pooling.global_lp_pool,
    "GlobalMaxPool": pooling.global_max_pool,
    "LpPool": pooling.lp_pool,
    "MaxPool": pooling.max_pool,
    pooling.BY_WINDOWS: pooling.max_pool_by_windows,
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
    "GridSample": grid_sample.grid_sample,
    "Resize": resize.resize,
    # data movement
    "Col2Im": data_movement.col2im,
    "Concat": data_movement.concat,
    "DepthToSpace": data_movement.depth_to_space,
    "Expand": data_movement.expand,
    "Flatten": data_movement.view,
    "Gather": gather.gather,
    "GatherElements": gather.gather_elements,
    "GatherND": gather.gather_nd,
    "OneHot": gather.one_hot,
    "Pad": padding.pad,
    "Reshape": data_movement.view,
    "ReverseSequence": data_movement.reverse_sequence,
    "ScatterElements": scatter.scatter_elements,
    "ScatterND": scatter.scatter_nd,
    "Slice": slicing.slice_,
    "SpaceToDepth": data_movement.space_to_depth,
    "Split": data_movement.split,
    "Squeeze": data_movement.view,
    "Tile": data_movement.tile,
    "TopK": gather.top_k,
    "Transpose": data_movement.transpose,
    "Unsqueeze": data_movement.view,
}

# Rules with another form on CUDA. Weight gradients of convolutions have a table of forms of their own
# (`weight_gradient.WEIGHT_FORMS`), sums and products choose in `rule_helpers`.
RULES_ON_CUDA: Mapping[str, Rule] = {
    "BatchNormalization.batch": normalization.batch_normalization_of_batch_on_cuda,
    "Relu": activations.relu_on_cuda,
}

# Operators with floating results that stop gradients: their derivative is zero almost everywhere.
STOPS = frozenset(
    {
        "Ceil", "ConstantOfShape", "EyeLike", "Floor", "Hardmax", "Multinomial", "RandomNormal",
        "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Range", "Round", "Sign",
    }
)  # fmt: skip

# Outputs that a rule reads and that the source model may lack.
EXTRA_OUTPUTS: Mapping[str, ExtraOutputs] = {
    "LayerNormalization": normalization.statistics_outputs,
    "MaxPool": pooling.indices_output,
}


def differentiate(
    model: TrainableModel, *, seed: str = "loss_scale", order: Sequence[str] | None = None
) -> DifferentiatedModel:
    """Backward pass of `model` by the rules of its provider; see `differentiate.differentiate`."""
    rules = {**RULES, **(RULES_ON_CUDA if model.provider == "cuda" else {})}
    return _differentiate(model, rules, STOPS, extra_outputs=EXTRA_OUTPUTS, seed=seed, order=order)
