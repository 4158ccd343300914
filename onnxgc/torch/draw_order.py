"""Masks in a trace, drawn in the order in which the module itself draws them.

In place, a tensor is filled in the order of its memory. A trace has the same operator out of place, which
fills a contiguous tensor: where dimensions were exchanged, other numbers would come.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

_IN_PLACE = {torch.ops.aten.bernoulli.p, torch.ops.aten.bernoulli.Tensor}
"""Random operators whose result does not have the strides of their input."""


def draw_in_memory_order(graph: fx.Graph) -> None:
    """Has each mask be drawn with dimensions in the order of memory, and exchanged behind that."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _IN_PLACE:
            continue
        source, chances, *others = node.args
        shape, strides = source.meta["val"].shape, source.meta["val"].stride()
        order = sorted(range(len(shape)), key=lambda axis: -strides[axis])
        if order == list(range(len(order))):
            continue
        with graph.inserting_before(node):
            ordered = _viewed(graph, source, torch.ops.aten.permute.default, order)
            if isinstance(chances, fx.Node):
                chances = _viewed(graph, chances, torch.ops.aten.expand.default, list(shape))
                chances = _viewed(graph, chances, torch.ops.aten.permute.default, order)
            drawn = graph.call_function(node.target, (ordered, chances, *others), dict(node.kwargs))
            drawn.meta = {**node.meta, "val": torch.empty_like(node.meta["val"].permute(order).contiguous())}
            back = _viewed(
                graph, drawn, torch.ops.aten.permute.default, list(map(order.index, range(len(order))))
            )
        node.replace_all_uses_with(back)
        graph.erase_node(node)


def _viewed(graph: fx.Graph, source: fx.Node, view: Any, to: list[int]) -> fx.Node:
    node = graph.call_function(view, (source, to))
    node.meta = {**source.meta, "val": view(source.meta["val"], to)}
    return node


class OutOfPlace(TorchFunctionMode):
    """In it what a program draws out of place has no order to keep, as it makes a contiguous tensor."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.bernoulli, torch.Tensor.bernoulli) and args:
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))
