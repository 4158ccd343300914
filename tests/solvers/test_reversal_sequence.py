from pathlib import Path
from random import Random

import onnx
import pytest

import onnxgc
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.solvers.baselines.reversal_plan import reversal_plan
from onnxgc.solvers.baselines.revolve import reversal_schedule
from tests.api.chains import chain as chain_of_layers
from tests.graph.random_graphs import chain
from tests.solvers.random_steps import random_step_problem
from tests.solvers.reversal_counts import optimal_forward_steps


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_a_bare_chain_runs_the_steps_of_the_schedule(slots: int) -> None:
    for steps in range(1, 30):
        plan = reversal_plan(chain([1] * (steps + 1)), reversal_schedule(steps, slots))
        runs = [name for name in plan.sequence if name.startswith("f")]
        # The first state and the last step run in addition to the forward steps of the schedule.
        assert len(runs) == optimal_forward_steps(steps, slots) + 2
        assert len(plan.sequence) - len(runs) == steps


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_live_states_of_a_bare_chain_are_the_slots_and_two_of_the_current_step(slots: int) -> None:
    problem = chain([1] * 31)
    plan = reversal_plan(problem, reversal_schedule(30, slots))
    assert problem.joint().profile(plan).peak_bytes <= slots + 2
    checkpoints = CheckpointPlan(plan.checkpoints, keeps_last_segment=False)
    assert problem.joint().profile(plan).peak_bytes < problem.joint().profile(checkpoints).peak_bytes


def test_sequences_of_any_step_are_valid() -> None:
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


def test_a_planned_network_has_the_loss_and_gradients_of_the_baseline(tmp_path: Path) -> None:
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
