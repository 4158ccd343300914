"""The rule of each operator, and from a model to its structure by them."""

from __future__ import annotations

from collections.abc import Mapping

from onnxgc.matching.normal_form.builder import Along, Builder, Rule
from onnxgc.matching.normal_form.structure import Structure
from onnxgc.matching.normal_form.terms import INFINITY
from onnxgc.matching.operators import data_movement, einsum, elementwise, products, reductions
from onnxgc.model.core.ir import TrainableModel

_ALIASES = ("Identity",)
_SHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")
_PLAIN = (
    "Sigmoid",
    "Log",
    "Softplus",
    "Elu",
    "Selu",
    "LeakyRelu",
    "Not",
    "Abs",
    "Floor",
    "Sin",
    "Cos",
    "Mish",
    "IsNaN",
)
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_ALIASES, data_movement.alias),
    **dict.fromkeys(_SHAPES, data_movement.reshape),
    **{op: elementwise.unary(op) for op in _PLAIN},
    **dict.fromkeys(
        ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL2"),
        reductions.reduce,
    ),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), reductions.global_pool),
    **dict.fromkeys(("MaxPool", "AveragePool"), reductions.pool),
    **dict.fromkeys(("Conv", "ConvTranspose"), products.conv),
    **dict.fromkeys(("Softmax", "LogSoftmax"), reductions.softmax),
    **dict.fromkeys(("Max", "Min"), elementwise.limit),
    **dict.fromkeys(
        ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or"), elementwise.compare
    ),
    "Where": elementwise.where,
    "Transpose": data_movement.transpose,
    "Expand": data_movement.expand,
    "Cast": data_movement.cast,
    "Dropout": data_movement.dropout,
    "Relu": elementwise.by(lambda terms, x: terms.clipped(x, 0.0, INFINITY)),
    "Neg": elementwise.by(lambda terms, x: terms.scaled(x, -1.0)),
    "Sqrt": elementwise.by(lambda terms, x: terms.power(x, 0.5)),
    "Reciprocal": elementwise.by(lambda terms, x: terms.power(x, -1.0)),
    "Erf": elementwise.by(lambda terms, x: terms.erf(x)),
    "Tanh": elementwise.by(lambda terms, x: terms.tanh(x)),
    "Exp": elementwise.by(lambda terms, x: terms.exp(x)),
    "Add": elementwise.add,
    "Sum": elementwise.add,
    "Sub": elementwise.sub,
    "Mul": elementwise.mul,
    "Div": elementwise.div,
    "Pow": elementwise.power_rule,
    "Clip": elementwise.clip,
    "Gelu": elementwise.gelu,
    "HardSigmoid": elementwise.hard_sigmoid,
    "HardSwish": elementwise.hard_swish,
    "Swish": elementwise.swish,
    "Einsum": einsum.einsum,
    "MatMul": products.matmul,
    "Gemm": products.gemm,
    "Gather": data_movement.gather,
    "GatherND": data_movement.gather_nd,
    "Resize": data_movement.resize,
    "Slice": data_movement.sliced,
    "Split": data_movement.split,
    "Concat": data_movement.concat,
    "Pad": data_movement.pad,
    "LayerNormalization": reductions.layer_normalization,
    "InstanceNormalization": reductions.instance_normalization,
    "BatchNormalization": reductions.batch_normalization,
}


def structure_of(model: TrainableModel, functions: Mapping[str, Along] | None = None) -> Structure:
    """The structure of a model's forward graph with its loss; batch statistics are no part of it.

    `functions` as in `Builder`.
    """
    translation = Builder(model, RULES, functions)
    for name in (*model.inputs, *model.targets):
        translation.add_input(name)
    for node in model.nodes:
        if not node.once:
            translation.visit(node)
    return translation.structure
