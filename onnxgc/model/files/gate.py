"""Checks everything that a model file states before anything else looks at it.

The cost is linear in the size of the graph; contents of weights are not read. Other modules may trust what passed.
"""

import math
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import AttributeProto, TensorProto, defs

from onnxgc.errors import ModelFileError
from onnxgc.model.core.draft import ONNX_DOMAINS
from onnxgc.model.core.ir import MAX_RANK, MAX_TENSOR_BYTES, SUB_BYTE_BITS, TensorType

MAX_FILE_BYTES = 2**31 - 1
"""Of a model without its external data: protobuf's limit."""
MAX_NODES = 200_000
"""With the nodes of bodies and branches, and of functions at each call."""
MAX_NESTING = 50
"""Of bodies and branches; of a text form, of brackets."""
MAX_NAME_LENGTH = 4096
MAX_SETTING = 2**31 - 1

_NAME_FIELDS = ("name", "op_type", "domain", "input", "output")
_TYPES = frozenset(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}
_FIELD_OF_TYPE: dict[int, str] = {
    TensorProto.FLOAT: "float_data",
    TensorProto.COMPLEX64: "float_data",
    TensorProto.INT64: "int64_data",
    TensorProto.DOUBLE: "double_data",
    TensorProto.COMPLEX128: "double_data",
    TensorProto.UINT32: "uint64_data",
    TensorProto.UINT64: "uint64_data",
    TensorProto.STRING: "string_data",
}
_PARTS: dict[int, int] = {TensorProto.COMPLEX64: 2, TensorProto.COMPLEX128: 2}
# fmt: off
_POSITIVE = frozenset([
    "kernel_shape", "strides", "dilations", "group", "num_groups", "blocksize", "hidden_size", "num_scan_inputs",
    "num_outputs", "output_shape", "num_heads", "kv_num_heads",
])
# fmt: on
_SIGNED = frozenset(["pads", "output_padding", "keepdims", "batch_dims"])
_AXES = frozenset(["axis", "axes", "perm", "scan_input_axes", "scan_output_axes"])
_ELEMENT_TYPES = frozenset(["to", "dtype", "output_dtype", "stash_type"])
_CHOICES = {
    "auto_pad": {"", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"},
    ("Pad", "mode"): {"constant", "reflect", "edge", "wrap"},
    ("Resize", "mode"): {"nearest", "linear", "cubic"},
}


def check_contents(model: onnx.ModelProto, folder: str, label: str) -> None:
    """Checks a model against the limits of this module and against itself.

    Raises:
        ModelFileError: names the first element that is wrong.
    """
    try:
        _check_text(model, "model")
        _check_opsets(model.opset_import)
        names = [(function.domain, function.name, function.overload) for function in model.functions]
        if repeated := _repeated(names):
            raise _WrongError(f"function '{repeated[1]}' is defined twice")
        _check_expansion(model)
        for function in model.functions:
            _check_opsets(function.opset_import)
            _check_nodes(function.node, folder, is_function=True)
        _check_graph(model.graph, folder)
    except _WrongError as error:
        raise ModelFileError(f"{label} is not a valid ONNX model: {error}; export it again") from None


class _WrongError(Exception):
    """What is wrong, and with which element."""


def _check_text(message: Message, owner: str) -> None:
    """Checks that all texts are UTF-8 and not too long where they are names; `owner` is the nearest named element."""
    waiting: list[tuple[Message, str]] = [(message, owner)]
    while waiting:
        message, owner = waiting.pop()
        name = getattr(message, "name", "")
        if name and isinstance(name, str):
            owner = f"{message.DESCRIPTOR.name.removesuffix('Proto').lower()} '{name}'"
        for field, value in message.ListFields():
            if field.message_type is not None:
                waiting.extend((child, owner) for child in ((value,) if isinstance(value, Message) else value))
            elif field.type == field.TYPE_STRING:
                for text in (value,) if isinstance(value, str | bytes) else value:
                    # Protobuf returns a text that it cannot decode as bytes.
                    if isinstance(text, bytes):
                        raise _WrongError(f"the text {text[:40]!r} in {owner} is not UTF-8")
                    if len(text) > MAX_NAME_LENGTH and field.name in _NAME_FIELDS:
                        raise _WrongError(f"a name in {owner} has {len(text)} characters, over {MAX_NAME_LENGTH}")


def _check_opsets(imports: Iterable[onnx.OperatorSetIdProto]) -> None:
    for entry in imports:
        newest = defs.onnx_opset_version() if entry.domain in ONNX_DOMAINS else MAX_SETTING
        if not 1 <= entry.version <= newest:
            raise _WrongError(f"opset {entry.version} of domain '{entry.domain}' is not from 1 to {newest}")


def _check_expansion(model: onnx.ModelProto) -> None:
    """Checks the nodes that inlining all function calls gives, without doing it."""
    bodies = {(function.domain, function.name, function.overload): function.node for function in model.functions}
    sizes: dict[tuple[str, str, str], int] = {}
    # A stack in place of recursion; None marks a function whose callees are being counted.
    for root in bodies:
        stack = [root]
        open_: set[tuple[str, str, str]] = set()
        while stack:
            key = stack[-1]
            calls = [call for call in map(_key, _all_nodes(bodies[key], 0)) if call in bodies]
            missing = [call for call in calls if call not in sizes]
            if key in sizes or not missing:
                sizes.setdefault(key, _expanded(bodies[key], sizes))
                open_.discard(key)
                stack.pop()
                continue
            open_.add(key)
            if missing[0] in open_:
                raise _WrongError(f"function '{missing[0][1]}' calls itself")
            stack.append(missing[0])
    count = _expanded(model.graph.node, sizes)
    if count > MAX_NODES:
        raise _WrongError(f"the graph has {count} nodes with those of its functions, over the limit of {MAX_NODES}")


def _key(node: onnx.NodeProto) -> tuple[str, str, str]:
    return node.domain, node.op_type, node.overload


def _expanded(nodes: Iterable[onnx.NodeProto], sizes: Mapping[tuple[str, str, str], int]) -> int:
    return sum(sizes.get(_key(node), 1) for node in _all_nodes(nodes, 0))


def _all_nodes(nodes: Iterable[onnx.NodeProto], depth: int) -> Iterator[onnx.NodeProto]:
    if depth > MAX_NESTING:
        raise _WrongError(f"bodies and branches are nested over {MAX_NESTING} deep")
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _all_nodes(attribute.g.node, depth + 1)
            for graph in attribute.graphs:
                yield from _all_nodes(graph.node, depth + 1)


def _check_graph(graph: onnx.GraphProto, folder: str) -> None:
    if repeated := _repeated(value.name for value in graph.input):
        raise _WrongError(f"input '{repeated}' is declared twice")
    if repeated := _repeated(tensor.name for tensor in graph.initializer):
        raise _WrongError(f"initializer '{repeated}' is stored twice")
    given = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    computed = [name for node in graph.node for name in node.output if name]
    if (repeated := _repeated(computed)) or (repeated := next((name for name in computed if name in given), "")):
        raise _WrongError(f"tensor '{repeated}' has two sources")
    for value in (*graph.input, *graph.output, *graph.value_info):
        _check_type(value.type, value.name)
    for tensor in graph.initializer:
        _check_tensor(tensor, f"initializer '{tensor.name}'", folder)
    _check_nodes(graph.node, folder, is_function=False)


def _repeated(names: Iterable[Any]) -> Any:
    return next((name for name, count in Counter(names).items() if count > 1), "")


def _check_type(kind: onnx.TypeProto, name: str) -> None:
    while kind.HasField("sequence_type") or kind.HasField("optional_type"):
        kind = kind.sequence_type.elem_type if kind.HasField("sequence_type") else kind.optional_type.elem_type
    if not kind.HasField("tensor_type"):
        return
    # The type 0 leaves it open.
    dtype, dimensions = kind.tensor_type.elem_type, kind.tensor_type.shape.dim
    if dtype and dtype not in _TYPES:
        raise _WrongError(f"tensor '{name}' has the unknown element type {dtype}")
    # Some exporters write -1 for an unknown size.
    sizes = [max(dimension.dim_value, 1) for dimension in dimensions if dimension.HasField("dim_value")]
    _check_size(dtype or TensorProto.FLOAT, sizes, f"tensor '{name}'")


def _check_size(dtype: int, sizes: Iterable[int], owner: str) -> int:
    """The bytes of a tensor's contents; a text counts as one."""
    shape = tuple(sizes)
    if any(size < 0 for size in shape):
        raise _WrongError(f"{owner} has the negative dimension {min(shape)}")
    if len(shape) > MAX_RANK:
        raise _WrongError(f"{owner} has {len(shape)} dimensions, over the limit of {MAX_RANK}")
    size = math.prod(shape) if dtype == TensorProto.STRING else TensorType(dtype, shape).size_bytes
    if size > MAX_TENSOR_BYTES:
        raise _WrongError(f"{owner} has {size} bytes, over the limit of {MAX_TENSOR_BYTES}")
    return size


def _check_tensor(tensor: onnx.TensorProto, owner: str, folder: str) -> None:
    dtype = tensor.data_type
    if dtype not in _TYPES:
        raise _WrongError(f"{owner} has the unknown element type {dtype}")
    size = _check_size(dtype, tensor.dims, owner)
    if tensor.HasField("segment"):
        raise _WrongError(f"{owner} is stored in segments, which are not supported")
    if tensor.data_location == TensorProto.EXTERNAL:
        if dtype == TensorProto.STRING:
            raise _WrongError(f"{owner} has texts in external data")
        _check_external(tensor, size, owner, folder)
        return
    count = math.prod(tensor.dims)
    if tensor.HasField("raw_data"):
        stored, needed, unit = len(tensor.raw_data), size, "bytes"
    else:
        per_field = 8 // SUB_BYTE_BITS.get(dtype, 8)
        stored = len(getattr(tensor, _FIELD_OF_TYPE.get(dtype, "int32_data")))
        needed, unit = -(-count // per_field) * _PARTS.get(dtype, 1), "values"
    if stored != needed:
        raise _WrongError(f"{owner} of shape {list(tensor.dims)} has {stored} {unit} in place of {needed}")


def _check_external(tensor: onnx.TensorProto, size: int, owner: str, folder: str) -> None:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    numbers: dict[str, int] = {}
    for key in ("offset", "length"):
        text = entries.get(key, "")
        if key in entries and not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise _WrongError(f"the {key} of {owner} in its external data is not a number of bytes: '{text[:40]}'")
        numbers[key] = int(text or 0)
    if not location or len(location) > MAX_NAME_LENGTH or "\0" in location:
        raise _WrongError(f"the external data of {owner} have no valid file name")
    if "length" in entries and numbers["length"] != size:
        raise _WrongError(f"the external data of {owner} have {numbers['length']} bytes in place of {size}")
    home = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(home, location))
    where = f"the external data of {owner} are in '{location}'"
    if os.path.isabs(location) or os.path.commonpath([home, path]) != home:
        raise _WrongError(f"{where}, by its path or a link outside of the model's folder; copy it there")
    try:
        status = os.stat(path)
    except FileNotFoundError:
        # Planning needs no contents; reading them reports the file.
        return
    except OSError as error:
        raise _WrongError(f"{where}, which cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise _WrongError(f"{where}, which is not a regular file")
    end = numbers["offset"] + size
    if end > status.st_size or ("length" not in entries and end != status.st_size):
        raise _WrongError(f"{where} from byte {numbers['offset']} to {end}, but that file has {status.st_size} bytes")


def _check_nodes(nodes: Iterable[onnx.NodeProto], folder: str, *, is_function: bool) -> None:
    for node in nodes:
        owner = f"node '{node.name or next(iter(node.output), '')}' ({node.op_type or 'no operator'})"
        if not any(node.output):
            raise _WrongError(f"{owner} has no output")
        if repeated := _repeated(attribute.name for attribute in node.attribute):
            raise _WrongError(f"attribute '{repeated}' of {owner} is given twice")
        for attribute in node.attribute:
            named = f"attribute '{attribute.name}' of {owner}"
            if attribute.ref_attr_name:
                if not is_function:
                    raise _WrongError(f"{named} refers to an attribute of a function, but is outside of one")
                continue
            if attribute.type == AttributeProto.UNDEFINED:
                raise _WrongError(f"{named} has no type")
            for tensor in (*([attribute.t] if attribute.type == AttributeProto.TENSOR else ()), *attribute.tensors):
                _check_tensor(tensor, named, folder)
            for graph in (*([attribute.g] if attribute.type == AttributeProto.GRAPH else ()), *attribute.graphs):
                if is_function:
                    _check_nodes(graph.node, folder, is_function=True)
                else:
                    _check_graph(graph, folder)
            if node.domain in ONNX_DOMAINS and node.op_type != "Constant":
                _check_setting(node, attribute, named)
        if node.domain in ONNX_DOMAINS:
            _check_counts(node, owner)


def _check_setting(node: onnx.NodeProto, attribute: onnx.AttributeProto, named: str) -> None:
    """Checks the range of an attribute by its name."""
    name = attribute.name
    choices = _CHOICES.get(name) or _CHOICES.get((node.op_type, name))
    if choices is not None and attribute.s.decode(errors="replace") not in choices:
        raise _WrongError(f"{named} is not one of {', '.join(sorted(filter(None, choices)))}")
    values = attribute.ints if attribute.type == AttributeProto.INTS else [attribute.i]
    if attribute.type not in (AttributeProto.INT, AttributeProto.INTS):
        return
    if name in _ELEMENT_TYPES and not all(value in _TYPES for value in values):
        raise _WrongError(f"{named} is the unknown element type {attribute.i}")
    low, high = -MAX_SETTING - 1, MAX_SETTING
    if name in _POSITIVE:
        low = 1
    elif name in _AXES:
        low, high = -MAX_RANK, MAX_RANK - 1
    elif name not in _SIGNED:
        return
    wrong = next((value for value in values if not low <= value <= high), None)
    if wrong is not None:
        raise _WrongError(f"{named} is {wrong}, not from {low} to {high}")


def _check_counts(node: onnx.NodeProto, owner: str) -> None:
    """Checks attributes that count inputs or outputs, and bodies that the operator requires."""
    values = {attribute.name: attribute for attribute in node.attribute if not attribute.ref_attr_name}
    if node.op_type == "Split" and "num_outputs" in values and values["num_outputs"].i != len(node.output):
        raise _WrongError(f"{owner} has {len(node.output)} outputs in place of {values['num_outputs'].i}")
    if node.op_type == "Scan" and "num_scan_inputs" in values and values["num_scan_inputs"].i > len(node.input):
        raise _WrongError(f"{owner} scans {values['num_scan_inputs'].i} of {len(node.input)} inputs")
