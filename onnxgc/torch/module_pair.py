"""An exported file and its module as a pair, run on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onnxgc.torch.exportable_functions import WithoutRandomness
from onnxgc.torch.onnx_module import OnnxModule

# Numbers with at most this many significant bits are exact in any type: 1, 0.5, -2.
_EXACT_BITS = 12
# A kind (output, statistic, gradient), and a name or index.
Key = tuple[str, str]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@contextmanager
def preserve_state(module: nn.Module) -> Iterator[None]:
    """Restores modes, buffers and random states on exit, also after an error."""
    modes = [(part, part.training) for part in module.modules()]
    buffers = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    devices = sorted({parameter.device.index for parameter in module.parameters() if parameter.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for part, mode in modes:
            part.training = mode
        with torch.no_grad():
            for part, name, buffer, before in buffers:
                part._buffers[name] = buffer
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


@dataclass(frozen=True, slots=True)
class ModulePair:
    """A file and its module, the type that both run in (None: their own), and the file's unit of rounding."""

    network: OnnxModule
    module: nn.Module
    dtype: torch.dtype | None
    unit: float

    @property
    def rounding(self) -> float:
        """The unit of rounding of the type that both run in."""
        return self.unit if self.dtype is None else torch.finfo(self.dtype).eps

    def step(self, side: nn.Module, call: Arguments, seed: int, training: bool) -> dict[Key, Tensor]:
        """Outputs, and in training also running statistics and gradients; nothing is random."""
        args, kwargs = call
        if not training or side is self.network:
            side.train(training)
        with (
            preserve_state(side),
            _default_type(self.dtype),
            torch.enable_grad(),
            WithoutRandomness() if training else nullcontext(),
        ):
            if side is self.network:
                args, kwargs = tuple(tensor_leaves(call)), {}
            outputs = tensor_leaves(side(*args, **kwargs))
            results = {("output", str(index)): output.detach() for index, output in enumerate(outputs)}
            if not training:
                return results
            parameters, buffers = self._named(side)
            results |= {("statistic", name): buffer.detach().clone() for name, buffer in buffers.items()}
            gradients = gradients_of(outputs, list(parameters.values()), seed)
            return results | {
                ("gradient", name): gradient
                for name, gradient in zip(parameters, gradients, strict=True)
                if gradient is not None
            }

    def _named(self, side: nn.Module) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        if side is self.module:
            trained = {name: p for name, p in side.named_parameters() if p.requires_grad}
            return trained, dict(side.named_buffers())
        names = self.network.onnx_names()
        buffers = {names[key]: value for key, value in self.network.named_buffers() if key in names}
        return trained_parameters(self.network), buffers

    def discrepancy(self, key: Key, call: Arguments, seed: int, training: bool) -> Discrepancy:
        kind, name = key
        if kind == "output":
            mode = "training mode" if training else "evaluation"
            output = self.network.output_names[int(name)]
            text = f"output '{output}' of the file differs from the module's in {mode}"
        elif kind == "statistic":
            text = f"the update of the running statistic '{name}' differs from the module's"
        else:
            text = f"the gradient of the parameter '{name}' differs from the module's"
        return Discrepancy(key, text, call, seed, training)

    @contextmanager
    def rounded(self, seed: int) -> Iterator[None]:
        """Perturbs the file's weights and constants by one unit of rounding."""
        generator = torch.Generator().manual_seed(seed)
        tensors = [*self.network.parameters(), *self.network.buffers()]
        before = [tensor.detach().clone() for tensor in tensors]
        try:
            with torch.no_grad():
                for tensor in tensors:
                    tensor.copy_(perturb(tensor, self.unit, generator))
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, before, strict=True):
                    tensor.copy_(value)


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """An output, statistic or gradient in which a file differs from its module, and the draw."""

    key: Key
    text: str
    call: Arguments
    seed: int
    training: bool


def perturb(tensor: Tensor, unit: float, generator: torch.Generator) -> Tensor:
    """A tensor with one unit of rounding added or subtracted, except to numbers exact in any type."""
    if not tensor.is_floating_point():
        return tensor.detach()
    signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
    mantissa, _ = torch.frexp(tensor.detach().double())
    is_exact = (mantissa * 2**_EXACT_BITS).frac() == 0
    step = torch.where(is_exact | ~tensor.isfinite(), 0.0, unit * tensor.detach().double().abs())
    return (tensor.detach() + (signs * step).to(tensor.dtype)).detach()


def gradients_of(outputs: list[Tensor], of: list[Tensor], seed: int) -> list[Tensor | None]:
    """Gradients of the outputs' sum with random weights; None where there is none."""
    generator = torch.Generator().manual_seed(seed)
    factors = [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]
    total = [
        (output.to(torch.promote_types(output.dtype, torch.float32)) * factor.to(output.device)).sum()
        for output, factor in zip(outputs, factors, strict=True)
        if output.requires_grad
    ]
    if not total or not of:
        return [None] * len(of)
    return list(torch.autograd.grad(sum(total[1:], total[0]), of, allow_unused=True))


@contextmanager
def _default_type(dtype: torch.dtype | None) -> Iterator[None]:
    """Sets the default type of tensors that forward creates."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype or before)
        yield
    finally:
        torch.set_default_dtype(before)


def trained_parameters(network: OnnxModule) -> dict[str, Tensor]:
    names = network.onnx_names()
    return {names[key]: value for key, value in network.named_parameters() if value.requires_grad}


def tensor_leaves(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def batch_of(call: Arguments) -> int | None:
    """The first dimension of the first tensor that has dimensions."""
    return next((tensor.shape[0] for tensor in tensor_leaves(call) if tensor.ndim), None)


def norm(tensor: Tensor) -> float:
    """The norm of the finite elements."""
    tensor = tensor.detach().double()
    return float(torch.where(tensor.isfinite(), tensor, 0.0).norm())


def distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference; equal infinities and NaN have distance zero."""
    one, other = one.detach().double(), other.detach().to(one.device).double()
    is_same = (one == other) | (one.isnan() & other.isnan())
    size = float(torch.where(is_same, 0.0, one - other).norm())
    return math.inf if math.isnan(size) else size
