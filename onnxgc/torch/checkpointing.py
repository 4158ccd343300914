"""A plan under a memory budget for a module as it is: its forward and backward, computed in another order."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import random
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_function
from torch.func import functional_call
from torch.utils import _pytree as pytree

from onnxgc.budget.bounds.peak_bound import floor_of_problem
from onnxgc.budget.least_peak import least_peak
from onnxgc.budget.operator_problem import OperatorProblem, simulate_sequence
from onnxgc.budget.search import BudgetedSequence, NoSequence, SearchOptions, within_budget
from onnxgc.errors import BudgetError, OnnxgcError, PlanError
from onnxgc.planning.memory_budget import Budget, parse_budget
from onnxgc.planning.order import Order
from onnxgc.torch.call_signature import CallSignature, repeated
from onnxgc.torch.draw_order import OutOfPlace, draw_in_memory_order
from onnxgc.torch.forward_outputs import Outcome
from onnxgc.torch.joint import Costs, Estimated, JointStep, joint_step
from onnxgc.torch.module_state import Binding, MoreState, Pattern, StateRead
from onnxgc.torch.operator_timing import Measured
from onnxgc.torch.partition import runnable, split
from onnxgc.torch.trace_errors import reason_of
from onnxgc.torch.traced_state import TracedState, other_tensors
from onnxgc.torch.undecomposed_kernels import as_kernels_run, with_autocast_cache
from onnxgc.tracing.devices import device as find_device

DEFAULT_TIME_LIMIT_SECONDS = 10.0
_MOST_KINDS = 64
"""Kinds of calls whose traces are kept, the latest; each holds two graphs."""
_MOST_TRACES = 16
_MANY_TRACES = 8
"""Traces of one kind after which it is said why there are more and more."""
"""Traces of one kind, by the state that forward has read."""
_TRACING = threading.RLock()
"""Held by the thread that traces: meanwhile parameters of the module and settings of PyTorch are others."""
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
    # Not a copy by `copy`, which modules may refuse: everything but `forward` is the same.
    planned = module.__class__.__new__(module.__class__)
    planned.__dict__.update(module.__dict__)
    forward = PlannedForward(module, planned, decide, costs)
    planned.__dict__["forward"] = forward
    if example_inputs is not None:
        forward.plan(*example_inputs, **(example_kwargs or {}))
    return planned


def plans_of(module: nn.Module) -> tuple[TorchPlan, ...]:
    """The plans that `checkpoint` has made for a module and its submodules so far, in order.

    Wrappers do not hide them: modules around a planned one (of data parallel training, of `torch.compile`, of
    adapters), and functions in the place of its forward, as Accelerate puts them.
    """
    found: dict[int, PlannedForward] = {}
    for inner in module.modules():
        forward = planned_forward(inner.__dict__.get("forward"))
        if forward is not None:
            found.setdefault(id(forward), forward)
    return tuple(plan for forward in found.values() for plan in forward.plans)


def planned_forward(function: Any) -> PlannedForward | None:
    """The planned forward behind functions that wrap it: what they name as wrapped, bind, or close over."""
    waiting, seen = [function], set[int]()
    while waiting:
        function = waiting.pop(0)
        if isinstance(function, PlannedForward):
            return function
        if id(function) in seen or not callable(function) or isinstance(function, nn.Module | type):
            continue
        seen.add(id(function))
        waiting += [getattr(function, name, None) for name in ("__wrapped__", "__func__", "func")]
        waiting += getattr(function, "__dict__", {}).values()
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # It is not filled yet.
                waiting.append(cell.cell_contents)
    return None


class Decide(Protocol):
    """Something that gives the sequence in which a joint graph is to run, and what is known of it."""

    def __call__(self, step: JointStep) -> tuple[tuple[int, ...], TorchPlan]: ...


@dataclass(frozen=True, slots=True)
class Search:
    """Looks for the sequence of least extra time within a budget."""

    budget: Budget
    options: SearchOptions

    def __call__(self, step: JointStep, least_bytes: int = 0) -> tuple[tuple[int, ...], TorchPlan]:
        """Within the budget; where that cannot be, within so many bytes if they are more."""
        problem = step.problem
        regular = simulate_sequence(problem, range(len(problem))).peak
        floor = floor_of_problem(problem)
        found: BudgetedSequence | NoSequence
        if self.budget.is_least:
            found = least_peak(problem, floor.size, self.options, (), None).found
        else:
            budget = self.budget.bytes_of(regular)
            found = within_budget(problem, budget, self.options)
            if isinstance(found, NoSequence) and budget < least_bytes:
                found = within_budget(problem, least_bytes, self.options)
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
    profile = simulate_sequence(problem, sequence)
    extra = profile.duration - problem.duration
    return TorchPlan(
        len(problem),
        len(sequence) - len(problem),
        simulate_sequence(problem, range(len(problem))).peak,
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


class _Unplanned(nn.Module):
    """Runs a module's own forward to be traced; hooks of the module itself run around that."""

    PREFIX = "planned."

    def __init__(self, planned: nn.Module, own: Callable[..., Any] | None) -> None:
        """`own` is the forward that the module has instead of that of its class."""
        super().__init__()
        self.planned = planned
        self.own = own

    def own_forward(self) -> Callable[..., Any]:
        forward: Callable[..., Any] = self.own or types.MethodType(type(self.planned).forward, self.planned)
        return forward

    def forward(
        self,
        state: TracedState,
        tensors: Sequence[torch.Tensor],
        arguments: Sequence[Any],
        settings: Mapping[str, Any],
    ) -> tuple[Outcome, tuple[torch.Tensor, ...]]:
        given = pytree.tree_flatten((arguments, settings))

        def forward() -> Any:
            made = self.own_forward()(*arguments, **settings)
            leaves, spec = pytree.tree_flatten((arguments, settings))
            if spec != given[1] or any(one is not other for one, other in zip(leaves, given[0], strict=True)):
                raise PlanError(
                    "forward changes a list or dictionary among its arguments; return it, or keep it in an "
                    "attribute or an object"
                )
            return made

        return state.run(forward, tensors)


class _Trace:
    """A step that was traced, and where it is not yet, that is when it first runs."""

    function: Callable[..., tuple[torch.Tensor, ...]]
    outcome: Outcome
    pattern: Pattern
    order: tuple[int, ...] = ()
    """For each tensor of the state, where it stands first among those of the call and the state."""
    is_split = False

    def bound(self, call: CallSignature) -> Binding | None:
        """The state of a call, where it is as the trace takes it to be."""
        binding = self.pattern.bind(call.objects)
        if binding is None or (binding.tensors and repeated((*call.tensors, *binding.tensors)) != self.order):
            return None
        return binding

    def run(self, call: CallSignature, binding: Binding) -> Any:
        tensors = (*call.tensors, *other_tensors(call.tensors, binding))
        try:
            if self.is_split:
                made = self.function(*tensors)
            else:
                # Else a graph could not be walked twice, by `retain_graph`.
                with functorch_config.patch(donated_buffer=False), _without_reports():
                    made = self.function(*tensors)
        except (_OnlyPlanned, OnnxgcError):
            raise
        except Exception as error:
            if self.is_split:
                raise
            raise PlanError(f"the module cannot be traced: {reason_of(error, call.module)}") from error
        return self.outcome.filled(made, binding)


class PlannedForward:
    """The forward of a planned module: traced, planned and kept for each kind of call."""

    def __init__(self, module: nn.Module, planned: nn.Module, decide: Decide, costs: Costs) -> None:
        self._planned = planned
        self._decide = decide
        self._costs = costs
        own: Any = module.__dict__.get("forward")
        if isinstance(own, PlannedForward):
            own = own._inner.own
        elif getattr(own, "__self__", None) is module:
            own = types.MethodType(own.__func__, planned)
        self._inner: _Unplanned = _Unplanned(planned, own)
        self._traces: OrderedDict[Hashable, list[_Trace]] = OrderedDict()
        """By kind of call, one trace for each set of attributes that forward has read."""
        self._read = StateRead()
        self._has_warned = False
        self._decided: dict[OperatorProblem, tuple[tuple[int, ...], TorchPlan]] = {}
        """Calls that differ only in what does not change the problem have one plan."""
        functools.update_wrapper(self, module.forward, updated=())
        self.__wrapped__ = self._inner.own_forward()
        self.__signature__ = inspect.signature(module.forward)

    @property
    def __code__(self) -> Any:
        """Of the module's own forward: exporters ask for the names of its arguments."""
        return self.__wrapped__.__code__

    @property
    def plans(self) -> tuple[TorchPlan, ...]:
        """What was decided so far, in order."""
        return tuple(plan for _, plan in self._decided.values())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_traces": OrderedDict()}

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        return _run_uncompiled(self, arguments, settings)

    def run(self, arguments: Sequence[Any], settings: Mapping[str, Any]) -> Any:
        with _TRACING:
            call = CallSignature.of(self._planned, arguments, settings)
            is_planned = call.needs_gradients() and not call.is_inside_a_trace()
            known = self._known(call) if is_planned else None
            if is_planned and known is None:
                return self._traced_and_kept(call)
        if known is None:
            return self._inner.own_forward()(*arguments, **settings)
        return known[0].run(call, known[1])

    def _known(self, call: CallSignature) -> tuple[_Trace, Binding] | None:
        """The trace that holds for a call, and the state that the call has for it."""
        call.check()
        key = call.key()
        for trace in self._traces.get(key, ()):
            binding = trace.bound(call)
            if binding is not None:
                self._traces.move_to_end(key)
                return trace, binding
        return None

    def _traced_and_kept(self, call: CallSignature) -> Any:
        """What forward gives in a new trace, which is kept."""
        key = call.key()
        traces = self._traces.setdefault(key, [])
        self._traces.move_to_end(key)
        if traces:
            self._warn_of_many(len(traces), traces[-1].pattern.differs)
        trace, made = self._traced(call)
        traces.append(trace)
        if len(self._traces) > _MOST_KINDS:
            self._traces.popitem(last=False)
        del traces[:-_MOST_TRACES]
        return made

    def _warn_of_many(self, count: int, place: str) -> None:
        if count >= _MANY_TRACES and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"forward reads '{place}', which has changed in {count} calls; each was traced anew, which "
                "takes time: keep it in a tensor, or change it less often",
                stacklevel=2,
            )

    def plan(self, *arguments: Any, **settings: Any) -> None:
        """Decides on one kind of call without a step; nothing is done where it needs no gradient."""
        call = CallSignature.of(self._planned, arguments, settings)
        if call.needs_gradients():
            call.check()
            with _TRACING, contextlib.suppress(_OnlyPlanned):
                self._traced(call, is_only_planned=True)

    def _traced(self, call: CallSignature, is_only_planned: bool = False) -> tuple[_Trace, Any]:
        """A trace of a call, and what forward gives in it."""
        while True:
            state = TracedState(call, self._inner.own_forward(), self._read)
            trace = self._trace(call, state, is_only_planned)
            try:
                return trace, trace.run(call, state.binding)
            except MoreState:
                continue
            finally:
                state.release()

    def _decision(self, step: JointStep) -> tuple[int, ...]:
        if step.problem not in self._decided:
            # A smaller batch may need a larger share; what another takes is there.
            most = max((plan.planned_peak_bytes for plan in self.plans), default=0)
            search = self._decide
            self._decided[step.problem] = search(step, most) if isinstance(search, Search) else search(step)
        return self._decided[step.problem][0]

    def _trace(self, call: CallSignature, state: TracedState, is_only_planned: bool) -> _Trace:
        trace = _Trace()
        trace.pattern = state.pattern
        trace.order = repeated((*call.tensors, *state.binding.tensors))
        form = call.form
        is_cached = torch.is_autocast_cache_enabled()
        leaves = [_is_cast_once(one) and is_cached for one in call.tensors]

        def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            own, arguments, settings = form.rebuilt(tensors)
            parameters = [one for one, is_leaf in zip(tensors, leaves, strict=False) if is_leaf]
            own = {f"{_Unplanned.PREFIX}{name}": value for name, value in own.items()}
            with (
                _told_of_tracing(),
                fx.traceback.preserve_node_meta(),
                _without_other_random_numbers(),
                as_kernels_run(),
                with_autocast_cache(parameters),
                OutOfPlace(),
            ):
                found: tuple[Outcome, tuple[torch.Tensor, ...]] = functional_call(
                    self._inner, own, (state, tensors, arguments, settings), tie_weights=True
                )
            trace.outcome, made = found
            return made

        def partition(
            joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            state.check()
            draw_in_memory_order(joint.graph)
            step = joint_step(joint.graph, num_fwd_outputs, self._costs)
            sequence = self._decision(step)
            if is_only_planned:
                raise _OnlyPlanned
            trace.is_split = True
            return split(joint, step, sequence)

        trace.function = aot_function(flat, runnable, runnable, partition_fn=partition)
        return trace


def _is_cast_once(tensor: torch.Tensor) -> bool:
    """Whether autocast converts a tensor once for all that read it."""
    is_leaf = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
    return is_leaf and tensor.dtype == torch.float32


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


@contextlib.contextmanager
def _without_other_random_numbers() -> Iterator[None]:
    """Refuses those of Python and NumPy, which a trace would hold fast.

    Raises:
        PlanError: forward has drawn some.
    """
    before = random.getstate(), repr(np.random.get_state())
    yield
    if before != (random.getstate(), repr(np.random.get_state())):
        raise PlanError(
            "forward draws random numbers from Python or NumPy, which would be the same in each step; draw "
            "them by torch, or pass them to forward"
        )


@contextlib.contextmanager
def _without_reports() -> Iterator[None]:
    """Without the tracebacks that PyTorch writes of what fails, and a warning that it causes itself."""
    reporting = logging.getLogger("torch._subclasses.fake_tensor")
    before = reporting.disabled
    reporting.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
            yield
    finally:
        reporting.disabled = before
