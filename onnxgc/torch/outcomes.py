"""What a forward gives and what it leaves behind, as tensors in a row and the rest."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from onnxgc.errors import PlanError


@dataclass(frozen=True, slots=True)
class Left:
    """A tensor that forward has put into an attribute of a module, or in the place of a buffer."""

    module: nn.Module
    name: str
    is_buffer: bool

    def set(self, value: torch.Tensor) -> None:
        holder = self.module._buffers if self.is_buffer else vars(self.module)
        holder[self.name] = value


class Watched:
    """The attributes and buffers of modules, to tell afterwards which tensors have come."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = dict(_held(module))

    def left(self) -> dict[Left, torch.Tensor]:
        """Tensors that were not there."""
        return {
            left: value
            for left, value in _held(self._module)
            if isinstance(value, torch.Tensor) and self._before.get(left) is not value
        }

    def put_back(self) -> None:
        """Attributes as they were, where they now hold other tensors."""
        for left in self.left():
            if left.is_buffer or left in self._before:
                left.set(self._before[left])
            else:
                del vars(left.module)[left.name]


def _held(module: nn.Module) -> Iterator[tuple[Left, Any]]:
    for part in module.modules():
        for name, value in vars(part).items():
            yield Left(part, name, False), value
        for name, value in part._buffers.items():
            yield Left(part, name, True), value


class _Place:
    """Stands where a tensor was inside of an object."""


@dataclass(frozen=True, slots=True)
class _Object:
    """An object like one that forward gave, with places for its tensors."""

    template: Any
    places: tuple[_Place, ...]

    @classmethod
    def of(cls, value: Any) -> tuple[_Object, list[torch.Tensor]]:
        with _Collecting() as collecting:
            try:
                template = copy.deepcopy(value)
            except Exception as error:  # Objects refuse to be copied in as many ways as there are.
                if not collecting.found:
                    return cls(value, ()), []
                raise PlanError(
                    f"forward returns a '{type(value).__name__}', whose tensors cannot be told; return them "
                    "in a tuple, a dictionary or a dataclass"
                ) from error
        if not collecting.found:
            return cls(value, ()), []
        return cls(template, tuple(collecting.places)), collecting.found

    def filled(self, tensors: Iterator[torch.Tensor]) -> Any:
        if not self.places:
            return self.template
        return copy.deepcopy(self.template, {id(place): next(tensors) for place in self.places})


class _Collecting(TorchFunctionMode):
    """In it a deep copy has places instead of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []
        self.places: list[_Place] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        self.found.append(args[0])
        self.places.append(_Place())
        return self.places[-1]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What does not change from call to call: `leaves` has None for a tensor."""

    spec: pytree.TreeSpec
    leaves: tuple[_Object | None, ...]
    left: tuple[Left, ...]

    @classmethod
    def of(cls, made: Any, left: dict[Left, torch.Tensor]) -> tuple[Outcome, tuple[torch.Tensor, ...]]:
        """The outcome of a forward that gave `made`, and all tensors of it."""
        leaves, spec = pytree.tree_flatten(made)
        rest: list[_Object | None] = []
        tensors: list[torch.Tensor] = []
        for leaf in leaves:
            opened, inside = (None, [leaf]) if isinstance(leaf, torch.Tensor) else _Object.of(leaf)
            rest.append(opened)
            tensors += inside
        return cls(spec, tuple(rest), tuple(left)), (*tensors, *left.values())

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What forward gives with these tensors, which also come where it leaves some."""
        given = iter(tensors)
        leaves = [next(given) if rest is None else rest.filled(given) for rest in self.leaves]
        for left in self.left:
            left.set(next(given))
        return pytree.tree_unflatten(leaves, self.spec)
