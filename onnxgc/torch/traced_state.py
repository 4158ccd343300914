"""The Python state of a module while its forward is traced."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxgc.errors import PlanError
from onnxgc.torch.call_signature import CallSignature
from onnxgc.torch.forward_outputs import Outcome
from onnxgc.torch.module_state import (
    KnownState,
    RetraceNeeded,
    Snapshot,
    functions_of,
    may_read_types,
    track_attribute_reads,
)
from onnxgc.torch.object_contents import is_cached
from onnxgc.torch.state_guard import Binding, StateGuard


class TracedState:
    """The state on which a forward depends: substituted during a trace, and restored after it."""

    def __init__(self, call: CallSignature, own: Callable[..., Any], known: KnownState) -> None:
        """`own` is the forward that runs."""
        functions = functions_of(call.module.modules(), own)
        self._known = known
        self._may_update = not may_read_types(functions)
        self._size = known.size
        self._module = call.module
        arguments = call.objects
        self._roots = [call.module, *functions, arguments]
        self.guard = StateGuard(known, call.module, functions, arguments)
        binding = self.guard.bind(arguments)
        assert binding is not None, "a guard accepts the call that it was made for"
        self.binding = binding
        self._before = Snapshot(self._roots)
        self._cached = [each for each in self._before.objects.values() if is_cached(each)]
        self._tensors = (*call.tensors, *other_tensors(call.tensors, binding))

    def release(self) -> None:
        """Releases the call, whose tensors a trace would otherwise keep live."""
        self._tensors, self.binding, self._before = (), Binding(), Snapshot(())
        self._roots, self._cached = [], []

    def run(
        self, forward: Callable[[], Any], replacements: Sequence[torch.Tensor]
    ) -> tuple[Outcome, tuple[torch.Tensor, ...]]:
        """Runs forward with a replacement for each tensor, and restores the state.

        Raises:
            RetraceNeeded: forward has read state that was not known.
        """
        addresses = map(id, self._tensors)
        self._clear_caches()
        try:
            self.guard.substitute(self.binding, dict(zip(addresses, replacements, strict=True)))
            substituted = Snapshot(self._roots)
            try:
                with track_attribute_reads(self._known, substituted, self._module.modules()):
                    result = forward()
            finally:
                if self._has_new_state(substituted):
                    raise RetraceNeeded
            return Outcome.from_result(result, substituted, self._module, self.binding)
        finally:
            self._before.restore()
            self._clear_caches()

    def _clear_caches(self) -> None:
        """Clears caches of `functools`: tensors of a trace must neither enter nor leave it."""
        for each in self._cached:
            each.cache_clear()

    def _has_new_state(self, substituted: Snapshot) -> bool:
        """Whether forward has read unknown state, or replaced a number that may become symbolic."""
        nodes = {id(holder): node for node, holder in self.binding.objects.items()}
        for holder, before, after in substituted.changes():
            node = nodes.get(id(holder))
            for key in node.keys if node is not None and self._may_update else ():
                one, other = before.get(key), after.get(key)
                if one is not other and {type(one), type(other)} <= {int, float}:
                    self._known.updated.add((id(holder), key))
        return self._known.size != self._size

    def check(self) -> None:
        """Restores the state and raises if backward has changed it.

        Raises:
            PlanError: backward has changed an object.
        """
        changes = self._before.changes()
        if changes:
            self._before.restore()
            holder, before, after = changes[0]
            changed = (key for key in (*after, *before) if before.get(key) is not after.get(key))
            place = self._before.name_of(holder, next(changed), self._module)
            raise PlanError(
                f"backward changes '{place}', which a planned step does not repeat; put such a hook on the "
                "whole module or on its parameters"
            )


def other_tensors(tensors: Sequence[torch.Tensor], binding: Binding) -> tuple[torch.Tensor, ...]:
    """The distinct tensors of the state that are not among the call's."""
    present = set(map(id, tensors))
    others = {id(one): one for one in binding.tensors if id(one) not in present}
    return tuple(others.values())
