"""A memory budget for `torch.compile`: a partitioner for Inductor, and a backend that uses it."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import _BACKENDS
from torch._functorch import partitioners
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import CompileContext
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._ops import HigherOrderOperator, OpOverload

from onnxgc import __version__
from onnxgc.budget.search import SearchOptions
from onnxgc.errors import BudgetError, PlanError
from onnxgc.planning.memory_budget import Budget, parse_budget
from onnxgc.planning.order_choice import Order
from onnxgc.torch.compiled_plan import CompiledPlanner
from onnxgc.torch.fused_kernels import FusedCosts, inlined_nodes
from onnxgc.torch.joint_problem import EstimatedCosts, JointStep, joint_step
from onnxgc.torch.operator_timing import MeasuredCosts
from onnxgc.torch.plan_search import BudgetPlanner, TorchPlan, plan_summary
from onnxgc.torch.planned_joint import repeat_as_given, split_joint
from onnxgc.tracing.devices import device as find_device

if TYPE_CHECKING:
    from onnxgc.torch.compiled_peak import PassMemory

logger = logging.getLogger("onnxgc.torch")
_OPTIONS = ("budget", "time_limit", "device", "seed")
_SOURCES = tuple(sorted(str(path) for path in Path(__file__).parent.glob("*.py")))


class Partitioner(CustomPartitionerFn):
    """Splits the joint graphs of compiled modules into forward and backward within a memory budget.

    For `torch._inductor.config.custom_partitioner_fn`. `budget` is bytes, a share of each graph's peak without
    recomputation, or `min`; `time_limit` is in seconds, for each graph. `device` names a data sheet for the
    durations of operators, which are otherwise measured. `plans` lists the plans made so far, in order; a graph
    from PyTorch's cache has none.

    Raises:
        BudgetFormError: the budget cannot be parsed.
        BudgetError: no plan fits the budget, when a graph is compiled.
    """

    def __init__(
        self, budget: str | float = "60%", *, time_limit: float = 10.0, device: str | None = None, seed: int = 0
    ) -> None:
        self._budget = parse_budget(budget)
        self._options = SearchOptions(Order.named("fixed"), time_limit, None, seed)
        self._measured = MeasuredCosts()
        self._costs = self._measured if device is None else EstimatedCosts(find_device(device))
        self._identity = ("onnxgc", __version__, str(budget), time_limit, device, seed)
        self._plans: dict[Any, TorchPlan] = {}
        self._latest: dict[Any, TorchPlan] = {}
        """By compiled frame: graphs between graph breaks are frames of their own."""
        self.more_graphs_follow = False
        """Whether the graph ends in a graph break: it then takes at most half of a budget in bytes."""

    @property
    def plans(self) -> tuple[TorchPlan, ...]:
        return tuple(self._plans.values())

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        reason = _reason_to_leave(gm.graph)
        if reason is not None:
            logger.warning("a compiled graph has PyTorch's own partition: %s", reason)
            return partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        is_compiled = kwargs.get("compiler") == "inductor"
        gm.graph.eliminate_dead_code()
        gm.graph = fx_graph_cse(gm.graph)
        results = kwargs["num_fwd_outputs"]
        if partitioners.has_recomputable_ops(gm):
            partitioners.cleanup_recompute_tags(gm, is_default_partition=False)
            outputs: Any = gm.graph.output_node().args[0]
            repeat_as_given(gm.graph, outputs[:results])
        inlined = inlined_nodes(gm.graph) if is_compiled else frozenset()
        costs = FusedCosts(self._costs) if is_compiled else self._costs
        step = joint_step(gm.graph, results, costs, inlined.__contains__)
        joint, static = gm.graph, kwargs.get("static_lifetime_input_indices") or []

        def split(sequence: Sequence[int]) -> tuple[fx.GraphModule, fx.GraphModule]:
            gm.graph = joint
            return split_joint(gm, step, sequence, results, static)

        def memory(sequence: Sequence[int]) -> PassMemory:
            from onnxgc.torch.compiled_peak import compiled_memory  # Inductor takes seconds to import.

            return compiled_memory(*split(sequence), results, self._workspace)

        return split(self._plan(step, CompiledPlanner(step, self._options, memory) if is_compiled else None))

    def uuid(self) -> Any:
        return (*self._identity, get_hash_for_files(_SOURCES))

    def _workspace(self, node: fx.Node) -> int:
        is_known = isinstance(node.target, OpOverload) and node.target.namespace == "aten"
        return self._measured(node).workspace_bytes if is_known else 0

    def _plan(self, step: JointStep, compiled: CompiledPlanner | None) -> tuple[int, ...]:
        started = time.perf_counter()
        compile_id = CompileContext.current_compile_id()
        frame = getattr(compile_id, "frame_id", None)
        held = sum(plan.saved_bytes for other, plan in self._latest.items() if other != frame)
        left = self._budget.size_bytes
        budgets = [self._budget]
        if left is not None:
            if left <= held:
                raise BudgetError(
                    f"no plan fits {left:,} bytes: graphs before the last graph break hold {held:,}; give more memory"
                )
            left -= held
            budgets = [Budget(size_bytes=left)]
            if self.more_graphs_follow:
                budgets.insert(0, Budget(size_bytes=max(left // 2, 1)))
        for budget in budgets:
            try:
                sequence, plan = self._planned(step, compiled, budget)
                break
            except BudgetError:
                if budget is budgets[-1]:
                    raise
        self._plans[compile_id or len(self._plans)] = self._latest[frame] = plan
        logger.info("compiled graph %s: planned in %.1f s: %s", compile_id, time.perf_counter() - started, plan)
        return sequence

    def _planned(
        self, step: JointStep, compiled: CompiledPlanner | None, budget: Budget
    ) -> tuple[tuple[int, ...], TorchPlan]:
        if compiled is None:
            sequence, bound = BudgetPlanner(budget, self._options)(step, 0)
            return sequence, plan_summary(step, sequence, bound)
        found = compiled.plan(budget)
        plan = plan_summary(step, found.sequence, found.lower_bound)
        regular, memory = found.regular, found.memory
        return found.sequence, replace(
            plan, regular_peak_bytes=regular.peak, planned_peak_bytes=memory.peak, saved_bytes=memory.saved
        )


def _reason_to_leave(graph: fx.Graph) -> str | None:
    """Why a graph keeps PyTorch's own partition."""
    annotation = getattr(partitioners, "_get_memory_budget_annotation", lambda node: None)
    for node in graph.nodes:
        if annotation(node) is not None:
            return "it is in a region with an activation memory budget"
        if isinstance(node.target, HigherOrderOperator):
            return f"it contains the higher-order operator {node.target}"
    return None


_partitioners: dict[int, tuple[Any, Partitioner]] = {}
"""By the identity of a call's options, which all graphs of a compiled module share."""


def compile_within_budget(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: Any = None
) -> Any:
    """The backend `onnxgc` of `torch.compile`: Inductor with a memory budget.

    `options` are those of `Partitioner`, or Inductor's.

    Raises:
        PlanError: an option is unknown.
    """
    given = dict(options or {})
    own = {name: given.pop(name) for name in _OPTIONS if name in given}
    if id(options) not in _partitioners:
        _partitioners[id(options)] = options, Partitioner(**own)
    partitioner = _partitioners[id(options)][1]
    partitioner.more_graphs_follow = bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))
    missing = _missing_compiler(example_inputs)
    if missing is not None:
        warnings.warn(f"onnxgc plans without compiled kernels: {missing}", stacklevel=2)
        from torch._inductor.decomposition import select_decomp_table

        compiler = aot_autograd(
            fw_compiler=_interpreted, partition_fn=partitioner, decompositions=select_decomp_table()
        )
        return compiler(gm, example_inputs)
    try:
        wrapper: Any = torch._TorchCompileInductorWrapper
        inductor = wrapper(mode, {**given, "custom_partitioner_fn": partitioner}, None)
    except RuntimeError as error:
        raise PlanError(f"{error}, and those of onnxgc: {', '.join(_OPTIONS)}") from error
    return inductor(gm, example_inputs)


def plans_of_options(options: Mapping[str, Any]) -> tuple[TorchPlan, ...]:
    """The plans of the modules compiled with this very dictionary of options."""
    found = _partitioners.get(id(options))
    return () if found is None else found[1].plans


def _interpreted(gm: fx.GraphModule, _: Any) -> Any:
    def run(values: list[Any]) -> Any:
        return fx.Interpreter(gm).boxed_run(values)

    vars(run)["_boxed_call"] = True
    return run


def _missing_compiler(example_inputs: Sequence[Any]) -> str | None:
    """The compiler that Inductor lacks here for the inputs' device."""
    devices = {value.device.type for value in example_inputs if isinstance(value, torch.Tensor)}
    if "cpu" in devices or not devices:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "Inductor has no C++ compiler here"
    if devices - {"cpu"}:
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton is not installed"
    return None


# As the entry point of an installed package, which PyTorch loads when the backend is first used.
_BACKENDS.setdefault("onnxgc", EntryPoint("onnxgc", f"{__name__}:compile_within_budget", "torch_dynamo_backends"))
