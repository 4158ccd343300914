"""A module as an ONNX model to be trained: every parameter kept, and what acts in training alone.

PyTorch's exporter writes models to be run. The module is therefore captured in training mode, and what
the exporter would lose on the way is put back.
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

from onnxgc.emission.write import check_model_writable, write_model
from onnxgc.errors import ExportError, RuntimeUnavailableError
from onnxgc.torch.export_check import Exported, check_equal, left_as_it_was
from onnxgc.torch.export_forms import AsExported
from onnxgc.torch.export_location import Whereabouts, place_of_operator
from onnxgc.torch.gradient_stops import with_detached
from onnxgc.torch.trace_advice import advice_on

logger = logging.getLogger(__name__)

_OPSET = 18
# The file of torch that packs sequences.
_PACKING = "torch/nn/utils/rnn.py"
_ADVICE = "For more information"


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

    `args` is what a training step passes: one tensor or a tuple, and keywords in `kwargs`. The model is
    written to `path` where one is given; over 2 GB, or with `external_data`, weights go beside it.

    Each parameter is one initializer under its own name, however often it is used and whatever equals it;
    so are buffers. BatchNormalization and Dropout stay what they are, that of attention and stochastic
    depth included. Inputs have the names of `forward`'s parameters, and outputs those of the fields or keys
    that it returns. With `dynamic_batch` the first dimension that the inputs share is symbolic; where the
    module cannot be captured so, it is that of `args`, with a warning. A parameter that requires no gradient
    is told to be a constant.

    With `check` the result is read back and compared with the module: outputs in evaluation mode; outputs,
    running statistics and gradients in training mode with all random choices left out. The module is
    as it was afterwards.

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
    with left_as_it_was(module):
        if not module.training:
            module.train()
        _check_parts(module)
        exported = _exported(module, call, dynamic_batch)
        if check:
            check_equal(exported, module, call.args, call.kwargs)
    if path is not None:
        write_model(exported.proto, path, external_data=external_data)
    return exported.proto


@dataclass(frozen=True, slots=True)
class _Call:
    """What forward is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> _Call:
        """The call with its keywords in the order of forward's parameters, as inputs are."""
        args = tuple(args) if isinstance(args, tuple | list) else (args,)
        try:
            order = list(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise ExportError(f"forward does not take these arguments: {error}") from error
        named = sorted(kwargs, key=lambda name: order.index(name) if name in order else len(order))
        return cls(args, {name: kwargs[name] for name in named})

    @property
    def batch(self) -> int | None:
        """The first dimension of the first tensor that has any."""
        tensors = (leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor))
        return next((tensor.shape[0] for tensor in tensors if tensor.ndim), None)

    def of_samples(self, change: Callable[[Tensor], Any], other: Callable[[Any], Any]) -> _Call:
        """The call with `change` made to the tensors that share the batch, and `other` to all else."""
        batch = self.batch

        def changed(leaf: Any) -> Any:
            is_batched = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == batch
            return change(leaf) if is_batched else other(leaf)

        return _Call(*pytree.tree_map(changed, (self.args, self.kwargs)))

    def doubled(self) -> _Call:
        """The call with the sample of a batch of one twice: torch takes one for a fixed number."""
        if self.batch != 1:
            return self
        return self.of_samples(lambda tensor: torch.cat([tensor, tensor]), lambda leaf: leaf)


def _check_parts(module: nn.Module) -> None:
    """Refuses or tells of parts that a file cannot say all about."""
    for name, part in module.named_modules():
        is_average = isinstance(part, _NormBase) and part.track_running_stats and part.momentum is None
        if is_average and part.training:
            raise ExportError(
                f"'{name}' averages its running statistics over all steps (momentum=None), "
                "which ONNX has no operator for; give it a momentum"
            )
        if isinstance(part, _InstanceNorm) and part.track_running_stats and part.training:
            raise ExportError(
                f"'{name}' trains running statistics of an InstanceNorm, which ONNX has no operator for; "
                "give it track_running_stats=False, or put it into evaluation mode"
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.padding_idx is not None:
            warnings.warn(
                f"row {part.padding_idx} of '{name}', its padding_idx, gets a gradient in the file",
                stacklevel=3,
            )


def _exported(module: nn.Module, call: _Call, dynamic_batch: bool) -> Exported:
    """The module as it is captured in training mode, in operators of ONNX, put right."""
    if not dynamic_batch or call.batch is None:
        return _converted(module, _captured(module, call, None))
    try:
        return _converted(module, _captured(module, call.doubled(), Dim("batch", min=1)))
    except ExportError as error:
        found = _converted(module, _captured(module, call, None))
        warnings.warn(
            f"the batch stays {call.batch}, since it cannot be symbolic ({error}); "
            "dynamic_batch=False says that this is wanted",
            stacklevel=3,
        )
        return found


def _captured(module: nn.Module, call: _Call, batch: Any) -> ExportedProgram:
    forms, whereabouts = AsExported(), Whereabouts(module)
    try:
        shapes = None if batch is None else _shapes(module, call, batch)
        with _quiet(), forms, whereabouts:
            program = torch.export.export(module, call.args, call.kwargs, dynamic_shapes=shapes, strict=False)
        return with_detached(program)
    except Exception as error:  # Capturing fails in as many ways as there are modules.
        told = f"the module cannot be captured: {_first_line(error)}"
        if whereabouts.is_inside:
            told += f" (at {forms.last} in {whereabouts.told})"
        packs = any(frame.filename.endswith(_PACKING) for frame in traceback.extract_tb(error.__traceback__))
        raise ExportError(_with_advice(f"{told}, a packed sequence" if packs else told)) from error


def _with_advice(told: str) -> str:
    advice = advice_on(told)
    return f"{told}; {advice}" if advice else told


def _shapes(module: nn.Module, call: _Call, batch: Any) -> dict[str, Any]:
    """What `torch.export` wants to know of shapes: for each parameter of forward."""
    shapes = call.of_samples(lambda tensor: {0: batch}, lambda leaf: None)
    bound = inspect.signature(module.forward).bind(*shapes.args, **shapes.kwargs)
    return dict(bound.arguments)


def _converted(module: nn.Module, program: ExportedProgram) -> Exported:
    try:
        with _quiet():
            converted = torch.onnx.export(
                program, dynamo=True, optimize=False, verbose=False, opset_version=_OPSET
            )
    except Exception as error:
        raise ExportError(
            _with_advice(f"the module cannot be converted to ONNX: {_reason(error, program)}")
        ) from error
    assert converted is not None, "an export by torch.export returns its result"
    # It needs what PyTorch's exporter needs.
    from onnxgc.torch.export_fixes import fix_export

    fix_export(converted.model, module, program)
    proto = converted.model_proto
    _check_parameters(proto, module, program)
    return Exported(proto, program, converted.exported_program or program)


def _check_parameters(proto: onnx.ModelProto, module: nn.Module, program: ExportedProgram) -> None:
    """Each parameter that forward reads is one initializer, with its value."""
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
                "see that forward uses it as it is, and not a copy"
            )


def _holds(tensor: onnx.TensorProto, parameter: nn.Parameter) -> bool:
    if tuple(tensor.dims) != tuple(parameter.shape):
        return False
    contents = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return tensor.raw_data == contents.tobytes()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter tells of itself, and prints."""
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
    """Of a failed conversion: the operator, its submodule, and what it failed of at first."""
    node = ""
    while error.__cause__ is not None:
        error = error.__cause__
        node = node or next(iter(re.findall(r"target=torch\.ops\.([\w.]+)", str(error))), "")
    path = place_of_operator(program, node) if node else ""
    return (f"{node}{f' in {path!r}' if path else ''}: " if node else "") + _first_line(error)


def _first_line(error: BaseException) -> str:
    """The first sentence, and of a list behind it the first item's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    told = [lines[0].partition(_ADVICE)[0], *(line[2:] for line in lines[1:2] if line.startswith("- "))]
    return ": ".join(line.partition(". ")[0].rstrip("!. ") for line in told)
