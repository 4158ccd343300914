"""A trainable model's forward graph as an ONNX model."""

from collections.abc import Mapping

import onnx
from onnx import helper, numpy_helper

from onnxgc.model.core.ir import Array, TensorType, TrainableModel


def to_proto(model: TrainableModel, values: Mapping[str, Array] | None = None) -> onnx.ModelProto:
    """The forward graph with its loss and updated statistics; weights are initializers.

    `values` replaces weights by name. Outputs are the loss, the model's own outputs and the next values of
    running statistics.
    """
    replaced = values or {}
    outputs = dict.fromkeys((model.loss, *model.outputs, *(item.updated for item in model.statistics)))
    inputs = (*model.inputs, *model.targets, *filter(None, [model.draw]))
    initializers = [
        numpy_helper.from_array(replaced[name] if name in replaced else weight.load(), name)
        for name, weight in model.weights.items()
    ]
    graph = helper.make_graph(
        [node.to_proto() for node in model.nodes],
        model.name,
        [_value_info(name, model.types[name]) for name in inputs],
        [_value_info(name, model.types[name]) for name in outputs],
        initializers,
        value_info=[
            _value_info(name, kind) for name, kind in model.types.items() if name not in outputs and name not in inputs
        ],
    )
    domains = {node.domain for node in model.nodes if node.domain}
    imports = [helper.make_opsetid("", model.opset)]
    imports += [helper.make_opsetid(domain, model.domains.get(domain, 1)) for domain in sorted(domains)]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=model.ir_version, producer_name="onnxgc")
    helper.set_model_props(proto, dict(model.metadata))
    return proto


def _value_info(name: str, kind: TensorType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind.dtype, kind.shape)
