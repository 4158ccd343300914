"""Whether an exported file computes and trains as the module that it was made from."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from onnxgc.errors import ExportError, OnnxgcError
from onnxgc.model.folding import RANDOM
from onnxgc.torch.module import OnnxModule, from_onnx
from onnxgc.torch.randomness import WithoutChoices

# Of float32 through a deep network whose operators come in another order: what is lost, merged or
# in another mode is off by the size of the values themselves.
_OUTPUT_TOLERANCE = 1e-2
_GRADIENT_TOLERANCE = 1e-1
# Gradients below this share of the largest are rounding errors, as those of a bias before a normalisation.
_VANISHING = 1e-3
# Means of what was normalised before are rounding errors.
_SMALLEST_MEAN = 1e-3
_SEED = 0
# Counts the steps of a normalisation; only an average over all steps reads it.
_COUNTER = "num_batches_tracked"


@dataclass(frozen=True, slots=True)
class Exported:
    """A file, the module as it was captured, and the same in the operators that were converted."""

    proto: onnx.ModelProto
    captured: ExportedProgram
    converted: ExportedProgram


@contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Modes, buffers and random numbers afterwards are those from before, also after an error."""
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


def check_equal(
    exported: Exported, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Compares what a file computes, and its gradients, with the module in training mode.

    Raises:
        ExportError: they differ; the line names the output, the statistic or the parameter.
    """
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    try:
        network = _read(exported, inputs)
    except OnnxgcError as error:
        raise ExportError(f"the exported file cannot be read back: {error}; check=False writes it") from error
    _check_roles(network, module)
    random = sorted({node.op_type for node in exported.proto.graph.node} & (RANDOM - {"Dropout"}))
    if random:
        warnings.warn(
            f"the file draws random numbers in evaluation too ({', '.join(random)}), so that it is not "
            "compared with the module",
            stacklevel=3,
        )
        return
    for check in (_check_training, _check_evaluation):
        with left_as_it_was(module), left_as_it_was(network):
            check(network, module, inputs, args, kwargs)


def _read(exported: Exported, inputs: list[Tensor]) -> OnnxModule:
    names = [value.name for value in exported.proto.graph.input]
    shapes = {name: tuple(value.shape) for name, value in zip(names, inputs, strict=True)}
    network = from_onnx(exported.proto, input_shapes=shapes)
    return network.to(inputs[0].device if inputs else "cpu")


def _check_roles(network: OnnxModule, module: nn.Module) -> None:
    """No constant of the file is taken for a parameter; a parameter taken for one has no gradient."""
    theirs = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in sorted(set(_trained(network)) - theirs):
        raise ExportError(f"the constant '{name}' of the file is taken for a parameter; make it a buffer")


def _check_evaluation(
    network: OnnxModule, module: nn.Module, inputs: list[Tensor], args: tuple[Any, ...], kwargs: Any
) -> None:
    network.eval()
    module.eval()
    with torch.no_grad():
        expected = _tensors(module(*args, **kwargs))
        if len(expected) != len(network.output_names):
            # It returns something else in training, such as auxiliary outputs; that was compared.
            return
        _check_outputs(network, _tensors(network(*inputs)), expected, "evaluation")


def _check_training(
    network: OnnxModule, module: nn.Module, inputs: list[Tensor], args: tuple[Any, ...], kwargs: Any
) -> None:
    """One step without random choices: outputs, running statistics and gradients."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    network.train()
    with torch.enable_grad(), WithoutChoices():
        expected = _tensors(module(*args, **kwargs))
        found = _tensors(network(*inputs))
    if len(found) != len(expected):
        raise ExportError(
            f"the file has {len(found)} outputs, and the module returns {len(expected)} tensors"
        )
    _check_outputs(network, found, expected, "training mode")
    updated = {name: network.state_dict()[key] for key, name in network.onnx_names().items()}
    for name, buffer in module.named_buffers():
        if name in updated and _distance(updated[name], buffer, _SMALLEST_MEAN) > _OUTPUT_TOLERANCE:
            raise ExportError(f"the running statistic '{name}' is not updated as in the module")
        if name not in updated and not name.endswith(_COUNTER) and not torch.equal(buffer, before[name]):
            warnings.warn(f"forward changes the buffer '{name}', which the file keeps as it is", stacklevel=4)
    _check_gradients(network, module, found, expected)


def _check_outputs(network: OnnxModule, found: list[Tensor], expected: list[Tensor], mode: str) -> None:
    for name, one, other in zip(network.output_names, found, expected, strict=True):
        if one.shape != other.shape or _distance(one, other) > _OUTPUT_TOLERANCE:
            raise ExportError(f"output '{name}' of the file is not the module's in {mode}")


def _check_gradients(
    network: OnnxModule, module: nn.Module, found: list[Tensor], expected: list[Tensor]
) -> None:
    ours = _trained(network)
    theirs = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    left, right = _gradients(found, ours), _gradients(expected, theirs)
    norms = {name: float(gradient.norm()) for name, gradient in right.items()}
    least = _VANISHING * max(norms.values(), default=0.0)
    for name, gradient in left.items():
        # What the module gives no gradient has one of zeros.
        true, norm = right.get(name, torch.zeros_like(gradient)), norms.get(name, 0.0)
        if float((gradient - true).norm()) > max(_GRADIENT_TOLERANCE * norm, least):
            raise ExportError(
                f"the gradient of the parameter '{name}' is not the module's; "
                "a detach() or no_grad() in forward is lost in a file"
            )
    for name in right:
        if name not in left and norms[name] > least:
            raise ExportError(f"the parameter '{name}' has no gradient in the file")


def _gradients(outputs: list[Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of all outputs with fixed random factors, in float32, where there are any."""
    generator = torch.Generator().manual_seed(_SEED)
    factors = [torch.randn(output.shape, generator=generator) for output in outputs]
    total = [
        (output.float() * factor.to(output.device)).sum()
        for output, factor in zip(outputs, factors, strict=True)
        if output.requires_grad
    ]
    if not total or not parameters:
        return {}
    found = torch.autograd.grad(sum(total[1:], total[0]), list(parameters.values()), allow_unused=True)
    gradients: tuple[Tensor | None, ...] = found
    return {
        name: gradient.float()
        for name, gradient in zip(parameters, gradients, strict=True)
        if gradient is not None
    }


def _trained(network: OnnxModule) -> dict[str, Tensor]:
    names = network.onnx_names()
    return {names[key]: value for key, value in network.named_parameters() if value.requires_grad}


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _distance(one: Tensor, other: Tensor, least: float = 1e-30) -> float:
    """The largest difference of two tensors as a share of the largest number; equal infinities differ not.

    What is smaller than `least` is a share of that.
    """
    one, other = (tensor.detach().double() for tensor in (one, other))
    apart = torch.where(one == other, 0.0, one - other).abs()
    scale = float(torch.where(other.isfinite(), other, 0.0).abs().max()) if other.numel() else 0.0
    return float(apart.max()) / max(scale, least) if apart.numel() else 0.0
