"""State that a forward keeps in Python objects: attributes of modules, and the objects that these contain.

Traces do not record such state. A `StateGuard` therefore describes the objects that forward reads, and its
trace serves the calls that it accepts. Their tensors become inputs of the trace, a `SymbolicNumber` replaces
a number that forward only updates, and a `Snapshot` finds the changes that forward makes.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from onnxgc.torch.object_contents import (
    ABSENT,
    PLAIN,
    Key,
    contents,
    is_library_function,
    is_opaque,
    is_same,
    names_used,
    set_contents,
)

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MODULE_STRUCTURE = frozenset(vars(nn.Module()))
"""Attributes of every module (parameters, submodules, hooks, mode), which call signatures compare."""
_MAX_DEPTH = 8
"""Keys in the name of a place."""
_METHODS = frozenset(dir(nn.Module)) - {"forward"}
"""Names that are never instance attributes."""
_MODULE_FILE = nn.Module.__init__.__code__.co_filename
Place = tuple[int, Key]
"""The address of an object and a key in it."""


class RetraceNeeded(BaseException):
    """Ends a trace that has found new state on which forward depends."""


@dataclass(slots=True)
class KnownState:
    """The state that a forward is known to read; it grows from trace to trace."""

    attributes: dict[tuple[int, str], tuple[nn.Module, str]] = field(default_factory=dict)
    """Attributes by the module's address and their name; an empty name means all attributes."""
    updated: set[Place] = field(default_factory=set)
    """Numbers that forward replaces."""
    inspected: set[Place] = field(default_factory=set)
    """Updated numbers whose values forward reads."""

    @property
    def size(self) -> int:
        return len(self.attributes) + len(self.updated) + len(self.inspected)


def _arithmetic(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The methods of an operation with the number as the left operand, and as the right one."""
    return (
        lambda number, other: number._record(function, ABSENT, other),
        lambda number, other: number._record(function, other, ABSENT),
    )


class SymbolicNumber:
    """Replaces a number that forward updates; records arithmetic, and ends a trace that reads the value."""

    __slots__ = ("_kind", "_known", "_steps", "place")

    def __init__(self, place: Place, kind: type, known: KnownState, *steps: tuple[Any, tuple[Any, ...]]) -> None:
        self.place = place
        self._kind = kind
        self._known = known
        self._steps = steps

    def evaluate(self, number: float) -> Any:
        """The value of the recorded arithmetic for the initial value `number`."""
        for function, operands in self._steps:
            number = function(*(number if operand is ABSENT else operand for operand in operands))
        return number

    def _record(self, function: Callable[..., Any], *operands: Any) -> SymbolicNumber:
        """`ABSENT` marks this number among the operands."""
        if any(operand is not ABSENT and type(operand) not in (int, float) for operand in operands):
            self._inspect()
        return SymbolicNumber(self.place, self._kind, self._known, *self._steps, (function, operands))

    def _inspect(self, *_: Any) -> Any:
        self._known.inspected.add(self.place)
        raise RetraceNeeded

    __add__, __radd__ = _arithmetic(operator.add)
    __sub__, __rsub__ = _arithmetic(operator.sub)
    __mul__, __rmul__ = _arithmetic(operator.mul)

    def __mod__(self, other: Any) -> SymbolicNumber:
        if other == 0:
            self._inspect()
        return self._record(operator.mod, ABSENT, other)

    def __deepcopy__(self, memo: Any) -> SymbolicNumber:
        memo.numbers.append(self)
        return self

    __bool__ = __int__ = __float__ = __index__ = __complex__ = __round__ = __trunc__ = __floor__ = __ceil__ = _inspect
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __str__ = __repr__ = __format__ = _inspect
    __neg__ = __pos__ = __abs__ = __invert__ = __pow__ = __rpow__ = __truediv__ = __rtruediv__ = _inspect
    __floordiv__ = __rfloordiv__ = __rmod__ = __divmod__ = __rdivmod__ = __and__ = __or__ = __xor__ = _inspect
    __lshift__ = __rshift__ = __len__ = __iter__ = __call__ = __getitem__ = __getattr__ = __reduce_ex__ = _inspect

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The type that `isinstance` sees; a guard accepts numbers of one type only."""
        return type(self.evaluate(self._kind(1)))


class Snapshot:
    """All objects reachable from the roots, with their contents at this moment."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._contents: dict[int, tuple[Any, dict[Key, Any]]] = {}
        self.objects: dict[int, Any] = {}
        """All objects but plain values and tensors, by address."""
        self.has_tensors = False
        self._parents: dict[int, tuple[Any, Key]] = {}
        waiting = list(roots)
        while waiting:
            holder = waiting.pop()
            self.has_tensors |= isinstance(holder, torch.Tensor)
            if id(holder) in self.objects or isinstance(holder, (*PLAIN, torch.Tensor)):
                continue
            self.objects[id(holder)] = holder
            found = contents(holder)
            if found is not None:
                self._contents[id(holder)] = holder, found
                waiting.extend(found.values())
                for key, value in found.items():
                    self._parents.setdefault(id(value), (holder, key))

    def value(self, holder: Any, key: Key) -> Any:
        """The value at a place when the snapshot was taken."""
        return self._contents[id(holder)][1].get(key, ABSENT) if id(holder) in self._contents else ABSENT

    def name_of(self, holder: Any, key: Key, module: nn.Module) -> str:
        """A place in Python's notation, beginning with the path of a submodule."""
        names = {id(part): name for name, part in module.named_modules()}
        keys = [key]
        while id(holder) not in names and id(holder) in self._parents and len(keys) < _MAX_DEPTH:
            holder, key = self._parents[id(holder)]
            keys.append(key)
        name: str = names.get(id(holder), "")
        for each in reversed(keys):
            name = place_name(name, each)
        return name

    def changes(self) -> list[tuple[Any, dict[Key, Any], dict[Key, Any]]]:
        """Objects whose contents have changed since, with both contents."""
        found = []
        for holder, before in self._contents.values():
            after = contents(holder) or {}
            if not is_same(before, after):
                found.append((holder, before, after))
        return found

    def restore(self) -> None:
        for holder, before, _ in self.changes():
            set_contents(holder, before)


@contextmanager
def track_attribute_reads(known: KnownState, snapshot: Snapshot, parts: Iterable[nn.Module]) -> Iterator[None]:
    """Adds to `known` the instance attributes of modules that are read, such as a Dropout's rate, or missed.

    Attributes that forward writes before it reads them do not count.

    Raises:
        RetraceNeeded: an attribute contains tensors that are not inputs of the trace.
    """
    addresses = set(map(id, parts))

    def retrace_for_tensors(value: Any) -> None:
        """Immediately: in-place changes of a tensor that is no input could not be undone."""
        if not isinstance(value, PLAIN) and Snapshot([value]).has_tensors:
            raise RetraceNeeded

    def tracked(module: nn.Module, name: str) -> Any:
        attributes: dict[str, Any] = object.__getattribute__(module, "__dict__")
        if id(module) not in addresses:
            pass
        elif name == "__dict__":
            key = id(module), ""
            if sys._getframe(1).f_code.co_filename != _MODULE_FILE and key not in known.attributes:
                known.attributes[key] = module, ""
                retrace_for_tensors(attributes)
        elif name not in MODULE_STRUCTURE and (id(module), name) not in known.attributes:
            value = attributes.get(name, ABSENT)
            is_own = value is not ABSENT or not (name in _METHODS or _is_registered(attributes, name))
            if is_own and snapshot.value(module, ("attribute", name)) is value:
                known.attributes[id(module), name] = module, name
                retrace_for_tensors(value)
        return object.__getattribute__(module, name)

    every: Any = nn.Module
    every.__getattribute__ = tracked
    try:
        yield
    finally:
        del every.__getattribute__


def _is_registered(attributes: Mapping[str, Any], name: str) -> bool:
    """Whether the name is a parameter, buffer or submodule, which call signatures compare."""
    return any(name in attributes.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))


def may_read_types(functions: Iterable[Any]) -> bool:
    """Whether a function may call `type` on a number, which reveals a `SymbolicNumber`."""
    return any("type" in names_used(each.__code__) for each in functions if isinstance(each, types.FunctionType))


def functions_of(modules: Iterable[nn.Module], own: Callable[..., Any]) -> list[Any]:
    """Functions that a forward may run, and the modules' classes: both may contain state.

    Functions are `forward`, hooks of submodules, and methods whose names occur in these, transitively;
    functions of libraries are not searched.
    """
    parts = list(modules)
    kinds = dict.fromkeys(
        kind for part in parts for kind in type(part).__mro__ if not is_opaque(kind) and kind is not object
    )
    named: dict[str, list[Any]] = {}
    for kind in kinds:
        for name, value in vars(kind).items():
            for function in _functions_of_attribute(value):
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
        if isinstance(function, types.FunctionType) and not is_library_function(function):
            waiting += [each for name in names_used(function.__code__) for each in named.get(name, ())]
    return [*found.values(), *kinds]


def _functions_of_attribute(value: Any) -> list[Any]:
    if isinstance(value, property):
        return [each for each in (value.fget, value.fset) if each is not None]
    function = getattr(value, "__func__", value)
    return [function] if isinstance(function, types.FunctionType) else []


def place_name(name: str, key: Key) -> str:
    """The place at `key` of the object called `name`, in Python's notation."""
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
