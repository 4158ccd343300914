"""From a differentiated model to the step graph that schedules and the judge work on."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from onnx import defs

from onnxgc.gradients.engine import Differentiated
from onnxgc.gradients.registry import differentiate
from onnxgc.model.core.draft import captured_names, reads_of
from onnxgc.model.core.ir import Array, Node, TensorType, TrainableModel
from onnxgc.model.core.node_flops import node_flops
from onnxgc.planning.schedule import Operator, StepGraph
from onnxgc.tracing.gradient_types import infer_types, type_of_array
from onnxgc.tracing.optimizers import Optimizer, Updates, with_updates
from onnxgc.tracing.runtime_costs import (
    IN_PLACE_OPERATORS,
    VIEW_OPERATORS,
    WORKSPACE_FIRST_OPERATORS,
    workspace_bytes,
)


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One training step of a model, with every node, type and constant, and no decision taken.

    `updates` is what an optimizer has added to it, or None.
    """

    model: TrainableModel
    differentiated: Differentiated
    types: Mapping[str, TensorType]
    constants: Mapping[str, Array]
    graph: StepGraph
    nodes: Mapping[str, Node]
    parameter_gradients: Mapping[str, str]
    keeps_outputs: bool
    updates: Updates | None = None


def retrace(step: TrainingStep, order: Sequence[str]) -> TrainingStep:
    """The same step with its forward nodes in another order."""
    differentiated = differentiate(step.model, seed=step.differentiated.seed, order=order)
    optimizer = None if step.updates is None else step.updates.optimizer
    return _described(step.model, differentiated, step.keeps_outputs, optimizer, step)


def trace(
    model: TrainableModel,
    *,
    seed: str,
    order: Sequence[str] | None = None,
    keep_outputs: bool = False,
    optimizer: Optimizer | None = None,
) -> TrainingStep:
    """Differentiate `model`, in the given order of forward nodes, and describe the whole step.

    With `keep_outputs` the model's own outputs are outputs of the step too. With an `optimizer` the step
    returns parameters and states as they are after it, and no gradients.
    """
    return _described(model, differentiate(model, seed=seed, order=order), keep_outputs, optimizer, None)


def _described(
    model: TrainableModel,
    differentiated: Differentiated,
    keep_outputs: bool,
    optimizer: Optimizer | None,
    before: TrainingStep | None,
) -> TrainingStep:
    """The step, with what is known from the same step in the order `before`."""
    seed = differentiated.seed
    known = {**model.types, **differentiated.extra_types, seed: model.types[model.loss]}
    updates = None
    if optimizer is not None:
        differentiated, updates = with_updates(model, differentiated, optimizer)
        known |= updates.types
    backward = differentiated.backward
    nodes = {node.name: node for node in (*differentiated.forward, *backward)}
    operators = {} if before is None else _operators_of_equal_nodes(before, nodes, differentiated.constants)
    added = {
        name: before.types[name]
        for node in backward
        if before is not None and node.name in operators
        for name in node.outputs
        if name
    }
    new = [node for node in backward if node.name not in operators]
    added.update(infer_types(new, {**known, **added}, differentiated.constants, model.opset))
    constants = {name: type_of_array(value) for name, value in differentiated.constants.items()}
    types = {**known, **constants, **added}

    def described(node: Node) -> Operator:
        return operators.get(node.name) or _operator(node, types)

    forward = tuple(map(described, differentiated.forward))
    chunks = tuple(tuple(map(described, chunk.nodes)) for chunk in differentiated.chunks)
    gradients = {
        name: differentiated.gradient_of[name]
        for name in model.parameters
        if name in differentiated.gradient_of
    }
    returned = tuple(gradients.values()) if updates is None else updates.returned
    measured = [] if updates is None else [name for name in (updates.norm,) if name]
    outputs = dict.fromkeys((model.loss, *returned, *(s.updated for s in model.statistics), *measured))
    if keep_outputs:
        outputs.update(dict.fromkeys(name for name in model.outputs if name not in model.weights))
    resident = {*model.inputs, *model.targets, *model.weights, *differentiated.constants, seed}
    resident |= {*filter(None, [model.draw])}
    sizes = {name: tensor_type.size_bytes for name, tensor_type in types.items()}
    if updates is not None:
        resident |= updates.types.keys()
        # They are written where the old values are.
        sizes |= dict.fromkeys(updates.replaced, 0)
    graph = StepGraph(
        forward,
        chunks,
        tuple(chunk.source for chunk in differentiated.chunks),
        sizes,
        frozenset(resident),
        tuple(outputs),
        frozenset(gradients.values()),
        {} if updates is None else dict(updates.replaced),
    )
    return TrainingStep(
        model,
        differentiated,
        types,
        differentiated.constants,
        graph,
        nodes,
        gradients,
        keep_outputs,
        updates,
    )


def _operators_of_equal_nodes(
    before: TrainingStep, nodes: Mapping[str, Node], constants: Mapping[str, Array]
) -> dict[str, Operator]:
    """What is already known of nodes that another order has too.

    Names of tensors come from the forward node that they are for; names of constants are counted.
    """
    changed = {
        name
        for name, value in constants.items()
        if name not in before.constants
        or before.constants[name].dtype != value.dtype
        or not np.array_equal(before.constants[name], value)
    }
    operators = (*before.graph.forward, *chain.from_iterable(before.graph.chunks))
    return {
        operator.name: operator
        for operator in operators
        if nodes.get(operator.name) == before.nodes[operator.name]
        and changed.isdisjoint(before.nodes[operator.name].inputs)
    }


def _operator(node: Node, types: Mapping[str, TensorType]) -> Operator:
    return Operator(
        node.name,
        reads_of(node),
        tuple(name for name in node.outputs if name),
        is_view=node.op in VIEW_OPERATORS,
        in_place=node.op in IN_PLACE_OPERATORS,
        # What a subgraph reads cannot be renamed to a copy, so its node is not run again.
        once=node.once or bool(captured_names(node)),
        needs_all_outputs=not _may_lack_outputs(node.op, node.domain),
        workspace_bytes=workspace_bytes(node, types),
        workspace_first=node.op in WORKSPACE_FIRST_OPERATORS,
        flops=node_flops(node, types),
    )


@functools.cache
def _may_lack_outputs(op: str, domain: str) -> bool:
    """Whether all outputs but the first may be left out: Dropout's mask may, a part of Split may not."""
    if not defs.has(op, domain):
        return False
    option = defs.OpSchema.FormalParameterOption
    first, *others = defs.get_schema(op, domain=domain).outputs
    return first.option != option.Variadic and all(other.option == option.Optional for other in others)
