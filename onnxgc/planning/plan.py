"""What a solver decides, and what it claims about its decision."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from onnxgc.errors import PlanError
from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.graph.terminals import forced_checkpoints


class Status(Enum):
    """What a solver can say about its plan."""

    OPTIMAL = "optimal"
    """Proved best for the objective that the solver is exact for."""
    FEASIBLE = "feasible"
    """No more than a plan; the solution's lower bound says how far from the best it can be."""


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The tensors to keep through forward, in topological order; all others are computed again."""

    checkpoints: tuple[Vertex, ...]

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
class Solution:
    """A plan and what is known about it.

    `objective_bytes` is the plan's value, `lower_bound_bytes` what no plan goes below (among the
    plans that the solver's objective admits), `seconds` the wall-clock time of the search.
    """

    plan: CheckpointPlan
    solver: str
    status: Status
    objective_bytes: int
    lower_bound_bytes: int
    seconds: float

    @property
    def gap(self) -> float:
        """The most that could still be saved, as a share of the objective: 0.0 when optimal."""
        if self.objective_bytes <= self.lower_bound_bytes:
            return 0.0
        return (self.objective_bytes - self.lower_bound_bytes) / self.objective_bytes


def _unknown_checkpoint(graph: ComputationGraph, vertex: Vertex) -> str:
    names = [str(known) for known in graph.vertices]
    close = difflib.get_close_matches(str(vertex), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"the first one is {names[0]!r}"
    return f"checkpoint {str(vertex)!r} is none of the graph's {len(names)} tensors; {hint}"
