"""Calls of a module, and which of them are of one kind, so that one trace does for all of them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from onnxgc.errors import PlanError

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), slice, range, enum.Enum, np.generic),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types whose values are told apart by what is written for them."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Tensor(enum.Enum):
    """Stands where a tensor was."""

    HERE = enum.auto()


@dataclass(frozen=True, slots=True)
class Form:
    """All of a call but its tensors: the names of the module's state, the other leaves, and their tree."""

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], Any, Any]:
        """State, arguments and keywords with these tensors."""
        count = len(self.names)
        given = iter(tensors[count:])
        leaves = [next(given) if leaf is _Tensor.HERE else leaf for leaf in self.leaves]
        arguments, settings = pytree.tree_unflatten(leaves, self.spec)
        return dict(zip(self.names, tensors[:count], strict=True)), arguments, settings


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module: its form, and the tensors of its state and its arguments."""

    module: nn.Module
    form: Form
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, module: nn.Module, arguments: Sequence[Any], settings: Mapping[str, Any]) -> Call:
        leaves, spec = pytree.tree_flatten((tuple(arguments), dict(settings)))
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        others = (_Tensor.HERE if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(module, Form(tuple(state), tuple(others), spec), (*state.values(), *tensors))

    def needs_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    def is_inside_a_trace(self) -> bool:
        """Whether somebody else records what happens here, or transforms it."""
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return True
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        return any(isinstance(one, FakeTensor | FunctionalTensor) or is_wrapped(one) for one in self.tensors)

    def check(self) -> None:
        """Refuse parameters that are not there, or of which only a shard is.

        Raises:
            PlanError: a submodule is sharded by itself, or has not been run yet.
        """
        for name, tensor in zip(self.form.names, self.tensors, strict=False):
            if nn.parameter.is_lazy(tensor):
                raise PlanError(
                    f"'{name}' has no shape before a first call; call the module once, then plan it"
                )
            if hasattr(tensor, "full_tensor"):
                raise PlanError(
                    f"'{name}' is only a shard when forward begins; plan the modules that are sharded one by "
                    "one, as in fully_shard(checkpoint(block, ...))"
                )

    def key(self) -> Hashable:
        """What a trace depends on, but for the attributes that forward reads."""
        kinds = tuple(
            (tuple(one.shape), one.stride(), one.dtype, one.device, one.requires_grad, type(one))
            for one in self.tensors
        )
        first: dict[int, int] = {}
        repeated = tuple(first.setdefault(id(one), index) for index, one in enumerate(self.tensors))
        parts = tuple(self.module.modules())
        hooks = tuple(tuple(vars(part)[name]) for part in parts[1:] for name in _HOOKS if vars(part)[name])
        modes = (torch.get_default_dtype(), *(part.training for part in parts))
        casts = tuple(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        )
        others = tuple(map(told_apart, self.form.leaves))
        return repr(self.form.spec), self.form.names, others, kinds, repeated, parts, hooks, modes, casts


@dataclass(frozen=True, slots=True)
class Read:
    """An attribute of a module that forward has read, as it was."""

    module: nn.Module
    name: str
    value: Hashable

    def holds(self) -> bool:
        return told_apart(vars(self.module).get(self.name)) == self.value


@contextmanager
def attributes_read() -> Iterator[list[Read]]:
    """Collects what is read of modules' own attributes, such as the rate of a Dropout.

    What has changed at the end is left out: forward itself has changed it, as it does with a counter.
    """
    found: dict[tuple[int, str], Read] = {}
    kept: list[Read] = []

    def noted(module: nn.Module, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if name not in _OF_EVERY_MODULE and not isinstance(value, torch.Tensor | nn.Module):
            key = id(module), name
            if key not in found and name in object.__getattribute__(module, "__dict__"):
                found[key] = Read(module, name, told_apart(value))
        return value

    every: Any = nn.Module
    every.__getattribute__ = noted
    try:
        yield kept
    finally:
        del every.__getattribute__
        kept += [read for read in found.values() if read.holds()]


def told_apart(value: Any) -> Hashable:
    """Something that differs for values that a forward may tell apart; other objects are only themselves."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return np.ndarray, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, list | tuple):
        return type(value), tuple(map(told_apart, value))
    if isinstance(value, dict):
        return type(value), tuple((told_apart(key), told_apart(entry)) for key, entry in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [part.name for part in dataclasses.fields(value)]
        return type(value), tuple(told_apart(getattr(value, name, None)) for name in names)
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
