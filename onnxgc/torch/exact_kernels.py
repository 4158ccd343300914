"""Traces that run the same kernels, and draw the same masks, as the module itself.

PyTorch traces some operators by decompositions, which round differently and draw other masks. It replaces
in-place random operators, which fill a tensor in memory order, by out-of-place operators, which fill a
contiguous tensor: after a transposition the masks would differ. The LSTM of a CPU is one operator with an
opaque workspace, which its backward reads.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

LAYER = torch.ops.aten.mkldnn_rnn_layer.default
LAYER_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
_DECOMPOSED_ALWAYS = frozenset(
    {
        *("broadcast_tensors", "empty.out", "one_hot", "pad_sequence", "unsafe_chunk"),
        *("tensor_split.tensor_indices_or_sections", "cudnn_batch_norm", "native_batch_norm"),
    }
)
"""Operators that can be traced only by their decompositions, which compute identical results."""
_IN_PLACE = {torch.ops.aten.bernoulli.p, torch.ops.aten.bernoulli.Tensor}
"""Random operators whose result is contiguous, whatever the strides of the input."""


@functools.cache
def _decomposed() -> tuple[Any, ...]:
    """Operators that PyTorch decomposes only while tracing."""
    overloads = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten" and rest not in _DECOMPOSED_ALWAYS:
            overloads.append(getattr(getattr(torch.ops.aten, packet, None), overload or "default", None))
    return tuple(each for each in overloads if any(key in getattr(each, "py_kernels", ()) for key in _KEYS))


@contextmanager
def without_decompositions() -> Iterator[None]:
    """Traces operators undecomposed, as they run: recurrent layers, `interpolate`, Dropout."""
    overloads = _decomposed()
    before = [dict(overload.py_kernels) for overload in overloads]
    try:
        for overload in overloads:
            for key in _KEYS:
                overload.py_kernels.pop(key, None)
            overload._dispatch_cache.clear()
        yield
    finally:
        for overload, kernels in zip(overloads, before, strict=True):
            overload.py_kernels.update(kernels)
            overload._dispatch_cache.clear()


@contextmanager
def with_autocast_cache(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Makes autocast convert each of these parameters once, as it does outside of a trace.

    Autocast's own cache accepts leaf tensors only, which the tensors of a trace are not.
    """
    convert = torch.ops.aten.to.dtype
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    known: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    cacheable = set(map(id, parameters))

    def cached(one: torch.Tensor, dtype: torch.dtype, *others: Any, **settings: Any) -> Any:
        is_by_autocast = id(one) in cacheable and torch._C._dispatch_tls_is_dispatch_key_excluded(
            getattr(torch._C.DispatchKey, f"Autocast{one.device.type.upper()}", composite)
        )
        key = id(one), dtype
        if is_by_autocast and key in known:
            return known[key]
        converted = convert._op_dk(composite, one, dtype, *others, **settings)
        if is_by_autocast:
            known[key] = converted
        return converted

    def clear() -> None:
        known.clear()
        clear_own_cache()

    clear_own_cache = torch.clear_autocast_cache
    convert.py_kernels[composite] = cached
    convert._dispatch_cache.clear()
    torch.clear_autocast_cache = clear
    try:
        yield
    finally:
        torch.clear_autocast_cache = clear_own_cache
        del convert.py_kernels[composite]
        convert._dispatch_cache.clear()


def layer_with_workspace(*arguments: Any) -> Any:
    """A layer with the workspace that backward reads, which is filled only if gradients are enabled."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return LAYER(*arguments)


def backward_with_workspace(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of a layer's backward with the workspace of a forward run: other bytes crash the process."""
    *_, is_trained, is_bidirectional, batch_sizes, is_batch_first, _ = arguments
    reverse, mode, hidden_size, num_layers, has_biases = arguments[13:18]
    outputs = layer_with_workspace(
        *arguments[:7],
        *(reverse, batch_sizes, mode, hidden_size, num_layers),
        *(has_biases, is_bidirectional, is_batch_first, is_trained),
    )
    return (*arguments[:-1], outputs[3])


def draw_in_memory_order(graph: fx.Graph) -> None:
    """Draws each mask with its dimensions in memory order, and permutes the result."""
    permute, expand = torch.ops.aten.permute.default, torch.ops.aten.expand.default
    for node in [each for target in _IN_PLACE for each in graph.find_nodes(op="call_function", target=target)]:
        source, probability, *others = node.args
        shape, strides = source.meta["val"].shape, source.meta["val"].stride()
        order = sorted(range(len(shape)), key=lambda axis: -strides[axis])
        if order == list(range(len(order))):
            continue
        with graph.inserting_before(node):
            ordered = _view(graph, source, permute, order)
            if isinstance(probability, fx.Node):
                probability = _view(graph, probability, expand, list(shape))
                probability = _view(graph, probability, permute, order)
            drawn = graph.call_function(node.target, (ordered, probability, *others), dict(node.kwargs))
            drawn.meta = {**node.meta, "val": torch.empty_like(node.meta["val"].permute(order).contiguous())}
            back = _view(graph, drawn, permute, [order.index(axis) for axis in range(len(order))])
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
