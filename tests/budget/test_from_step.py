from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from onnxgc.budget.from_step import StepProblem, problem_of
from onnxgc.budget.operator_problem import simulate_sequence
from onnxgc.model.read import read_model
from onnxgc.planning.schedule import Operator, Recompute, Release, StepGraph
from onnxgc.planning.schedule_from_sequence import schedule_of_sequence
from onnxgc.planning.simulate import simulate
from onnxgc.tracing.step_graph import trace
from tests.budget.random_problems import random_sequence
from tests.solvers.random_steps import random_step_problem

MODELS = Path(__file__).parents[2] / "models"


def with_views(random: Random, step: StepGraph) -> StepGraph:
    """The step with views, and views of views, of operators' inputs; some readers read these instead."""
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


def both_timelines(step: StepGraph, posed: StepProblem, sequence: list[int]) -> tuple[list[int], list[int]]:
    copies: dict[str, int] = {}

    def copy_name(name: str) -> str:
        copies[name] = copies.get(name, 1) + 1
        return f"{name}__copy{copies[name]}"

    schedule = schedule_of_sequence(step, posed.names_of(sequence), copy_name)
    assert posed.sequence_of(schedule) == sequence
    profile = simulate(schedule, step)
    ran = [entry for entry in schedule.instructions if not isinstance(entry, Release)]
    named = set(posed.names)
    live = [
        live
        for entry, live in zip(ran, profile.timeline, strict=True)
        if (entry.source if isinstance(entry, Recompute) else entry.operator.name) in named
    ]
    of_sequence = simulate_sequence(posed.problem, sequence)
    assert of_sequence.peak == profile.peak_bytes
    return list(of_sequence.timeline), live


def test_sequence_and_schedule_have_equal_memory_on_random_steps():
    random = Random(41)
    views = repeats = 0
    for _ in range(250):
        step = with_views(random, random_step_problem(random, 7).joint().step)
        posed = problem_of(step, {})
        views += sum(operator.is_view for operator in step.forward)
        for sequence in (
            list(range(len(posed.problem))),
            random_sequence(random, posed.problem, 2 * len(posed.problem)),
        ):
            repeats += len(sequence) - len(posed.problem)
            of_sequence, of_schedule = both_timelines(step, posed, sequence)
            assert of_sequence == of_schedule
    assert views > 300
    assert repeats > 1000


@pytest.mark.parametrize("model", ["alexnet", "mobilenet_v2"])
def test_sequence_and_schedule_have_equal_memory_on_networks(model: str):
    step = trace(read_model(MODELS / f"{model}.onnx"), seed="loss_scale").graph
    posed = problem_of(step, {})
    of_sequence, of_schedule = both_timelines(step, posed, list(range(len(posed.problem))))
    assert of_sequence == of_schedule
    sequence = random_sequence(Random(42), posed.problem, 2 * len(posed.problem))
    assert len(sequence) > 1.2 * len(posed.problem)
    of_sequence, of_schedule = both_timelines(step, posed, sequence)
    assert of_sequence == of_schedule


def test_outputs_of_a_step_are_computed_once_and_kept():
    random = Random(43)
    for _ in range(100):
        step = random_step_problem(random, 7).joint().step
        posed = problem_of(step, {name.name: 3 for name in step.forward})
        by_name = {operator.name: operator for operator in step.forward}
        by_name.update((operator.name, operator) for chunk in step.chunks for operator in chunk)
        for posed_operator in posed.problem.operators:
            operator = by_name[posed_operator.name]
            kept = [storage in posed.problem.kept for storage in posed_operator.writes]
            assert kept == [name in step.outputs for name in operator.outputs]
            assert posed_operator.may_repeat == (not operator.once and not any(kept))
            assert posed_operator.duration == (3 if operator in step.forward else 0)


def test_a_replacement_runs_after_all_readers_of_the_tensor_in_any_order():
    """Some read a view of it, and one is a forward operator without other dependents."""
    forward = (
        Operator("view", ("w",), ("viewed",), is_view=True),
        Operator("second view", ("viewed",), ("viewed twice",), is_view=True),
        Operator("layer", ("x", "viewed"), ("h",)),
        Operator("aside", ("x", "w"), ("a",)),
    )
    backward = (
        Operator("weight", ("x", "h"), ("gradient",)),
        Operator("input", ("h", "viewed twice"), ("passed",)),
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
