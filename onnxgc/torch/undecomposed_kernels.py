"""Operators in a trace, such that it runs what a module itself runs.

PyTorch traces some by decompositions of their own, which round differently and draw other masks; and the
LSTM of a CPU is one operator, which keeps what backward reads in bytes that only it understands.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

LAYER = torch.ops.aten.mkldnn_rnn_layer.default
LAYER_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
_NEEDED = frozenset(
    {
        *("broadcast_tensors", "empty.out", "one_hot", "pad_sequence", "unsafe_chunk"),
        *("tensor_split.tensor_indices_or_sections", "cudnn_batch_norm", "native_batch_norm"),
    }
)
"""Operators that a trace takes by a decomposition alone; it computes the very same."""


@functools.cache
def _decomposed() -> tuple[Any, ...]:
    """Operators that PyTorch decomposes while it traces, and otherwise runs as they are."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        kind, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        operator = getattr(torch.ops.aten, packet, None) if kind == "aten" and rest not in _NEEDED else None
        if operator is not None and (overload or "default") in operator.overloads():
            found.append(getattr(operator, overload or "default"))
    return tuple(one for one in found if any(key in one.py_kernels for key in _KEYS))


@contextmanager
def as_kernels_run() -> Iterator[None]:
    """In it operators are traced as they run otherwise: recurrent layers, `interpolate`, Dropout."""
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
    """In it autocast converts each of these once for all that read it, as it does outside of a trace.

    A trace is without autocast's own cache, and its tensors are no leaves, which alone are cached.
    """
    convert = torch.ops.aten.to.dtype
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    known: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    there = set(map(id, parameters))

    def cached(one: torch.Tensor, dtype: torch.dtype, *others: Any, **settings: Any) -> Any:
        is_by_autocast = id(one) in there and torch._C._dispatch_tls_is_dispatch_key_excluded(
            getattr(torch._C.DispatchKey, f"Autocast{one.device.type.upper()}", composite)
        )
        key = id(one), dtype
        if is_by_autocast and key in known:
            return known[key]
        made = convert._op_dk(composite, one, dtype, *others, **settings)
        if is_by_autocast:
            known[key] = made
        return made

    def clear() -> None:
        known.clear()
        clear_all()

    clear_all = torch.clear_autocast_cache
    convert.py_kernels[composite] = cached
    convert._dispatch_cache.clear()
    torch.clear_autocast_cache = clear
    try:
        yield
    finally:
        torch.clear_autocast_cache = clear_all
        del convert.py_kernels[composite]
        convert._dispatch_cache.clear()


def layer_with_workspace(*arguments: Any) -> Any:
    """A layer that keeps what backward reads, which it does where gradients are on alone."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return LAYER(*arguments)


def backward_with_workspace(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of a layer's backward, with a workspace by forward: other bytes end the process."""
    *_, is_trained, is_bidirectional, batch_sizes, is_batch_first, _ = arguments
    reverse, mode, hidden_size, num_layers, has_biases = arguments[13:18]
    made = layer_with_workspace(
        *arguments[:7],
        *(reverse, batch_sizes, mode, hidden_size, num_layers),
        *(has_biases, is_bidirectional, is_batch_first, is_trained),
    )
    return (*arguments[:-1], made[3])
