"""What a solver decides, and what it claims about its decision."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from onnxgc.errors import PlanError
from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.graph.terminals import forced_checkpoints


class Objective(Enum):
    """What a plan is to make small."""

    PEAK = "peak"
    """The simulated peak of the training graph that will run."""
    ACTIVATIONS = "activations"
    """The same without the parameters' gradients, as where they go into buffers that are always there."""
    PAPER = "paper"
    """The sum of the checkpoints and the heaviest segment, over sets whose segments are independent
    (reading A of `onnxgc.graph.segments`)."""
    TIME = "time"
    """The extra time under a memory budget."""
    GENERAL = "general"
    """The same sum over all sets whose segments can follow one another (reading G): no path leaves a
    segment and comes back, and no two segments wait for each other."""


def parse_objective(name: str | None) -> Objective | None:
    """The objective of that name; none for none.

    Raises:
        PlanError: there is no such objective.
    """
    known = [objective.value for objective in Objective if objective is not Objective.TIME]
    if name is not None and name not in known:
        raise PlanError(f"objective '{name}' is none of {', '.join(known)}; pass one of them to --objective")
    return None if name is None else Objective(name)


class Status(Enum):
    """What a solver can say about its plan."""

    OPTIMAL = "optimal"
    """Proved best for the objective that the solver is exact for."""
    FEASIBLE = "feasible"
    """No more than a plan; the solution's lower bound says how far from the best it can be."""


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The tensors to keep through forward, in topological order; all others are computed again.

    `order` is the order in which vertices are computed; empty for the model's own, changed only as far
    as segments need it to follow one another. With `keeps_last_segment`, what backward reaches
    first is held too: there is nothing to gain by computing it again at once.

    A `sequence`, where there is one, says all of it: the names of the step's operators in the order in
    which they run, repeated where they run again. Checkpoints are then what never runs again.
    """

    checkpoints: tuple[Vertex, ...]
    order: tuple[Vertex, ...] = ()
    keeps_last_segment: bool = True
    sequence: tuple[str, ...] = ()

    @classmethod
    def for_graph(cls, graph: ComputationGraph, checkpoints: Iterable[Vertex]) -> CheckpointPlan:
        """Put checkpoints in order, drop repeats, and add the graph's single source and target.

        Raises:
            PlanError: a checkpoint is no vertex of the graph; the closest names are given.
        """
        wanted = tuple(checkpoints)
        for vertex in wanted:
            if vertex not in graph:
                raise PlanError(_unknown_checkpoint(graph, vertex))
        return cls(graph.in_order((*wanted, *forced_checkpoints(graph))))


@dataclass(frozen=True, slots=True)
class TimeCost:
    """Time of a step, in nanoseconds or in whatever unit durations were given.

    `regular` is that of every operator once, `extra` what the plan adds, and no plan within the budget
    adds less than `lower_bound`.
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
        """What could still be saved, as a share of the plan's whole time."""
        total = self.regular + self.extra
        return max(0, self.extra - self.lower_bound) / total if total else 0.0

    @property
    def gap_of_extra(self) -> float:
        """The same as a share of the extra time."""
        return max(0, self.extra - self.lower_bound) / self.extra if self.extra else 0.0


@dataclass(frozen=True, slots=True)
class Solution:
    """A plan and what is known about it.

    For the objective `TIME` the status speaks of `time`, and `objective_bytes` is the plan's peak.
    `objective_bytes` is the plan's value, `lower_bound_bytes` what no plan goes below (among the
    plans that the objective admits), set by `bound_operator` where one operator sets it. `seconds` is
    the wall-clock time of the search, which a user may have `interrupted`.
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
        """The most that could still be saved, as a share of the objective: 0.0 when optimal."""
        if self.time is not None:
            return self.time.gap
        if self.objective_bytes <= self.lower_bound_bytes:
            return 0.0
        return (self.objective_bytes - self.lower_bound_bytes) / self.objective_bytes


def _unknown_checkpoint(graph: ComputationGraph, vertex: Vertex) -> str:
    names = [str(known) for known in graph.vertices]
    close = difflib.get_close_matches(str(vertex), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"the first one is {names[0]!r}"
    return f"checkpoint {str(vertex)!r} is none of the graph's {len(names)} tensors; {hint}"
