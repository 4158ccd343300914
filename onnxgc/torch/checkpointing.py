"""A plan under a memory budget for a module as it is: its forward and backward, computed in another order."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_function
from torch.func import functional_call
from torch.utils import _pytree as pytree

from onnxgc.errors import BudgetError, OnnxgcError, PlanError
from onnxgc.planning.budgets import Budget, parse_budget
from onnxgc.rematerialisation.floors import floor_of_problem
from onnxgc.rematerialisation.least_peak import least_peak
from onnxgc.rematerialisation.problem import OperatorProblem, judge
from onnxgc.rematerialisation.search import (
    BudgetedSequence,
    NoSequence,
    Order,
    SearchOptions,
    within_budget,
)
from onnxgc.torch.joint import Costs, Estimated, JointStep, joint_step
from onnxgc.torch.measuring import Measured
from onnxgc.torch.partition import runnable, split
from onnxgc.tracing.devices import device as find_device

DEFAULT_TIME_LIMIT_SECONDS = 10.0
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """The memory of one tensor that is held from forward to backward, and the operator that makes it."""

    operator: str
    dtype: torch.dtype
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """What was decided for one kind of call: peaks in bytes, extra time as a share of the regular.

    Peaks count what forward and backward allocate, gradients of parameters included; parameters and
    the call's own inputs were there before. `saved` is what backward reads of forward, but for these
    inputs, parameters, and states of generators; `saved_bytes` is all that is held between the two.
    """

    operators: int
    repeated: int
    regular_peak_bytes: int
    planned_peak_bytes: int
    saved_bytes: int
    extra_time_ratio: float
    lower_bound_ratio: float
    is_optimal: bool
    saved: tuple[SavedTensor, ...] = field(repr=False)


def checkpoint(
    module: Module,
    example_inputs: Any,
    *,
    budget: str | float = "60%",
    example_kwargs: Mapping[str, Any] | None = None,
    device: str | None = None,
    order: str = "free",
    time_limit: float | None = DEFAULT_TIME_LIMIT_SECONDS,
    step_limit: int | None = None,
    seed: int = 0,
) -> Module:
    """A module like the given one, with the same class and parameters, that trains in less memory.

    `example_inputs` is what a training step passes to it: one tensor or a tuple, and keywords in
    `example_kwargs`. The plan for them is made at once; calls of other shapes or in another mode get
    theirs when they come. Where no gradient is asked for the module runs as it is. Each operator is
    measured once on the machine itself, or taken from the data sheet of a `device`. `budget` is as for
    `onnxgc.optimize`: bytes, a share of the peak that stores everything, or `min`.

    Raises:
        BudgetError: no plan fits the budget.
        BudgetFormError: the budget is not written as one.
        PlanError: the module cannot be traced.
    """
    search = Search(parse_budget(budget), SearchOptions(Order.named(order), time_limit, step_limit, seed))
    costs = Measured() if device is None else Estimated(find_device(device))
    arguments = example_inputs if isinstance(example_inputs, tuple | list) else (example_inputs,)
    return planned_module(module, search, costs, arguments, example_kwargs)


def planned_module(
    module: Module,
    decide: Decide,
    costs: Costs,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
) -> Module:
    """A module like the given one that runs in the order that `decide` gives; examples have it at once."""
    planned = copy.copy(module)
    forward = PlannedForward(module, planned, decide, costs)
    planned.forward = forward
    if example_inputs is not None:
        forward.plan(*example_inputs, **(example_kwargs or {}))
    return planned


def plans_of(module: nn.Module) -> tuple[TorchPlan, ...]:
    """The plans that `checkpoint` has made for a module so far, in order."""
    forward = module.__dict__.get("forward")
    return tuple(forward.plans.values()) if isinstance(forward, PlannedForward) else ()


class Decide(Protocol):
    """Something that gives the sequence in which a joint graph is to run, and what is known of it."""

    def __call__(self, step: JointStep) -> tuple[tuple[int, ...], TorchPlan]: ...


@dataclass(frozen=True, slots=True)
class Search:
    """Looks for the sequence of least extra time within a budget."""

    budget: Budget
    options: SearchOptions

    def __call__(self, step: JointStep) -> tuple[tuple[int, ...], TorchPlan]:
        problem = step.problem
        regular = judge(problem, range(len(problem))).peak
        floor = floor_of_problem(problem)
        found: BudgetedSequence | NoSequence
        if self.budget.is_least:
            found = least_peak(problem, floor.size, self.options, (), None).found
        else:
            budget = self.budget.bytes_of(regular)
            found = within_budget(problem, budget, self.options)
            if isinstance(found, NoSequence):
                node = step.nodes[found.operator]
                at = "" if node is None else f" ('{node.name}')"
                raise BudgetError(
                    f"no plan within {budget:,} bytes was found; nothing goes below {floor.size:,}{at}; give "
                    "more memory, a smaller batch, or budget='min'"
                )
        return found.sequence, described(step, found.sequence, found.lower_bound)


def described(step: JointStep, sequence: Sequence[int], lower_bound: int = 0) -> TorchPlan:
    """The figures of a sequence; `lower_bound` is what no other takes less than, in nanoseconds."""
    problem = step.problem
    profile = judge(problem, sequence)
    extra = profile.duration - problem.duration
    return TorchPlan(
        len(problem),
        len(sequence) - len(problem),
        judge(problem, range(len(problem))).peak,
        profile.peak,
        profile.timeline[sequence.index(step.turn)],
        extra / problem.duration if problem.duration else 0.0,
        lower_bound / problem.duration if problem.duration else 0.0,
        extra <= lower_bound,
        tuple(_saved(step, sequence)),
    )


def _saved(step: JointStep, sequence: Sequence[int]) -> Iterator[SavedTensor]:
    """What is written before the turn and read behind it."""
    problem = step.problem
    turn = sequence.index(step.turn)
    held = {storage for index in sequence[:turn] for storage in problem.operations[index].writes}
    read: set[int] = set()
    for index in sequence[turn + 1 :]:
        read.update(held.intersection(problem.operations[index].reads))
        held.difference_update(problem.operations[index].writes)
    for storage in sorted(read):
        node = step.nodes[problem.producer[storage]]
        assert node is not None, "the turn comes behind forward"
        if problem.sizes[storage]:
            yield SavedTensor(node.name, step.dtypes[storage], problem.sizes[storage])


class _OnlyPlanned(BaseException):
    """Ends a trace once its plan is made."""


class PlannedForward:
    """The forward of a planned module: traced, planned and kept for each kind of call.

    Attributes:
        plans: what was decided, by kind of call.
    """

    def __init__(self, module: nn.Module, planned: nn.Module, decide: Decide, costs: Costs) -> None:
        self._planned = planned
        self._decide = decide
        self._costs = costs
        # Hooks of the module itself run around its forward, not in it.
        self._inner = copy.copy(module)
        self._inner.__dict__.pop("forward", None)
        for name, value in self._inner.__dict__.items():
            if name.endswith("_hooks") and isinstance(value, dict):
                self._inner.__dict__[name] = OrderedDict()
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._decided: dict[OperatorProblem, tuple[tuple[int, ...], TorchPlan]] = {}
        """Calls that differ only in what does not change the problem have one plan."""
        self.plans: dict[Any, TorchPlan] = {}
        functools.update_wrapper(self, module.forward, updated=())
        self.__signature__ = inspect.signature(module.forward)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": {}}

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        return _run_uncompiled(self, arguments, settings)

    def run(self, arguments: Sequence[Any], settings: Mapping[str, Any]) -> Any:
        call = _Call.of(self._planned, arguments, settings)
        if not call.needs_gradients():
            return self._inner_forward(*arguments, **settings)
        call.check_whole()
        key = call.key()
        if key not in self._compiled:
            self._compiled[key] = self._traced(call, key)
        return self._compiled[key](call.tensors())

    def plan(self, *arguments: Any, **settings: Any) -> TorchPlan | None:
        """The plan for one kind of call, made without a step; None where it needs no gradient."""
        call = _Call.of(self._planned, arguments, settings)
        if not call.needs_gradients():
            return None
        key = call.key()
        if key not in self.plans:
            with contextlib.suppress(_OnlyPlanned):
                self._traced(call, key, is_only_planned=True)(call.tensors())
        return self.plans[key]

    def _inner_forward(self, *arguments: Any, **settings: Any) -> Any:
        self._inner.training = self._planned.training
        return self._inner.forward(*arguments, **settings)

    def _traced(self, call: _Call, key: Any, is_only_planned: bool = False) -> Callable[..., Any]:
        results: list[Any] = []

        def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            state, arguments, settings = call.rebuilt(tensors)
            self._inner.training = self._planned.training
            with _told_of_tracing(), fx.traceback.preserve_node_meta():
                made = functional_call(self._inner, state, arguments, settings, tie_weights=True)
            leaves, spec = pytree.tree_flatten(made)
            is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
            results[:] = [
                spec,
                is_tensor,
                [None if known else leaf for known, leaf in zip(is_tensor, leaves, strict=True)],
            ]
            return tuple(leaf for known, leaf in zip(is_tensor, leaves, strict=True) if known)

        def partition(
            joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            step = joint_step(joint.graph, num_fwd_outputs, self._costs)
            if step.problem not in self._decided:
                self._decided[step.problem] = self._decide(step)
            sequence, self.plans[key] = self._decided[step.problem]
            if is_only_planned:
                raise _OnlyPlanned
            return split(joint, step, sequence)

        traced = aot_function(flat, runnable, runnable, partition_fn=partition)

        def run(tensors: Sequence[torch.Tensor]) -> Any:
            try:
                found = iter(traced(*tensors))
            except (_OnlyPlanned, OnnxgcError):
                raise
            except Exception as error:
                if results and key in self.plans:
                    raise
                raise PlanError(f"the module cannot be traced: {_reason(error)}") from error
            spec, is_tensor, others = results
            leaves = [next(found) if known else other for known, other in zip(is_tensor, others, strict=True)]
            return pytree.tree_unflatten(leaves, spec)

        return run


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a module: its state by name, and its arguments as leaves of a tree."""

    module: nn.Module
    state: dict[str, torch.Tensor]
    leaves: list[Any]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, module: nn.Module, arguments: Sequence[Any], settings: Mapping[str, Any]) -> _Call:
        leaves, spec = pytree.tree_flatten((tuple(arguments), dict(settings)))
        return cls(module, {**dict(module.named_parameters()), **dict(module.named_buffers())}, leaves, spec)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.state.values(), *(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))]

    def needs_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors())

    def check_whole(self) -> None:
        """Refuse parameters of which only a shard is there.

        Raises:
            PlanError: a submodule is sharded by itself.
        """
        for name, tensor in self.state.items():
            if hasattr(tensor, "full_tensor"):
                raise PlanError(
                    f"'{name}' is only a shard when forward begins; plan the modules that are sharded one by "
                    "one, as in fully_shard(checkpoint(block, ...))"
                )

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], Any, Any]:
        """State, arguments and keywords with other tensors in the place of these."""
        count = len(self.state)
        given = iter(tensors[count:])
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        arguments, settings = pytree.tree_unflatten(leaves, self.spec)
        return dict(zip(self.state, tensors[:count], strict=True)), arguments, settings

    def key(self) -> Any:
        """What a trace depends on."""
        others = tuple(repr(leaf) for leaf in self.leaves if not isinstance(leaf, torch.Tensor))
        kinds = tuple(
            (tuple(one.shape), one.stride(), one.dtype, one.device, one.requires_grad, type(one))
            for one in self.tensors()
        )
        modes = tuple(one.training for one in self.module.modules())
        casts = tuple(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        )
        return repr(self.spec), others, kinds, modes, casts


# Compilation would look into the forward that is planned, and find nothing to plan in it.
_disabled: Any = torch.compiler.disable
_run_uncompiled: Callable[..., Any] = _disabled(PlannedForward.run)


@contextlib.contextmanager
def _told_of_tracing() -> Iterator[None]:
    """Has `torch.compiler.is_compiling()` say so: libraries then leave out what depends on the data."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _reason(error: Exception) -> str:
    if "convert all Tensors to FakeTensors" in str(error):
        return (
            "it reads a tensor that is none of its inputs, parameters and buffers; register it by "
            "register_buffer, or pass it to forward"
        )
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
