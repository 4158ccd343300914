"""All models of a step's memory agree with the simulator (docs/memory-models.md)."""

from collections.abc import Sequence
from random import Random

import numpy as np

from onnxgc.budget.from_step import problem_of
from onnxgc.budget.improve import compiled_loops
from onnxgc.budget.improve.removable_runs import RemovableRuns
from onnxgc.budget.operator_problem import OperatorProblem, simulate_sequence
from onnxgc.planning.schedule import Schedule, StepGraph, copy_namer
from onnxgc.planning.schedule_from_sequence import schedule_of_sequence
from onnxgc.planning.simulate import simulate
from onnxgc.solvers.peak.cut_search import plan_of_cuts
from onnxgc.solvers.peak.local_search import peak_of_kept
from onnxgc.solvers.peak.phase_memory import PhaseCosts
from onnxgc.solvers.peak.step_model import StepModel, step_model
from tests.budget.random_problems import random_sequence
from tests.solvers.random_steps import random_step_problem

MAX_BYTES = 1 << 40


def timeline_of_kernels(problem: OperatorProblem, sequence: Sequence[int]) -> list[int]:
    tables = compiled_loops.tables_of(problem)
    state = compiled_loops.state_for(tables, len(sequence))
    state.sequence[: len(sequence)] = list(sequence)
    peak, overflow = compiled_loops.evaluate(tables, state, len(sequence), 0)
    timeline: list[int] = state.memory[: len(sequence)].tolist()
    assert (peak, overflow) == (max(timeline), sum(timeline))
    return timeline


def peak_of_cuts(model: StepModel, cuts: Sequence[int]) -> int:
    """The peak of the plan of these cuts, phase by phase."""
    costs = PhaseCosts(model)
    for cut in range(model.positions - 1):
        costs.row(cut, MAX_BYTES, np.zeros(model.positions + 1, np.int64))
    costs.last_row(MAX_BYTES)
    lower, kept_bytes, peak = -1, 0, 0
    waiting: frozenset[int] = frozenset()
    for cut in cuts:
        need, adds = costs.phase(lower, cut, waiting)
        peak = max(peak, kept_bytes + need)
        kept_bytes += adds
        waiting = costs.waiting_after(lower, cut, waiting)
        lower = cut
    return max(peak, kept_bytes + costs.last_phase(lower, waiting))


def backward_peak_of_baseline(model: StepModel) -> int:
    """The baseline's peak in backward, from the slots and the forward tensors that later slots read."""
    peak = 0
    for number, slot in enumerate(model.slots):
        live = sum(stored.size for stored in model.storages if stored.slots and stored.slots[-1] >= number)
        peak = max(peak, live + slot.peak_bytes)
    return peak


def assert_models_of_sequences_agree(step: StepGraph, schedule: Schedule) -> None:
    """`simulate_sequence`, `evaluate` and `RemovableRuns`, before and after removals, on one schedule."""
    posed = problem_of(step, {})
    problem = posed.problem
    sequence = posed.sequence_of(schedule)
    expected = list(simulate(schedule, step).timeline)
    assert list(simulate_sequence(problem, sequence).timeline) == expected
    assert timeline_of_kernels(problem, sequence) == expected
    runs = RemovableRuns(problem, sequence)
    assert runs.memory[:-1].tolist() == expected
    places = list(range(len(sequence)))
    for place in runs.repeats():
        if runs.remove(place, MAX_BYTES):
            places.remove(place)
    shorter = schedule_of_sequence(step, posed.names_of(runs.sequence()), copy_namer())
    assert runs.memory[places].tolist() == list(simulate(shorter, step).timeline)


def test_models_of_sequences_agree_on_any_sequence():
    random = Random(61)
    repeats = 0
    for _ in range(150):
        step = random_step_problem(random, 7).joint().step
        posed = problem_of(step, {})
        sequence = random_sequence(random, posed.problem, 2 * len(posed.problem))
        repeats += len(sequence) - len(posed.problem)
        schedule = schedule_of_sequence(step, posed.names_of(sequence), copy_namer())
        assert_models_of_sequences_agree(step, schedule)
    assert repeats > 500


def test_all_models_agree_on_plans_of_cuts():
    random = Random(62)
    recomputed = 0
    for _ in range(600):
        joint = (problem := random_step_problem(random, 12)).joint()
        order = problem.graph.vertices
        model = step_model(joint.step_in(order), joint.members, order)
        cuts = [cut for cut in range(len(order) - 1) if random.random() < 0.3]
        plan = plan_of_cuts(order, model, cuts)
        step, schedule = joint.scheduled(plan)
        recomputed += len(schedule.recomputed)
        assert_models_of_sequences_agree(step, schedule)
        peak = simulate(schedule, step).peak_bytes
        assert peak_of_kept(model, [order.index(vertex) for vertex in plan.checkpoints]) == peak
        assert peak_of_cuts(model, cuts) == peak
    assert recomputed > 300


def test_the_step_model_has_the_baselines_memory():
    random = Random(63)
    for _ in range(150):
        joint = (problem := random_step_problem(random, 8)).joint()
        order = problem.graph.vertices
        model = step_model(joint.step_in(order), joint.members, order)
        step, schedule = joint.scheduled(plan_of_cuts(order, model, []))
        timeline = simulate(schedule, step).timeline
        assert backward_peak_of_baseline(model) == max(timeline[len(step.forward) :])
        assert peak_of_kept(model, range(len(order))) == max(timeline)
