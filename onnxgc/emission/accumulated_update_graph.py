"""A separate graph that updates parameters from accumulated gradients."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import onnx
from onnx import helper, numpy_helper

from onnxgc import __version__
from onnxgc.model.core.ir import TensorType
from onnxgc.tracing.optimizer_updates import Updates, update_nodes
from onnxgc.tracing.optimizers import UpdateRule

_OPSET, _IR = 18, 9


def update_model(
    optimizer: UpdateRule, parameters: Mapping[str, TensorType], gradients: Mapping[str, str], taken: Iterable[str] = ()
) -> tuple[onnx.ModelProto, Updates]:
    """The graph from parameters, gradients and states to new parameters and states.

    `gradients` maps a parameter to the name of its gradient. An output may overwrite the input that it
    replaces. States get names that are not in `taken`.
    """
    nodes, constants, updates = update_nodes(optimizer, parameters, gradients, taken)
    types = {
        **parameters,
        **{gradients[name]: TensorType(onnx.TensorProto.FLOAT, kind.shape) for name, kind in parameters.items()},
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
