"""Explicit `detach()` where a captured module stops gradients implicitly."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
_DETACH = torch.ops.aten.detach.default
# Operators that convert a tensor to a number.
_NUMBERS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)


def add_detach(program: ExportedProgram) -> ExportedProgram:
    """Inserts, in place, `detach()` after regions under `no_grad` and before conversions to numbers.

    The exporter inlines both, and gradients would flow through them.
    """
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.target in _NUMBERS:
            (source,) = node.args
            with graph.inserting_before(node):
                node.args = (_detached(graph, source),)
        elif _is_without_gradients(node):
            with graph.inserting_after(node):
                detached = _detached(graph, node)
            node.replace_all_uses_with(detached, delete_user_cb=lambda user, new=detached: user is not new)
    program.graph_module.recompile()
    return program


def _is_without_gradients(node: fx.Node) -> bool:
    """Whether a node is a floating-point output of a region under `no_grad`."""
    region, value = node.args[0] if node.target is operator.getitem else None, node.meta.get("val")
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return isinstance(region, fx.Node) and region.target is _REGION and not region.args[0] and is_float


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    detached = graph.call_function(_DETACH, (node,))
    detached.meta = dict(node.meta)
    return detached
