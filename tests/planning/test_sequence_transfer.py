from pathlib import Path

import pytest

from onnxgc.api import optimize
from onnxgc.api.planned_step import trace_problem
from onnxgc.api.step_planning import step_with_plan
from onnxgc.errors import PlanError
from onnxgc.model.read import read_model
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.schedule_from_sequence import StepOperators
from onnxgc.planning.sequence_transfer import transferred_sequence
from tests.api.chains import chain

MODEL = Path(__file__).parents[2] / "models" / "resnet18.onnx"


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_a_plan_fits_other_batches(provider: str):
    """Gradients of other batches are computed in other parts."""
    made = optimize(MODEL, input_shapes={"x": (16, 3, 112, 112)}, provider=provider, solver="peak", check=False).planned
    known = StepOperators.from_step(made.step.graph).operators
    runs = (getattr(run, "source", run.operator.name) for run in made.schedule.runs)
    sequence = tuple(name for name in runs if name in known)
    repeated = len(sequence) - len(set(sequence))
    assert repeated
    for batch in (7, 48):
        model = read_model(MODEL, input_shapes={"x": (batch, 3, 112, 112)}, provider=provider)
        planned = step_with_plan(model, CheckpointPlan((), sequence=sequence))
        assert planned.profile.peak_bytes < 1.02 * planned.regular_profile.peak_bytes
        assert len(planned.schedule.recomputed) == pytest.approx(repeated, rel=0.1)


def test_a_plan_of_another_network_is_rejected():
    made = optimize(chain(2), budget="90%", step_limit=1, check=False).planned.solution.plan.sequence
    for layers in (1, 3):
        step = trace_problem(read_model(chain(layers))).step.graph
        assert transferred_sequence(made, step) is None
    with pytest.raises(PlanError, match="before its inputs"):
        optimize(chain(3), plan=optimize(chain(2), budget="90%", step_limit=1, check=False), check=False)


def test_the_same_step_keeps_its_sequence():
    planned = optimize(chain(4), budget="60%", step_limit=1, check=False).planned
    names = planned.solution.plan.sequence
    assert transferred_sequence(names, planned.step.graph) == names
