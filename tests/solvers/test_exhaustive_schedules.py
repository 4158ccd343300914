from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from onnxgc.errors import PlanError
from onnxgc.planning.plan import Objective
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.planning.schedule import Compute, Recompute, Schedule, StepGraph, _with_releases, _without_idle_outputs
from onnxgc.planning.simulate import simulate
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.baselines.exhaustive import EXHAUSTIVE
from onnxgc.solvers.peak.cut_search import PEAK
from onnxgc.solvers.plan_bounds import largest_working_set
from tests.graph.random_graphs import chain, random_problem
from tests.solvers.exhaustive_schedules import least_peak_of_schedules, with_linked_backward
from tests.solvers.random_steps import random_step_problem

RUNS = ("", "__recompute")
"""Suffixes of the tensors of an operator's first and second run."""


def sequences(step: StepGraph) -> Iterator[list[Compute | Recompute]]:
    """Every order of operators, with every choice of second runs and of the copy that is read."""
    forward = {operator.name for operator in step.forward}
    operators = [*step.forward, *(operator for chunk in step.chunks for operator in chunk)]
    maker = {name: operator.name for operator in operators for name in operator.outputs}
    runs: dict[str, int] = {operator.name: 0 for operator in operators}
    taken: list[Compute | Recompute] = []

    def extend() -> Iterator[list[Compute | Recompute]]:
        if all(runs.values()):
            yield list(taken)
        for operator in operators:
            past = runs[operator.name]
            if past == 2 or (past and (operator.once or operator.name not in forward)):
                continue
            if operator.name not in forward and not all(runs[name] for name in forward):
                continue
            known = dict.fromkeys(name for name in operator.inputs if name in maker)
            for choice in product(*(RUNS[: runs[maker[name]]] for name in known)):
                source = {name: name + run for name, run in zip(known, choice, strict=True)}
                renamed = replace(
                    operator,
                    inputs=tuple(source.get(name, name) for name in operator.inputs),
                    outputs=tuple(name + RUNS[past] for name in operator.outputs),
                )
                runs[operator.name] += 1
                taken.append(
                    Recompute(replace(renamed, name=f"{operator.name}.again"), operator.name, 0)
                    if past
                    else Compute(renamed)
                )
                yield from extend()
                taken.pop()
                runs[operator.name] -= 1

    return extend()


def least_simulated_peak(step: StepGraph) -> int:
    copies = {f"{name}{RUNS[1]}": name for operator in step.forward for name in operator.outputs}
    return min(
        simulate(Schedule(tuple(_with_releases(_without_idle_outputs(s, step), step)), copies), step).peak_bytes
        for s in sequences(step)
    )


def small_problems(seed: int, count: int, max_vertices: int, max_events: int) -> Iterator[CheckpointProblem]:
    random = Random(seed)
    while count:
        draw = random_step_problem if count % 2 else random_problem
        problem = draw(random, max_vertices)
        step = problem.joint().step
        events = sum(1 if operator.once else 2 for operator in step.forward) + sum(map(len, step.chunks))
        if events <= max_events:
            count -= 1
            yield problem


def step_of(problem: CheckpointProblem) -> StepGraph:
    step = problem.joint().step
    return with_linked_backward(step) if problem.traced is None else step


def test_equals_the_least_simulated_peak_of_all_schedules():
    for problem in small_problems(91, 50, 4, 8):
        step = step_of(problem)
        assert least_peak_of_schedules(step) == least_simulated_peak(step)


def test_lies_between_the_lower_bound_and_every_plan():
    above = 0
    for problem in small_problems(92, 80, 4, 100):
        step = step_of(problem)
        least = least_peak_of_schedules(step)
        planned = EXHAUSTIVE.solve(problem, SolverOptions(objective=Objective.PEAK)).objective_bytes
        solution = PEAK.solve(problem)
        assert largest_working_set(step).bytes <= least <= planned <= solution.objective_bytes
        assert solution.lower_bound_bytes <= planned
        above += solution.objective_bytes > planned
    assert above <= 20, "plans are mostly optimal"


def test_unsupported_steps_raise():
    step = chain([1] * 6).joint().step
    with pytest.raises(PlanError, match="more than 5 states"):
        least_peak_of_schedules(step, max_states=5)
