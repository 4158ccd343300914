"""Plans of joint graphs: the search within a memory budget, and the figures of a sequence."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from onnxgc.budget.bounds.peak_bound import floor_of_problem
from onnxgc.budget.improve.removable_runs import without_needless_repeats
from onnxgc.budget.least_peak import least_peak
from onnxgc.budget.operator_problem import simulate_sequence
from onnxgc.budget.search import BudgetedSequence, NoSequence, SearchOptions, within_budget
from onnxgc.errors import BudgetError
from onnxgc.planning.memory_budget import Budget
from onnxgc.torch.joint_problem import JointStep


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor kept from forward to backward: the operator that computes it, and its bytes."""

    operator: str
    dtype: torch.dtype
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """The plan for one kind of call: peaks in bytes, extra time as a share of the baseline's time.

    Peaks count the allocations of forward and backward, gradients of parameters included, but neither
    parameters nor the call's own inputs. `saved` lists the tensors of forward that backward reads, without
    these inputs, parameters and generator states; `saved_bytes` counts all live bytes at the forward/backward
    boundary.
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


Planner = Callable[[JointStep, int, Sequence[tuple[int, ...]]], tuple[tuple[int, ...], int]]
"""Chooses the sequence in which a joint graph runs, with a lower bound on its extra time in nanoseconds.

The integer is the memory, in bytes, that plans of other calls need anyway; then come the sequences of calls
with the same operators and other shapes.
"""


@dataclass(frozen=True, slots=True)
class BudgetPlanner:
    """Searches for the sequence of least extra time within a memory budget."""

    budget: Budget
    options: SearchOptions

    def __call__(
        self, step: JointStep, available_bytes: int, alike: Sequence[tuple[int, ...]] = ()
    ) -> tuple[tuple[int, ...], int]:
        """Tries the budget, then `available_bytes` if they are more.

        A sequence of `alike` that fits is taken without a search, less the runs that it does not need here.

        Raises:
            BudgetError: no sequence fits.
        """
        problem = step.problem
        floor = floor_of_problem(problem)
        result: BudgetedSequence | NoSequence
        if self.budget.is_least and alike:
            profiles = {one: simulate_sequence(problem, one) for one in (tuple(range(len(problem))), *alike)}
            return min(profiles, key=lambda one: (profiles[one].peak, profiles[one].duration)), 0
        if self.budget.is_least:
            result = least_peak(problem, floor.size, self.options).best
        else:
            budget = self.budget.bytes_of(simulate_sequence(problem, range(len(problem))).peak)
            baseline = range(len(problem))
            fitting = [one for one in alike if simulate_sequence(problem, one).peak <= budget]
            if fitting and simulate_sequence(problem, baseline).peak > budget:
                thinned = [tuple(without_needless_repeats(problem, one, budget)) for one in fitting]
                return min(thinned, key=lambda one: simulate_sequence(problem, one).duration), 0
            result = within_budget(problem, budget, self.options, alike)
            if isinstance(result, NoSequence) and budget < available_bytes:
                result = within_budget(problem, available_bytes, self.options)
            if isinstance(result, NoSequence):
                node = step.nodes[result.operator]
                at = "" if node is None else f" ('{node.name}')"
                raise BudgetError(
                    f"no plan within {budget:,} bytes was found; no plan is below {floor.size:,}{at}; give "
                    "more memory, a smaller batch, or budget='min'"
                )
        return result.sequence, result.lower_bound


def plan_summary(step: JointStep, sequence: Sequence[int], lower_bound: int) -> TorchPlan:
    """The figures of a sequence; `lower_bound` is one on extra time, in nanoseconds."""
    problem = step.problem
    profile = simulate_sequence(problem, sequence)
    extra = profile.duration - problem.duration
    return TorchPlan(
        len(problem),
        len(sequence) - len(problem),
        simulate_sequence(problem, range(len(problem))).peak,
        profile.peak,
        profile.timeline[sequence.index(step.boundary)],
        extra / problem.duration if problem.duration else 0.0,
        lower_bound / problem.duration if problem.duration else 0.0,
        extra <= lower_bound,
        tuple(_saved_tensors(step, sequence)),
    )


def _saved_tensors(step: JointStep, sequence: Sequence[int]) -> Iterator[SavedTensor]:
    """Tensors written in forward and read in backward before they are recomputed."""
    problem = step.problem
    boundary = sequence.index(step.boundary)
    kept = {storage for index in sequence[:boundary] for storage in problem.operators[index].writes}
    read: set[int] = set()
    for index in sequence[boundary + 1 :]:
        read.update(kept.intersection(problem.operators[index].reads))
        kept.difference_update(problem.operators[index].writes)
    for storage in sorted(read):
        node = step.nodes[problem.producer[storage]]
        assert node is not None, "forward precedes the boundary"
        if problem.sizes[storage]:
            yield SavedTensor(node.name, step.dtypes[storage], problem.sizes[storage])
