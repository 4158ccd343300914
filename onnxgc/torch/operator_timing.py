"""Durations and workspaces of a trace's ATen operators, measured on this machine.

Operators run one at a time on random inputs of their shapes, so that only the largest operator has to fit
into memory. Operators of equal kind, shapes and settings are measured once. An operator that rejects random
values is measured as a copy of its inputs and outputs.
"""

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _disable_current_modes

from onnxgc.torch import exact_kernels

# The profiler's library otherwise prints when it starts and stops.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
_RUNS = 3
"""Timed runs of an operator, of which the fastest counts; an earlier run measures memory."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Nanoseconds of one run, and its peak bytes beyond inputs and outputs."""

    duration_ns: int
    workspace_bytes: int


class MeasuredCosts:
    """Costs of nodes, each measured on first use."""

    def __init__(self) -> None:
        self._known: dict[str, Cost] = {}

    def __call__(self, node: fx.Node) -> Cost:
        key = f"{node.target} {_described((node.args, node.kwargs))}"
        if key not in self._known:
            # Under a trace PyTorch would not execute the operator.
            with _disable_current_modes():
                self._known[key] = _measured(node)
        return self._known[key]


def _measured(node: fx.Node) -> Cost:
    # The state of the module's own generator must not change.
    given = {name: None if name == "generator" else value for name, value in node.kwargs.items()}
    arguments, settings = fx.map_arg((node.args, given), lambda source: _like(source.meta["val"]))
    if node.target is exact_kernels.LAYER_BACKWARD:
        arguments = exact_kernels.backward_with_workspace(arguments)
    device = next((leaf.device for leaf in _tensors((arguments, settings))), torch.device("cpu"))

    def run() -> Any:
        return node.target(*arguments, **settings)  # type: ignore[operator]

    with torch.no_grad():
        try:
            workspace = _workspace(run, device)
        except Exception:  # Operators that check values may raise anything.
            workspace, copied = 0, _tensors((arguments, settings, _like(node.meta.get("val"))))

            def run() -> Any:
                return [one.clone() for one in copied]

        fastest = min(_nanoseconds(run, device) for _ in range(_RUNS))
    return Cost(fastest, workspace)


def _nanoseconds(run: Callable[[], Any], device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter_ns()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns() - started


def _workspace(run: Callable[[], Any], device: torch.device) -> int:
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        outputs = run()
        output_bytes = torch.cuda.memory_allocated(device) - before
        del outputs
        return max(0, torch.cuda.max_memory_allocated(device) - before - output_bytes)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        outputs = run()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    del outputs
    return max(0, peak - live)


def _like(value: Any) -> Any:
    """Tensors of the trace with contents: random numbers, and zeros for indices."""
    if isinstance(value, list | tuple):
        return type(value)(_like(entry) for entry in value)
    if not isinstance(value, torch.Tensor):
        return hint(value) if isinstance(value, torch.SymInt) else value
    size = hint(value.untyped_storage().nbytes()) // value.element_size()
    tensor = torch.zeros(size, dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point:
        tensor.uniform_(0.1, 1.0)
    shape, stride = (tuple(map(hint, sizes)) for sizes in (value.shape, value.stride()))
    return tensor.as_strided(shape, stride, hint(value.storage_offset()))


@functools.cache
def nanoseconds_of_copy(device: torch.device) -> float:
    """Time to move one byte of memory, by a copy of 16 MiB."""
    with _disable_current_modes():
        values = torch.zeros(2**22, device=device)
        return min(_nanoseconds(values.clone, device) for _ in range(_RUNS + 1)) / (2 * 2**24)


def hint(size: Any) -> int:
    """A size, symbolic or not: the value with which it was traced."""
    return size if isinstance(size, int) else int(size.node.hint)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _described(value: Any) -> str:
    return repr(fx.map_arg(value, lambda source: _shape_of(source.meta.get("val"))))


def _shape_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.device}"
    return [_shape_of(entry) for entry in value] if isinstance(value, list | tuple) else value
