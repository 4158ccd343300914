"""Solvers beside exhaustive searches, on many small random graphs from fixed seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any

from onnxgc.planning.plan import Objective, Solution, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.planning.schedule import StepGraph
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.registry import SOLVERS
from onnxgc.solvers.schedules import least_peak_of_schedules, with_linked_backward
from scripts.benchmarking.records import Progress
from tests.graph.random_graphs import chain, random_problem
from tests.solvers.random_steps import random_step_problem
from tests.solvers.test_peak import family, least_peak_of_cuts

FEWEST_VERTICES, MOST_VERTICES = 3, 12
MOST_VERTICES_OF_FAMILY = 7
MOST_VERTICES_OF_SCHEDULES = 5
_TOLD_EVERY = 500


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many instances each comparison has."""

    graphs: int = 10_000
    chains: int = 2_000
    families: int = 2_000
    schedules: int = 500


@dataclass(slots=True)
class Comparison:
    """What a solver finds beside a truth, over many instances.

    `below` counts values under the truth, `false_bounds` lower bounds above it, `false_proofs` plans
    called optimal that are not: each must be 0. Ratios are of value to truth, where the truth is
    above 0.
    """

    solver: str
    truth: str
    on: str
    instances: int = 0
    equal: int = 0
    called_optimal: int = 0
    below: int = 0
    false_bounds: int = 0
    false_proofs: int = 0
    ratios: list[float] = field(default_factory=list)

    def add(self, solution: Solution, truth: int) -> None:
        """A value, and what its solver claims about it."""
        self.add_value(solution.objective_bytes, truth)
        is_called_optimal = solution.status is Status.OPTIMAL
        self.called_optimal += is_called_optimal
        self.false_bounds += solution.lower_bound_bytes > truth
        self.false_proofs += is_called_optimal and solution.objective_bytes > truth

    def add_value(self, value: int, truth: int) -> None:
        self.instances += 1
        self.equal += value == truth
        self.below += value < truth
        if truth:
            self.ratios.append(value / truth)

    def figures(self) -> dict[str, Any]:
        return {
            "solver": self.solver,
            "truth": self.truth,
            "on": self.on,
            "instances": self.instances,
            "equal": self.equal,
            "called_optimal": self.called_optimal,
            "below": self.below,
            "false_bounds": self.false_bounds,
            "false_proofs": self.false_proofs,
            "worst_ratio": max(self.ratios, default=1.0),
            "mean_ratio": math.fsum(self.ratios) / len(self.ratios) if self.ratios else 1.0,
        }


def run_exactness(sizes: Sizes, seed: int, tell: Progress) -> list[dict[str, Any]]:
    """All comparisons, one row each."""
    found: list[Comparison] = []
    for compare in (_sums, _chains, _families, _schedules):
        found += compare(sizes, seed, tell)
    return [comparison.figures() for comparison in found]


def small_graphs(seed: int) -> Iterator[CheckpointProblem]:
    """Random graphs of 3 to 12 vertices, without end."""
    random = Random(seed)
    while True:
        problem = random_problem(random, MOST_VERTICES)
        if FEWEST_VERTICES <= len(problem.graph) <= MOST_VERTICES:
            yield problem


def _sums(sizes: Sizes, seed: int, tell: Progress) -> list[Comparison]:
    compared = {
        solver: Comparison(solver, f"every set, '{objective.value}'", "random graphs, 3-12 vertices")
        for solver, objective in (("acg", Objective.PAPER), ("general", Objective.GENERAL))
        if solver in SOLVERS
    }
    for problem in _told(islice(small_graphs(seed), sizes.graphs), sizes.graphs, "sums", tell):
        for solver, comparison in compared.items():
            solution = SOLVERS[solver].solve(problem)
            comparison.add(solution, _exhaustive(problem, solution.objective))
    return list(compared.values())


def _chains(sizes: Sizes, seed: int, tell: Progress) -> list[Comparison]:
    comparison = Comparison("lcg", "every set, 'paper'", "chains, 3-12 vertices")
    random = Random(seed + 1)
    for _ in _told(range(sizes.chains), sizes.chains, "chains", tell):
        largest = random.choice([1, 3, 10, 1000])
        vertices = random.randint(FEWEST_VERTICES, MOST_VERTICES)
        problem = chain([random.randint(0, largest) for _ in range(vertices)])
        solution = SOLVERS["lcg"].solve(problem)
        comparison.add(solution, _exhaustive(problem, solution.objective))
    return [comparison]


# Graphs with sizes alone, and training steps with gradients, workspaces and in-place operators.
_DRAWS: dict[str, Callable[[Random, int], CheckpointProblem]] = {
    "bare graphs": random_problem,
    "training steps": random_step_problem,
}


def _families(sizes: Sizes, seed: int, tell: Progress) -> list[Comparison]:
    found = []
    for number, (what, draw) in enumerate(_DRAWS.items()):
        random = Random(seed + 2 + number)
        on = f"{what}, up to {MOST_VERTICES_OF_FAMILY} vertices"
        comparison = Comparison("cuts of peak", "all cuts of its orders", on)
        count = sizes.families // len(_DRAWS)
        for _ in _told(range(count), count, f"cuts, {what}", tell):
            problem = draw(random, MOST_VERTICES_OF_FAMILY)
            joint = problem.joint()
            truth = min(joint.profile(plan).peak_bytes for plan in family(problem))
            comparison.add_value(least_peak_of_cuts(problem), truth)
        found.append(comparison)
    return found


def _schedules(sizes: Sizes, seed: int, tell: Progress) -> list[Comparison]:
    found = []
    for number, (what, draw) in enumerate(_DRAWS.items()):
        random = Random(seed + 4 + number)
        on = f"{what}, up to {MOST_VERTICES_OF_SCHEDULES} vertices"
        peak = Comparison("peak", "all schedules", on)
        plans = Comparison("best plan of all", "all schedules", on)
        count = sizes.schedules // len(_DRAWS)
        for _ in _told(range(count), count, f"schedules, {what}", tell):
            problem = draw(random, MOST_VERTICES_OF_SCHEDULES)
            truth = least_peak_of_schedules(_step(problem))
            peak.add(SOLVERS["peak"].solve(problem), truth)
            # Its orders are few enough for the exhaustive search over plans.
            plans.add_value(_exhaustive(problem, Objective.PEAK), truth)
        found += [peak, plans]
    return found


def _step(problem: CheckpointProblem) -> StepGraph:
    step = problem.joint().step
    return with_linked_backward(step) if problem.traced is None else step


def _exhaustive(problem: CheckpointProblem, objective: Objective) -> int:
    return SOLVERS["exhaustive"].solve(problem, SolverOptions(objective=objective)).objective_bytes


def _told(items: Iterable[Any], count: int, what: str, tell: Progress) -> Iterator[Any]:
    for number, item in enumerate(items):
        if number % _TOLD_EVERY == 0:
            tell(f"{what}: {number:,} of {count:,}")
        yield item
