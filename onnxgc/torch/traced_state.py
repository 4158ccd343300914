"""The Python state of a module while its forward is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxgc.errors import PlanError
from onnxgc.torch.call_signature import CallSignature
from onnxgc.torch.forward_outputs import Outcome
from onnxgc.torch.module_state import (
    Binding,
    MoreState,
    Pattern,
    Snapshot,
    StateRead,
    ask_for_types,
    attributes_read,
    functions_of,
)
from onnxgc.torch.object_contents import is_cached


class TracedState:
    """The state that a forward depends on: found, replaced by what a trace uses, put back."""

    def __init__(self, call: CallSignature, own: Callable[..., Any], known: StateRead) -> None:
        """`own` is the forward that runs."""
        functions = functions_of(call.module.modules(), own)
        self._known = known
        self._may_count = not ask_for_types(functions)
        self._size = known.size
        self._module = call.module
        arguments = call.objects
        self._roots = [call.module, *functions, arguments]
        self.pattern = Pattern(known, call.module, functions, arguments)
        binding = self.pattern.bind(arguments)
        assert binding is not None, "a pattern describes what is there"
        self.binding = binding
        self._before = Snapshot(self._roots)
        self._cached = [each for each in self._before.objects.values() if is_cached(each)]
        self._tensors = (*call.tensors, *other_tensors(call.tensors, binding))

    def release(self) -> None:
        """Lets go of the call, whose tensors a trace would keep else."""
        self._tensors, self.binding, self._before = (), Binding(), Snapshot(())
        self._roots, self._cached = [], []

    def run(
        self, forward: Callable[[], Any], stand_ins: Sequence[torch.Tensor]
    ) -> tuple[Outcome, tuple[torch.Tensor, ...]]:
        """Runs forward on stand-ins for all tensors, and leaves the state as it was.

        Raises:
            MoreState: forward has read more of it than was known.
        """
        addresses = map(id, self._tensors)
        self._clear_caches()
        try:
            self.pattern.swap(self.binding, dict(zip(addresses, stand_ins, strict=True)))
            swapped = Snapshot(self._roots)
            try:
                with attributes_read(self._known, swapped, self._module.modules()):
                    made = forward()
            finally:
                if self._is_more_known(swapped):
                    raise MoreState
            return Outcome.of(made, swapped, self._module, self.binding)
        finally:
            self._before.put_back()
            self._clear_caches()

    def _clear_caches(self) -> None:
        """Of `functools`: a trace can use nothing from before, and leaves nothing that is of use."""
        for each in self._cached:
            each.cache_clear()

    def _is_more_known(self, swapped: Snapshot) -> bool:
        """Whether forward has read more than is known, or replaced a number that it may just count on."""
        held = {id(holder): node for node, holder in self.binding.objects.items()}
        for holder, before, after in swapped.changes():
            node = held.get(id(holder))
            for key in node.keys if node is not None and self._may_count else ():
                one, other = before.get(key), after.get(key)
                if one is not other and {type(one), type(other)} <= {int, float}:
                    self._known.counted.add((id(holder), key))
        return self._known.size != self._size

    def check(self) -> None:
        """Refuse what backward has changed, which would not change again."""
        changes = self._before.changes()
        if changes:
            self._before.put_back()
            holder, before, after = changes[0]
            changed = (key for key in (*after, *before) if before.get(key) is not after.get(key))
            place = self._before.name_of(holder, next(changed), self._module)
            raise PlanError(
                f"backward changes '{place}', which a planned step does not do again; put such a hook on the "
                "whole module or on its parameters"
            )


def other_tensors(tensors: Sequence[torch.Tensor], binding: Binding) -> tuple[torch.Tensor, ...]:
    """Each tensor of the state once that is none of the call's."""
    there = set(map(id, tensors))
    others = {id(one): one for one in binding.tensors if id(one) not in there}
    return tuple(others.values())
