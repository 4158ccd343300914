"""A trace's guard on Python state: the objects that forward reads, and values that determine its result."""

import dataclasses
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from onnxgc.errors import PlanError
from onnxgc.torch.module_state import MODULE_STRUCTURE, KnownState, Place, SymbolicNumber, place_name
from onnxgc.torch.object_contents import ABSENT, PLAIN, Key, contents, set_contents


@dataclass(frozen=True, slots=True)
class _TensorSlot:
    """A place of a tensor with this signature."""

    signature: Hashable


@dataclass(frozen=True, slots=True)
class _NumberSlot:
    """A place of a number of this type that forward updates."""

    kind: type
    place: Place


@dataclass(frozen=True, slots=True)
class _ConstantSlot:
    """A place of this value."""

    value: Any
    key: Hashable


@dataclass(slots=True, eq=False)
class ObjectNode:
    """An object with contents: a slot or node for each key, for a module only the keys that forward reads."""

    kind: type
    name: str
    keys: tuple[Key, ...] = ()
    children: tuple[Any, ...] = ()
    root: Any = None
    """The object itself if it is the same in all calls, such as a module."""
    plain: tuple[Any, ...] | None = None
    """The values if all are constants."""


@dataclass(slots=True)
class Binding:
    """The objects of a call by their nodes, with their tensors in order and their numbers by place."""

    objects: dict[ObjectNode, Any] = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)
    numbers: dict[Place, Any] = field(default_factory=dict)
    nodes: dict[int, ObjectNode] = field(default_factory=dict)
    """The node of each object but tuples, by address: different nodes have different objects."""


class StateGuard:
    """Accepts calls in which the objects that forward reads equal those of the traced call."""

    def __init__(self, known: KnownState, module: nn.Module, functions: Iterable[Any], arguments: list[Any]) -> None:
        """`functions` are those that forward may run, and classes; `arguments` are objects of the call.

        Raises:
            PlanError: forward reads an object without comparable contents, such as an iterator.
        """
        self._known = known
        self._names = {id(part): name for name, part in module.named_modules()}
        self._nodes: dict[int, ObjectNode] = {}
        self.mismatch = ""
        """The place at which the guard rejected a call last."""
        attributes: dict[int, tuple[nn.Module, list[str]]] = {}
        for part, name in known.attributes.values():
            if id(part) in self._names:
                attributes.setdefault(id(part), (part, []))[1].append(name)
        self._roots = [self._module_node(part, names) for part, names in attributes.values()]
        self._roots += [node for each in functions if (node := self._root_node(each)) is not None]
        self._arguments = self._object_node(arguments, "argument")

    def _module_node(self, module: nn.Module, names: Sequence[str]) -> ObjectNode:
        if "" in names:
            names = [each for each in vars(module) if each not in MODULE_STRUCTURE]
        keys = tuple(("attribute", each) for each in sorted(names))
        node = ObjectNode(type(module), self._names[id(module)], keys, root=module)
        values = (vars(module).get(name, ABSENT) for _, name in keys)
        node.children = tuple(map(partial(self._child, node, module), keys, values))
        return node

    def _root_node(self, holder: Any) -> ObjectNode | None:
        if contents(holder) is None:
            return None
        node = self._nodes.get(id(holder))
        if node is None:
            node = self._object_node(holder, getattr(holder, "__qualname__", type(holder).__name__))
        node.root = holder
        return node

    def _object_node(self, holder: Any, name: str) -> ObjectNode:
        entries = contents(holder)
        assert entries is not None, "callers check that the object has contents"
        root = holder if isinstance(holder, type) else None
        node = self._nodes[id(holder)] = ObjectNode(type(holder), name, tuple(entries), root=root)
        node.children = tuple(map(partial(self._child, node, holder), entries, entries.values()))
        if all(isinstance(child, _ConstantSlot) for child in node.children):
            node.plain = tuple(entries.values())
        return node

    def _child(self, node: ObjectNode, holder: Any, key: Key, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _TensorSlot(tensor_signature(value))
        place = id(holder), key
        is_updated = place in self._known.updated and type(value) in (int, float)
        if is_updated and place not in self._known.inspected:
            return _NumberSlot(type(value), place)
        if id(value) in self._nodes:
            return self._nodes[id(value)]
        name = place_name(node.name, key)
        if id(value) not in self._names and contents(value) is not None:
            if isinstance(value, set) and any(isinstance(each, torch.Tensor) for each in value):
                raise PlanError(
                    f"'{name}' is a set of tensors, which forward reads; keep them in a list or a dictionary"
                )
            return self._object_node(value, name)
        if hasattr(value, "__next__"):
            raise PlanError(f"'{name}' is an iterator, which forward reads; keep a list and an index in its place")
        return _ConstantSlot(value, comparison_key(value))

    def bind(self, arguments: list[Any]) -> Binding | None:
        """The present objects and those of a call; None if the guard rejects them."""
        binding = Binding()
        holders = [*((node, node.root) for node in self._roots), (self._arguments, arguments)]
        is_accepted = all(self._bind_node(node, holder, binding) for node, holder in holders)
        return binding if is_accepted else None

    def _bind_node(self, node: ObjectNode, holder: Any, binding: Binding) -> bool:
        """Adds an object and its contents to the binding."""
        known = binding.objects.get(node, ABSENT)
        if known is not ABSENT:
            return known is holder or isinstance(holder, tuple)
        self.mismatch = node.name
        if type(holder) is not node.kind or (node.root is not None and node.root is not holder):
            return False
        if not isinstance(holder, tuple) and binding.nodes.setdefault(id(holder), node) is not node:
            return False
        binding.objects[node] = holder
        if isinstance(node.root, nn.Module):
            values = [vars(holder).get(name, ABSENT) for _, name in node.keys]
        else:
            entries = contents(holder)
            if entries is None or tuple(entries) != node.keys:
                return False
            values = list(entries.values())
        if node.plain is not None and all(map(operator.is_, values, node.plain)):
            return True
        for key, child, value in zip(node.keys, node.children, values, strict=True):
            if not self._bind_child(child, value, binding):
                if not isinstance(child, ObjectNode):
                    self.mismatch = place_name(node.name, key)
                return False
        return True

    def _bind_child(self, child: Any, value: Any, binding: Binding) -> bool:
        if isinstance(child, ObjectNode):
            return self._bind_node(child, value, binding)
        if isinstance(child, _TensorSlot):
            if not isinstance(value, torch.Tensor) or tensor_signature(value) != child.signature:
                return False
            binding.tensors.append(value)
            return True
        if isinstance(child, _NumberSlot):
            binding.numbers[child.place] = value
            return type(value) is child.kind
        return value is child.value or bool(comparison_key(value) == child.key)

    def substitute(self, binding: Binding, replacements: Mapping[int, torch.Tensor]) -> None:
        """Replaces tensors in the objects, by address, and numbers by symbolic ones."""
        for node, holder in binding.objects.items():
            if isinstance(holder, tuple):
                continue
            present = contents(holder) or {}
            wanted = dict(present)
            for key, child in zip(node.keys, node.children, strict=True):
                if key in present:
                    wanted[key] = self._substitute(child, present[key], replacements)
            set_contents(holder, wanted)

    def _substitute(self, child: Any, value: Any, replacements: Mapping[int, torch.Tensor]) -> Any:
        if isinstance(child, _TensorSlot):
            return replacements.get(id(value), value)
        if isinstance(child, _NumberSlot):
            return SymbolicNumber(child.place, child.kind, self._known)
        if isinstance(child, ObjectNode) and isinstance(value, tuple):
            entries = [
                self._substitute(one, each, replacements) for one, each in zip(child.children, value, strict=False)
            ]
            if any(one is not other for one, other in zip(entries, value, strict=True)):
                return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
        return value


def tensor_signature(tensor: torch.Tensor) -> Hashable:
    """The properties of a tensor on which a trace depends."""
    return (
        *(tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else tensor.layout),
        *(tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)),
    )


def comparison_key(value: Any) -> Hashable:
    """Equal for values that forward cannot distinguish; an object without a value equals only itself."""
    if isinstance(value, PLAIN):
        return type(value), repr(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return np.ndarray, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, list | tuple):
        return type(value), tuple(map(comparison_key, value))
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(comparison_key, value))
    if isinstance(value, dict):
        items = ((comparison_key(key), comparison_key(entry)) for key, entry in value.items())
        return type(value), tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [part.name for part in dataclasses.fields(value)]
        return type(value), tuple(comparison_key(getattr(value, name, None)) for name in names)
    return _IdentityKey(value)


class _IdentityKey:
    """Compares an object by identity, and keeps it alive so that its address is not reused."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IdentityKey) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)
