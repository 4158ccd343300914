"""Export of a module as an ONNX model for training, with all parameters and training-only operators.

PyTorch's exporter writes models for inference. The module is therefore captured in training mode, and export
fixes restore the information that the exporter loses.
"""

from __future__ import annotations

import inspect
import io
import logging
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

from onnxgc.emission.atomic_files import check_model_writable, write_model
from onnxgc.errors import ExportError, RuntimeUnavailableError
from onnxgc.torch.export_check import ExportedModel, check_equal
from onnxgc.torch.exportable_functions import ExportableForms
from onnxgc.torch.failing_submodule import SubmoduleTracker, submodule_calling
from onnxgc.torch.gradient_stops import add_detach
from onnxgc.torch.module_pair import preserve_state
from onnxgc.torch.unsupported_operator_advice import advice_on

logger = logging.getLogger(__name__)

_OPSET = 18
# The file of torch that packs sequences.
_PACKING = "torch/nn/utils/rnn.py"
_POINTER = "For more information"


def export_training(
    module: nn.Module,
    args: Any = (),
    path: str | os.PathLike[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_batch: bool = True,
    check: bool = True,
    external_data: bool = False,
) -> onnx.ModelProto:
    """The forward of a module as an ONNX model that trains as the module does.

    `args` are the arguments of a training step: one tensor or a tuple, and keywords in `kwargs`. The model is
    written to `path` if one is given; weights go to a separate file over 2 GB, or with `external_data`.

    Each parameter and buffer is one initializer under its own name, also if it is shared or equals another.
    BatchNormalization and Dropout remain operators, including the Dropout of attention and stochastic depth.
    Inputs have the names of `forward`'s parameters, outputs those of the fields or keys that it returns. With
    `dynamic_batch` the first dimension that inputs share is symbolic; if the module cannot be captured so,
    the batch is that of `args`, with a warning. Parameters that require no gradient are marked as frozen.

    With `check` the file is read back and compared with the module: outputs in evaluation mode; outputs,
    running statistics and gradients in training mode, with randomness switched off. The module's modes,
    buffers and random states are restored.

    Raises:
        ExportError: the module cannot be captured or converted, or the result does not equal it.
        OutputFileError: the file cannot be written.
        RuntimeUnavailableError: onnxscript, which PyTorch's exporter needs, is not installed.
    """
    if find_spec("onnxscript") is None:
        raise RuntimeUnavailableError(
            "export_training needs onnxscript, which is not installed: pip install 'onnxgc[torch]'"
        )
    if path is not None:
        check_model_writable(path)
    call = _Call.of(module, args, kwargs or {})
    with preserve_state(module):
        if not module.training:
            module.train()
        _check_parts(module)
        exported = _export(module, call, dynamic_batch)
        if check:
            check_equal(exported, module, call.args, call.kwargs)
    if path is not None:
        write_model(exported.proto, path, external_data=external_data)
    return exported.proto


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> _Call:
        """The call with its keywords in the order of forward's parameters."""
        args = tuple(args) if isinstance(args, tuple | list) else (args,)
        try:
            order = list(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise ExportError(f"forward does not take these arguments: {error}") from error
        named = sorted(kwargs, key=lambda name: order.index(name) if name in order else len(order))
        return cls(args, {name: kwargs[name] for name in named})

    @property
    def batch(self) -> int | None:
        """The first dimension of the first tensor that has dimensions."""
        tensors = (leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor))
        return next((tensor.shape[0] for tensor in tensors if tensor.ndim), None)

    def map_leaves(self, change: Callable[[Tensor], Any], other: Callable[[Any], Any]) -> _Call:
        """The call with `change` applied to tensors with the batch dimension, and `other` to other leaves."""
        batch = self.batch

        def changed(leaf: Any) -> Any:
            is_batched = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == batch
            return change(leaf) if is_batched else other(leaf)

        return _Call(*pytree.tree_map(changed, (self.args, self.kwargs)))

    def doubled(self) -> _Call:
        """The call with a batch of one repeated: `torch.export` specialises on dimensions of size 1."""
        if self.batch != 1:
            return self
        return self.map_leaves(lambda tensor: torch.cat([tensor, tensor]), lambda leaf: leaf)


def _check_parts(module: nn.Module) -> None:
    """Rejects submodules that ONNX cannot express, and warns of differences in a file."""
    for name, part in module.named_modules():
        is_average = isinstance(part, _NormBase) and part.track_running_stats and part.momentum is None
        if is_average and part.training:
            raise ExportError(
                f"'{name}' averages its running statistics over all steps (momentum=None), "
                "for which ONNX has no operator; give it a momentum"
            )
        if isinstance(part, _InstanceNorm) and part.track_running_stats and part.training:
            raise ExportError(
                f"'{name}' trains running statistics of an InstanceNorm, for which ONNX has no operator; "
                "give it track_running_stats=False, or put it into evaluation mode"
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.padding_idx is not None:
            warnings.warn(
                f"row {part.padding_idx} of '{name}', its padding_idx, gets a gradient in the file",
                stacklevel=3,
            )


def _export(module: nn.Module, call: _Call, dynamic_batch: bool) -> ExportedModel:
    """The module in operators of ONNX, with a symbolic batch if possible."""
    if not dynamic_batch or call.batch is None:
        return _convert(module, _capture(module, call, None))
    try:
        return _convert(module, _capture(module, call.doubled(), Dim("batch", min=1)))
    except ExportError as error:
        found = _convert(module, _capture(module, call, None))
        warnings.warn(
            f"the batch stays {call.batch}, since it cannot be symbolic ({error}); "
            "pass dynamic_batch=False to silence this warning",
            stacklevel=3,
        )
        return found


def _capture(module: nn.Module, call: _Call, batch: Any) -> ExportedProgram:
    forms, tracker = ExportableForms(), SubmoduleTracker(module)
    try:
        shapes = None if batch is None else _shapes(module, call, batch)
        with _silence_exporter(), forms, tracker:
            program = torch.export.export(module, call.args, call.kwargs, dynamic_shapes=shapes, strict=False)
        return add_detach(program)
    except Exception as error:  # Capturing may raise anything.
        text = f"the module cannot be captured: {_first_line(error)}"
        if tracker.is_inside:
            text += f" (at {forms.last} in {tracker.location})"
        packs = any(frame.filename.endswith(_PACKING) for frame in traceback.extract_tb(error.__traceback__))
        raise ExportError(_with_advice(f"{text}, a packed sequence" if packs else text)) from error


def _with_advice(text: str) -> str:
    advice = advice_on(text)
    return f"{text}; {advice}" if advice else text


def _shapes(module: nn.Module, call: _Call, batch: Any) -> dict[str, Any]:
    """The argument `dynamic_shapes` of `torch.export`, by parameters of forward."""
    shapes = call.map_leaves(lambda tensor: {0: batch}, lambda leaf: None)
    bound = inspect.signature(module.forward).bind(*shapes.args, **shapes.kwargs)
    return dict(bound.arguments)


def _convert(module: nn.Module, program: ExportedProgram) -> ExportedModel:
    try:
        with _silence_exporter():
            converted = torch.onnx.export(
                program, dynamo=True, optimize=False, verbose=False, opset_version=_OPSET
            )
    except Exception as error:
        raise ExportError(
            _with_advice(f"the module cannot be converted to ONNX: {_reason(error, program)}")
        ) from error
    assert converted is not None, "an export of a captured program returns its result"
    # Its dependencies are optional, like those of PyTorch's exporter.
    from onnxgc.torch.export_fixes import fix_export

    fix_export(converted.model, module, program)
    proto = converted.model_proto
    _check_parameters(proto, module, program)
    return ExportedModel(proto, program, converted.exported_program or program)


def _check_parameters(proto: onnx.ModelProto, module: nn.Module, program: ExportedProgram) -> None:
    """Requires one initializer with its value for each parameter that forward reads."""
    signature = program.graph_signature
    used = {node.name for node in program.graph.nodes if node.users}
    read = {target for name, target in signature.inputs_to_parameters.items() if name in used}
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    every = list(module.named_parameters(remove_duplicate=False))
    read_ids = {id(parameter) for name, parameter in every if name in read}
    for name, parameter in module.named_parameters():
        if id(parameter) not in read_ids:
            logger.info("forward does not read the parameter '%s', which is left out", name)
        elif name not in stored or not _holds(stored[name], parameter):
            raise ExportError(
                f"the exporter does not keep the parameter '{name}'; "
                "forward must use the parameter itself, not a copy"
            )


def _holds(tensor: onnx.TensorProto, parameter: nn.Parameter) -> bool:
    if tuple(tensor.dims) != tuple(parameter.shape):
        return False
    contents = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return tensor.raw_data == contents.tobytes()


@contextmanager
def _silence_exporter() -> Iterator[None]:
    """Suppresses the exporter's logs, warnings and prints."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "torch.fx")]
    levels = [other.level for other in loggers]
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            for other in loggers:
                other.setLevel(logging.CRITICAL)
            yield
        finally:
            for other, level in zip(loggers, levels, strict=True):
                other.setLevel(level)


def _reason(error: BaseException, program: ExportedProgram) -> str:
    """The operator of a failed conversion, its submodule, and the first cause."""
    node = ""
    while error.__cause__ is not None:
        error = error.__cause__
        node = node or next(iter(re.findall(r"target=torch\.ops\.([\w.]+)", str(error))), "")
    path = submodule_calling(program, node) if node else ""
    return (f"{node}{f' in {path!r}' if path else ''}: " if node else "") + _first_line(error)


def _first_line(error: BaseException) -> str:
    """The first sentence of an error, and that of the first item of a list below it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    sentences = [lines[0].partition(_POINTER)[0], *(line[2:] for line in lines[1:2] if line.startswith("- "))]
    return ": ".join(line.partition(". ")[0].rstrip("!. ") for line in sentences)
