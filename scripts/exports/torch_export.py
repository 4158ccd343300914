"""Exports of modules by both exporters of PyTorch, with data for a comparison of training steps."""

import inspect
import json
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from scripts.exports.torch_models import TORCH_MODELS, Recipe, TorchModel

_SCRIPT_OPSET = 17


@dataclass(frozen=True, slots=True)
class Export:
    """An export of a model by a recipe, with a static or a symbolic batch."""

    recipe: Recipe
    dynamic: bool

    @property
    def suffix(self) -> str:
        return f"{self.recipe.value}-{'dynamic' if self.dynamic else 'static'}"


def exports_of(model: TorchModel) -> tuple[Export, ...]:
    return tuple(Export(recipe, dynamic) for recipe in model.recipes for dynamic in (False, True))


def export_module(module: nn.Module, inputs: Mapping[str, Tensor], path: Path, export: Export) -> None:
    """Writes one export of a module, and restores the mode of the module."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    path.parent.mkdir(parents=True, exist_ok=True)
    training = module.training
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _EXPORTERS[export.recipe](module, inputs, path, export.dynamic)
    module.train(training)


def export_model(name: str, path: Path, small: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """Writes a model of `TORCH_MODELS` with a static batch; returns its module and the batch."""
    module, batch = TORCH_MODELS[name].module(small), TORCH_MODELS[name].batch(small)
    export_module(module, batch, path, Export(Recipe.DYNAMO, dynamic=False))
    return module, batch


def _by_dynamo(module: nn.Module, inputs: Mapping[str, Tensor], path: Path, dynamic: bool) -> None:
    batch = torch.export.Dim("batch", min=1, max=1024)
    each = tuple({0: batch} for _ in inputs)
    shapes = (each,) if _has_variadic_forward(module) else each
    torch.onnx.export(
        module.eval(),
        tuple(inputs.values()),
        str(path),
        dynamo=True,
        optimize=False,
        verbose=False,
        input_names=list(inputs),
        output_names=["output"],
        dynamic_shapes=shapes if dynamic else None,
        external_data=_is_large(module),
    )


def _by_script(module: nn.Module, inputs: Mapping[str, Tensor], path: Path, dynamic: bool) -> None:
    # The exporter runs the module, which updates its running statistics.
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    torch.onnx.export(
        module.train(),
        tuple(inputs.values()),
        str(path),
        dynamo=False,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        opset_version=_SCRIPT_OPSET,
        input_names=list(inputs),
        output_names=["output"],
        dynamic_axes={name: {0: "batch"} for name in (*inputs, "output")} if dynamic else None,
    )
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


def _has_variadic_forward(module: nn.Module) -> bool:
    """Whether `forward` has `*inputs`, which count as one argument."""
    parameters = inspect.signature(module.forward).parameters.values()
    found: bool = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    return found


def _is_large(module: nn.Module) -> bool:
    size_bytes: int = sum(tensor.nbytes for tensor in module.state_dict().values())
    return size_bytes > 1 << 30


_EXPORTERS: Mapping[Recipe, Callable[[nn.Module, Mapping[str, Tensor], Path, bool], None]] = {
    Recipe.DYNAMO: _by_dynamo,
    Recipe.SCRIPT: _by_script,
}


def write_torch_model(path: Path, model: TorchModel, export: Export, small: bool) -> None:
    """Exports a model with its batch (`.npz`) and the initializers of each parameter (`.json`)."""
    module, batch = model.module(small), model.batch(small)
    export_module(module, batch, path, export)
    with torch.no_grad():
        target = model.target(module(*batch.values()))
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in batch.items()}
    np.savez(path.with_suffix(".npz"), target=target.numpy(), **arrays)
    matches = match_parameters(module, onnx.load(path))
    described = {
        "loss": model.loss,
        "class_axis": model.class_axis,
        "parameters": {key: [list(match) for match in found] for key, found in matches.items()},
    }
    path.with_suffix(".json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def match_parameters(module: nn.Module, proto: onnx.ModelProto) -> dict[str, list[tuple[str, bool]]]:
    """The initializers of each parameter, and whether they are transposed.

    Initializers are compared by value: exporters rename and transpose parameters, and duplicate tied ones. A
    parameter without an initializer was changed, for example by constant folding.
    """
    by_value: dict[tuple[tuple[int, ...], bytes], list[str]] = {}
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            value = numpy_helper.to_array(tensor)
            by_value.setdefault((value.shape, value.tobytes()), []).append(tensor.name)
    found: dict[str, list[tuple[str, bool]]] = {}
    for name, parameter in module.named_parameters():
        value = parameter.detach().numpy()
        matches = [(other, False) for other in by_value.get((value.shape, value.tobytes()), [])]
        if value.ndim == 2:
            transposed = np.ascontiguousarray(value.T)
            matches += [
                (other, True)
                for other in by_value.get((transposed.shape, transposed.tobytes()), [])
                if (other, False) not in matches
            ]
        found[name] = matches
    return found
