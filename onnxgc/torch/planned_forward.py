"""The forward of a planned module: a trace and a plan for each kind of call.

Calls with equal signatures share a list of traces, one for each state of Python objects that forward has read
(`state_guard`). A call runs the first trace whose guard accepts it; otherwise forward is traced, planned and
split into forward and backward.
"""

import contextlib
import functools
import inspect
import logging
import operator
import random
import threading
import time
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_function
from torch.func import functional_call
from torch.utils import _pytree as pytree

from onnxgc.budget.operator_problem import OperatorProblem
from onnxgc.errors import OnnxgcError, PlanError
from onnxgc.torch.call_signature import CallSignature, first_occurrences
from onnxgc.torch.exact_kernels import (
    ContiguousDraws,
    draw_in_memory_order,
    with_autocast_cache,
    without_decompositions,
)
from onnxgc.torch.forward_outputs import Outcome
from onnxgc.torch.joint_problem import Costs, JointStep, joint_step
from onnxgc.torch.module_state import KnownState, RetraceNeeded
from onnxgc.torch.partition import boxed_function, split
from onnxgc.torch.plan_search import Planner, TorchPlan, plan_summary
from onnxgc.torch.state_guard import Binding, StateGuard
from onnxgc.torch.trace_errors import reason_of
from onnxgc.torch.traced_state import TracedState, other_tensors

logger = logging.getLogger(__name__)
_MAX_SIGNATURES = 64
"""Signatures whose traces are kept, the most recently used; a trace contains two graphs."""
_MAX_TRACES = 16
"""Traces of one signature, the latest."""
_MIN_TRACES_TO_WARN = 8
"""Traces of one signature after which a warning names the state that keeps changing."""
_TRACING = threading.RLock()
"""Owned by the thread that traces, which replaces parameters of the module and settings of PyTorch."""


class _Traced(BaseException):
    """Ends the first run of a trace that is made ahead of its step."""


class _OwnForward(nn.Module):
    """Runs a module's own forward under a trace; the module's own hooks run around it, untraced."""

    PREFIX = "planned."

    def __init__(self, planned: nn.Module, own: Callable[..., Any] | None) -> None:
        """`own` is the forward that the instance has in place of its class's."""
        super().__init__()
        self.planned = planned
        self.own = own

    def own_forward(self) -> Callable[..., Any]:
        return self.own or types.MethodType(type(self.planned).forward, self.planned)

    def forward(
        self, state: TracedState, tensors: Sequence[torch.Tensor], arguments: Sequence[Any], settings: Mapping[str, Any]
    ) -> tuple[Outcome, tuple[torch.Tensor, ...]]:
        before, structure = pytree.tree_flatten((arguments, settings))

        def forward() -> Any:
            result = self.own_forward()(*arguments, **settings)
            leaves, spec = pytree.tree_flatten((arguments, settings))
            if spec != structure or not all(map(operator.is_, leaves, before)):
                raise PlanError(
                    "forward changes a list or dictionary among its arguments; return it, or keep it in an "
                    "attribute or an object"
                )
            return result

        return state.run(forward, tensors)


class _Trace:
    """A traced step; tracing itself happens when the function first runs."""

    function: Callable[..., tuple[torch.Tensor, ...]]
    outcome: Outcome
    guard: StateGuard
    order: tuple[int, ...] = ()
    """For each tensor of the call and the state, the index of its first occurrence among them."""
    is_split = False
    is_ahead = False
    """Whether the trace is made ahead of its first step."""

    def bind(self, call: CallSignature) -> Binding | None:
        """The state that the trace reads in this call; None if the guard rejects it."""
        binding = self.guard.bind(call.objects)
        if binding is None or not binding.tensors:
            return binding
        is_like = first_occurrences((*call.tensors, *binding.tensors)) == self.order
        return binding if is_like else None

    def run(self, call: CallSignature, binding: Binding) -> Any:
        """The result of forward; objects are changed as forward changes them.

        Raises:
            PlanError: the module cannot be traced.
        """
        tensors = (*call.tensors, *other_tensors(call.tensors, binding))
        if self.is_split:
            return self.outcome.fill(self.function(*tensors), binding)
        try:
            # With donated buffers, `retain_graph` would be refused.
            with functorch_config.patch(donated_buffer=False), _silence_failures():
                results = self.function(*tensors)
        except OnnxgcError:
            raise
        except Exception as error:
            if self.is_split:
                raise
            raise PlanError(f"the module cannot be traced: {reason_of(error, call.module)}") from error
        return self.outcome.fill(results, binding)


class PlannedForward:
    """The forward of a planned module."""

    def __init__(self, module: nn.Module, planned: nn.Module, planner: Planner, costs: Costs) -> None:
        self._planned = planned
        self._planner = planner
        self._costs = costs
        own: Any = module.__dict__.get("forward")
        if isinstance(own, PlannedForward):
            own = own._inner.own
        elif getattr(own, "__self__", None) is module:
            own = types.MethodType(own.__func__, planned)
        self._inner: _OwnForward = _OwnForward(planned, own)
        self._traces: OrderedDict[Hashable, list[_Trace]] = OrderedDict()
        """Traces by signature, one for each state that forward has read."""
        self._known = KnownState()
        self._has_warned = False
        self._decisions: dict[OperatorProblem, tuple[tuple[int, ...], TorchPlan]] = {}
        """Calls of different signatures may pose the same problem; they share its plan."""
        functools.update_wrapper(self, module.forward, updated=())
        self.__wrapped__ = self._inner.own_forward()
        self.__signature__ = inspect.signature(module.forward)

    @property
    def __code__(self) -> Any:
        """The code of the module's own forward, from which exporters read argument names."""
        return self.__wrapped__.__code__

    @property
    def plans(self) -> tuple[TorchPlan, ...]:
        """The plans made so far, in order."""
        return tuple(plan for _, plan in self._decisions.values())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_traces": OrderedDict()}

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        return _run_uncompiled(self, arguments, settings)

    def run(self, arguments: Sequence[Any], settings: Mapping[str, Any]) -> Any:
        with _TRACING:
            call = CallSignature.from_call(self._planned, arguments, settings)
            is_planned = call.needs_gradients() and not call.is_traced()
            match = self._matching_trace(call) if is_planned else None
            if is_planned and match is None:
                return self._run_new_trace(call)
        if match is None:
            return self._inner.own_forward()(*arguments, **settings)
        trace, binding = match
        return trace.run(call, binding)

    def _matching_trace(self, call: CallSignature) -> tuple[_Trace, Binding] | None:
        call.check_parameters()
        key = call.key()
        for trace in self._traces.get(key, ()):
            binding = trace.bind(call)
            if binding is not None:
                self._traces.move_to_end(key)
                return trace, binding
        return None

    def _run_new_trace(self, call: CallSignature, is_ahead: bool = False) -> Any:
        key = call.key()
        traces = self._traces.setdefault(key, [])
        self._traces.move_to_end(key)
        if traces:
            self._warn_of_retracing(len(traces), traces[-1].guard.mismatch)
        trace, result = self._traced(call, is_ahead)
        traces.append(trace)
        if len(self._traces) > _MAX_SIGNATURES:
            self._traces.popitem(last=False)
        del traces[:-_MAX_TRACES]
        return result

    def _warn_of_retracing(self, count: int, location: str) -> None:
        if count >= _MIN_TRACES_TO_WARN and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"forward reads '{location}', which has changed in {count} calls; each change costs a new "
                "trace, which takes time: keep it in a tensor, or change it less often",
                stacklevel=2,
            )

    def plan(self, *arguments: Any, **settings: Any) -> None:
        """Makes the plan of a call without running a step; does nothing if it needs no gradient."""
        call = CallSignature.from_call(self._planned, arguments, settings)
        if call.needs_gradients():
            with _TRACING:
                if self._matching_trace(call) is None:
                    self._run_new_trace(call, is_ahead=True)

    def _traced(self, call: CallSignature, is_ahead: bool) -> tuple[_Trace, Any]:
        """A new trace and its result; forward is traced until no new state is found."""
        while True:
            state = TracedState(call, self._inner.own_forward(), self._known)
            trace = self._trace(call, state)
            trace.is_ahead = is_ahead
            try:
                return trace, trace.run(call, state.binding)
            except _Traced:
                trace.is_ahead = False
                return trace, None
            except RetraceNeeded:
                continue
            finally:
                state.release()

    def _sequence_for(self, step: JointStep) -> tuple[int, ...]:
        if step.problem not in self._decisions:
            # A smaller batch may need a larger share; the memory of another call's plan is available anyway.
            available = max((plan.planned_peak_bytes for plan in self.plans), default=0)
            alike = [one for other, (one, _) in self._decisions.items() if _has_operators_of(other, step.problem)]
            started = time.perf_counter()
            sequence, lower_bound = self._planner(step, available, alike)
            plan = plan_summary(step, sequence, lower_bound)
            self._decisions[step.problem] = sequence, plan
            logger.info("planned in %.1f s: %s", time.perf_counter() - started, plan)
        return self._decisions[step.problem][0]

    def _trace(self, call: CallSignature, state: TracedState) -> _Trace:
        trace = _Trace()
        trace.guard = state.guard
        trace.order = first_occurrences((*call.tensors, *state.binding.tensors))
        form = call.form
        has_cache = torch.is_autocast_cache_enabled()
        casts_once = [has_cache and _is_cast_once(one) for one in call.tensors]

        def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            own, arguments, settings = form.fill(tensors)
            parameters = [one for one, is_cached in zip(tensors, casts_once, strict=False) if is_cached]
            own = {f"{_OwnForward.PREFIX}{name}": value for name, value in _at_every_place(self._planned, own)}
            with (
                # Libraries skip data-dependent code when `torch.compiler.is_compiling()`.
                _replaced(torch.compiler, "_is_compiling_flag", True),
                fx.traceback.preserve_node_meta(),
                _reject_untraced_randomness(),
                without_decompositions(),
                with_autocast_cache(parameters),
                ContiguousDraws(),
            ):
                result: tuple[Outcome, tuple[torch.Tensor, ...]] = functional_call(
                    self._inner, own, (state, tensors, arguments, settings), tie_weights=False
                )
            trace.outcome, results = result
            return results

        def partition(
            joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            state.check()
            draw_in_memory_order(joint.graph)
            step = joint_step(joint.graph, num_fwd_outputs, self._costs)
            sequence = self._sequence_for(step)
            trace.is_split = True
            return split(joint, step, sequence)

        def forward(gm: fx.GraphModule, example_inputs: Any) -> Any:
            run = boxed_function(gm, example_inputs)

            def started(given: list[Any]) -> Any:
                if trace.is_ahead:
                    raise _Traced
                return run(given)

            vars(started)["_boxed_call"] = True
            return started

        trace.function = aot_function(flat, forward, boxed_function, partition_fn=partition)
        return trace


# torch.compile would otherwise trace through the planned forward, and leave it nothing to plan.
_disabled: Any = torch.compiler.disable
_run_uncompiled: Callable[..., Any] = _disabled(PlannedForward.run)


def _at_every_place(module: nn.Module, own: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Values of parameters and buffers by each module that holds them, and one name of that module.

    PyTorch's own `tie_weights` restores a module with two names wrongly.
    """
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    values = {id(held[name]): value for name, value in own.items()}
    for prefix, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and id(tensor) in values:
                yield f"{prefix}.{name}".lstrip("."), values[id(tensor)]


def _has_operators_of(one: OperatorProblem, other: OperatorProblem) -> bool:
    """Whether two problems differ in sizes, durations and workspaces only."""
    return (one.kept, len(one)) == (other.kept, len(other)) and all(
        replace(a, duration=b.duration, workspace=b.workspace) == b
        for a, b in zip(one.operators, other.operators, strict=True)
    )


def _is_cast_once(tensor: torch.Tensor) -> bool:
    """Whether autocast's cache converts a tensor once for all of its readers."""
    is_leaf = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
    return is_leaf and tensor.dtype == torch.float32


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _reject_untraced_randomness() -> Iterator[None]:
    """Rejects random numbers from Python's and NumPy's global generators, which a trace would freeze.

    Raises:
        PlanError: forward draws such numbers.
    """
    before = random.getstate(), repr(np.random.get_state())
    yield
    if before != (random.getstate(), repr(np.random.get_state())):
        raise PlanError(
            "forward draws random numbers from Python or NumPy, which would be the same in each step; draw "
            "them by torch, or pass them to forward"
        )


@contextlib.contextmanager
def _silence_failures() -> Iterator[None]:
    """Suppresses PyTorch's logged tracebacks of failed traces, and a warning that it triggers itself."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with _replaced(logger, "disabled", True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
        yield
