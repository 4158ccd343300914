"""The table of rules of operators, and the structure of a model."""

import math
from collections.abc import Mapping

from onnxgc.matching.normal_form import functions
from onnxgc.matching.normal_form.affine import scaled
from onnxgc.matching.normal_form.builder import Builder, IdentifiedFunction, Rule
from onnxgc.matching.normal_form.value_graph import Structure
from onnxgc.matching.operators import data_movement, einsum, elementwise, products, reductions
from onnxgc.model.core.ir import TrainableModel

_WITH_ATTRIBUTES = (
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
    "Identity": data_movement.alias,
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), data_movement.reshape),
    **{op: elementwise.with_attributes(op) for op in _WITH_ATTRIBUTES},
    **dict.fromkeys(
        ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL2"), reductions.reduce
    ),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), reductions.global_pool),
    **dict.fromkeys(("MaxPool", "AveragePool"), reductions.pool),
    **dict.fromkeys(("Conv", "ConvTranspose"), products.conv),
    **dict.fromkeys(("Softmax", "LogSoftmax"), reductions.softmax),
    **dict.fromkeys(("Add", "Sum", "Sub"), elementwise.add),
    **dict.fromkeys(("Max", "Min"), elementwise.limit),
    **dict.fromkeys(("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or"), elementwise.compare),
    "Where": elementwise.where,
    "Transpose": data_movement.transpose,
    "Expand": data_movement.expand,
    "Cast": data_movement.cast,
    "Dropout": data_movement.dropout,
    "Relu": elementwise.by(lambda structure, x: functions.clipped(structure, x, 0.0, math.inf)),
    "Neg": elementwise.by(lambda structure, x: scaled(structure, x, -1.0)),
    "Sqrt": elementwise.by(lambda structure, x: functions.power(structure, x, 0.5)),
    "Reciprocal": elementwise.by(lambda structure, x: functions.power(structure, x, -1.0)),
    "Erf": elementwise.by(lambda structure, x: functions.odd(structure, "Erf", x)),
    "Tanh": elementwise.by(lambda structure, x: functions.odd(structure, "Tanh", x)),
    "Exp": elementwise.by(functions.exp),
    "Mul": elementwise.mul,
    "Div": elementwise.div,
    "Pow": elementwise.power,
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


def structure_of(model: TrainableModel, identified: Mapping[str, IdentifiedFunction] | None = None) -> Structure:
    """The structure of a model's forward graph with its loss, without batch statistics.

    `identified` has tensors that are identified as functions of other tensors.
    """
    builder = Builder(model, RULES, identified)
    for name in (*model.inputs, *model.targets):
        builder.add_input(name)
    for node in model.nodes:
        if not node.once:
            builder.visit(node)
    return builder.structure
