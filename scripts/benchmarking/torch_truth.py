"""Gradients of a module by torch autograd: exact ones in float64, and several in float32."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onnxgc.model.core.ir import Array
from scripts.exports.torch_models import TorchModel

SINGLE_RUNS = ("onednn", "native", "rounded")
"""Runs in float32: with oneDNN's kernels, with torch's own, and with all values perturbed by one rounding."""
ROUNDING = 2.0**-24


@dataclass(frozen=True, slots=True)
class Truth:
    """A batch and the gradients of a module's parameters: in float64, and by each of `SINGLE_RUNS`."""

    batch: Mapping[str, Array]
    target: Array
    loss: float
    exact: Mapping[str, Array]
    singles: tuple[Mapping[str, Array], ...]

    @classmethod
    def of(cls, model: TorchModel, small: bool, seed: int = 1) -> "Truth":
        batch = model.batch(small, seed)
        module = model.module(small)
        with torch.no_grad():
            target = model.target(module(*batch.values()))
        loss, exact = _training_step(model, small, batch, target, "double")
        singles = tuple(_training_step(model, small, batch, target, run)[1] for run in SINGLE_RUNS)
        arrays = {name: value.numpy() for name, value in batch.items()}
        return cls(arrays, target.numpy(), loss, exact, singles)


@contextlib.contextmanager
def torch_kernels(*, onednn: bool) -> Iterator[None]:
    """Torch with oneDNN's kernels, or with its own."""
    with warnings.catch_warnings():
        # Warnings about options that no CPU has.
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=onednn):
            yield


def _training_step(
    model: TorchModel, small: bool, batch: Mapping[str, torch.Tensor], target: torch.Tensor, run: str
) -> tuple[float, dict[str, Array]]:
    """Loss and gradients of one training step of a fresh module; `run` is `double` or a single run."""
    dtype = torch.float64 if run == "double" else torch.float32
    module = model.module(small).to(dtype)
    inputs = [value.to(dtype) if value.is_floating_point() else value for value in batch.values()]
    if run == "rounded":
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1 + ROUNDING * torch.randn(parameter.shape, generator=generator))
        inputs = [
            value * (1 + ROUNDING * torch.randn(value.shape, generator=generator))
            if value.is_floating_point()
            else value
            for value in inputs
        ]
    with _CastsTo(dtype), torch_kernels(onednn=run != "native"):
        loss = model.loss_of(module(*inputs), target)
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    return float(loss.detach()), {name: gradient.numpy() for name, gradient in gradients.items()}


class _CastsTo(TorchFunctionMode):
    """A context in which a module's own casts to float32, as in normalisations, are casts to `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].to(self._dtype)
        named = {key: self._replaced(value) for key, value in (kwargs or {}).items()}
        return func(*map(self._replaced, args), **named)

    def _replaced(self, value: Any) -> Any:
        return self._dtype if value is torch.float32 else value
