"""Placement of updates in the training step: each after the last read of the old value."""

from collections.abc import Mapping
from dataclasses import replace

from onnxgc.gradients.differentiate import BackwardChunk, ConstantPool, DifferentiatedModel
from onnxgc.model.core.draft import reads_of
from onnxgc.model.core.ir import Node, TrainableModel
from onnxgc.model.operators.registry import VIEW_OPERATORS
from onnxgc.tracing.optimizer_updates import Updates, UpdateWriter
from onnxgc.tracing.optimizers import Accumulation, Optimizer


def with_updates(
    model: TrainableModel, differentiated: DifferentiatedModel, optimizer: Optimizer
) -> tuple[DifferentiatedModel, Updates]:
    """The step with its updates, each after the last chunk that reads the old value.

    With clipping all updates come at the end, since they depend on all gradients.

    Raises:
        OptimizerError: a group matches no parameter.
    """
    gradients = {
        name: differentiated.gradient_of[name] for name in model.parameters if name in differentiated.gradient_of
    }
    nodes = (*differentiated.forward, *differentiated.backward)
    taken = {
        *model.types,
        *model.weights,
        *differentiated.constants,
        differentiated.seed,
        *(name for node in nodes for name in node.outputs),
    }
    constants = ConstantPool(taken)
    writer = UpdateWriter(
        optimizer,
        {name: model.weights[name].type for name in gradients},
        gradients,
        constants,
        taken,
        node_names=(node.name for node in nodes),
        has_float64=not model.is_portable,
    )
    ready = _last_readers(differentiated, gradients)
    max_norm = None if isinstance(optimizer, Accumulation) else optimizer.clip_norm
    after: dict[int, list[Node]] = {}
    last = len(differentiated.chunks) - 1
    if max_norm is not None:
        after[last] = writer.clip(max_norm)
    for name in sorted(gradients, key=lambda name: ready[name]):
        after.setdefault(ready[name] if max_norm is None else last, []).extend(writer.update(name))
    chunks: list[BackwardChunk] = []
    for index, chunk in enumerate(differentiated.chunks):
        chunks.append(chunk)
        if index in after:
            added = tuple(after[index])
            chunks.append(BackwardChunk(chunk.source, added, tuple(node.outputs[0] for node in added[-1:])))
    updated = replace(differentiated, chunks=tuple(chunks), constants={**differentiated.constants, **constants.values})
    return updated, writer.updates()


def _last_readers(differentiated: DifferentiatedModel, gradients: Mapping[str, str]) -> dict[str, int]:
    """For each parameter, the first chunk after which its gradient exists and its old value is unread."""
    parameter_of = {name: name for name in gradients}
    """The parameter of each view of one."""
    for node in differentiated.forward:
        if node.op in VIEW_OPERATORS and node.inputs[0] in parameter_of:
            parameter_of[node.outputs[0]] = parameter_of[node.inputs[0]]
    by_gradient = {gradient: name for name, gradient in gradients.items()}
    ready = dict.fromkeys(gradients, 0)
    for index, chunk in enumerate(differentiated.chunks):
        for node in chunk.nodes:
            for name in reads_of(node):
                if name in parameter_of:
                    ready[parameter_of[name]] = index
            if node.op in VIEW_OPERATORS and node.inputs[0] in parameter_of:
                parameter_of[node.outputs[0]] = parameter_of[node.inputs[0]]
            for name in node.outputs:
                if name in by_gradient:
                    ready[by_gradient[name]] = index
    return ready
