"""Export of a module as an ONNX model for training, with all parameters and training-only operators.

PyTorch's exporter writes models for inference. The module is therefore captured in training mode, and export
fixes restore the information that the exporter loses.
"""

import inspect
import io
import logging
import operator
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from typing import Any

import onnx
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

from onnxgc.emission.atomic_files import check_model_writable, write_model
from onnxgc.errors import ExportError, RuntimeUnavailableError
from onnxgc.torch.export_check import ExportedModel, check_equal
from onnxgc.torch.exportable_functions import ExportableForms
from onnxgc.torch.first_mismatch import submodule_path
from onnxgc.torch.module_pair import Arguments, batch_of, preserve_state
from onnxgc.torch.trace_errors import advice_on, failing_submodule

logger = logging.getLogger(__name__)

_OPSET = 18
# The file of torch that packs sequences.
_PACKING = "torch/nn/utils/rnn.py"
_POINTER = "For more information"
_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
# Operators that convert a tensor to a number.
_NUMBERS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)


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
    call = _bound(module, args, kwargs or {})
    with preserve_state(module):
        if not module.training:
            module.train()
        _check_parts(module)
        exported = _export(module, call, dynamic_batch)
        if check:
            check_equal(exported, module, call)
    if path is not None:
        write_model(exported.proto, path, external_data=external_data)
    return exported.proto


def _bound(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Arguments:
    """The arguments of forward, with keywords in the order of its parameters."""
    args = tuple(args) if isinstance(args, tuple | list) else (args,)
    try:
        order = list(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise ExportError(f"forward does not take these arguments: {error}") from error
    names = sorted(kwargs, key=lambda name: order.index(name) if name in order else len(order))
    return args, {name: kwargs[name] for name in names}


def _map_batched(
    call: Arguments, change: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda leaf: leaf
) -> Arguments:
    """The call with `change` applied to tensors with the batch dimension, and `other` to other leaves."""
    batch = batch_of(call)

    def changed(leaf: Any) -> Any:
        is_batched = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == batch
        return change(leaf) if is_batched else other(leaf)

    args, kwargs = pytree.tree_map(changed, call)
    return args, kwargs


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
                f"row {part.padding_idx} of '{name}', its padding_idx, gets a gradient in the file", stacklevel=3
            )


def _export(module: nn.Module, call: Arguments, dynamic_batch: bool) -> ExportedModel:
    """The module in operators of ONNX, with a symbolic batch if possible."""
    batch = batch_of(call)
    if not dynamic_batch or batch is None:
        return _convert(module, _capture(module, call, None))
    # `torch.export` specialises on dimensions of size 1.
    given = call if batch != 1 else _map_batched(call, lambda tensor: torch.cat([tensor, tensor]))
    try:
        return _convert(module, _capture(module, given, Dim("batch", min=1)))
    except ExportError as error:
        exported = _convert(module, _capture(module, call, None))
        warnings.warn(
            f"the batch stays {batch}, since it cannot be symbolic ({error}); "
            "pass dynamic_batch=False to silence this warning",
            stacklevel=3,
        )
        return exported


def _capture(module: nn.Module, call: Arguments, batch: Any) -> ExportedProgram:
    forms = ExportableForms()
    try:
        shapes = None if batch is None else _shapes(module, call, batch)
        with _silence_exporter(), forms:
            program = torch.export.export(module, *call, dynamic_shapes=shapes, strict=False)
        _add_detach(program.graph_module)
        return program
    except Exception as error:  # Capturing may raise anything.
        text = f"the module cannot be captured: {_first_line(error)}"
        if submodule := failing_submodule(error, module):
            text += f" (at {forms.last} in {submodule})"
        packs = any(frame.filename.endswith(_PACKING) for frame in traceback.extract_tb(error.__traceback__))
        raise ExportError(_with_advice(f"{text}, a packed sequence" if packs else text)) from error


def _with_advice(text: str) -> str:
    advice = advice_on(text)
    return f"{text}; {advice}" if advice else text


def _shapes(module: nn.Module, call: Arguments, batch: Any) -> dict[str, Any]:
    """The argument `dynamic_shapes` of `torch.export`, by parameters of forward."""
    args, kwargs = _map_batched(call, lambda tensor: {0: batch}, lambda leaf: None)
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)


def _add_detach(module: fx.GraphModule) -> None:
    """Inserts `detach()` after regions under `no_grad` and before conversions to numbers.

    The exporter inlines both, and gradients would flow through them.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.target in _NUMBERS:
            (source,) = node.args
            with graph.inserting_before(node):
                node.args = (_detached(graph, source),)
        elif _is_without_gradients(node):
            with graph.inserting_after(node):
                detached = _detached(graph, node)
            node.replace_all_uses_with(detached, delete_user_cb=lambda user, new=detached: user is not new)
    module.recompile()


def _is_without_gradients(node: fx.Node) -> bool:
    """Whether a node is a floating-point output of a region under `no_grad`."""
    region, value = node.args[0] if node.target is operator.getitem else None, node.meta.get("val")
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return isinstance(region, fx.Node) and region.target is _REGION and not region.args[0] and is_float


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    return detached


def _convert(module: nn.Module, program: ExportedProgram) -> ExportedModel:
    try:
        with _silence_exporter():
            converted = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False, opset_version=_OPSET)
    except Exception as error:
        raise ExportError(_with_advice(f"the module cannot be converted to ONNX: {_reason(error, program)}")) from error
    assert converted is not None, "an export of a captured program returns its result"
    # Its dependencies are optional, like those of PyTorch's exporter.
    from onnxgc.torch.export_fixes import fix_export

    fix_export(converted.model, module, program)
    proto = converted.model_proto
    _check_parameters(proto, module, program)
    return ExportedModel(proto, converted.exported_program or program)


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
        elif name not in stored or not _has_value(stored[name], parameter):
            raise ExportError(
                f"the exporter does not keep the parameter '{name}'; forward must use the parameter itself, not a copy"
            )


def _has_value(tensor: onnx.TensorProto, parameter: nn.Parameter) -> bool:
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
    if not node:
        return _first_line(error)
    wanted = re.sub(r"^aten\._?|_forward\b|\.\w+$", "", node)
    calls = (each for each in program.graph_module.graph.nodes if each.op == "call_function")
    path = next((submodule_path(each) for each in calls if wanted and wanted in str(each.target)), "")
    return f"{node}{f' in {path!r}' if path else ''}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    """The first sentence of an error, and that of the first item of a list below it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    sentences = [lines[0].partition(_POINTER)[0], *(line[2:] for line in lines[1:2] if line.startswith("- "))]
    return ": ".join(line.partition(". ")[0].rstrip("!. ") for line in sentences)
