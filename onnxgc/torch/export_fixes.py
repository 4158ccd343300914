"""Export fixes: corrections of training information that PyTorch's exporter loses."""

import re
from collections.abc import Container, Mapping
from itertools import chain, count
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from onnxgc.model.core.export_marks import EVALUATED, MARK, STOPPED

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_STACK_TRACE = "pkg.torch.onnx.stack_trace"
_HIERARCHY = "pkg.torch.onnx.class_hierarchy"
# Operators through which the exporter computes a zero bias.
_PASSING = ("Expand", "Cast", "CastLike", "Identity")


def fix_export(model: ir.Model, module: nn.Module, program: ExportedProgram) -> None:
    """Corrects, in place, the export of a module that was captured as `program`."""
    graph = model.graph
    _name_weights(graph, module)
    _name_inputs(graph)
    _name_batch(graph)
    _name_outputs(graph, program)
    _drop_computed_biases(graph)
    ir.passes.common.RemoveUnusedNodesPass()(model)
    _mark_normalisations(graph, _modes_of_normalisations(program))
    _mark_stopped_gradients(graph)
    for node in graph.all_nodes():
        # Stack traces describe the machine, not the model.
        node.metadata_props.pop(_STACK_TRACE, None)


def _name_weights(graph: ir.Graph, module: nn.Module) -> None:
    """Gives tied parameters their first name, and marks frozen ones."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    for other, parameter in module.named_parameters(remove_duplicate=False):
        value = graph.initializers.get(other)
        if value is None:
            continue
        name = first[id(parameter)]
        if other != name and name in graph.initializers:
            value.replace_all_uses_with(graph.initializers[name])
            del graph.initializers[other]
            continue
        value.name = name
        if not parameter.requires_grad:
            value.metadata_props[_KIND] = "BUFFER"


def _name_inputs(graph: ir.Graph) -> None:
    """Renames inputs that share their name with a weight."""
    taken = {value.name for value in graph.inputs} | set(graph.initializers)
    for value in graph.inputs:
        if value.name in graph.initializers:
            value.name = _unused(f"{value.name}_input", taken)


def _name_batch(graph: ir.Graph) -> None:
    """Renames the symbol of symbolic dimensions to `batch`."""
    symbols = {
        dimension.value
        for value in graph.inputs
        for dimension in value.shape or ()
        if isinstance(dimension, ir.SymbolicDim)
    }
    symbol = next(iter(symbols), None)
    if symbol is None:
        return
    values = [*graph.inputs, *(value for node in graph.all_nodes() for value in node.outputs)]
    for shape in filter(None, (value.shape for value in values)):
        for axis, dimension in enumerate(shape):
            if isinstance(dimension, ir.SymbolicDim) and dimension.value is not None:
                shape[axis] = re.sub(rf"\b{symbol}\b", "batch", dimension.value)


def _name_outputs(graph: ir.Graph, program: ExportedProgram) -> None:
    """Names outputs by the fields or keys in which the module returns them."""
    wanted = _names_of_outputs(program)
    taken = {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
    taken |= {value.name: value for node in graph for value in node.outputs}
    given = set[int]()
    for index, (value, name) in enumerate(zip(graph.outputs, wanted, strict=True)):
        if value.producer() is None or id(value) in given:
            # An output that is an input, a weight or another output needs a separate tensor.
            copy = ir.node("Identity", [value])
            copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
            graph.append(copy)
            graph.outputs[index] = value = copy.outputs[0]
        given.add(id(value))
        if taken.get(name) is not None and taken[name] is not value:
            name = _unused(name, taken)
        value.name = name
        taken[name] = value


def _names_of_outputs(program: ExportedProgram) -> list[str]:
    spec = program.call_spec.out_spec
    assert spec is not None, "torch.export records the structure of outputs"
    leaves, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(spec.num_leaves), spec))
    tensors = program.graph_signature.user_outputs
    paths = [path for (path, _), tensor in zip(leaves, tensors, strict=True) if isinstance(tensor, str)]
    parts = ([_part(key) for key in path] for path in paths)
    return ["_".join(names if names and not names[0].isdigit() else ["output", *names]) for names in parts]


def _part(key: Any) -> str:
    """A step of the path to an output: a field, a key or an index."""
    return str(next(getattr(key, kind) for kind in ("name", "key", "idx") if hasattr(key, kind)))


def _drop_computed_biases(graph: ir.Graph) -> None:
    """Removes zero biases of convolutions without one, whose shape is wrong in three dimensions."""
    for node in graph.all_nodes():
        if node.op_type in ("Conv", "ConvTranspose") and len(node.inputs) > 2 and _is_zero(node.inputs[2]):
            node.resize_inputs(2)


def _is_zero(value: ir.Value | None) -> bool:
    """Whether a tensor is a constant zero, possibly expanded or cast."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "Constant":
            constant = ir.convenience.get_const_tensor(value)
            return constant is not None and not constant.numpy().any()
        if node.op_type not in _PASSING:
            return False
        value = node.inputs[0]
    return False


def _mark_normalisations(graph: ir.Graph, modes: Mapping[str, bool]) -> None:
    """Marks the mode of each BatchNormalization unless all are in training mode."""
    if all(modes.values()):
        return
    taken = {value.name for node in graph.all_nodes() for value in node.outputs}
    for node in graph.all_nodes():
        if node.op_type != "BatchNormalization":
            continue
        running = [value for value in node.inputs[3:] if value is not None]
        if not modes.get(str(running[0].name)):
            node.metadata_props[MARK] = EVALUATED
        else:
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
            node.resize_outputs(3)
            for value, read in zip(node.outputs[1:], running, strict=True):
                value.name = _unused(f"{read.name}_new", taken)
                value.type, value.shape = read.type, read.shape


def _mark_stopped_gradients(graph: ir.Graph) -> None:
    """Marks the Identity nodes of detach() as stopping the gradient."""
    for node in graph.all_nodes():
        if node.op_type == "Identity" and "'aten.detach.default'" in node.metadata_props.get(_HIERARCHY, ""):
            node.metadata_props[MARK] = STOPPED


def _modes_of_normalisations(program: ExportedProgram) -> dict[str, bool]:
    """For each running mean, whether its BatchNormalization is in training mode."""
    buffers = program.graph_signature.inputs_to_buffers
    calls = program.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default)
    tracked = (node.args for node in calls if node.args[3] is not None)
    return {buffers.get(args[3].name, ""): bool(args[5]) for args in tracked}


def _unused(wanted: str, taken: Container[str | None]) -> str:
    numbered = (f"{wanted}_{number}" for number in count(1))
    return next(name for name in chain([wanted], numbered) if name not in taken)
