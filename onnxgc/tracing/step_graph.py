"""From a differentiated model to the step graph that planning and the simulator use."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from onnx import defs

from onnxgc.gradients.differentiate import DifferentiatedModel
from onnxgc.gradients.registry import differentiate
from onnxgc.model.core.draft import captured_names, reads_of
from onnxgc.model.core.ir import Array, Node, TensorType, TrainableModel
from onnxgc.model.operators.registry import (
    IN_PLACE_OPERATORS,
    VIEW_OPERATORS,
    facts_by_name,
    node_flops,
    workspace_bytes,
)
from onnxgc.planning.schedule import Instruction, Operator, Recompute, Release, Schedule, StepGraph
from onnxgc.tracing.gradient_types import infer_types, type_of_array
from onnxgc.tracing.optimizer_updates import Updates
from onnxgc.tracing.optimizers import Optimizer
from onnxgc.tracing.update_placement import with_updates


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One training step of a model before planning: nodes, types and constants.

    `keeps_outputs`: the model's own outputs are outputs of the step. `updates` are an optimizer's, or None.
    """

    model: TrainableModel
    differentiated: DifferentiatedModel
    types: Mapping[str, TensorType]
    constants: Mapping[str, Array]
    graph: StepGraph
    nodes: Mapping[str, Node]
    parameter_gradients: Mapping[str, str]
    keeps_outputs: bool
    updates: Updates | None = None


def retrace(step: TrainingStep, order: Sequence[str]) -> TrainingStep:
    """The same step with its forward nodes in another order, reusing operators of unchanged nodes."""
    differentiated = differentiate(step.model, seed=step.differentiated.seed, order=order)
    optimizer = None if step.updates is None else step.updates.optimizer
    return _training_step(step.model, differentiated, step.keeps_outputs, optimizer, step)


def trace(
    model: TrainableModel,
    *,
    seed: str,
    order: Sequence[str] | None = None,
    keep_outputs: bool = False,
    optimizer: Optimizer | None = None,
) -> TrainingStep:
    """The training step of `model`, with forward nodes in `order` (default: the model's own).

    `seed` names the fed gradient of the loss. With `keep_outputs` the model's own outputs are outputs of the
    step too. With an `optimizer` the step returns new parameters and states instead of gradients.

    Raises:
        UnsupportedOperatorError, NoParametersError: see `onnxgc.gradients.differentiate.differentiate`.
        OptimizerError: a parameter group matches no parameter.
    """
    return _training_step(model, differentiate(model, seed=seed, order=order), keep_outputs, optimizer, None)


def _training_step(
    model: TrainableModel,
    differentiated: DifferentiatedModel,
    keep_outputs: bool,
    optimizer: Optimizer | None,
    before: TrainingStep | None,
) -> TrainingStep:
    """The step; `before` is the same step in another order, whose types and operators are reused."""
    known = {**model.types, **differentiated.extra_types, differentiated.seed: model.types[model.loss]}
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

    def operator_of(node: Node) -> Operator:
        return operators.get(node.name) or _operator(node, types, model.provider)

    gradient_of = differentiated.gradient_of
    gradients = {name: gradient_of[name] for name in model.parameters if name in gradient_of}
    sizes = {name: kind.size_bytes for name, kind in types.items()}
    if updates is not None:
        # New values overwrite the old ones.
        sizes |= dict.fromkeys(updates.replaced, 0)
    graph = StepGraph(
        tuple(map(operator_of, differentiated.forward)),
        tuple(tuple(map(operator_of, chunk.nodes)) for chunk in differentiated.chunks),
        tuple(chunk.source for chunk in differentiated.chunks),
        sizes,
        _resident(model, differentiated, updates),
        _outputs(model, gradients, updates, keep_outputs),
        frozenset(gradients.values()),
        {} if updates is None else dict(updates.replaced),
    )
    return TrainingStep(
        model, differentiated, types, differentiated.constants, graph, nodes, gradients, keep_outputs, updates
    )


def _resident(model: TrainableModel, differentiated: DifferentiatedModel, updates: Updates | None) -> frozenset[str]:
    """Tensors that are live during the whole step: inputs, weights, constants, and an optimizer's inputs."""
    resident = {*model.inputs, *model.targets, *model.weights, *differentiated.constants, differentiated.seed}
    if model.draw:
        resident.add(model.draw)
    return frozenset(resident if updates is None else resident | updates.types.keys())


def _outputs(
    model: TrainableModel, gradients: Mapping[str, str], updates: Updates | None, keep_outputs: bool
) -> tuple[str, ...]:
    """The loss, gradients or new values, running statistics, the norm, and the model's own outputs."""
    returned = tuple(gradients.values()) if updates is None else updates.returned
    outputs = [model.loss, *returned, *(statistic.updated for statistic in model.statistics)]
    if updates is not None and updates.norm:
        outputs.append(updates.norm)
    if keep_outputs:
        outputs += [name for name in model.outputs if name not in model.weights]
    return tuple(dict.fromkeys(outputs))


def _operators_of_equal_nodes(
    before: TrainingStep, nodes: Mapping[str, Node], constants: Mapping[str, Array]
) -> dict[str, Operator]:
    """Operators of `before` whose nodes are unchanged in the new order.

    Tensors are named after their forward node, but constants are numbered: a constant of the same name may
    have another value.
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


def _operator(node: Node, types: Mapping[str, TensorType], provider: str) -> Operator:
    return Operator(
        node.name,
        reads_of(node),
        tuple(name for name in node.outputs if name),
        is_view=node.op in VIEW_OPERATORS,
        in_place=node.op in IN_PLACE_OPERATORS,
        # Tensors that a subgraph captures cannot be renamed to copies, so its node is never recomputed.
        once=node.once or bool(captured_names(node)),
        needs_all_outputs=not _has_optional_outputs(node.op, node.domain),
        workspace_bytes=workspace_bytes(node, types, provider),
        workspace_first=facts_by_name(node.op).workspace_first,
        flops=node_flops(node, types),
    )


def with_workspaces(schedule: Schedule, step: TrainingStep) -> Schedule:
    """The schedule with the workspaces of the kernels of CPUs."""

    def changed(entry: Instruction) -> Instruction:
        if isinstance(entry, Release):
            return entry
        node = step.nodes[entry.source if isinstance(entry, Recompute) else entry.operator.name]
        size_bytes = workspace_bytes(node, step.types)
        return replace(entry, operator=replace(entry.operator, workspace_bytes=size_bytes))

    return replace(schedule, instructions=tuple(map(changed, schedule.instructions)))


@functools.cache
def _has_optional_outputs(op: str, domain: str) -> bool:
    """Whether all outputs except the first are optional: Dropout's mask is, a part of Split is not."""
    if not defs.has(op, domain):
        return False
    option = defs.OpSchema.FormalParameterOption
    first, *others = defs.get_schema(op, domain=domain).outputs
    return first.option != option.Variadic and all(other.option == option.Optional for other in others)
