"""The function of each ONNX operator.

A function takes the node's inputs by position and its attributes by name; its signature lists the attributes
that it supports. Further parameters are `training` (whether the module is in training mode), `outputs` (how
many of its results are read; for more than one it returns a tuple) and `like` (a tensor with the module's
device and floating type).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from onnxgc.torch.operators import (
    activations,
    creation,
    data_movement,
    elementwise,
    indexing,
    normalization,
    pooling,
    products,
    reductions,
    resampling,
)

_OF_THE_SAME_NAME = (
    *("Add", "Sub", "Mul", "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos"),
    *("Cosh", "Erf", "Exp", "Floor", "Log", "Neg", "Reciprocal", "Round", "Sign", "Sin", "Sinh"),
    *("Sqrt", "Tan", "Where", "IsNaN", "Relu", "Sigmoid", "Tanh", "MatMul"),
)
OPERATORS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(torch, name.lower()) for name in _OF_THE_SAME_NAME},
    # arithmetic
    "Div": elementwise.div,
    "Mod": elementwise.mod,
    "Pow": elementwise.power,
    "Sum": elementwise.sum_,
    "Max": elementwise.maximum,
    "Min": elementwise.minimum,
    # elementwise
    "Cast": elementwise.cast,
    "CumSum": elementwise.cumulative_sum,
    "Identity": elementwise.identity,
    "Trilu": elementwise.triangle,
    # comparison and logic
    "And": torch.logical_and,
    "BitShift": elementwise.bit_shift,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseNot": torch.bitwise_not,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "IsInf": elementwise.is_infinite,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Not": torch.logical_not,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
    # activations
    "Clip": activations.clip,
    "Dropout": activations.dropout,
    "Elu": activations.elu,
    "Gelu": activations.gelu,
    "HardSigmoid": activations.hard_sigmoid,
    "HardSwish": F.hardswish,
    "Hardmax": activations.hardmax,
    "LeakyRelu": activations.leaky_relu,
    "LogSoftmax": activations.log_softmax,
    "Mish": F.mish,
    "PRelu": activations.prelu,
    "Selu": activations.selu,
    "Shrink": activations.shrink,
    "Softmax": activations.softmax,
    "Softmax.masked": activations.masked_softmax,
    "Softplus": activations.softplus,
    "Softsign": F.softsign,
    "Swish": activations.swish,
    "ThresholdedRelu": activations.thresholded_relu,
    # matrix products and convolution
    "Conv": products.conv,
    "ConvTranspose": products.conv_transpose,
    "Einsum": products.einsum,
    "Gemm": products.gemm,
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
    "InstanceNormalization": normalization.instance_normalization,
    "LRN": normalization.lrn,
    "LayerNormalization": normalization.layer_normalization,
    "LpNormalization": normalization.lp_normalization,
    "RMSNormalization": normalization.rms_normalization,
    # reductions
    "ArgMax": reductions.arg_max,
    "ArgMin": reductions.arg_min,
    "ReduceL1": reductions.reduce_l1,
    "ReduceL2": reductions.reduce_l2,
    "ReduceLogSum": reductions.reduce_log_sum,
    "ReduceLogSumExp": reductions.reduce_log_sum_exp,
    "ReduceMax": reductions.reduce_max,
    "ReduceMean": reductions.reduce_mean,
    "ReduceMin": reductions.reduce_min,
    "ReduceProd": reductions.reduce_prod,
    "ReduceSum": reductions.reduce_sum,
    "ReduceSumSquare": reductions.reduce_sum_square,
    # sampling
    "GridSample": resampling.grid_sample,
    "Resize": resampling.resize,
    # data movement
    "Col2Im": data_movement.col2im,
    "Concat": data_movement.concat,
    "DepthToSpace": data_movement.depth_to_space,
    "Expand": data_movement.expand,
    "Flatten": data_movement.flatten,
    "Pad": data_movement.pad,
    "Reshape": data_movement.reshape,
    "ReverseSequence": data_movement.reverse_sequence,
    "Slice": data_movement.slice_,
    "SpaceToDepth": data_movement.space_to_depth,
    "Split": data_movement.split,
    "Squeeze": data_movement.squeeze,
    "Tile": data_movement.tile,
    "Transpose": data_movement.transpose,
    "Unsqueeze": data_movement.unsqueeze,
    # gather and scatter
    "Gather": indexing.gather,
    "GatherElements": indexing.gather_elements,
    "GatherND": indexing.gather_nd,
    "NonZero": indexing.non_zero,
    "OneHot": indexing.one_hot,
    "ScatterElements": indexing.scatter_elements,
    "ScatterND": indexing.scatter_nd,
    "Shape": indexing.shape_of,
    "Size": indexing.size_of,
    "TopK": indexing.top_k,
    # creation
    "Bernoulli": creation.bernoulli,
    "ConstantOfShape": creation.constant_of_shape,
    "EyeLike": creation.eye_like,
    "Multinomial": creation.multinomial,
    "RandomNormal": creation.random_normal,
    "RandomNormalLike": creation.random_normal,
    "RandomUniform": creation.random_uniform,
    "RandomUniformLike": creation.random_uniform,
    "Range": creation.range_,
}

SETTINGS: Mapping[str, tuple[int, ...]] = {
    "Clip": (1, 2),
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "Dropout": (1, 2),
    "Expand": (1,),
    "MaxUnpool": (2,),
    "OneHot": (1,),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    **{op: (1,) for op in OPERATORS if op.startswith("Reduce")},
}
"""Inputs that a function takes as numbers if they are constant, without a copy from a device."""

INDICES: Mapping[str, int] = {"Gather": 1}
"""Inputs that a function takes as a number if they are a constant scalar."""
