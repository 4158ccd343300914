"""The largest batch of a PyTorch module that trains in a given memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from onnxgc.budget.operator_problem import simulate_sequence
from onnxgc.budget.quick_search import quick_within
from onnxgc.budget.size_search import SizePoint, largest_fitting
from onnxgc.errors import BudgetError, BudgetFormError
from onnxgc.planning.memory_budget import parse_budget, parse_extra_time
from onnxgc.torch.checkpointing import planned_module
from onnxgc.torch.joint_problem import EstimatedCosts, JointStep
from onnxgc.tracing.devices import device as find_device

DEFAULT_EXTRA_TIME = "20%"
_SECONDS_PER_SIZE = 5.0


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest batch found, and all batches that fit, the smallest first.

    Attributes:
        batch: the batch.
        budget_bytes: the `budget` of `checkpoint` for this batch: the memory without what does not belong to
            the step.
        points: batches with the extra time of their plans, as shares of the baseline's time.
    """

    batch: int
    budget_bytes: int
    points: tuple[SizePoint, ...] = field(repr=False)


def largest_batch(
    module: nn.Module,
    make_inputs: Callable[[int], Any],
    memory: str | float,
    *,
    extra_time: str | float = DEFAULT_EXTRA_TIME,
    optimizer_states: int = 2,
    device: str | None = None,
    start: int = 1,
) -> LargestBatch:
    """Find the largest batch of a module that `checkpoint` can train within a memory.

    The memory holds parameters and buffers, the optimizer's state, the call's inputs, and forward and
    backward with all gradients; sizes are those that PyTorch's allocator sees. No step runs.

    Args:
        module: the module, in the mode in which it trains.
        make_inputs: the arguments of a call for a batch: one tensor or a tuple.
        memory: bytes, or text such as 8GiB.
        extra_time: the extra time allowed, as a share of the baseline's.
        optimizer_states: tensors that the optimizer keeps for each trainable parameter: 2 for Adam, 0 for SGD.
        device: name of a device whose data sheet gives durations; by default a100 with CUDA, else cpu.
        start: the first batch to try.

    Raises:
        BudgetError: not even the batch 1 fits.
        BudgetFormError: the memory cannot be parsed.
        PlanError: the module cannot be traced.

    >>> from torch import randn
    >>> module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    >>> largest_batch(module, lambda batch: randn(batch, 64), "2MiB", device="a100").batch > 256
    True
    """
    device = device or ("a100" if torch.cuda.is_available() else "cpu")
    costs = EstimatedCosts(find_device(device))
    allowed, memory_bytes = parse_extra_time(extra_time), parse_budget(memory).size_bytes
    if memory_bytes is None:
        raise BudgetFormError(f"the memory {memory!r} is not a number of bytes; write a size such as 8GiB")
    fixed = sum(map(_bytes, (*module.parameters(), *module.buffers())))
    fixed += optimizer_states * sum(_bytes(one) for one in module.parameters() if one.requires_grad)
    points: dict[int, SizePoint] = {}
    planner = _WithinMemory(allowed)
    largest_budget = 0

    def fits(batch: int) -> bool:
        nonlocal largest_budget
        given = make_inputs(batch)
        arguments = given if isinstance(given, tuple | list) else (given,)
        inputs = sum(_bytes(leaf) for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
        planner.budget_bytes = memory_bytes - fixed - inputs
        try:
            planned_module(module, planner, costs, arguments)
        except BudgetError:
            return False
        peak, extra, duration = planner.figures
        points[batch] = SizePoint(batch, fixed + inputs + peak, extra, duration / 1e9)
        largest_budget = planner.budget_bytes if batch == max(points) else largest_budget
        return True

    found = largest_fitting(fits, start)
    if not found:
        raise BudgetError(
            f"no batch trains within {memory_bytes:,} bytes and {float(allowed):.0%} extra time; parameters, buffers "
            f"and optimizer state alone take {fixed:,}; give more memory or extra_time"
        )
    return LargestBatch(found, largest_budget, tuple(points[batch] for batch in sorted(points)))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _WithinMemory:
    """A planner that repairs the plan of the last batch.

    Attributes:
        budget_bytes: the memory of forward and backward.
        figures: of the last plan: peak in bytes, extra time as a share, time of a step in nanoseconds.
    """

    def __init__(self, allowed: Fraction) -> None:
        self._allowed = allowed
        self.budget_bytes = 0
        self.figures = (0, 0.0, 0)
        self._last: tuple[int, ...] = ()

    def __call__(
        self, step: JointStep, available_bytes: int, alike: Sequence[Sequence[int]] = ()
    ) -> tuple[tuple[int, ...], int]:
        problem = step.problem
        best = quick_within(problem, self.budget_bytes, list(self._starts(step)), seconds=_SECONDS_PER_SIZE)
        found = None if best is None else simulate_sequence(problem, best)
        if best is None or found is None or found.duration - problem.duration > self._allowed * problem.duration:
            raise BudgetError("no plan was found")
        self._last = best
        extra = (found.duration - problem.duration) / max(problem.duration, 1)
        self.figures = found.peak, extra, found.duration
        return best, 0

    def _starts(self, step: JointStep) -> Iterator[tuple[int, ...]]:
        if set(self._last) == set(range(len(step.problem))):
            yield self._last
