"""Plans, and solutions: plans with a value, a bound and a status."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from onnxgc.errors import PlanError
from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.graph.virtual_terminals import forced_checkpoints


class Objective(Enum):
    """The quantity that a plan minimises."""

    PEAK = "peak"
    """The simulated peak of the training graph that will run."""
    ACTIVATIONS = "activations"
    """The same without the parameters' gradients, for gradients in permanent buffers."""
    PAPER = "paper"
    """The sum of the checkpoints and the heaviest segment, over sets whose segments are independent
    (reading A of `onnxgc.graph.segments`)."""
    TIME = "time"
    """The extra time under a memory budget."""
    GENERAL = "general"
    """The same sum over all sets whose segments can run one after another (reading G): no path leaves a
    segment and returns to it, and no two segments depend on each other."""


def parse_objective(name: str | None) -> Objective | None:
    """The objective of that name; `None` for `None`.

    Raises:
        PlanError: the name is unknown.
    """
    known = [objective.value for objective in Objective if objective is not Objective.TIME]
    if name is not None and name not in known:
        raise PlanError(f"objective '{name}' is not one of {', '.join(known)}; pass one of them to --objective")
    return None if name is None else Objective(name)


class Status(Enum):
    """The quality of a plan as its solver proves it."""

    OPTIMAL = "optimal"
    """Proved best for the objective that the solver is exact for."""
    FEASIBLE = "feasible"
    """A valid plan; the solution's lower bound limits its distance to the optimum."""


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The checkpoints, in topological order; all other tensors are discarded and recomputed.

    `order` is the order in which vertices are computed; empty for the model's own, changed only as far as
    segments need it to run one after another. With `keeps_last_segment` the segment that backward
    reaches first stays live too: its immediate recomputation would save nothing.

    A `sequence` determines the whole plan: the names of the step's operators in the order in which they
    run, recomputed ones repeatedly. Checkpoints are then the vertices that are never recomputed.
    """

    checkpoints: tuple[Vertex, ...]
    order: tuple[Vertex, ...] = ()
    keeps_last_segment: bool = True
    sequence: tuple[str, ...] = ()

    @classmethod
    def for_graph(cls, graph: ComputationGraph, checkpoints: Iterable[Vertex]) -> "CheckpointPlan":
        """Sort checkpoints, remove repeats, and add the graph's single source and target.

        Raises:
            PlanError: a checkpoint is not a vertex of the graph; the message suggests the closest names.
        """
        wanted = tuple(checkpoints)
        for vertex in wanted:
            if vertex not in graph:
                raise PlanError(_unknown_checkpoint(graph, vertex))
        return cls(graph.in_order((*wanted, *forced_checkpoints(graph))))


@dataclass(frozen=True, slots=True)
class TimeCost:
    """Time of a step, in nanoseconds or in the unit of the given durations.

    `regular` is the time of every operator once, `extra` the time that the plan adds, `lower_bound` the least
    that any plan within the budget adds.
    """

    regular: int
    extra: int
    lower_bound: int

    @property
    def extra_ratio(self) -> float:
        return self.extra / self.regular if self.regular else 0.0

    @property
    def lower_bound_ratio(self) -> float:
        return self.lower_bound / self.regular if self.regular else 0.0

    @property
    def gap(self) -> float:
        """The most time that a better plan could save, as a share of the plan's whole time."""
        total = self.regular + self.extra
        return max(0, self.extra - self.lower_bound) / total if total else 0.0

    @property
    def gap_of_extra(self) -> float:
        """The same as a share of the extra time."""
        return max(0, self.extra - self.lower_bound) / self.extra if self.extra else 0.0


@dataclass(frozen=True, slots=True)
class Solution:
    """A plan with its value, a lower bound and a status.

    `objective_bytes` is the plan's value, `lower_bound_bytes` a lower bound on that of every plan that the
    objective admits, set by `bound_operator` if one operator sets it. For the objective `TIME` the
    status refers to `time`, and `objective_bytes` is the plan's peak. `seconds` is the wall-clock time of
    the search, which a user may have `interrupted`.
    """

    plan: CheckpointPlan
    solver: str
    status: Status
    objective: Objective
    objective_bytes: int
    lower_bound_bytes: int
    seconds: float
    bound_operator: str = ""
    time: TimeCost | None = None
    interrupted: bool = False

    @property
    def gap(self) -> float:
        """The most that a better plan could save, as a share of the objective: 0.0 when optimal."""
        if self.time is not None:
            return self.time.gap
        if self.objective_bytes <= self.lower_bound_bytes:
            return 0.0
        return (self.objective_bytes - self.lower_bound_bytes) / self.objective_bytes


def _unknown_checkpoint(graph: ComputationGraph, vertex: Vertex) -> str:
    names = [str(known) for known in graph.vertices]
    close = difflib.get_close_matches(str(vertex), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"the first one is {names[0]!r}"
    return f"checkpoint {str(vertex)!r} is not one of the graph's {len(names)} tensors; {hint}"
