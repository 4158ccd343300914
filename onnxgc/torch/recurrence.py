"""Recurrent layers in a trace, such that it runs what the layer itself runs.

PyTorch traces them by decompositions of their own, which round differently and draw other masks; and the
LSTM of a CPU is one operator, which keeps what backward reads in bytes that only it understands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

LAYER = torch.ops.aten.mkldnn_rnn_layer.default
LAYER_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_LAYERS = (torch.ops.aten.lstm, torch.ops.aten.gru, torch.ops.aten.rnn_tanh, torch.ops.aten.rnn_relu)
_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)


@contextmanager
def as_layers_run() -> Iterator[None]:
    """In it layers are traced as the operators that they run otherwise."""
    overloads = [getattr(layer, name or "default") for layer in _LAYERS for name in layer._overload_names]
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
