"""The contents of Python objects by key: the state that a forward may keep can be enumerated and changed.

Containers, instances, arrays, and functions with the variables that they use have contents. All other objects
(tensors, locks, loggers, objects of PyTorch) are opaque.
"""

import contextvars
import enum
import functools
import os
import random
import sys
import sysconfig
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

Key = tuple[str, Any]
"""The kind of a place in an object, and its name or index."""

PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), slice, range, enum.Enum, np.generic),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types whose values differ if and only if their representations do."""
_CONTAINERS = (dict, list, tuple, deque, set, types.SimpleNamespace)
_OPAQUE_PACKAGES = frozenset(
    {"accelerate", "deepspeed", "lightning", "numpy", "onnxgc", "pytorch_lightning", "torch", "tqdm"}
)
"""Packages whose objects are opaque: they contain the state of a whole run."""
_INSPECTED_STANDARD_MODULES = frozenset({"__main__", "argparse", "collections"})
LIBRARIES = (sysconfig.get_paths()["stdlib"], f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "absent"})()
"""The value of a missing entry."""


def contents(holder: Any) -> dict[Key, Any] | None:
    """The contents of an object; None if it is opaque."""
    if isinstance(holder, (*PLAIN, torch.Tensor)):
        return None
    if isinstance(holder, types.FunctionType):
        return _function_contents(holder)
    if isinstance(holder, types.MethodType):
        return {("method", "object"): holder.__self__, ("method", "function"): holder.__func__}
    if is_cached(holder):
        return {("cached", ""): holder.__wrapped__}
    if isinstance(holder, contextvars.ContextVar):
        return {("context", ""): holder.get(None)}
    if isinstance(holder, weakref.ReferenceType):
        referent = holder()
        return None if isinstance(referent, torch.Tensor) else {("referent", ""): referent}
    if isinstance(holder, functools.partial):
        return {("partial", name): getattr(holder, name) for name in ("func", "args", "keywords")}
    if isinstance(holder, type):
        return None if is_opaque(holder) else dict(_class_attributes(holder))
    if isinstance(holder, np.ndarray):
        return None if holder.dtype.hasobject else {("array", ""): holder.tobytes()}
    state = _generator_state(holder)
    if state is not None:
        return {("random", ""): state}
    if not isinstance(holder, (*_CONTAINERS, nn.Module)) and is_opaque(type(holder)):
        return None
    found: dict[Key, Any] = {}
    if isinstance(holder, dict):
        found.update((("item", key), value) for key, value in dict.items(holder))
    elif isinstance(holder, list | tuple | deque):
        found.update((("at", index), value) for index, value in enumerate(holder))
    elif isinstance(holder, set):
        found["elements", ""] = frozenset(holder)
    found.update((("attribute", name), value) for name, value in getattr(holder, "__dict__", {}).items())
    found.update((("slot", name), getattr(holder, name)) for name in _filled_slots(holder))
    return found


def set_contents(holder: Any, wanted: Mapping[Key, Any]) -> None:
    """Gives an object exactly these contents, by the keys of `contents`."""
    present = contents(holder)
    assert present is not None, "an opaque object is never changed"
    if isinstance(holder, list):
        list.__setitem__(holder, slice(None), _of_kind("at", wanted))
    elif isinstance(holder, deque):
        deque.clear(holder)
        deque.extend(holder, _of_kind("at", wanted))
    for key in present:
        if key not in wanted:
            _delete_entry(holder, key)
    for key, value in wanted.items():
        if present.get(key, ABSENT) is not value:
            _set_entry(holder, key, value)
    if isinstance(holder, dict):
        items = {name: value for (kind, name), value in wanted.items() if kind == "item"}
        if list(items) != list(dict.keys(holder)):
            base = _base_class(holder)
            base.clear(holder)
            for name, value in items.items():
                base.__setitem__(holder, name, value)


def is_same(before: Mapping[Key, Any], after: Mapping[Key, Any]) -> bool:
    """Whether two contents have identical values in the same order."""
    if list(before) != list(after):
        return False
    pairs = zip(before, before.values(), after.values(), strict=True)
    return all(one is other or (key[0] in _BY_VALUE and one == other) for key, one, other in pairs)


_BY_VALUE = ("array", "random", "elements")
"""Kinds of places whose values `contents` creates at each call."""


def is_cached(function: Any) -> bool:
    """Whether a function caches results by `functools.cache` or `lru_cache`."""
    return isinstance(function, functools._lru_cache_wrapper)


def is_opaque(kind: type) -> bool:
    """Whether instances of a class are opaque."""
    package = kind.__module__.partition(".")[0]
    return package in _OPAQUE_PACKAGES or (
        package in sys.stdlib_module_names and package not in _INSPECTED_STANDARD_MODULES
    )


def is_library_function(function: types.FunctionType) -> bool:
    """Whether a function belongs to Python or an installed package."""
    path = function.__code__.co_filename
    return path.startswith("<frozen") or any(part in path for part in LIBRARIES)


@functools.lru_cache(maxsize=4096)
def names_used(code: types.CodeType) -> frozenset[str]:
    """Names of globals and attributes that a function and its inner functions use."""
    inner = (names_used(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _function_contents(function: types.FunctionType) -> dict[Key, Any] | None:
    package = function.__module__.partition(".")[0] if function.__module__ else ""
    if package in _OPAQUE_PACKAGES:
        return None
    found: dict[Key, Any] = {
        ("code", ""): function.__code__,
        ("code", "defaults"): function.__defaults__,
        ("code", "keywords"): function.__kwdefaults__,
    }
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # A cell is empty until its variable is assigned.
        if (value := _cell(cell)) is not ABSENT:
            found["cell", name] = value
    if not is_library_function(function):
        names = sorted(names_used(function.__code__))
        for name in names:
            value = function.__globals__.get(name, ABSENT)
            if isinstance(value, types.ModuleType):
                if _is_own_module(value):
                    read = (attribute for attribute in names if attribute in vars(value))
                    found.update((("module", (name, part)), vars(value)[part]) for part in read)
            elif value is not ABSENT and not isinstance(value, types.BuiltinFunctionType):
                found["global", name] = value
    found.update((("attribute", name), value) for name, value in vars(function).items())
    return found


def _is_own_module(module: types.ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    return path is not None and not any(part in path for part in LIBRARIES)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _class_attributes(kind: type) -> Iterator[tuple[Key, Any]]:
    """A class's own data attributes."""
    for name, value in vars(kind).items():
        is_code = callable(value) or hasattr(value, "__get__") or isinstance(value, types.ModuleType)
        is_code = is_code and not is_cached(value)
        if not name.startswith("__") and not is_code:
            yield ("class", name), value


def _generator_state(holder: Any) -> str | None:
    """The state of a random generator of Python or NumPy; None for other objects."""
    if isinstance(holder, random.Random):
        return repr(holder.getstate())
    if isinstance(holder, np.random.Generator):
        return repr(holder.bit_generator.state)
    return repr(holder.get_state()) if isinstance(holder, np.random.RandomState) else None


def _filled_slots(holder: Any) -> Iterator[str]:
    for kind in type(holder).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = f"_{kind.__name__.lstrip('_')}{name}" if _is_private(name) else name
            if isinstance(vars(kind).get(mangled), types.MemberDescriptorType) and hasattr(holder, mangled):
                yield mangled


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _of_kind(kind: str, entries: Mapping[Key, Any]) -> list[Any]:
    return [value for key, value in entries.items() if key[0] == kind]


def _base_class(holder: dict[Any, Any]) -> Any:
    """The type whose methods change a dictionary, regardless of overrides in its class."""
    return OrderedDict if isinstance(holder, OrderedDict) else dict


def _set_entry(holder: Any, key: Key, value: Any) -> None:
    kind, name = key
    match kind:
        case "item":
            _base_class(holder).__setitem__(holder, name, value)
        case "attribute":
            vars(holder)[name] = value
        case "slot":
            object.__setattr__(holder, name, value)
        case "class":
            setattr(holder, name, value)
        case "elements":
            holder.clear()
            holder.update(value)
        case "array":
            np.copyto(holder, np.frombuffer(value, holder.dtype).reshape(holder.shape))
        case "context":
            holder.set(value)
        case "global":
            holder.__globals__[name] = value
        case "module":
            setattr(holder.__globals__[name[0]], name[1], value)
        case "cell":
            holder.__closure__[holder.__code__.co_freevars.index(name)].cell_contents = value


def _delete_entry(holder: Any, key: Key) -> None:
    kind, name = key
    match kind:
        case "item":
            _base_class(holder).__delitem__(holder, name)
        case "attribute":
            del vars(holder)[name]
        case "slot":
            object.__delattr__(holder, name)
        case "class":
            delattr(holder, name)
        case "global":
            del holder.__globals__[name]
        case "module":
            delattr(holder.__globals__[name[0]], name[1])
        case "cell":
            del holder.__closure__[holder.__code__.co_freevars.index(name)].cell_contents
