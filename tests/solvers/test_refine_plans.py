import pytest

from onnxgc.api.planned_step import trace_problem
from onnxgc.model.read import read_model
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.peak.refine_plans import adopt_decisions, transfer_plan
from tests.api.chains import chain


@pytest.fixture(scope="module")
def problem() -> CheckpointProblem:
    return trace_problem(read_model(chain(12))).problem


def _plan(problem: CheckpointProblem, *kept: str) -> CheckpointPlan:
    return CheckpointPlan.for_graph(problem.graph, kept)


def test_only_changeable_vertices_change(problem: CheckpointProblem):
    plan, vertices = _plan(problem, "h1"), problem.graph.vertices
    joint = problem.joint()
    some = transfer_plan(problem, [plan], [("h5", "h8")])
    assert set(some.checkpoints) ^ set(plan.checkpoints) <= {"h5", "h8"}
    every = transfer_plan(problem, [plan], [("h5", "h8"), vertices])
    peaks = [joint.profile(found).peak_bytes for found in (plan, some, every)]
    assert peaks[0] > peaks[1] > peaks[2]


def test_transfer_never_raises_the_peak(problem: CheckpointProblem):
    good = transfer_plan(problem, [_plan(problem, "h3", "h6", "h9")], [problem.graph.vertices])
    assert transfer_plan(problem, [good, _plan(problem, "h1")], []) == good


def test_decisions_are_adopted_while_the_peak_allows(problem: CheckpointProblem):
    joint, vertices = problem.joint(), problem.graph.vertices
    own = transfer_plan(problem, [_plan(problem, "h3", "h6", "h9")], [vertices])
    wishes, decided = CheckpointPlan(vertices, keeps_last_segment=False), vertices[: len(vertices) // 2]
    peak = joint.profile(own).peak_bytes
    changed = []
    for share in (0.99, 1, 1.1, 1.3, 2):
        found = adopt_decisions(problem, own, wishes, decided, int(share * peak))
        adopted = set(found.checkpoints) ^ set(own.checkpoints)
        assert adopted <= set(decided) & (set(own.checkpoints) ^ set(wishes.checkpoints))
        assert joint.profile(found).peak_bytes <= max(share, 1) * peak
        for vertex in set(decided) - set(found.checkpoints) if share >= 1 else ():
            more = CheckpointPlan.for_graph(problem.graph, {*found.checkpoints, vertex})
            more = CheckpointPlan(more.checkpoints, keeps_last_segment=False)
            assert joint.profile(more).peak_bytes > share * peak, "this decision could have been adopted too"
        changed.append(len(adopted))
    assert changed == sorted(changed)
    assert changed[0] == 0
    assert set(decided) <= set(found.checkpoints)
    assert 0 < changed[3] < changed[4]
