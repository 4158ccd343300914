"""State that a forward keeps in Python objects, such as attributes of modules and what these hold.

A trace sees none of it. Therefore a `Pattern` describes the objects that a forward reads, and a trace holds
for calls that meet it. Their tensors are inputs of the trace, a `Tally` stands for a number that forward only
counts on, and a `Snapshot` finds what forward has changed.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from onnxgc.errors import PlanError
from onnxgc.torch.object_contents import (
    PLAIN,
    Key,
    assign,
    contents,
    is_closed,
    is_library,
    is_same,
    names_used,
)

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()
"""Stands for an attribute that is not there."""
_STRUCTURE = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, submodules, hooks and mode are compared otherwise."""
_MAX_DEPTH = 8
"""Keys that the name of a place has at most."""
_METHODS = frozenset(dir(nn.Module)) - {"forward"}
"""Names that no instance has of its own."""
_MODULE_FILE = nn.Module.__init__.__code__.co_filename
Place = tuple[int, Key]
"""The address of an object and a key in it."""


class MoreState(BaseException):
    """Ends a trace that has found more of the state that forward depends on; it begins again."""


@dataclass(slots=True)
class StateRead:
    """What is known so far of the state that a forward reads; it grows while traces are tried."""

    attributes: dict[tuple[int, str], tuple[nn.Module, str]] = field(default_factory=dict)
    """Attributes of modules by the module's address and the name; no name for all of them."""
    counted: set[Place] = field(default_factory=set)
    """Numbers that forward replaces, and of which it may read nothing else."""
    steering: set[Place] = field(default_factory=set)
    """Numbers of these whose values decide something."""

    @property
    def size(self) -> int:
        return len(self.attributes) + len(self.counted) + len(self.steering)


class Tally:
    """Stands for a number that forward counts on: it notes sums, and ends a trace that looks at it."""

    __slots__ = ("_kind", "_known", "_steps", "place")

    def __init__(
        self, place: Place, kind: type, known: StateRead, *steps: tuple[Any, tuple[Any, ...]]
    ) -> None:
        self.place = place
        self._kind = kind
        self._known = known
        self._steps = steps

    def after(self, number: float) -> Any:
        """The number that it stands for, where it began as `number`."""
        for function, others in self._steps:
            number = function(*(number if other is ABSENT else other for other in others))
        return number

    def _counted(self, function: Callable[..., Any], *others: Any) -> Tally:
        if any(other is not ABSENT and type(other) not in (int, float) for other in others):
            self._look()
        return Tally(self.place, self._kind, self._known, *self._steps, (function, others))

    def _look(self, *_: Any) -> Any:
        self._known.steering.add(self.place)
        raise MoreState

    def __add__(self, other: Any) -> Tally:
        return self._counted(operator.add, ABSENT, other)

    def __radd__(self, other: Any) -> Tally:
        return self._counted(operator.add, other, ABSENT)

    def __sub__(self, other: Any) -> Tally:
        return self._counted(operator.sub, ABSENT, other)

    def __rsub__(self, other: Any) -> Tally:
        return self._counted(operator.sub, other, ABSENT)

    def __mul__(self, other: Any) -> Tally:
        return self._counted(operator.mul, ABSENT, other)

    def __rmul__(self, other: Any) -> Tally:
        return self._counted(operator.mul, other, ABSENT)

    def __mod__(self, other: Any) -> Tally:
        if other == 0:
            self._look()
        return self._counted(operator.mod, ABSENT, other)

    def __deepcopy__(self, memo: Any) -> Tally:
        memo.tallies.append(self)
        return self

    __bool__ = __int__ = __float__ = __index__ = __complex__ = __round__ = __trunc__ = __floor__ = (
        __ceil__
    ) = _look
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __str__ = __repr__ = __format__ = _look
    __neg__ = __pos__ = __abs__ = __invert__ = __pow__ = __rpow__ = __truediv__ = __rtruediv__ = _look
    __floordiv__ = __rfloordiv__ = __rmod__ = __divmod__ = __rdivmod__ = __and__ = __or__ = __xor__ = _look
    __lshift__ = __rshift__ = __len__ = __iter__ = __call__ = __getitem__ = __getattr__ = __reduce_ex__ = (
        _look
    )

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What `isinstance` asks for; a pattern holds for numbers of one type."""
        return type(self.after(self._kind(1)))


class Snapshot:
    """All objects that are reachable from some, with what each held."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._held: dict[int, tuple[Any, dict[Key, Any]]] = {}
        self.objects: dict[int, Any] = {}
        """All but plain values and tensors, by address."""
        self.has_tensors = False
        self._inside: dict[int, tuple[Any, Key]] = {}
        waiting = list(roots)
        while waiting:
            holder = waiting.pop()
            self.has_tensors |= isinstance(holder, torch.Tensor)
            if id(holder) in self.objects or isinstance(holder, (*PLAIN, torch.Tensor)):
                continue
            self.objects[id(holder)] = holder
            found = contents(holder)
            if found is not None:
                self._held[id(holder)] = holder, found
                waiting.extend(found.values())
                for key, value in found.items():
                    self._inside.setdefault(id(value), (holder, key))

    def value(self, holder: Any, key: Key) -> Any:
        """What an object held at a place."""
        return self._held[id(holder)][1].get(key, ABSENT) if id(holder) in self._held else ABSENT

    def name_of(self, holder: Any, key: Key, module: nn.Module) -> str:
        """A place as programs write it, by the paths of a module's parts."""
        names = {id(part): name for name, part in module.named_modules()}
        keys = [key]
        while id(holder) not in names and id(holder) in self._inside and len(keys) < _MAX_DEPTH:
            holder, key = self._inside[id(holder)]
            keys.append(key)
        name: str = names.get(id(holder), "")
        for each in reversed(keys):
            name = place_name(name, each)
        return name

    def changes(self) -> list[tuple[Any, dict[Key, Any], dict[Key, Any]]]:
        """Objects that hold something else now, with what they held and hold."""
        found = []
        for holder, before in self._held.values():
            after = contents(holder) or {}
            if not is_same(before, after):
                found.append((holder, before, after))
        return found

    def put_back(self) -> None:
        for holder, before, _ in self.changes():
            assign(holder, before)


@contextmanager
def attributes_read(known: StateRead, snapshot: Snapshot, parts: Iterable[nn.Module]) -> Iterator[None]:
    """Notes what is read of own attributes of modules, such as the rate of a Dropout, and those not there.

    What forward has written before it reads it does not count.
    """
    addresses = set(map(id, parts))

    def begin_again(value: Any) -> None:
        """At once: what is done to a tensor that is no input of the trace would be done for good."""
        if not isinstance(value, PLAIN) and Snapshot([value]).has_tensors:
            raise MoreState

    def noted(module: nn.Module, name: str) -> Any:
        held: dict[str, Any] = object.__getattribute__(module, "__dict__")
        if id(module) not in addresses:
            pass
        elif name == "__dict__":
            key = id(module), ""
            if sys._getframe(1).f_code.co_filename != _MODULE_FILE and key not in known.attributes:
                known.attributes[key] = module, ""
                begin_again(held)
        elif name not in _STRUCTURE and (id(module), name) not in known.attributes:
            value = held.get(name, ABSENT)
            is_own = value is not ABSENT or not (name in _METHODS or _is_registered(held, name))
            if is_own and snapshot.value(module, ("attribute", name)) is value:
                known.attributes[id(module), name] = module, name
                begin_again(value)
        return object.__getattribute__(module, name)

    every: Any = nn.Module
    every.__getattribute__ = noted
    try:
        yield
    finally:
        del every.__getattribute__


def _is_registered(held: Mapping[str, Any], name: str) -> bool:
    """Whether a module has a parameter, buffer or submodule of that name, which are compared otherwise."""
    return any(name in held.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))


def ask_for_types(functions: Iterable[Any]) -> bool:
    """Whether one of these functions may ask for the type of a number, for which a tally gives its own."""
    return any(
        "type" in names_used(each.__code__) for each in functions if isinstance(each, types.FunctionType)
    )


def functions_of(modules: Iterable[nn.Module], own: Callable[..., Any]) -> list[Any]:
    """Functions that a forward may run, but for those of libraries, and classes: both may keep state.

    Of a class's functions these are `forward` and what is called by names that are used there; hooks of
    submodules come in addition.
    """
    parts = list(modules)
    kinds = dict.fromkeys(
        kind for part in parts for kind in type(part).__mro__ if not is_closed(kind) and kind is not object
    )
    named: dict[str, list[Any]] = {}
    for kind in kinds:
        for name, value in vars(kind).items():
            for function in _functions_behind(value):
                named.setdefault(name, []).append(function)
    hooks = [hook for part in parts[1:] for name in HOOKS for hook in vars(part)[name].values()]
    found: dict[int, Any] = {}
    waiting = [own, *hooks, *named.get("forward", ())]
    while waiting:
        function = waiting.pop()
        function = getattr(function, "__func__", function)
        if id(function) in found:
            continue
        found[id(function)] = function
        if isinstance(function, types.FunctionType) and not is_library(function):
            waiting += [each for name in names_used(function.__code__) for each in named.get(name, ())]
    return [*found.values(), *kinds]


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _functions_behind(value: Any) -> list[Any]:
    if isinstance(value, property):
        return [each for each in (value.fget, value.fset) if each is not None]
    function = getattr(value, "__func__", value)
    return [function] if isinstance(function, types.FunctionType) else []


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor of this kind is."""

    kind: Hashable


@dataclass(frozen=True, slots=True)
class _Number:
    """Where a number of this type is that forward counts on."""

    kind: type
    place: Place


@dataclass(frozen=True, slots=True)
class _Value:
    """Where this value is."""

    value: Any
    told: Hashable

    def holds(self, value: Any) -> bool:
        return value is self.value or disambiguate(value) == self.told


@dataclass(slots=True, eq=False)
class Node:
    """An object that holds others; `children` belong to `keys`, of which a root may have but some."""

    kind: type
    name: str
    keys: tuple[Key, ...] = ()
    children: tuple[Any, ...] = ()
    root: Any = None
    """The object itself where it is always the same, such as a module."""
    plain: tuple[Any, ...] | None = None
    """The values where all of them are plain."""


@dataclass(slots=True)
class Binding:
    """The objects of a call that a pattern stands for, their tensors and numbers in a row."""

    objects: dict[Node, Any] = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)
    numbers: dict[Place, Any] = field(default_factory=dict)


class Pattern:
    """What the state that a forward reads looks like: the objects, and values where they decide."""

    def __init__(
        self, known: StateRead, module: nn.Module, functions: Iterable[Any], arguments: list[Any]
    ) -> None:
        """`functions` are those that forward may run, and classes; `arguments` are objects of the call.

        Raises:
            PlanError: something is read that cannot be followed, such as an iterator.
        """
        self._known = known
        self._names = {id(part): name for name, part in module.named_modules()}
        self._nodes: dict[int, Node] = {}
        self.differs = ""
        """The place at which a call did not meet the pattern the last time."""
        attributes: dict[int, tuple[nn.Module, list[str]]] = {}
        for part, name in known.attributes.values():
            if id(part) in self._names:
                attributes.setdefault(id(part), (part, []))[1].append(name)
        self._roots = [self._root(part, names) for part, names in attributes.values()]
        self._roots += [node for each in functions if (node := self._whole(each)) is not None]
        self._arguments = self._opened(arguments, "argument")

    def _root(self, module: nn.Module, names: Sequence[str]) -> Node:
        name = self._names[id(module)]
        if "" in names:
            names = [each for each in vars(module) if each not in _STRUCTURE]
        keys = tuple(("attribute", each) for each in sorted(names))
        held = vars(module)
        node = Node(type(module), name, keys, root=module)
        node.children = tuple(self._child(held.get(key[1], ABSENT), node, key, module) for key in keys)
        return node

    def _whole(self, holder: Any) -> Node | None:
        if contents(holder) is None:
            return None
        node = self._nodes.get(id(holder))
        if node is None:
            node = self._opened(holder, getattr(holder, "__qualname__", type(holder).__name__))
        node.root = holder
        return node

    def _opened(self, holder: Any, name: str) -> Node:
        found = contents(holder)
        assert found is not None, "it was asked before"
        root = holder if isinstance(holder, type) else None
        node = self._nodes[id(holder)] = Node(type(holder), name, tuple(found), root=root)
        node.children = tuple(self._child(value, node, key, holder) for key, value in found.items())
        if all(isinstance(child, _Value) for child in node.children):
            node.plain = tuple(found.values())
        return node

    def _child(self, value: Any, node: Node, key: Key, holder: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _Tensor(kind_of(value))
        place = id(holder), key
        is_counted = place in self._known.counted and type(value) in (int, float)
        if is_counted and place not in self._known.steering:
            return _Number(type(value), place)
        if id(value) in self._nodes:
            return self._nodes[id(value)]
        name = place_name(node.name, key)
        if id(value) not in self._names and contents(value) is not None:
            if isinstance(value, set) and any(isinstance(each, torch.Tensor) for each in value):
                raise PlanError(
                    f"'{name}' is a set of tensors, which forward reads; keep them in a list or a dictionary"
                )
            return self._opened(value, name)
        if hasattr(value, "__next__"):
            raise PlanError(
                f"'{name}' is an iterator, which forward reads; keep a list and an index in its place"
            )
        return _Value(value, disambiguate(value))

    def bind(self, arguments: list[Any]) -> Binding | None:
        """The objects as they are now, with those of a call; None where they do not look so any more."""
        binding = Binding()
        taken: dict[int, Node] = {}
        holders = [*((node, node.root) for node in self._roots), (self._arguments, arguments)]
        is_met = all(self._bound(node, holder, binding, taken) for node, holder in holders)
        return binding if is_met else None

    def _bound(self, node: Node, holder: Any, binding: Binding, taken: dict[int, Node]) -> bool:
        known = binding.objects.get(node, ABSENT)
        if known is not ABSENT:
            return known is holder or isinstance(holder, tuple)
        self.differs = node.name
        if type(holder) is not node.kind or (node.root is not None and node.root is not holder):
            return False
        if not isinstance(holder, tuple) and taken.setdefault(id(holder), node) is not node:
            return False
        binding.objects[node] = holder
        if isinstance(node.root, nn.Module):
            held = vars(holder)
            values = [held.get(key[1], ABSENT) for key in node.keys]
        else:
            found = contents(holder)
            if found is None or tuple(found) != node.keys:
                return False
            values = list(found.values())
        if node.plain is not None and all(map(operator.is_, values, node.plain)):
            return True
        for key, child, value in zip(node.keys, node.children, values, strict=True):
            if not self._meets(child, value, binding, taken):
                if not isinstance(child, Node):
                    self.differs = place_name(node.name, key)
                return False
        return True

    def _meets(self, child: Any, value: Any, binding: Binding, taken: dict[int, Node]) -> bool:
        if isinstance(child, Node):
            return self._bound(child, value, binding, taken)
        if isinstance(child, _Tensor):
            if not isinstance(value, torch.Tensor) or kind_of(value) != child.kind:
                return False
            binding.tensors.append(value)
            return True
        if isinstance(child, _Number):
            binding.numbers[child.place] = value
            return type(value) is child.kind
        return bool(child.holds(value))

    def swap(self, binding: Binding, stand_ins: Mapping[int, torch.Tensor]) -> None:
        """Puts stand-ins in the place of tensors, by their addresses, and tallies in that of numbers."""
        for node, holder in binding.objects.items():
            if isinstance(holder, tuple):
                continue
            held = contents(holder) or {}
            wanted = dict(held)
            for key, child in zip(node.keys, node.children, strict=True):
                if key in held:
                    wanted[key] = self._swapped(child, held[key], stand_ins)
            assign(holder, wanted)

    def _swapped(self, child: Any, value: Any, stand_ins: Mapping[int, torch.Tensor]) -> Any:
        if isinstance(child, _Tensor):
            return stand_ins.get(id(value), value)
        if isinstance(child, _Number):
            return Tally(child.place, child.kind, self._known)
        if isinstance(child, Node) and isinstance(value, tuple):
            entries = [
                self._swapped(one, each, stand_ins) for one, each in zip(child.children, value, strict=False)
            ]
            if any(one is not other for one, other in zip(entries, value, strict=True)):
                return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
        return value


def place_name(name: str, key: Key) -> str:
    """The name of a place in an object with a name, as programs write it."""
    kind, part = key
    if kind in ("item", "at"):
        return f"{name}[{part!r}]"
    if kind in ("global", "cell"):
        return str(part)
    if kind == "module":
        return ".".join(part)
    if kind in ("array", "random", "elements", "referent"):
        return name
    return f"{name}.{part}" if name else str(part)


def kind_of(tensor: torch.Tensor) -> Hashable:
    """What a trace depends on of a tensor."""
    return (
        *(tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else tensor.layout),
        *(tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)),
    )


def disambiguate(value: Any) -> Hashable:
    """Something that differs for values that a forward may tell apart; other objects are only themselves."""
    if isinstance(value, PLAIN):
        return type(value), repr(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return np.ndarray, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, list | tuple):
        return type(value), tuple(map(disambiguate, value))
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(disambiguate, value))
    if isinstance(value, dict):
        return type(value), tuple((disambiguate(key), disambiguate(entry)) for key, entry in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [part.name for part in dataclasses.fields(value)]
        return type(value), tuple(disambiguate(getattr(value, name, None)) for name in names)
    return _Itself(value)


class _Itself:
    """Equal to that of the same object alone, which it keeps: another may not get its address."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)
