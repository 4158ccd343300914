import heapq
from itertools import product
from math import comb
from pathlib import Path
from random import Random

import onnx
import pytest

import onnxgc
from onnxgc.errors import BudgetError, PlanError
from onnxgc.planning.plan import CheckpointPlan, Status
from onnxgc.solvers.base import SolverOptions
from onnxgc.solvers.baselines.bptt import BPTT, policy
from onnxgc.solvers.baselines.reversal_plan import reversal_plan
from onnxgc.solvers.baselines.revolve import REVOLVE, reversal_schedule
from onnxgc.solvers.reversal_schedule import (
    Action,
    Advance,
    Backward,
    ReleaseState,
    Restore,
    Store,
    default_slots,
    first_sweep_states,
)
from tests.api.chains import chain as chain_of_layers
from tests.graph.random_graphs import chain
from tests.solvers.random_steps import random_step_problem
from tests.solvers.reversal_counts import forward_steps, optimal_forward_steps


def min_steps_by_exploration(steps: int, slots: int) -> int:
    """Dijkstra's algorithm over all possible actions, without assuming a recursion."""
    start = (0, frozenset({0}), steps)  # current state, stored states, steps not yet differentiated
    queue = [(0, 0, start)]
    seen = set()
    ticket = 0
    while queue:
        cost, _, node = heapq.heappop(queue)
        current, stored, left = node
        if node in seen:
            continue
        seen.add(node)
        if left == 0:
            return cost
        following = [(0, (state, stored, left)) for state in stored]
        following += [(0, (current, stored - {state}, left)) for state in stored if state]
        if len(stored) < slots:
            following.append((0, (current, stored | {current}, left)))
        if current < left - 1:
            following.append((1, (current + 1, stored, left)))
        if current == left - 1:
            following.append((0, (current, stored, left - 1)))
        for price, reached in following:
            ticket += 1
            heapq.heappush(queue, (cost + price, ticket, reached))
    raise AssertionError("a chain can always be reversed")


def run(schedule: tuple[Action, ...], slots: int) -> list[int]:
    """Run a schedule with checks of each action; returns the steps in the order of their backward."""
    current = 0
    stored: set[int] = set()
    order: list[int] = []
    for action in schedule:
        match action:
            case Advance(start, stop):
                assert current == start < stop
                current = stop
            case Store(state):
                assert current == state
                assert state not in stored
                stored.add(state)
                assert len(stored) <= slots
            case Restore(state):
                assert state in stored
                current = state
            case ReleaseState(state):
                stored.remove(state)
            case Backward(step):
                assert current == step
                order.append(step)
    assert not stored
    return order


@pytest.mark.parametrize("steps", range(41))
def test_schedules_are_valid_and_have_the_optimal_cost(steps: int):
    for slots in range(1, 9):
        budgeted = policy(steps, slots)
        for schedule in (reversal_schedule(steps, slots), budgeted.schedule):
            assert run(schedule, slots) == list(reversed(range(steps)))
            assert forward_steps(schedule) == optimal_forward_steps(steps, slots)
        assert budgeted.evaluations == optimal_forward_steps(steps, slots) + steps


@pytest.mark.parametrize("steps", range(1, 9))
def test_no_other_schedule_takes_fewer_steps(steps: int):
    for slots in range(1, 5):
        assert optimal_forward_steps(steps, slots) == min_steps_by_exploration(steps, slots)


def test_long_chains():
    assert forward_steps(reversal_schedule(5000, 3)) == optimal_forward_steps(5000, 3)
    assert forward_steps(reversal_schedule(5000, 4999)) == 4999


@pytest.mark.parametrize("steps, slots", [(-1, 1), (3, 0), (3, -2)])
def test_impossible_sizes_raise(steps: int, slots: int):
    for function in (reversal_schedule, optimal_forward_steps, policy):
        with pytest.raises(ValueError, match="at least 0 steps and 1 slot"):
            function(steps, slots)


def test_checkpoints_are_the_states_of_the_first_sweep():
    for steps, slots in product(range(1, 30), range(1, 7)):
        options = SolverOptions(slots=slots, budget_bytes=2 * slots)
        for solver, schedule in ((REVOLVE, reversal_schedule(steps, slots)), (BPTT, policy(steps, slots).schedule)):
            solution = solver.solve(chain([2] * (steps + 1)), options)
            assert solution.plan.checkpoints == (*first_sweep_states(schedule), steps)
            # The optimum is in forward steps, not in the paper's objective.
            assert solution.status is Status.FEASIBLE


def test_without_a_number_of_slots_no_step_advances_more_than_twice():
    for steps in (*range(40), *range(40, 200, 9)):
        slots = default_slots(steps)
        assert optimal_forward_steps(steps, slots) <= 2 * steps
        assert slots == 1 or comb(slots + 1, 2) < steps
        problem = chain([1] * (steps + 1))
        for solver in (REVOLVE, BPTT):
            assert len(solver.solve(problem).plan.checkpoints) <= slots + 1


def test_a_budget_in_bytes():
    problem = chain([7, *[4] * 30, 9])
    for budget_bytes in range(7, 60):
        checkpoints = BPTT.solve(problem, SolverOptions(budget_bytes=budget_bytes)).plan.checkpoints
        assert sum(problem.size_bytes(vertex) for vertex in checkpoints[:-1]) <= budget_bytes
    assert BPTT.solve(chain([0] * 9), SolverOptions(budget_bytes=0)).objective_bytes == 0
    with pytest.raises(BudgetError, match="6 bytes is less than the first state, 0, of 7 bytes"):
        BPTT.solve(problem, SolverOptions(budget_bytes=6))
    with pytest.raises(PlanError, match="0 slots"):
        REVOLVE.solve(problem, SolverOptions(slots=0))


def test_other_graphs_are_refused():
    for solver in (REVOLVE, BPTT):
        with pytest.raises(PlanError, match="chains of equal states only, and vertices 1 and 3 differ in size"):
            solver.solve(chain([1, 2, 2, 3, 1]))


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_a_bare_chain_runs_the_steps_of_the_schedule(slots: int):
    for steps in range(1, 30):
        plan = reversal_plan(chain([1] * (steps + 1)), reversal_schedule(steps, slots))
        runs = [name for name in plan.sequence if name.startswith("f")]
        # The first state and the last step run in addition to the forward steps of the schedule.
        assert len(runs) == optimal_forward_steps(steps, slots) + 2
        assert len(plan.sequence) - len(runs) == steps


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_live_states_of_a_bare_chain_are_the_slots_and_two_of_the_current_step(slots: int):
    problem = chain([1] * 31)
    plan = reversal_plan(problem, reversal_schedule(30, slots))
    assert problem.joint().profile(plan).peak_bytes <= slots + 2
    checkpoints = CheckpointPlan(plan.checkpoints, keeps_last_segment=False)
    assert problem.joint().profile(plan).peak_bytes < problem.joint().profile(checkpoints).peak_bytes


def test_sequences_of_any_step_are_valid():
    random = Random(51)
    with_sequence = 0
    for _ in range(1500):
        problem = random_step_problem(random, 6)
        graph, steps = problem.graph, len(problem.graph) - 1
        if any(len(graph.successors(v)) > 1 or len(graph.predecessors(v)) > 1 for v in graph.vertices):
            continue
        if steps < 1 or len(graph.sources) > 1:
            continue
        for slots in (1, 2, 3):
            plan = reversal_plan(problem, reversal_schedule(steps, slots))
            with_sequence += bool(plan.sequence)
            step = problem.joint().step
            once = [o.name for o in step.forward if o.once or set(step.outputs) & set(o.outputs)]
            assert all(plan.sequence.count(name) <= 1 for name in once)
            assert problem.joint().profile(plan).peak_bytes > 0 or not any(step.sizes.values())
    assert with_sequence > 30


def test_a_planned_network_has_the_loss_and_gradients_of_the_baseline(tmp_path: Path):
    model, planned = tmp_path / "model.onnx", tmp_path / "planned.onnx"
    # A chain of equal tensors, with their mean as the loss.
    network = chain_of_layers(8, batch=64, width=8)
    network.graph.node.pop()
    network.graph.initializer.pop()
    network.graph.node.append(onnx.helper.make_node("ReduceMean", ["h7"], ["loss"], keepdims=0))
    network.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    onnx.save(network, model)
    onnxgc.optimize(model, planned, solver="revolve", loss="loss")
    checks = onnxgc.verify(model, training=planned).checks
    assert [check.name for check in checks if not check.holds] == []
