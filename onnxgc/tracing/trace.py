"""From a differentiated model to the step graph that schedules and the judge work on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxgc.gradients.engine import Differentiated
from onnxgc.gradients.registry import differentiate
from onnxgc.model.costs import node_flops
from onnxgc.model.draft import captured_names, reads_of
from onnxgc.model.ir import Array, Node, TensorType, TrainableModel
from onnxgc.planning.schedule import Operator, StepGraph
from onnxgc.tracing.runtime_costs import IN_PLACE_OPERATORS, VIEW_OPERATORS, workspace_bytes
from onnxgc.tracing.types import infer_types, type_of_array


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One training step of a model, with every node, type and constant, and no decision taken."""

    model: TrainableModel
    differentiated: Differentiated
    types: Mapping[str, TensorType]
    constants: Mapping[str, Array]
    graph: StepGraph
    nodes: Mapping[str, Node]
    parameter_gradients: Mapping[str, str]
    keeps_outputs: bool


def retrace(step: TrainingStep, order: Sequence[str]) -> TrainingStep:
    """The same step with its forward nodes in another order."""
    seed = step.differentiated.seed
    return trace(step.model, seed=seed, order=order, keep_outputs=step.keeps_outputs)


def trace(
    model: TrainableModel, *, seed: str, order: Sequence[str] | None = None, keep_outputs: bool = False
) -> TrainingStep:
    """Differentiate `model`, in the given order of forward nodes, and describe the whole step.

    With `keep_outputs` the model's own outputs are outputs of the step too.
    """
    differentiated = differentiate(model, seed=seed, order=order)
    known = {**model.types, **differentiated.extra_types, seed: model.types[model.loss]}
    added = infer_types(differentiated.backward, known, differentiated.constants, model.opset)
    constants = {name: type_of_array(value) for name, value in differentiated.constants.items()}
    types = {**known, **constants, **added}
    forward = tuple(_operator(node, types) for node in differentiated.forward)
    chunks = tuple(tuple(_operator(node, types) for node in chunk.nodes) for chunk in differentiated.chunks)
    gradients = {
        name: differentiated.gradient_of[name]
        for name in model.parameters
        if name in differentiated.gradient_of
    }
    outputs = dict.fromkeys((model.loss, *gradients.values(), *(s.updated for s in model.statistics)))
    if keep_outputs:
        outputs.update(dict.fromkeys(name for name in model.outputs if name not in model.weights))
    graph = StepGraph(
        forward,
        chunks,
        tuple(chunk.source for chunk in differentiated.chunks),
        {name: tensor_type.size_bytes for name, tensor_type in types.items()},
        frozenset((*model.inputs, *model.targets, *model.weights, *differentiated.constants, seed)),
        tuple(outputs),
        frozenset(gradients.values()),
    )
    nodes = {node.name: node for node in (*differentiated.forward, *differentiated.backward)}
    return TrainingStep(
        model, differentiated, types, differentiated.constants, graph, nodes, gradients, keep_outputs
    )


def _operator(node: Node, types: Mapping[str, TensorType]) -> Operator:
    return Operator(
        node.name,
        reads_of(node),
        tuple(name for name in node.outputs if name),
        is_view=node.op in VIEW_OPERATORS,
        in_place=node.op in IN_PLACE_OPERATORS,
        # What a subgraph reads cannot be renamed to a copy, so its node is not run again.
        once=node.once or bool(captured_names(node)),
        # Split cuts by the number of its outputs.
        needs_all_outputs=node.op == "Split",
        workspace_bytes=workspace_bytes(node, types),
        flops=node_flops(node, types),
    )
