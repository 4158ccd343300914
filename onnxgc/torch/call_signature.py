"""Signatures of a module's calls: calls with equal signatures may share a trace."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from onnxgc.errors import PlanError
from onnxgc.torch.module_state import HOOKS
from onnxgc.torch.object_contents import contents
from onnxgc.torch.state_guard import comparison_key, tensor_signature

_TENSOR = object()
"""Takes the position of a tensor among the leaves of a call."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call without its tensors: the names of the module's state, the other leaves, and their tree."""

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    def fill(self, tensors: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], Any, Any]:
        """State, arguments and keywords with these tensors, of which those beyond the call's are ignored."""
        count = len(self.names)
        given = iter(tensors[count:])
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.leaves]
        arguments, settings = pytree.tree_unflatten(leaves, self.spec)
        return dict(zip(self.names, tensors[:count], strict=True)), arguments, settings


@dataclass(frozen=True, slots=True)
class CallSignature:
    """A call of a module: its form, and the tensors of its state and its arguments."""

    module: nn.Module
    form: CallForm
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def from_call(cls, module: nn.Module, arguments: Sequence[Any], settings: Mapping[str, Any]) -> CallSignature:
        leaves, spec = pytree.tree_flatten((tuple(arguments), dict(settings)))
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        others = (_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(module, CallForm(tuple(state), tuple(others), spec), (*state.values(), *tensors))

    @property
    def objects(self) -> list[Any]:
        """Arguments with contents of which PyTorch's pytrees do not know."""
        others = (leaf for leaf in self.form.leaves if leaf is not _TENSOR)
        return [leaf for leaf in others if contents(leaf) is not None]

    def needs_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    def is_traced(self) -> bool:
        """Whether another trace records the call, or a function transform wraps its tensors."""
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return True
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        return any(isinstance(one, FakeTensor | FunctionalTensor) or is_wrapped(one) for one in self.tensors)

    def check_parameters(self) -> None:
        """Rejects uninitialised and sharded parameters.

        Raises:
            PlanError: a submodule is sharded by itself, or has not been run yet.
        """
        for name, tensor in zip(self.form.names, self.tensors, strict=False):
            if nn.parameter.is_lazy(tensor):
                raise PlanError(f"'{name}' has no shape before a first call; call the module once, then plan it")
            if hasattr(tensor, "full_tensor"):
                raise PlanError(
                    f"'{name}' is only a shard when forward begins; plan the modules that are sharded one by "
                    "one, as in fully_shard(checkpoint(block, ...))"
                )

    def key(self) -> Hashable:
        """Everything on which a trace depends, except for the contents of objects that forward reads."""
        signatures = tuple(map(tensor_signature, self.tensors))
        parts = tuple(self.module.modules())
        hooks = tuple(tuple(vars(part)[name]) for part in parts[1:] for name in HOOKS if vars(part)[name])
        modes = tuple(part.training for part in parts)
        others = tuple(comparison_key(leaf) if contents(leaf) is None else type(leaf) for leaf in self.form.leaves)
        repetitions = first_occurrences(self.tensors)
        return (
            *(repr(self.form.spec), self.form.names, others, signatures, repetitions, parts, hooks),
            *(modes, _global_settings()),
        )


def first_occurrences(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each tensor, the index of its first occurrence."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(one), index) for index, one in enumerate(tensors))


def _global_settings() -> Hashable:
    """Settings of PyTorch that select operators."""
    casts = ((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    attention: Any = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        *(*casts, torch.is_autocast_cache_enabled()),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_mkldnn_enabled(),
        *(attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled(), attention.math_sdp_enabled()),
    )
