"""Solvers compared with exhaustive searches, on many small random graphs from fixed seeds."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from random import Random
from typing import Any

from onnxgc.planning.plan import Objective, Solution, Status
from onnxgc.planning.problem import CheckpointProblem
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

Problems = Iterator[CheckpointProblem]
Draw = Callable[[Random, int], CheckpointProblem]
Value = Callable[[CheckpointProblem], int]
Searches = Mapping[str, Callable[[CheckpointProblem], Solution | int]]


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

    def add(self, found: Solution | int, truth: int) -> None:
        """Adds a value, with the solver's claims about it if there are any."""
        value = found if isinstance(found, int) else found.objective_bytes
        if isinstance(found, Solution):
            is_called_optimal = found.status is Status.OPTIMAL
            self.called_optimal += is_called_optimal
            self.false_bounds += found.lower_bound_bytes > truth
            self.false_proofs += is_called_optimal and value > truth
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
    rows: list[dict[str, Any]] = []
    seed, paper, peak = options.seed, partial(_exhaustive, Objective.PAPER), partial(_exhaustive, Objective.PEAK)

    def compare(problems: Problems, count: int, on: str, truth: str, truth_of: Value, searches: Searches) -> None:
        found = {name: Comparison(name, truth, on) for name in searches}
        for number, problem in enumerate(islice(problems, count)):
            if number % _PROGRESS_EVERY == 0:
                progress(f"{', '.join(searches)}, {on}: {number:,} of {count:,}")
            true_value = truth_of(problem)
            for name, search in searches.items():
                found[name].add(search(problem), true_value)
        rows.extend(comparison.figures() for comparison in found.values())

    solve: Searches = {name: SOLVERS[name].solve for name in ("acg", "general", "lcg", "peak")}
    on = "random graphs, 3-12 vertices"
    compare(small_graphs(seed), options.graphs, on, "every set, 'paper'", paper, {"acg": solve["acg"]})
    every = partial(_exhaustive, Objective.GENERAL)
    compare(small_graphs(seed), options.graphs, on, "every set, 'general'", every, {"general": solve["general"]})
    chains = _chains(Random(seed + 1))
    compare(chains, options.chains, "chains, 3-12 vertices", "every set, 'paper'", paper, {"lcg": solve["lcg"]})
    for number, (what, draw) in enumerate(_DRAWS.items(), seed + 2):
        on, count = f"{what}, up to {MAX_VERTICES_OF_FAMILY} vertices", options.families // len(_DRAWS)
        problems = _drawn(draw, Random(number), MAX_VERTICES_OF_FAMILY)
        compare(problems, count, on, "all cuts of its orders", _least_of_family, {"cuts of peak": least_peak_of_cuts})
    for number, (what, draw) in enumerate(_DRAWS.items(), seed + 4):
        on, count = f"{what}, up to {MAX_VERTICES_OF_SCHEDULES} vertices", options.schedules // len(_DRAWS)
        problems = _drawn(draw, Random(number), MAX_VERTICES_OF_SCHEDULES)
        searches: Searches = {"peak": solve["peak"], "best plan of all": peak}
        compare(problems, count, on, "all schedules", _least_of_schedules, searches)
    return rows


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


def _chains(random: Random) -> Iterator[CheckpointProblem]:
    while True:
        largest = random.choice([1, 3, 10, 1000])
        yield chain([random.randint(0, largest) for _ in range(random.randint(MIN_VERTICES, MAX_VERTICES))])


# Graphs with sizes only, and training steps with gradients, workspaces and in-place operators.
_DRAWS: dict[str, Draw] = {"bare graphs": random_problem, "training steps": random_step_problem}


def _drawn(draw: Draw, random: Random, max_vertices: int) -> Iterator[CheckpointProblem]:
    while True:
        yield draw(random, max_vertices)


def _least_of_family(problem: CheckpointProblem) -> int:
    joint = problem.joint()
    return min(joint.profile(plan).peak_bytes for plan in family(problem))


def _least_of_schedules(problem: CheckpointProblem) -> int:
    step = problem.joint().step
    return least_peak_of_schedules(with_linked_backward(step) if problem.traced is None else step)


def _exhaustive(objective: Objective, problem: CheckpointProblem) -> int:
    return SOLVERS["exhaustive"].solve(problem, SolverOptions(objective=objective)).objective_bytes


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
