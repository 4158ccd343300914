"""The ONNX model of a training file, from its nodes: inputs, outputs, types, weights and metadata."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxgc import __version__
from onnxgc.emission.annotated_node import AnnotatedNode
from onnxgc.emission.dimension_names import dimension_names
from onnxgc.emission.graph_tensors import GraphTensors
from onnxgc.model.core.draft import reads_of
from onnxgc.model.core.ir import Array, TensorType
from onnxgc.model.core.stored_weights import MIN_EXTERNAL_BYTES, ArrayWeight, write_weight
from onnxgc.tracing.step_graph import TrainingStep

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class TrainingModel:
    """The contents of a training file; docs/training-file.md defines its inputs, outputs and metadata.

    `nodes` are all nodes in order, `tensors` the names and types that emission added. `values` replaces
    weights by name. With `stores_state` the file contains the first values of parameters and statistics.
    With `streams` large weights have no contents: `write_model` streams them.
    """

    step: TrainingStep
    nodes: Sequence[AnnotatedNode]
    tensors: GraphTensors
    peak_bytes: int
    metadata: Mapping[str, str]
    values: Mapping[str, Array]
    stores_state: bool = True
    streams: bool = False

    @property
    def _used(self) -> set[str]:
        return {name for annotated in self.nodes for name in reads_of(annotated.node)}

    @property
    def _fed_weights(self) -> list[str]:
        """Parameters and running statistics, which are inputs."""
        model, used = self.step.model, self._used
        trained = [name for name in model.parameters if name in self.step.parameter_gradients]
        return [*trained, *(statistic.name for statistic in model.statistics if statistic.name in used)]

    def first_values(self) -> dict[str, Array]:
        """The first values of parameters, running statistics and an optimizer's states."""
        weights, updates = self.step.model.weights, self.step.updates
        values = {
            name: self.values[name] if name in self.values else weights[name].load() for name in self._fed_weights
        }
        for name in () if updates is None else updates.state_names:
            kind = self.step.types[name]
            values[name] = np.zeros(kind.shape, helper.tensor_dtype_to_np_dtype(kind.dtype))
        return values

    def to_proto(self) -> onnx.ModelProto:
        model = self.step.model
        used, fed_weights = self._used, self._fed_weights
        frozen = [name for name in model.weights if name in used and name not in set(fed_weights)]
        outputs, described = self.step.graph.outputs, self._descriptions()
        graph = helper.make_graph(
            [annotated.to_proto() for annotated in self.nodes],
            model.name or "training",
            self._inputs(fed_weights),
            [_value_info(name, self.step.types[name], described[name]) for name in outputs],
            self._initializers(used),
            value_info=self._inner_tensors(set(outputs)),
        )
        domains = sorted({annotated.node.domain for annotated in self.nodes} - {""})
        proto = helper.make_model(
            graph,
            opset_imports=[
                helper.make_opsetid("", model.opset),
                *(helper.make_opsetid(domain, model.domains.get(domain, 1)) for domain in domains),
            ],
            ir_version=model.ir_version,
            producer_name="onnxgc",
            producer_version=__version__,
        )
        for name in (*(fed_weights if self.stores_state else ()), *frozen):
            # Written directly into the model: an intermediate list would copy all weights once more.
            value = self.values.get(name)
            weight = model.weights[name] if value is None else ArrayWeight(value)
            tensor = proto.graph.initializer.add()
            if self.streams and value is None and weight.type.size_bytes >= MIN_EXTERNAL_BYTES:
                tensor.name, tensor.data_type, tensor.data_location = name, weight.type.dtype, TensorProto.EXTERNAL
                tensor.dims.extend(weight.type.shape)
            else:
                write_weight(weight, name, tensor)
        helper.set_model_props(
            proto,
            {
                **model.metadata,
                "onnxgc.version": __version__,
                "onnxgc.schema": str(SCHEMA_VERSION),
                "onnxgc.names": json.dumps(self._names()),
                **self.metadata,
            },
        )
        return proto

    @property
    def _loss_scale(self) -> TensorType:
        return TensorType(self.step.types[self.step.model.loss].dtype, ())

    def _inputs(self, fed_weights: Sequence[str]) -> list[onnx.ValueInfoProto]:
        model, updates = self.step.model, self.step.updates
        scalars, states = (updates.scalars.values(), updates.state_names) if updates else ((), ())
        fed = [*model.inputs, *model.targets, *fed_weights, *scalars, *filter(None, [model.draw]), *states]
        zero, seed = self.tensors.zero, self.step.differentiated.seed
        types = {**self.step.types, seed: self._loss_scale, zero: self.tensors.type_of(zero)}
        described = self._descriptions()
        return [_value_info(name, types[name], described[name]) for name in (*fed, seed, zero)]

    def _descriptions(self) -> dict[str, str]:
        """A line on each input and output."""
        step, model = self.step, self.step.model
        replaced = {statistic.updated: statistic.name for statistic in model.statistics}
        texts = {
            **dict.fromkeys(model.inputs, "input of the model"),
            **dict.fromkeys(model.outputs, "output of the model"),
            **dict.fromkeys(model.targets, "labels or desired output"),
            **dict.fromkeys(model.parameters, "parameter of the model"),
            **dict.fromkeys(replaced.values(), "running statistic"),
            **{gradient: f"gradient of {name}" for name, gradient in step.parameter_gradients.items()},
            model.draw: "number of the run",
            model.loss: "loss",
            step.differentiated.seed: "factor of all gradients",
            self.tensors.zero: "always 0",
        }
        if (updates := step.updates) is not None:
            replaced |= updates.replaced
            texts[updates.norm] = "norm of all gradients"
            texts |= {name: f"{key.replace('_', ' ')} of the update" for key, name in updates.scalars.items()}
            for name, states in updates.states.items():
                texts |= dict.fromkeys(states, f"state of {updates.optimizer.name} for {name}")
        return texts | {new: f"new value of {old}" for new, old in replaced.items()}

    def _initializers(self, used: set[str]) -> list[onnx.TensorProto]:
        """Defaults of the loss scale and the barriers' zero, and the constants that nodes read."""
        dtype = helper.tensor_dtype_to_np_dtype(self._loss_scale.dtype)
        return [
            numpy_helper.from_array(np.ones((), dtype), self.step.differentiated.seed),
            numpy_helper.from_array(np.zeros(1, np.int64), self.tensors.zero),
            *(
                numpy_helper.from_array(value, name)
                for name, value in (*self.step.constants.items(), *self.tensors.constants.values.items())
                if name in used
            ),
        ]

    def _inner_tensors(self, outputs: set[str]) -> list[onnx.ValueInfoProto]:
        """Types of all inner tensors, with names for first dimensions, unless the file is portable."""
        nodes = [annotated.node for annotated in self.nodes]
        computed = [name for node in nodes for name in node.outputs if name]
        read = {name for node in nodes for name in reads_of(node)}
        types = {name: self.tensors.type_of(name) for name in read.union(computed)}
        if self.step.model.is_portable:
            # The runtime would fold the length of a barrier's empty slice.
            empty = (name for name in computed if name not in self.tensors.vectors and types[name].shape[:1] == (0,))
            first = dict.fromkeys(empty, "empty")
        else:
            first = dimension_names(
                nodes, types, outputs=outputs, numbered=self.tensors.vectors, peak_bytes=self.peak_bytes
            )
        infos = []
        for name in computed:
            if name in outputs:
                continue
            shape: list[int | str] = list(types[name].shape)
            if name in first:
                shape[0] = first[name]
            infos.append(helper.make_tensor_value_info(name, types[name].dtype, shape))
        return infos

    def _names(self) -> dict[str, Any]:
        """Names of the inputs and outputs by their meaning, for the metadata."""
        model = self.step.model
        return {
            **json.loads(model.metadata.get("onnxgc.names", "{}")),
            "loss_scale": self.step.differentiated.seed,
            "barrier_zero": self.tensors.zero,
            "gradients": dict(self.step.parameter_gradients),
            "statistics": {statistic.name: statistic.updated for statistic in model.statistics},
            **self._names_of_updates(),
        }

    def _names_of_updates(self) -> dict[str, Any]:
        """Names of an optimizer's inputs and outputs; empty without one."""
        updates = self.step.updates
        if updates is None:
            return {}
        new_of = updates.new_of
        norm = {"gradient_norm": updates.norm} if updates.norm else {}
        return {
            "gradients": {},
            "parameters": {name: new_of[name] for name in updates.states if name in new_of},
            "states": {name: new_of[name] for name in updates.state_names},
            "states_of": {name: list(states) for name, states in updates.states.items()},
            **updates.scalars,
            **norm,
        }


def _value_info(name: str, kind: TensorType, description: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind.dtype, kind.shape, description)
