"""The search over all schedules, against the simulation of every schedule and against plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from onnxgc.errors import PlanError
from onnxgc.planning.plan import Objective
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.planning.schedule import (
    Compute,
    Operator,
    Recompute,
    Schedule,
    StepGraph,
    _with_releases,
    _without_idle_outputs,
    build_schedule,
)
from onnxgc.planning.simulate import simulate
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.baselines.exhaustive import EXHAUSTIVE
from onnxgc.solvers.peak.cut_search import PEAK
from onnxgc.solvers.plan_bounds import largest_working_set
from tests.graph.random_graphs import chain, problem_of, random_problem
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


def test_equals_the_least_simulated_peak_of_all_schedules() -> None:
    for problem in small_problems(91, 160, 4, 8):
        step = step_of(problem)
        assert least_peak_of_schedules(step) == least_simulated_peak(step)


def test_lies_between_the_lower_bound_and_every_plan() -> None:
    for problem in small_problems(92, 120, 4, 100):
        step = step_of(problem)
        least = least_peak_of_schedules(step)
        planned = EXHAUSTIVE.solve(problem, SolverOptions(objective=Objective.PEAK)).objective_bytes
        assert largest_working_set(step).bytes <= least <= planned <= PEAK.solve(problem).objective_bytes


def test_order_of_backward_is_free_within_data_dependencies() -> None:
    """Two gradients that each read a large tensor run one after the other, for any given order."""
    problem = problem_of([(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)], [0, 8, 1, 8, 1, 0])
    step = with_linked_backward(problem.joint().step)
    orders = [step, problem.joint().retraced(("f0", "f3", "f4", "f1", "f2", "f5"))]
    assert {least_peak_of_schedules(order) for order in orders} == {10}


def test_an_operator_runs_at_most_twice() -> None:
    """With more runs, 2 bytes would suffice for a unit chain of any length."""
    peaks = [
        least_peak_of_schedules(with_linked_backward(chain([0, *[1] * length]).joint().step)) for length in range(1, 9)
    ]
    assert peaks == [1, 2, 2, 2, 3, 3, 3, 3]


def test_tensors_that_cannot_be_recomputed_stay_live() -> None:
    step = with_linked_backward(chain([0, *[1] * 6]).joint().step)
    fixed = replace(step, forward=tuple(replace(operator, once=True) for operator in step.forward))
    assert least_peak_of_schedules(step) < least_peak_of_schedules(fixed) == 6


def test_a_second_run_may_work_in_place_and_step_outputs_do_not_share_memory() -> None:
    forward = (
        Operator("a", ("x",), ("t.a",)),
        Operator("b", ("t.a",), ("t.b",), in_place=True),
        Operator("c", ("t.b",), ("t.c",)),
    )
    chunks = ((Operator("b.c", ("t.c",), ("g.c",), workspace_bytes=6),), (Operator("b.b", ("t.b", "g.c"), ("g.b",)),))
    sizes = {"t.a": 4, "t.b": 4, "t.c": 1, "g.c": 1, "g.b": 0}
    step = StepGraph(forward, chunks, ("c", "b"), sizes, frozenset({"x"}), (), frozenset())
    assert least_peak_of_schedules(step) == least_simulated_peak(step) == 8
    returned = replace(step, outputs=("t.b",), chunks=((replace(chunks[0][0], workspace_bytes=0),), chunks[1]))
    assert least_peak_of_schedules(returned) == least_simulated_peak(returned) == 8


def test_links_do_not_change_the_simulation() -> None:
    for problem in small_problems(93, 60, 6, 100):
        if problem.traced is None:
            step = problem.joint().step
            linked = with_linked_backward(step)
            one, two = (simulate(build_schedule(s, frozenset(), str), s) for s in (step, linked))
            assert one == two


def test_unsupported_steps_raise() -> None:
    step = chain([1] * 6).joint().step
    with pytest.raises(PlanError, match="more than 5 states"):
        least_peak_of_schedules(step, max_states=5)
    view = replace(step.forward[1], is_view=True)
    with pytest.raises(PlanError, match="views"):
        least_peak_of_schedules(replace(step, forward=(step.forward[0], view, *step.forward[2:])))
