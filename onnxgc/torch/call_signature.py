"""Calls of a module, and which of them are of one kind, so that one trace does for all of them."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from onnxgc.errors import PlanError
from onnxgc.torch.module_state import HOOKS, disambiguate, kind_of
from onnxgc.torch.object_contents import contents


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
        """State, arguments and keywords with these tensors; more than these are left alone."""
        count = len(self.names)
        given = iter(tensors[count:])
        leaves = [next(given) if leaf is _Tensor.HERE else leaf for leaf in self.leaves]
        arguments, settings = pytree.tree_unflatten(leaves, self.spec)
        return dict(zip(self.names, tensors[:count], strict=True)), arguments, settings


@dataclass(frozen=True, slots=True)
class CallSignature:
    """One call of a module: its form, and the tensors of its state and its arguments."""

    module: nn.Module
    form: Form
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, module: nn.Module, arguments: Sequence[Any], settings: Mapping[str, Any]) -> CallSignature:
        leaves, spec = pytree.tree_flatten((tuple(arguments), dict(settings)))
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        others = (_Tensor.HERE if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(module, Form(tuple(state), tuple(others), spec), (*state.values(), *tensors))

    @property
    def objects(self) -> list[Any]:
        """Arguments that hold others, but for those that PyTorch takes apart itself."""
        return [leaf for leaf in self.form.leaves if leaf is not _Tensor.HERE and contents(leaf) is not None]

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
        """What a trace depends on, but for what objects hold that forward reads."""
        kinds = tuple(map(kind_of, self.tensors))
        parts = tuple(self.module.modules())
        hooks = tuple(tuple(vars(part)[name]) for part in parts[1:] for name in HOOKS if vars(part)[name])
        modes = tuple(part.training for part in parts)
        others = tuple(
            disambiguate(leaf) if contents(leaf) is None else type(leaf) for leaf in self.form.leaves
        )
        return (
            *(repr(self.form.spec), self.form.names, others, kinds, repeated(self.tensors), parts, hooks),
            *(modes, _settings()),
        )


def repeated(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each tensor, where it stands first."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(one), index) for index, one in enumerate(tensors))


def _settings() -> Hashable:
    """Settings of PyTorch by which operators are chosen while a module runs."""
    casts = ((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    attention: Any = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        *(*casts, torch.is_autocast_cache_enabled()),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_mkldnn_enabled(),
        *(attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled(), attention.math_sdp_enabled()),
    )
