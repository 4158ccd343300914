import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, fx

import onnxgc
from onnxgc.errors import BudgetError, PlanError
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.torch import OnnxModule, from_onnx, plans_of
from onnxgc.torch.joint_problem import JointStep
from onnxgc.torch.onnx_plan import PlanFollower
from tests.torch.test_checkpointing import joint_step_of

BATCH = 4
TEXT = """
<ir_version: 9, opset_import: ["" : 18]>
network (float[4, 3, 12, 12] x, float[4, 16] z) => (float[4, 10] scores, float[4, 8, 12, 12] image)
<float[8, 3, 3, 3] w1, float[8] scale, float[8] bias, float[8] mean, float[8] variance,
 float[8, 8, 3, 3] w2, float[128, 16] w3, float[16, 10] w4>
{
  c1 = Conv <pads = [1, 1, 1, 1]> (x, w1)
  n1 = BatchNormalization (c1, scale, bias, mean, variance)
  r1 = Relu (n1)
  c2 = Conv <pads = [1, 1, 1, 1]> (r1, w2)
  s2 = Sigmoid (c2)
  e2 = Exp (s2)
  image = Mul (e2, r1)
  p = MaxPool <kernel_shape = [3, 3], strides = [3, 3]> (image)
  flat = Flatten (p)
  h = MatMul (flat, w3)
  t = Tanh (h)
  both = Mul (t, z)
  g = Sigmoid (both)
  scores = MatMul (g, w4)
}
"""
NAMES = ("c1", "n1", "r1", "c2", "s2", "e2", "image", "p", "h", "t", "both", "g", "scores")


def model() -> onnx.ModelProto:
    proto = onnx.parser.parse_model(TEXT)
    generator = torch.Generator().manual_seed(0)
    for value in proto.graph.value_info:
        shape = tuple(entry.dim_value for entry in value.type.tensor_type.shape.dim)
        # Small values, so that no activation saturates and no two tensors are equal.
        values = 0.1 * torch.rand(shape, generator=generator) + 0.01
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values.numpy(), value.name))
    del proto.graph.value_info[:]
    return proto


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, 3, 12, 12, generator=generator), torch.randn(BATCH, 16, generator=generator)


def values(module: OnnxModule) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if "custom" in n.meta:
                found[n.meta["custom"]["onnx"].outputs[0]] = result
            return result

    copied = copy.deepcopy(module)
    like = copied.get_buffer("onnxgc_like")
    Recorder(copied.program.graph_module).run(True, like, *inputs(), *copied.weights())
    return found


def saved(module: OnnxModule) -> list[Tensor]:
    found: list[Tensor] = []

    def pack(one: Tensor) -> Tensor:
        found.append(one.detach())
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        outputs = module(*inputs())
    del outputs
    return found


def step(module: OnnxModule) -> list[Tensor]:
    for _ in range(2):
        scores, image = module(*inputs())
        (scores.square().mean() + image.mean()).backward()
    gradients = [one.grad for one in module.parameters() if one.grad is not None]
    return [scores.detach(), image.detach(), *gradients, *module.buffers()]


@pytest.mark.parametrize(
    ("kept", "needed"),
    [
        ((), ()),
        (("r1",), ("r1",)),
        (("c2", "h"), ("c2", "h")),
        (("s2", "p"), ("s2", "p")),
        (("n1", "image", "both"), ("n1", "both")),
        # Backward reads outputs of operators where it could read inputs.
        (("c1", "n1", "r1", "c2", "s2", "e2", "t"), ("c1", "r1", "s2", "e2", "t")),
    ],
)
def test_exactly_the_kept_tensors_are_saved(kept: tuple[str, ...], needed: tuple[str, ...]) -> None:
    known = values(from_onnx(model()))
    module = from_onnx(model(), plan={"schema": 1, "checkpoints": list(kept), "keeps_last_segment": False})
    tensors = saved(module)
    found = {
        name
        for name in NAMES
        if any(one.shape == known[name].shape and torch.equal(one, known[name]) for one in tensors)
    }
    # Outputs of the module are live anyway.
    assert found - {"image", "scores"} == set(needed)
    assert plans_of(module)[0].repeated > 0


def test_results_under_a_plan_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxgc.torch.onnx_module.DEFAULT_TIME_LIMIT_SECONDS", 0.5)
    result = onnxgc.optimize(model(), tmp_path / "training.onnx", check=False)
    in_sequence = onnxgc.optimize(model(), budget="95%", check=False, time_limit=0.5)
    assert in_sequence.plan.sequence
    described = {"schema": 1, "checkpoints": ["r1", "s2", "h"], "keeps_last_segment": True}
    (tmp_path / "plan.json").write_text(json.dumps(described), encoding="utf-8")
    files = tmp_path / "training.onnx", tmp_path / "plan.json"
    budgeted = from_onnx(model(), budget="90%")
    (found,) = plans_of(budgeted)
    assert found.planned_peak_bytes <= 0.9 * found.regular_peak_bytes
    regular = step(from_onnx(model()))
    plans = (result, result.plan, ["r1", "p"], ["image"], *files, in_sequence)
    for planned in (budgeted, *(from_onnx(model(), plan) for plan in plans)):
        assert all(map(torch.equal, regular, step(planned)))


def test_errors_are_specific(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="not both"):
        from_onnx(model(), ["r1"], "60%")
    with pytest.raises(PlanError, match="such as 'other'"):
        from_onnx(model(), ["other"])
    with pytest.raises(BudgetError):
        from_onnx(model(), budget="1%")
    with pytest.raises(PlanError, match="cannot read the plan"):
        from_onnx(model(), tmp_path / "missing.json")
    onnx.save(model(), tmp_path / "forward.onnx")
    with pytest.raises(PlanError, match="a model without a plan"):
        from_onnx(model(), tmp_path / "forward.onnx")


def joint_step() -> JointStep:
    module = from_onnx(model())
    return joint_step_of(module, module.example_inputs({}))


def recomputed(step: JointStep, plan: CheckpointPlan) -> list[str]:
    sequence, _ = PlanFollower(plan)(step, 0)
    return [step.problem.operators[index].name for index in sorted(set(sequence)) if sequence.count(index) > 1]


def test_statistics_and_outputs_are_kept() -> None:
    step = joint_step()
    # Backward of the normalisation reads only its input and its statistics.
    kept = CheckpointPlan(("c1", "r1", "c2", "s2", "e2", "p", "h", "t", "both", "g"), keeps_last_segment=False)
    assert not [name for name in recomputed(step, kept) if "norm" in name]
    # The products `image` and `scores` are returned.
    everything = recomputed(step, CheckpointPlan((), keeps_last_segment=False))
    assert [name for name in everything if "norm" in name]
    assert not {"mul", "mm_1"}.intersection(everything)


def test_the_segment_that_backward_reads_first_is_kept_on_request() -> None:
    step = joint_step()
    kept, discarded = (
        recomputed(step, CheckpointPlan(("r1", "p"), keeps_last_segment=keeps)) for keeps in (True, False)
    )
    assert "tanh" in discarded
    assert set(kept) < set(discarded)
    assert "tanh" not in kept
    # Backward reads the segment of the convolutions later.
    assert "sigmoid" in kept


def test_operators_that_may_not_repeat_run_once() -> None:
    step = joint_step()
    plan = CheckpointPlan((), keeps_last_segment=False)
    assert "tanh" in recomputed(step, plan)
    once = tuple(
        replace(operator, may_repeat=operator.may_repeat and operator.name != "tanh")
        for operator in step.problem.operators
    )
    assert "tanh" not in recomputed(replace(step, problem=replace(step.problem, operators=once)), plan)
