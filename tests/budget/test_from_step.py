"""A training step as a problem: both judges say the same of every sequence."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest

from onnxgc.budget.from_step import StepProblem, problem_of
from onnxgc.budget.operator_problem import simulate_sequence
from onnxgc.model.read import read_model
from onnxgc.planning.schedule import Operator, Recompute, Release, StepGraph
from onnxgc.planning.sequences import schedule_of_sequence
from onnxgc.planning.simulate import simulate
from onnxgc.tracing.step_graph import trace
from tests.budget.random_problems import random_sequence
from tests.solvers.random_steps import random_step_problem

MODELS = Path(__file__).parents[2] / "models"


def with_views(random: Random, step: StepGraph) -> StepGraph:
    """The step with views, and views of views, of what operators read; some readers read those instead."""
    sizes = dict(step.sizes)
    views_of: dict[str, list[str]] = {}
    number = 0

    def rewired(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        nonlocal number
        found: list[Operator] = []
        for operator in operators:
            inputs = list(operator.inputs)
            for place, name in enumerate(inputs):
                choice = [name, *views_of.get(name, ())]
                inputs[place] = random.choice(choice)
                if random.random() < 0.25:
                    number += 1
                    view = f"view{number}"
                    sizes[view] = sizes[name]
                    found.append(Operator(f"v.{view}", (inputs[place],), (view,), is_view=True))
                    views_of.setdefault(name, []).append(view)
                    inputs[place] = view
            found.append(replace(operator, inputs=tuple(inputs)))
        return tuple(found)

    forward = rewired(step.forward)
    return replace(step, forward=forward, chunks=tuple(map(rewired, step.chunks)), sizes=sizes)


def both_judges(step: StepGraph, posed: StepProblem, sequence: list[int]) -> tuple[list[int], list[int]]:
    """Memory at each run of an operator: of the sequence, and of its schedule."""
    taken: dict[str, int] = {}

    def copy_name(name: str) -> str:
        taken[name] = taken.get(name, 1) + 1
        return f"{name}__copy{taken[name]}"

    schedule = schedule_of_sequence(step, posed.names_of(sequence), copy_name)
    assert posed.sequence_of(schedule) == sequence
    profile = simulate(schedule, step)
    ran = [entry for entry in schedule.steps if not isinstance(entry, Release)]
    named = set(posed.names)
    held = [
        held
        for entry, held in zip(ran, profile.timeline, strict=True)
        if (entry.source if isinstance(entry, Recompute) else entry.operator.name) in named
    ]
    judged = simulate_sequence(posed.problem, sequence)
    assert judged.peak == profile.peak_bytes
    return list(judged.timeline), held


def test_both_judges_agree_on_random_steps() -> None:
    random = Random(41)
    views = again = 0
    for _ in range(250):
        step = with_views(random, random_step_problem(random, 7).joint().step)
        posed = problem_of(step, {})
        views += sum(operator.is_view for operator in step.forward)
        for sequence in (
            list(range(len(posed.problem))),
            random_sequence(random, posed.problem, 2 * len(posed.problem)),
        ):
            again += len(sequence) - len(posed.problem)
            judged, simulated = both_judges(step, posed, sequence)
            assert judged == simulated
    assert views > 300
    assert again > 1000


@cache
def step_of(model: str) -> StepGraph:
    return trace(read_model(MODELS / f"{model}.onnx"), seed="loss_scale").graph


@pytest.mark.parametrize("model", ["alexnet", "vgg11", "resnet18", "mobilenet_v2"])
def test_both_judges_agree_on_networks(model: str) -> None:
    step = step_of(model)
    posed = problem_of(step, {})
    judged, simulated = both_judges(step, posed, list(range(len(posed.problem))))
    assert judged == simulated
    sequence = random_sequence(Random(42), posed.problem, 2 * len(posed.problem))
    assert len(sequence) > 1.2 * len(posed.problem)
    judged, simulated = both_judges(step, posed, sequence)
    assert judged == simulated


def test_what_a_step_returns_is_made_once_and_kept() -> None:
    random = Random(43)
    for _ in range(100):
        step = random_step_problem(random, 7).joint().step
        posed = problem_of(step, {name.name: 3 for name in step.forward})
        operators = {operator.name: operator for operator in step.forward}
        operators.update((operator.name, operator) for chunk in step.chunks for operator in chunk)
        for operation in posed.problem.operations:
            operator = operators[operation.name]
            kept = [posed.problem.is_sink(storage) for storage in operation.writes]
            assert kept == [name in step.outputs for name in operator.outputs]
            assert operation.may_repeat == (not operator.once and not any(kept))
            assert operation.duration == (3 if operator in step.forward else 0)


def test_what_replaces_a_tensor_runs_behind_all_that_read_it_in_any_order() -> None:
    """Some read a view of it, and one is a forward operator that nothing else waits for."""
    forward = (
        Operator("view", ("w",), ("shown",), is_view=True),
        Operator("again", ("shown",), ("shown twice",), is_view=True),
        Operator("layer", ("x", "shown"), ("h",)),
        Operator("aside", ("x", "w"), ("a",)),
    )
    backward = (
        Operator("weight", ("x", "h"), ("gradient",)),
        Operator("input", ("h", "shown twice"), ("passed",)),
        Operator("update", ("gradient", "w"), ("new w",)),
    )
    names = [name for operator in (*forward, *backward) for name in operator.outputs]
    step = StepGraph(
        forward,
        (backward,),
        ("layer",),
        {**dict.fromkeys(names, 1), "new w": 0},
        frozenset({"x", "w"}),
        ("new w", "a", "passed"),
        frozenset({"gradient"}),
        {"new w": "w"},
    )
    posed = problem_of(step, {})
    random = Random(44)
    orders = {tuple(random_sequence(random, posed.problem, 0)) for _ in range(200)}
    assert len(orders) > 5
    assert {posed.names[order[-1]] for order in orders} == {"update"}
