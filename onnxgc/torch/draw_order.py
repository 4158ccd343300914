"""Random masks of a trace, drawn in the same order as in the module itself.

In-place random operators fill a tensor in memory order. A trace replaces them by out-of-place operators,
which fill a contiguous tensor: after a transposition the masks would differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

_IN_PLACE = {torch.ops.aten.bernoulli.p, torch.ops.aten.bernoulli.Tensor}
"""Random operators whose result is contiguous, whatever the strides of the input."""


def draw_in_memory_order(graph: fx.Graph) -> None:
    """Draws each mask with its dimensions in memory order, and permutes the result."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _IN_PLACE:
            continue
        source, probability, *others = node.args
        shape, strides = source.meta["val"].shape, source.meta["val"].stride()
        order = sorted(range(len(shape)), key=lambda axis: -strides[axis])
        if order == list(range(len(order))):
            continue
        with graph.inserting_before(node):
            ordered = _view(graph, source, torch.ops.aten.permute.default, order)
            if isinstance(probability, fx.Node):
                probability = _view(graph, probability, torch.ops.aten.expand.default, list(shape))
                probability = _view(graph, probability, torch.ops.aten.permute.default, order)
            drawn = graph.call_function(node.target, (ordered, probability, *others), dict(node.kwargs))
            drawn.meta = {**node.meta, "val": torch.empty_like(node.meta["val"].permute(order).contiguous())}
            back = _view(
                graph, drawn, torch.ops.aten.permute.default, list(map(order.index, range(len(order))))
            )
        node.replace_all_uses_with(back)
        graph.erase_node(node)


def _view(graph: fx.Graph, source: fx.Node, view: Any, to: list[int]) -> fx.Node:
    node = graph.call_function(view, (source, to))
    node.meta = {**source.meta, "val": view(source.meta["val"], to)}
    return node


class ContiguousDraws(TorchFunctionMode):
    """Makes inputs of out-of-place draws contiguous, so that `draw_in_memory_order` leaves them unchanged.

    Their masks are contiguous in the module itself, too.
    """

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.bernoulli, torch.Tensor.bernoulli) and args:
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))
