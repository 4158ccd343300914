"""Output types of one node: ONNX's inference, completed and corrected."""

from collections.abc import Mapping

import onnx
from onnx import defs, helper, numpy_helper, shape_inference

from onnxgc.model.core.draft import Draft, captured_names, reads_of
from onnxgc.model.core.ir import MAX_TENSOR_BYTES, Node, TensorType
from onnxgc.model.rebatch.shape_pair import ShapeWalk
from onnxgc.model.static_shapes.consistency import inconsistency
from onnxgc.model.static_shapes.shape_errors import ShapeMessages, UnresolvedShapeError, inference_reason

_MAX_SETTING_ELEMENTS = 1024
"""Larger tensors are never shapes, axes, scales or ratios."""
_SAME_AS_INPUT = frozenset(["GroupNormalization", "LayerNormalization", "MeanVarianceNormalization", "RotaryEmbedding"])
"""Operators whose output has the type of their first input, which ONNX's inference does not know."""
_POOLING = frozenset(["AveragePool", "LpPool", "MaxPool"])

Protos = dict[str, onnx.TypeProto]


def type_proto(kind: TensorType) -> onnx.TypeProto:
    return helper.make_tensor_type_proto(kind.dtype, kind.shape)


def static_type(proto: onnx.TypeProto | None) -> TensorType | None:
    """The type of a tensor whose sizes are all known; None for any other type."""
    if proto is None or not proto.HasField("tensor_type") or not proto.tensor_type.HasField("shape"):
        return None
    dimensions = proto.tensor_type.shape.dim
    if not all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in dimensions):
        return None
    return TensorType(proto.tensor_type.elem_type, tuple(dim.dim_value for dim in dimensions))


class TypeInference:
    """Infers the output types of a node from the types and constants that a walk knows."""

    def __init__(self, walk: ShapeWalk, draft: Draft, messages: ShapeMessages) -> None:
        self._walk = walk
        self._draft = draft
        self._messages = messages
        self._settings: dict[str, onnx.TensorProto] = {}
        self._ir_version = max(draft.ir_version, 4)
        self._opsets = [helper.make_opsetid(*entry) for entry in (("", draft.opset), *draft.other_domains.items())]

    def infer(self, node: Node) -> Protos:
        """The types of the node's outputs; a type may lack sizes that depend on the data.

        Raises:
            UnresolvedShapeError: the node contradicts its inputs, or its operator is unknown.
        """
        version = self._draft.other_domains.get(node.domain, 1) if node.domain else self._draft.opset
        if node.domain and not defs.has(node.op, version, node.domain):
            return self._of_other_domain(node)
        reads = reads_of(node)
        missing = next((name for name in reads if name not in self._walk.protos), None)
        if missing is not None:
            output = next(filter(None, node.outputs))
            raise UnresolvedShapeError(self._walk.problems.get(missing, self._messages.not_static(output, node)))
        types = {name: self._walk.protos[name] for name in reads}
        inferred = self._by_schema(node, version, types)
        if any(name and static_type(inferred.get(name)) is None for name in node.outputs):
            if node.domain:
                return self._of_other_domain(node)
            inferred |= self._by_function_body(node, types)
        self._complete(node, types, inferred)
        _drop_windows_in_padding(node, types, inferred)
        _ignore_output_padding(node, types, inferred)
        for name in node.outputs:
            kind = static_type(inferred.get(name))
            if kind is not None and kind.size_bytes > MAX_TENSOR_BYTES:
                size = f"tensor '{name}' would have {kind.size_bytes} bytes, over the limit of {MAX_TENSOR_BYTES}"
                raise UnresolvedShapeError(self._messages.inconsistent(node, size))
        inputs = [self._walk.type_of(name) for name in node.inputs]
        problem = inconsistency(node, inputs, static_type(inferred.get(node.outputs[0])), self._walk.value)
        if problem:
            raise UnresolvedShapeError(self._messages.inconsistent(node, problem))
        return inferred

    def _by_schema(self, node: Node, version: int, types: Mapping[str, onnx.TypeProto]) -> Protos:
        try:
            return shape_inference.infer_node_outputs(
                defs.get_schema(node.op, version, node.domain),
                node.to_proto(),
                dict(types),
                self._settings_of(node),
                opset_imports=self._opsets,
                ir_version=self._ir_version,
            )
        except (shape_inference.InferenceError, defs.SchemaError, onnx.checker.ValidationError) as error:
            reason = inference_reason(error)
            raise UnresolvedShapeError(self._messages.inconsistent(node, reason)) from error

    def _by_function_body(self, node: Node, types: Mapping[str, onnx.TypeProto]) -> Protos:
        """Types of a node whose operator ONNX defines as a function of other operators."""
        graph = helper.make_graph(
            [node.to_proto()],
            "one_node",
            [helper.make_value_info(name, kind) for name, kind in types.items()],
            [onnx.ValueInfoProto(name=name) for name in node.outputs if name],
        )
        outputs = self._outputs_of(graph)
        return {value.name: value.type for value in outputs if static_type(value.type) is not None}

    def _complete(self, node: Node, types: Mapping[str, onnx.TypeProto], inferred: Protos) -> None:
        """Adds to `inferred` the types that ONNX's inference does not know."""
        first = node.outputs[0]
        if node.op in _SAME_AS_INPUT and static_type(inferred.get(first)) is None:
            inferred[first] = self._walk.protos[node.inputs[0]]
        if node.domain:
            return
        if node.op == "Loop":
            inferred |= self._invariant_states(node, types)
        if node.op == "GatherND" and static_type(inferred.get(first)) is None:
            inferred |= _gather_nd_type(node, types)

    def _invariant_states(self, node: Node, types: Mapping[str, onnx.TypeProto]) -> Protos:
        """Types of a Loop's states that an iteration does not change, for any number of iterations."""
        body: onnx.GraphProto = node.attribute("body")
        number, condition, *states = body.input
        kinds = {
            number.name: helper.make_tensor_type_proto(onnx.TensorProto.INT64, ()),
            condition.name: helper.make_tensor_type_proto(onnx.TensorProto.BOOL, ()),
        }
        starts = node.inputs[2:]
        kinds |= {state.name: self._walk.protos[start] for state, start in zip(states, starts, strict=True)}
        kinds |= {name: types[name] for name in captured_names(node)}
        settings = self._settings_of(node.with_changes(inputs=captured_names(node)))
        graph = helper.make_graph(
            list(body.node),
            "one_step",
            [helper.make_value_info(name, kind) for name, kind in kinds.items()],
            [onnx.ValueInfoProto(name=value.name) for value in body.output],
            list(settings.values()),
        )
        after = self._outputs_of(graph)[1:]
        return {
            output: kinds[state.name]
            for output, state, value in zip(node.outputs, states, after, strict=False)
            if output
            and static_type(value.type) is not None
            and static_type(value.type) == static_type(kinds[state.name])
        }

    def _outputs_of(self, graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
        model = helper.make_model(graph, opset_imports=self._opsets, ir_version=self._ir_version)
        return list(shape_inference.infer_shapes(model, data_prop=True).graph.output)

    def _of_other_domain(self, node: Node) -> Protos:
        """Output types of an operator without inference, as the file declares them."""
        outputs = [name for name in node.outputs if name]
        if node.op in _SAME_AS_INPUT and len(outputs) == 1:
            return {outputs[0]: self._walk.protos[node.inputs[0]]}
        declared = {name: self._draft.declared[name] for name in outputs if name in self._draft.declared}
        if all(static_type(declared.get(name)) is not None for name in outputs):
            return declared
        raise UnresolvedShapeError(self._messages.outside_onnx(node, outputs[0]))

    def _settings_of(self, node: Node) -> dict[str, onnx.TensorProto]:
        """The node's small constant inputs, which may determine the shape of its outputs."""
        settings: dict[str, onnx.TensorProto] = {}
        for name in filter(None, node.inputs):
            if name not in self._settings:
                weight = self._walk.weights.get(name)
                if weight is None or weight.type.element_count > _MAX_SETTING_ELEMENTS:
                    continue
                value = self._walk.value(name)
                if value is None:
                    continue
                self._settings[name] = numpy_helper.from_array(value, name)
            settings[name] = self._settings[name]
        return settings


def _gather_nd_type(node: Node, types: Mapping[str, onnx.TypeProto]) -> Protos:
    """The type of a GatherND's output, which ONNX's inference omits for scalars."""
    data, indices = static_type(types[node.inputs[0]]), static_type(types[node.inputs[1]])
    if data is None or indices is None or not indices.shape:
        return {}
    indexed = int(node.attribute("batch_dims", 0)) + indices.shape[-1]
    shape = (*indices.shape[:-1], *data.shape[indexed:])
    return {node.outputs[0]: type_proto(TensorType(data.dtype, shape))}


def _drop_windows_in_padding(node: Node, types: Mapping[str, onnx.TypeProto], inferred: Protos) -> None:
    """Corrects the extent of pooling with ceil_mode: no window begins in the padding at the end.

    Older versions of ONNX's inference count such a window; runtimes never compute it. Source: ONNX
    MaxPool-22 and AveragePool-22, `ceil_mode`.
    """
    if node.op not in _POOLING or not node.attribute("ceil_mode", 0):
        return
    source = static_type(types[node.inputs[0]])
    if source is None or node.attribute("auto_pad", "NOTSET") not in ("NOTSET", ""):
        return
    rank = len(source.shape) - 2
    strides = node.attribute("strides") or [1] * rank
    pads = node.attribute("pads") or [0] * (2 * rank)
    for output in filter(None, node.outputs):
        kind = static_type(inferred.get(output))
        if kind is None:
            continue
        spatial = tuple(
            extent - 1 if (extent - 1) * stride >= size + begin else extent
            for extent, stride, size, begin in zip(kind.shape[2:], strides, source.shape[2:], pads[:rank], strict=True)
        )
        inferred[output] = type_proto(TensorType(kind.dtype, (*kind.shape[:2], *spatial)))


def _ignore_output_padding(node: Node, types: Mapping[str, onnx.TypeProto], inferred: Protos) -> None:
    """Corrects the extent of ConvTranspose with auto_pad, which output_padding does not change.

    ONNX's inference adds it. Source: ONNX ConvTranspose-11, `auto_pad`: output_shape[i] = input_shape[i] *
    strides[i]; where all windows together cover less, runtimes end there.
    """
    if node.op != "ConvTranspose" or node.domain or node.attribute("output_shape"):
        return
    output_padding = node.attribute("output_padding") or ()
    if node.attribute("auto_pad") not in ("SAME_UPPER", "SAME_LOWER") or not any(output_padding):
        return
    source, weight = (static_type(types[name]) for name in node.inputs[:2])
    kind = static_type(inferred.get(node.outputs[0]))
    if source is None or weight is None or kind is None:
        return
    ones = [1] * (len(source.shape) - 2)
    spatial = tuple(
        min(size * stride, (size - 1) * stride + dilation * (width - 1) + 1 + added)
        for size, width, stride, dilation, added in zip(
            source.shape[2:],
            weight.shape[2:],
            node.attribute("strides") or ones,
            node.attribute("dilations") or ones,
            output_padding,
            strict=True,
        )
    )
    inferred[node.outputs[0]] = type_proto(TensorType(kind.dtype, (*kind.shape[:2], *spatial)))
