"""The module of a node, from PyTorch's metadata or from a name that is a path."""

import ast
import re
from contextlib import suppress

import onnx

from onnxgc.model.core.draft import Draft, reads_of

_SCOPES = "pkg.torch.onnx.name_scopes"
_CALL = r"(Stateful)?PartitionedCall(_\d+)?"


def module_of(node: onnx.NodeProto) -> str:
    """The path of a node's module, such as `layer1.0.conv1`; empty if the file does not record it."""
    metadata = {entry.key: entry.value for entry in node.metadata_props}
    # As `: Net/blocks.0: Block/add: aten.add.Tensor`. The outermost module has no name.
    scopes = [scope.partition(":") for scope in metadata.get("namespace", "").split("/")]
    if _SCOPES in metadata:
        path = ["", *names_in(metadata[_SCOPES])][-2]
    elif all(colon for _, colon, _ in scopes):
        path = ["", *(name for name, _, _ in scopes)][-2]
    else:
        path = _path_of_name(node)
    return "".join(character if character.isprintable() else "?" for character in path)


def with_modules_of(draft: Draft, source: Draft) -> Draft:
    """The draft with new nodes in the module of `source`'s node with the same output, or of their readers."""
    module_at = {name: node.module for node in source.nodes for name in node.outputs}
    read_in: dict[str, set[str]] = {}
    nodes = []
    for node in reversed(draft.nodes):
        module = node.module or next((module_at[name] for name in node.outputs if name in module_at), None)
        if module is None:
            readers = set().union(*(read_in.get(name, ()) for name in node.outputs))
            module = readers.pop() if len(readers) == 1 else ""
        for name in reads_of(node):
            read_in.setdefault(name, set()).add(module)
        nodes.append(node.with_changes(module=module))
    return draft.with_changes(nodes=tuple(reversed(nodes)))


def names_in(listed: str) -> list[str]:
    """Names of a list in metadata, as `['a', 'b']` or `a,b`."""
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        if isinstance(found := ast.literal_eval(listed), list):
            return list(map(str, found))
    return [name.strip(" '[]") for name in listed.split(",")]


def _path_of_name(node: onnx.NodeProto) -> str:
    """The module in `/layer1/layer1.0/conv1/Conv` (older exporter of PyTorch) or `model/dense/MatMul`."""
    *scopes, operation = node.name.partition(";")[0].removeprefix("/").split("/")
    if not node.name.startswith("/"):
        return "/".join(scope for scope in scopes if not re.fullmatch(_CALL, scope))
    if not re.fullmatch(rf"{re.escape(node.op_type)}(_\d+)?", operation):
        return ""  # Extended by a tool that fuses nodes.
    modules: list[str] = []
    for scope in scopes:
        # A part of a container has the container's name in its own.
        if modules and scope.startswith(f"{modules[-1]}."):
            modules.pop()
        modules.append(scope)
    return ".".join(modules)
