"""The results and side effects of a forward: its tensors in order, and everything that is constant."""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from onnxgc.errors import PlanError
from onnxgc.torch.module_state import Snapshot, SymbolicNumber, place_name
from onnxgc.torch.object_contents import ABSENT, PLAIN, Key, contents, set_contents
from onnxgc.torch.state_guard import Binding, ObjectNode


@dataclass(frozen=True, slots=True)
class SideEffect:
    """A change of an object, of all its contents or of some keys.

    `target` is the object, or its node if other calls have other objects.
    """

    target: Any
    keys: tuple[Key, ...]
    deleted: tuple[Key, ...]
    is_whole: bool

    def apply(self, values: Iterable[Any], binding: Binding) -> None:
        holder = binding.objects[self.target] if isinstance(self.target, ObjectNode) else self.target
        wanted = {} if self.is_whole else dict(contents(holder) or {})
        for key in self.deleted:
            wanted.pop(key, None)
        wanted.update(zip(self.keys, values, strict=True))
        set_contents(holder, wanted)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The constant part of a forward's results: leaves, with None for each tensor.

    If forward has side effects or returns objects that are not plain values, `template` has all values.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    template: _Template | None = None
    effects: tuple[SideEffect, ...] = ()

    @classmethod
    def from_result(
        cls, result: Any, changed: Snapshot, module: nn.Module, binding: Binding
    ) -> tuple[Outcome, tuple[torch.Tensor, ...]]:
        """The outcome of a forward with this result and the changes since a snapshot, and all of its tensors.

        `binding` has the objects that the next call may replace.

        Raises:
            PlanError: a change cannot be repeated in each call.
        """
        fixed = (tuple, type, types.FunctionType)
        nodes = {
            id(one): node for node, one in binding.objects.items() if node.root is None and not isinstance(one, fixed)
        }
        changes = list(_effects(changed, module, nodes))
        effects, values = [effect for effect, _ in changes], [entries for _, entries in changes]
        leaves, spec = pytree.tree_flatten(result)
        if not effects and all(map(_is_plain, leaves)):
            tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            return cls(spec, tuple(None if isinstance(x, torch.Tensor) else (x,) for x in leaves)), tensors
        template, tensors = _Template.from_values([result, *values], nodes, changed.objects)
        return cls(spec, (), template, tuple(effects)), tensors

    def fill(self, tensors: Sequence[torch.Tensor], binding: Binding) -> Any:
        """The result of forward with these tensors; applies its side effects."""
        if self.template is None:
            given = iter(tensors)
            leaves = [next(given) if leaf is None else leaf[0] for leaf in self.leaves]
            return pytree.tree_unflatten(leaves, self.spec)
        result, *values = self.template.fill(tensors, binding)
        for effect, entries in zip(self.effects, values, strict=True):
            effect.apply(entries, binding)
        return result


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is not SymbolicNumber and isinstance(leaf, (torch.Tensor, *PLAIN))


def _effects(
    changed: Snapshot, module: nn.Module, nodes: Mapping[int, ObjectNode]
) -> Iterator[tuple[SideEffect, list[Any]]]:
    fixed = {
        id(vars(part)[kind]): (name, description)
        for name, part in module.named_modules()
        for kind, description in (("_parameters", "a parameter"), ("_modules", "a submodule"))
    }
    addresses = set(map(id, module.modules()))
    for holder, before, after in changed.changes():
        keys = [key for key, value in after.items() if before.get(key, ABSENT) is not value]
        if id(holder) in fixed:
            name, description = fixed[id(holder)]
            wrong = place_name(name, ("attribute", next(iter([*keys, *before]))[1]))
            raise PlanError(
                f"forward sets '{wrong}', {description}; call the module once before it is planned, or set "
                "it outside of forward"
            )
        if any(kind == "random" for kind, _ in keys):
            raise PlanError(
                "forward draws random numbers from a generator of Python or NumPy, which would be the same "
                "in each step; draw them by torch, or pass them to forward"
            )
        deleted = tuple(key for key in before if key not in after)
        rest = [key for key in before if key in after]
        is_reordered = isinstance(holder, list | deque) or list(after)[: len(rest)] != rest
        is_whole = is_reordered and id(holder) not in addresses
        if is_whole:
            keys = list(after)
        effect = SideEffect(nodes.get(id(holder), holder), tuple(keys), deleted, is_whole)
        yield effect, [after[key] for key in keys]


class _Place:
    """Takes the position of a tensor, or of an object that existed before, inside an object."""


@dataclass(frozen=True, slots=True)
class _Template:
    """A value with places for its tensors, and for the objects of a call."""

    value: list[Any]
    tensors: tuple[_Place, ...]
    objects: tuple[tuple[ObjectNode, _Place], ...]
    kept: tuple[Any, ...]
    """Objects that are never copied: they existed before forward, or cannot be copied."""
    numbers: tuple[SymbolicNumber, ...]

    @classmethod
    def from_values(
        cls, values: Sequence[Any], nodes: Mapping[int, ObjectNode], known: Mapping[int, Any]
    ) -> tuple[_Template, tuple[torch.Tensor, ...]]:
        """The template of some values, and its tensors.

        `known` maps the address of each object that existed before forward to the object, `nodes` to its
        guard node.

        Raises:
            PlanError: a value contains tensors but cannot be copied.
        """
        memo = _Memo(nodes, known)
        template = []
        with _CollectTensors() as collecting:
            for value in values:
                count = len(collecting.tensors)
                try:
                    template.append(copy.deepcopy(value, memo))
                except Exception as error:  # `copy.deepcopy` may raise anything.
                    if len(collecting.tensors) > count or Snapshot([value]).has_tensors:
                        raise PlanError(
                            f"forward returns or keeps a '{type(value).__name__}', whose tensors cannot be "
                            "found; use a tuple, a dictionary or a dataclass in its place"
                        ) from error
                    template.append(value)
                    memo.kept[id(value)] = value
        places, objects = tuple(collecting.places), tuple(memo.places.items())
        result = cls(template, places, objects, tuple(memo.kept.values()), tuple(memo.numbers))
        return result, tuple(collecting.tensors)

    def fill(self, tensors: Iterable[torch.Tensor], binding: Binding) -> Any:
        memo: dict[int, Any] = {id(place): one for place, one in zip(self.tensors, tensors, strict=True)}
        memo.update((id(place), binding.objects[node]) for node, place in self.objects)
        memo.update((id(one), one) for one in self.kept)
        memo.update((id(number), number.evaluate(binding.numbers[number.place])) for number in self.numbers)
        return copy.deepcopy(self.value, memo)


class _Memo(dict[int, Any]):
    """The memo of a deep copy that does not copy objects from before."""

    def __init__(self, nodes: Mapping[int, ObjectNode], known: Mapping[int, Any]) -> None:
        super().__init__()
        self._nodes = nodes
        self._known = known
        self.places: dict[ObjectNode, _Place] = {}
        self.kept: dict[int, Any] = {}
        self.numbers: list[SymbolicNumber] = []

    def get(self, address: int, default: Any = None) -> Any:
        node = self._nodes.get(address)
        if node is not None:
            return self.places.setdefault(node, _Place())
        # A tuple may contain tensors of the trace.
        if address in self._known and not isinstance(self._known[address], tuple):
            self.kept[address] = self._known[address]
            return self._known[address]
        return super().get(address, default)


class _CollectTensors(TorchFunctionMode):
    """Replaces tensors by places in deep copies, and collects them."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self.places: list[_Place] = []

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        self.tensors.append(args[0])
        self.places.append(_Place())
        return self.places[-1]
