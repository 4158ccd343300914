"""What `inspect` finds in a training file."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import onnx
from onnx import numpy_helper

from onnxgc.api.read_options import ReadOptions
from onnxgc.emission.static_types import static_types
from onnxgc.errors import ModelFileError
from onnxgc.model.core.draft import attributes_of
from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.model.weight_roles.roles import ParameterDecision, Role
from onnxgc.tracing.card_costs import OperatorCost, operator_costs, total_cost
from onnxgc.tracing.devices import Device


class TrainingFileContents:
    """The nodes of a training file with the types of their tensors, and the figures in its metadata.

    Raises:
        ModelFileError: the file was not written by `optimize`.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = model.graph
        properties = {entry.key: entry.value for entry in model.metadata_props}
        self.types = static_types(model)
        try:
            names = json.loads(properties["onnxgc.names"])
            self.weights = tuple(_weights(names, self.types))
            states = names.get("states", ())
            state_bytes = sum(self.types[name].size_bytes for name in states)
            self._kept = {*states, *(weight.name for weight in self.weights)}
            # With the optimizer's state, as in the report of `optimize`.
            self.peak_bytes = int(properties["onnxgc.simulated_peak_bytes"]) + state_bytes
            self.loss = properties["onnxgc.loss"]
            options = ReadOptions.from_json(properties["onnxgc.options"])
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ModelFileError(
                f"the metadata of the training file '{model.graph.name}' are incomplete or wrong ({error}); "
                "write it again with `onnxgc optimize`"
            ) from error
        self.opset = next(entry.version for entry in model.opset_import if not entry.domain)
        self.nodes = [
            Node(
                node.op_type,
                tuple(node.input),
                tuple(node.output),
                attributes_of(node),
                name=node.name,
                domain=node.domain,
            )
            for node in model.graph.node
        ]
        recomputed = sum(
            entry.value == "recompute"
            for node in model.graph.node
            for entry in node.metadata_props
            if entry.key == "onnxgc.role"
        )
        barriers = "with barriers" if options.has_barriers else "without barriers"
        if not options.stores_state:
            barriers += ", first values in a state file"
        self.note = (
            f"a training file of {len(self.nodes):,} nodes, of which {recomputed:,} recompute, in the forms "
            f"for {options.provider}, {barriers}"
        )

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs without a value in the file, states and weights left out."""
        stored = {tensor.name for tensor in self._graph.initializer}
        return {
            value.name: self.types[value.name].shape
            for value in self._graph.input
            if value.name not in stored and value.name not in self._kept
        }

    def card_costs(self, device: Device) -> tuple[OperatorCost, ...]:
        """Expected costs of a step by operator, the slowest first, and their total."""
        stored = {tensor.name: tensor for tensor in self._graph.initializer}

        def constant(name: str) -> Array | None:
            tensor = stored.get(name)
            is_external = tensor is not None and tensor.data_location == onnx.TensorProto.EXTERNAL
            return None if tensor is None or is_external else numpy_helper.to_array(tensor)

        outputs = [value.name for value in self._graph.output]
        costs = operator_costs(self.nodes, self.types, outputs, constant, device)
        return (*costs, total_cost(costs))


def _weights(names: Mapping[str, Any], types: Mapping[str, TensorType]) -> Iterator[ParameterDecision]:
    trained = names.get("parameters") or names["gradients"]
    for role, named in ((Role.PARAMETER, trained), (Role.STATISTIC, names["statistics"])):
        for name in named:
            yield ParameterDecision(name, types[name], role, "named in the file's metadata")
