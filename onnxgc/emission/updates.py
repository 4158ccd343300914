"""A graph of its own that updates parameters by gradients that were added up before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import onnx
from onnx import helper, numpy_helper

from onnxgc import __version__
from onnxgc.model.core.ir import TensorType
from onnxgc.tracing.optimizers import SGD, AdamW, Updates, update_nodes

_OPSET, _IR = 18, 9


def update_model(
    optimizer: SGD | AdamW,
    parameters: Mapping[str, TensorType],
    gradients: Mapping[str, str],
    taken: Iterable[str] = (),
) -> tuple[onnx.ModelProto, Updates]:
    """The graph from parameters, `gradients` by parameter, and states to new parameters and states.

    All are inputs; an output may be written where the input lies that it replaces. No state has a name
    that is `taken`.
    """
    nodes, constants, updates = update_nodes(optimizer, parameters, gradients, taken)
    types = {
        **parameters,
        **{
            gradients[name]: TensorType(onnx.TensorProto.FLOAT, kind.shape)
            for name, kind in parameters.items()
        },
        **updates.types,
    }
    outputs = {new: types[old] for new, old in updates.replaced.items()}
    if updates.norm:
        outputs[updates.norm] = TensorType(onnx.TensorProto.FLOAT, ())
        updates = replace(updates, types={**updates.types, updates.norm: outputs[updates.norm]})
    graph = helper.make_graph(
        [node.to_proto() for node in nodes],
        "update",
        [helper.make_tensor_value_info(name, kind.dtype, kind.shape) for name, kind in types.items()],
        [helper.make_tensor_value_info(name, kind.dtype, kind.shape) for name, kind in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", _OPSET)],
        ir_version=_IR,
        producer_name="onnxgc",
        producer_version=__version__,
    )
    return model, updates
