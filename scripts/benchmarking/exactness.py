"""Solvers compared with exhaustive searches, on many small random graphs from fixed seeds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any

from onnxgc.planning.plan import Objective, Solution, Status
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.planning.schedule import StepGraph
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.registry import SOLVERS
from scripts.benchmarking.records import Progress, Record
from scripts.benchmarking.tables import markdown_table
from tests.graph.random_graphs import chain, random_problem
from tests.solvers.exhaustive_schedules import least_peak_of_schedules, with_linked_backward
from tests.solvers.random_steps import random_step_problem
from tests.solvers.test_peak import family, least_peak_of_cuts

MIN_VERTICES, MAX_VERTICES = 3, 12
MAX_VERTICES_OF_FAMILY = 7
MAX_VERTICES_OF_SCHEDULES = 5
_PROGRESS_EVERY = 500


@dataclass(frozen=True, slots=True)
class Options:
    """The number of instances of each comparison."""

    seed: int = 0
    graphs: int = 10_000
    chains: int = 2_000
    families: int = 2_000
    schedules: int = 500


@dataclass(slots=True)
class Comparison:
    """Values of a solver and true optima, over many instances.

    `below` counts values below the truth, `false_bounds` lower bounds above it, and `false_proofs` suboptimal
    plans that are reported optimal: all must be 0. Ratios are of value to truth, where the truth is positive.
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
        """Adds a value with the solver's claims about it."""
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
        found = dataclasses.asdict(self)
        del found["ratios"]
        found["worst_ratio"] = max(self.ratios, default=1.0)
        found["mean_ratio"] = math.fsum(self.ratios) / len(self.ratios) if self.ratios else 1.0
        return found


def run(options: Options, progress: Progress) -> list[dict[str, Any]]:
    """All comparisons, one row each."""
    found: list[Comparison] = []
    for compare in (_sums, _chains, _families, _schedules):
        found += compare(options, progress)
    return [comparison.figures() for comparison in found]


def small_graphs(seed: int) -> Iterator[CheckpointProblem]:
    """An infinite sequence of random graphs of `MIN_VERTICES` to `MAX_VERTICES`."""
    random = Random(seed)
    while True:
        problem = random_problem(random, MAX_VERTICES)
        if MIN_VERTICES <= len(problem.graph) <= MAX_VERTICES:
            yield problem


def results_section(record: Record) -> str:
    rows = record["figures"]
    wrong = sum(map(_count_wrong, rows))
    headings = ["solver", "truth", "on", "instances", "equal", "mean ratio", "worst ratio"]
    return (
        "**Exactness** on small random graphs from fixed seeds, compared with exhaustive searches. *All "
        "schedules* may run operators in any order, discard any tensor at any time and compute each forward "
        "tensor twice. Wrong values, lower bounds and proofs of optimality: "
        f"{wrong or 'none'}.\n\n{markdown_table(headings, list(map(_document_row, rows)))}"
    )


def _sums(options: Options, progress: Progress) -> list[Comparison]:
    compared = {
        solver: Comparison(solver, f"every set, '{objective.value}'", "random graphs, 3-12 vertices")
        for solver, objective in (("acg", Objective.PAPER), ("general", Objective.GENERAL))
        if solver in SOLVERS
    }
    for problem in _reported(islice(small_graphs(options.seed), options.graphs), options.graphs, "sums", progress):
        for solver, comparison in compared.items():
            solution = SOLVERS[solver].solve(problem)
            comparison.add(solution, _exhaustive(problem, solution.objective))
    return list(compared.values())


def _chains(options: Options, progress: Progress) -> list[Comparison]:
    comparison = Comparison("lcg", "every set, 'paper'", "chains, 3-12 vertices")
    random = Random(options.seed + 1)
    for _ in _reported(range(options.chains), options.chains, "chains", progress):
        largest = random.choice([1, 3, 10, 1000])
        vertices = random.randint(MIN_VERTICES, MAX_VERTICES)
        problem = chain([random.randint(0, largest) for _ in range(vertices)])
        solution = SOLVERS["lcg"].solve(problem)
        comparison.add(solution, _exhaustive(problem, solution.objective))
    return [comparison]


# Graphs with sizes only, and training steps with gradients, workspaces and in-place operators.
_DRAWS: dict[str, Callable[[Random, int], CheckpointProblem]] = {
    "bare graphs": random_problem,
    "training steps": random_step_problem,
}


def _families(options: Options, progress: Progress) -> list[Comparison]:
    found = []
    for number, (what, draw) in enumerate(_DRAWS.items()):
        random = Random(options.seed + 2 + number)
        on = f"{what}, up to {MAX_VERTICES_OF_FAMILY} vertices"
        comparison = Comparison("cuts of peak", "all cuts of its orders", on)
        count = options.families // len(_DRAWS)
        for _ in _reported(range(count), count, f"cuts, {what}", progress):
            problem = draw(random, MAX_VERTICES_OF_FAMILY)
            joint = problem.joint()
            truth = min(joint.profile(plan).peak_bytes for plan in family(problem))
            comparison.add_value(least_peak_of_cuts(problem), truth)
        found.append(comparison)
    return found


def _schedules(options: Options, progress: Progress) -> list[Comparison]:
    found = []
    for number, (what, draw) in enumerate(_DRAWS.items()):
        random = Random(options.seed + 4 + number)
        on = f"{what}, up to {MAX_VERTICES_OF_SCHEDULES} vertices"
        peak = Comparison("peak", "all schedules", on)
        plans = Comparison("best plan of all", "all schedules", on)
        count = options.schedules // len(_DRAWS)
        for _ in _reported(range(count), count, f"schedules, {what}", progress):
            problem = draw(random, MAX_VERTICES_OF_SCHEDULES)
            truth = least_peak_of_schedules(_step(problem))
            peak.add(SOLVERS["peak"].solve(problem), truth)
            plans.add_value(_exhaustive(problem, Objective.PEAK), truth)
        found += [peak, plans]
    return found


def _step(problem: CheckpointProblem) -> StepGraph:
    step = problem.joint().step
    return with_linked_backward(step) if problem.traced is None else step


def _exhaustive(problem: CheckpointProblem, objective: Objective) -> int:
    return SOLVERS["exhaustive"].solve(problem, SolverOptions(objective=objective)).objective_bytes


def _reported(items: Iterable[Any], count: int, what: str, progress: Progress) -> Iterator[Any]:
    for number, item in enumerate(items):
        if number % _PROGRESS_EVERY == 0:
            progress(f"{what}: {number:,} of {count:,}")
        yield item


def _count_wrong(row: Mapping[str, Any]) -> int:
    return int(row["below"] + row["false_bounds"] + row["false_proofs"])


def failures(figures: Any) -> list[str]:
    """Comparisons with a wrong value, bound or proof of optimality."""
    return [
        f"{row['solver']} on {row['on']}: {row['below']} values below the truth, {row['false_bounds']} false bounds, "
        f"{row['false_proofs']} false proofs"
        for row in figures
        if _count_wrong(row)
    ]


def _document_row(row: Mapping[str, Any]) -> list[str]:
    return [
        row["solver"] if " " in row["solver"] else f"`{row['solver']}`", row["truth"], row["on"],
        f"{row['instances']:,}", f"{row['equal'] / row['instances']:.1%}",
        f"{row['mean_ratio']:.4f}", f"{row['worst_ratio']:.2f}",
    ]  # fmt: skip
