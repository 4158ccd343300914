"""Reading of ONNX files: a path or a ModelProto becomes a checked model without function calls."""

import os
import re
import stat
import warnings
from collections.abc import Iterable, Mapping
from copy import deepcopy
from importlib import import_module
from typing import Any, NamedTuple

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import helper, inliner, shape_inference
from onnx.serialization import registry

from onnxgc.errors import ModelFileError
from onnxgc.model.core.draft import ONNX_DOMAINS, fresh_name
from onnxgc.model.files.contrib_domain import move_to_runtime_domain
from onnxgc.model.files.gate import MAX_FILE_BYTES, MAX_NESTING, check_contents

_CONSTANT_MARK = "onnxgc constant of "
# A model file begins with the field `ir_version`: field 1, a varint.
_FIRST_BYTE = b"\x08"
_TEXT_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]')


def source_of(model: Any) -> str | os.PathLike[str] | onnx.ModelProto:
    """A model in any accepted form, as a path or an `onnx.ModelProto`.

    An `onnx_ir.Model` and a `torch.onnx.ONNXProgram` are converted to an `onnx.ModelProto`.

    Raises:
        ModelFileError: `model` has another type.
    """
    if isinstance(model, str | os.PathLike | onnx.ModelProto):
        return model
    if isinstance(proto := getattr(model, "model_proto", None), onnx.ModelProto):
        return proto
    if type(model).__module__.startswith("onnx_ir"):
        return _with_embedded_weights(import_module("onnx_ir").to_proto(model), model)
    raise ModelFileError(
        f"a model is a path, an onnx.ModelProto, an onnx_ir.Model or a torch.onnx.ONNXProgram, "
        f"not a {type(model).__name__}"
    )


def _with_embedded_weights(proto: onnx.ModelProto, model: Any) -> onnx.ModelProto:
    """The proto of an `onnx_ir.Model` with external weights embedded: it does not record their folder."""
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            tensor.raw_data = model.graph.initializers[tensor.name].const_value.tobytes()
            tensor.ClearField("data_location")
            tensor.ClearField("external_data")
    return proto


def check_model_file(path: str | os.PathLike[str]) -> None:
    """Fails early for a path that is not a regular file.

    Raises:
        ModelFileError: the path is missing, a directory, or readable only once, such as a pipe.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError as error:
        raise ModelFileError(f"there is no file '{path}'; give the path of an ONNX model") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(f"'{path}' cannot be read: {reason}") from error
    if stat.S_ISDIR(mode):
        raise ModelFileError(f"'{path}' is a directory, not an ONNX file")
    if not stat.S_ISREG(mode):
        raise ModelFileError(
            f"'{path}' is not a regular file; a model is read more than once, so write it to a regular file"
        )


class Loaded(NamedTuple):
    """A checked model without function calls, and the folder of its external data."""

    proto: onnx.ModelProto
    folder: str


def load_proto(source: str | os.PathLike[str] | onnx.ModelProto | Loaded) -> Loaded:
    """The model, checked unless it is loaded already.

    External data is not read. Calls of model-local functions are replaced by their bodies.

    Raises:
        ModelFileError: the file is missing, or not a valid ONNX model.
    """
    if isinstance(source, Loaded):
        return source
    if isinstance(source, onnx.ModelProto):
        model, folder, label = source, "", "the model"
    else:
        path = os.fspath(source)
        model, folder, label = _read_file(path), os.path.dirname(os.path.abspath(path)), f"'{path}'"
    _check_graph(model, label)
    check_contents(model, folder, label)
    if model.functions:
        model = _without_functions(model, label)
    _check_model(model, label)
    return Loaded(model, folder)


def is_text(path: str | os.PathLike[str]) -> bool:
    """Whether a file is ONNX in a text form, by its suffix."""
    suffix = os.path.splitext(os.fspath(path))[1]
    return registry.get_format_from_file_extension(suffix) not in (None, "protobuf")


def model_files(source: str | os.PathLike[str]) -> tuple[str, ...]:
    """A model's file and the files of its external data; only the first if the model cannot be read."""
    path = os.fspath(source)
    try:
        check_model_file(path)
        graph = _loaded(path).graph
    except Exception:
        return (path,)
    folder = os.path.dirname(os.path.abspath(path))
    entries = (entry for tensor in graph.initializer for entry in tensor.external_data)
    names = sorted({entry.value for entry in entries if entry.key == "location"})
    return (path, *(os.path.join(folder, name) for name in names))


def _with_weights_as_inputs(graph: onnx.GraphProto) -> onnx.GraphProto:
    """A copy of the graph in which initializers are typed inputs."""
    declared = {value.name for value in graph.input}
    weights = (
        helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in graph.initializer
        if tensor.name not in declared
    )
    return onnx.GraphProto(
        name=graph.name or "graph", node=graph.node, input=[*graph.input, *weights], output=graph.output
    )


def _read_file(path: str) -> onnx.ModelProto:
    check_model_file(path)
    size = os.path.getsize(path)
    if size > MAX_FILE_BYTES:
        raise ModelFileError(
            f"'{path}' has {size} bytes, over protobuf's limit of {MAX_FILE_BYTES}; export it with external data"
        )
    if is_text(path) and size:
        return _read_text(path)
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise ModelFileError(f"'{path}' cannot be read: {error.strerror}") from error
    if not content:
        raise ModelFileError(f"'{path}' is empty (0 bytes); give an ONNX model")
    try:
        model: onnx.ModelProto = onnx.ModelProto.FromString(content)
    except DecodeError as error:
        if content.startswith(_FIRST_BYTE):
            raise ModelFileError(
                f"'{path}' is truncated or damaged: it starts like an ONNX file but cannot be decoded; "
                "export or copy it again"
            ) from error
        raise ModelFileError(f"'{path}' is not an ONNX file; give an exported model") from error
    return model


def _read_text(path: str) -> onnx.ModelProto:
    try:
        return _loaded(path)
    except ModelFileError:
        raise
    except Exception as error:  # Each text format has its own parser, with its own exceptions.
        raise ModelFileError(f"'{path}' is not an ONNX model in text form: {_first_line(error)}") from error


def _check_nesting(path: str) -> None:
    """Checks the depth of brackets outside of texts: ONNX's parsers recurse without a limit."""
    depth = 0
    with open(path, encoding="utf-8") as file:
        for match in _TEXT_OR_BRACKET.finditer(file.read()):
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(match[0], 0)
            if depth > 4 * MAX_NESTING:
                raise ModelFileError(f"'{path}' nests brackets over {4 * MAX_NESTING} deep; export it in binary form")


def _loaded(path: str) -> onnx.ModelProto:
    if is_text(path):
        _check_nesting(path)
    with warnings.catch_warnings():
        # ONNX warns that some text forms may change.
        warnings.simplefilter("ignore")
        return onnx.load(path, load_external_data=False)


def _check_graph(model: onnx.ModelProto, label: str) -> None:
    if not model.HasField("graph") or (not model.ir_version and not model.graph.node):
        raise ModelFileError(f"{label} is not an ONNX model, or is truncated: it has no graph; export it again")
    if not model.graph.node:
        raise ModelFileError(f"{label} has an empty graph: there is no operator to train; export it again")
    if not model.graph.output:
        raise ModelFileError(f"{label} has no outputs, so nothing can be trained; export it with the scores as output")


def _without_functions(model: onnx.ModelProto, label: str) -> onnx.ModelProto:
    if model.graph.initializer:
        shell = onnx.ModelProto(
            ir_version=model.ir_version,
            opset_import=model.opset_import,
            functions=model.functions,
            metadata_props=model.metadata_props,
            graph=_with_weights_as_inputs(model.graph),
        )
    else:
        shell = deepcopy(model)
    _mark_constants(shell)
    try:
        _flatten_functions(shell)
        if _mixes_opsets(shell):
            # The inliner converts bodies to the model's opset, and needs the types of their inputs.
            shell = shape_inference.infer_shapes(shell)
        inlined = inliner.inline_local_functions(shell, convert_version=True)
    except Exception as error:  # The inliner raises plain RuntimeErrors from C++.
        raise ModelFileError(
            f"the functions of {label} cannot be inlined: {_first_line(error).rpartition('failed: ')[2]}; "
            "export it without functions, or with functions of the model's opset"
        ) from error
    if _mixes_opsets(shell):
        _rename_repeated_outputs(inlined.graph)
    _merge_constants(inlined.graph)
    return _with_payloads(inlined, model.graph)


def _mark_constants(model: onnx.ModelProto) -> None:
    """Marks each constant of a function by a text that identifies its copies after inlining."""
    for function in model.functions:
        for node in function.node:
            if node.op_type == "Constant" and not any(a.ref_attr_name for a in node.attribute):
                owner = f"{function.domain}::{function.name}:{function.overload}"
                node.doc_string = f"{_CONSTANT_MARK}{owner}/{node.output[0]}"


def _merge_constants(graph: onnx.GraphProto) -> None:
    """Merges the copies of each constant of a function, so that repeated calls share one weight."""
    outputs = {value.name for value in graph.output}
    first: dict[str, str] = {}
    merged: dict[str, str] = {}
    kept = []
    for node in graph.node:
        _rename_reads(node, merged)
        mark = node.doc_string if node.doc_string.startswith(_CONSTANT_MARK) else ""
        if mark in first and node.output[0] not in outputs:
            merged[node.output[0]] = first[mark]
            continue
        if mark:
            first.setdefault(mark, node.output[0])
        kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def _flatten_functions(model: onnx.ModelProto) -> None:
    """Inlines function calls inside functions of the same opset.

    The inliner converts a body to the model's opset, but cannot convert the calls in it.
    """
    local = {(function.domain, function.name) for function in model.functions}
    flat = []
    for function in model.functions:
        own = _default_opset(function.opset_import)
        calls = any((node.domain, node.op_type) in local for node in function.node)
        same_opset = [f for f in model.functions if _default_opset(f.opset_import) in (None, own)]
        if not calls or own == _default_opset(model.opset_import):
            flat.append(function)
            continue
        graph = onnx.GraphProto(
            name=function.name,
            node=function.node,
            input=[onnx.ValueInfoProto(name=name) for name in function.input],
            output=[onnx.ValueInfoProto(name=name) for name in function.output],
        )
        shell = onnx.ModelProto(
            ir_version=model.ir_version,
            opset_import=function.opset_import,
            functions=[f for f in same_opset if f is not function],
            graph=graph,
        )
        body = deepcopy(function)
        del body.node[:]
        body.node.extend(inliner.inline_local_functions(shell).graph.node)
        flat.append(body)
    del model.functions[:]
    model.functions.extend(flat)


def _mixes_opsets(model: onnx.ModelProto) -> bool:
    """Whether a function has another opset than the model."""
    own = _default_opset(model.opset_import)
    return any(_default_opset(function.opset_import) not in (None, own) for function in model.functions)


def _default_opset(imports: Iterable[onnx.OperatorSetIdProto]) -> int | None:
    return next((int(entry.version) for entry in imports if entry.domain in ONNX_DOMAINS), None)


def _rename_repeated_outputs(graph: onnx.GraphProto) -> None:
    """Renames tensors that several converted bodies define: conversion adds equal names to each body."""
    defined = {value.name for value in graph.input}
    taken = defined | {name for node in graph.node for name in (*node.input, *node.output)}
    current: dict[str, str] = {}
    for node in graph.node:
        _rename_reads(node, current)
        for index, name in enumerate(node.output):
            if name and name in defined:
                current[name] = node.output[index] = fresh_name(name, taken)
            defined.add(name)


def _rename_reads(node: onnx.NodeProto, current: Mapping[str, str]) -> None:
    for index, name in enumerate(node.input):
        node.input[index] = current.get(name, name)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                _rename_reads(inner, current)


def _with_payloads(inlined: onnx.ModelProto, source: onnx.GraphProto) -> onnx.ModelProto:
    initial = {tensor.name for tensor in source.initializer}
    declared = {value.name for value in source.input}
    inputs = [value for value in inlined.graph.input if value.name in declared or value.name not in initial]
    del inlined.graph.input[:]
    inlined.graph.input.extend(inputs)
    inlined.graph.initializer.extend(source.initializer)
    return inlined


def _check_model(model: onnx.ModelProto, label: str) -> None:
    shell = onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, graph=_with_weights_as_inputs(model.graph)
    )
    uses_default = any(node.domain in ONNX_DOMAINS for node in model.graph.node)
    if shell.opset_import and not uses_default and _default_opset(shell.opset_import) is None:
        shell.opset_import.append(helper.make_opsetid("", 1))
    move_to_runtime_domain(shell)
    for value in (*shell.graph.input, *shell.graph.output):
        # A missing shape is not an error of the file; --input-shapes supplies it.
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(shell)
    except onnx.checker.ValidationError as error:
        if "topologically sorted" in str(error):
            # Lifting sorts the nodes, and its errors are clearer.
            return
        raise ModelFileError(f"{label} is not a valid ONNX model: {_first_line(error)}; export it again") from error


def _first_line(error: Exception) -> str:
    reason = error.args[0] if error.args else ""
    text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(error)
    return next(filter(None, map(str.strip, text.splitlines())), type(error).__name__)
