"""Plans of PyTorch modules: forward and backward recompute activations within a memory budget."""

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from onnxgc.budget.search import SearchOptions
from onnxgc.planning.memory_budget import parse_budget
from onnxgc.planning.order_choice import Order
from onnxgc.torch.joint_problem import Costs, EstimatedCosts
from onnxgc.torch.operator_timing import MeasuredCosts
from onnxgc.torch.plan_search import BudgetPlanner, Planner, TorchPlan
from onnxgc.torch.planned_forward import PlannedForward
from onnxgc.torch.stored_plans import StoredPlanner
from onnxgc.tracing.devices import device as find_device

DEFAULT_TIME_LIMIT_SECONDS = 10.0
Module = TypeVar("Module", bound=nn.Module)


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
    plans: str | os.PathLike[str] | None = None,
) -> Module:
    """Plans a module: the result shares its class and parameters, and trains within a memory budget.

    Outputs and gradients are those of the module itself, bit for bit. `example_inputs` are the arguments of a
    training step: one tensor or a tuple, and keywords in `example_kwargs`. Their plan is made immediately;
    calls with other shapes or in another mode are planned when they first occur. Calls without gradients run
    the module's own forward. Durations of operators are measured once on this machine, or estimated from the
    data sheet of a `device`. `budget` is as for `onnxgc.optimize`: bytes, a share of the baseline's peak, or
    `min`. `time_limit` (seconds) and `step_limit` bound the search. `plans` is a folder in which plans are kept:
    another run with equal shapes, options and versions takes them without a search.

    Raises:
        BudgetError: no plan fits the budget.
        BudgetFormError: the budget cannot be parsed.
        OutputFileError: the folder cannot be written to.
        PlanError: the module cannot be traced.

    >>> from torch import nn, randn
    >>> module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    >>> planned = checkpoint(module, randn(256, 64), budget="70%", device="a100")
    >>> (plan,) = plans_of(planned)
    >>> plan.planned_peak_bytes < plan.regular_peak_bytes
    True
    """
    options = SearchOptions(Order.named(order), time_limit, step_limit, seed)
    planner: Planner = (search := BudgetPlanner(parse_budget(budget), options))
    if plans is not None:
        planner = StoredPlanner(search, Path(plans))
    costs = MeasuredCosts() if device is None else EstimatedCosts(find_device(device))
    arguments = example_inputs if isinstance(example_inputs, tuple | list) else (example_inputs,)
    if any(getattr(part, "gradient_checkpointing", False) for part in module.modules()):
        warnings.warn(
            "the module checkpoints its layers already, which the plan takes as given; it is free to choose after "
            "module.gradient_checkpointing_disable()",
            stacklevel=2,
        )
    return planned_module(module, planner, costs, arguments, example_kwargs)


def planned_module(
    module: Module,
    planner: Planner,
    costs: Costs,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
) -> Module:
    """A module that shares everything with the given one but `forward`, which follows the planner.

    Example inputs are planned immediately.
    """
    # Modules may refuse `copy.copy`.
    planned = module.__class__.__new__(module.__class__)
    planned.__dict__.update(module.__dict__)
    forward = PlannedForward(module, planned, planner, costs)
    planned.__dict__["forward"] = forward
    if example_inputs is not None:
        forward.plan(*example_inputs, **(example_kwargs or {}))
    return planned


def plans_of(module: nn.Module) -> tuple[TorchPlan, ...]:
    """The plans that `checkpoint` has made so far for a module and its submodules, in order.

    Plans are found inside wrappers: modules around a planned one (data parallel training, `torch.compile`,
    adapters), and functions that replace its forward, as in Accelerate.
    """
    forwards = (planned_forward(vars(inner).get("forward")) for inner in module.modules())
    # In order, each once.
    unique = dict.fromkeys(forward for forward in forwards if forward is not None)
    return tuple(plan for forward in unique for plan in forward.plans)


def planned_forward(function: Any) -> PlannedForward | None:
    """The planned forward inside functions that wrap, bind, or close over it."""
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
            with contextlib.suppress(ValueError):  # The cell is still empty.
                waiting.append(cell.cell_contents)
    return None
