"""MaxPool's gradient without indices, and portable files: the same bits, less memory, nothing that others lack."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgc
from onnxgc.api import OptimizeResult, PlannedStep, emit, plan_step
from onnxgc.api.budget_plans import BudgetRequest
from onnxgc.api.pool_forms import with_least_pools
from onnxgc.errors import PlanError
from onnxgc.gradients.pooling import by_windows
from onnxgc.model.core.ir import Array, TrainableModel
from onnxgc.model.read import read_model
from onnxgc.planning.memory_budget import Budget
from onnxgc.planning.plan import TimeCost
from onnxgc.runtime.ort import make_session
from onnxgc.training import Trainer
from tests.model.model_helpers import model_of, normal
from tests.training.networks import digits, digits_network

MODELS = Path(__file__).parents[2] / "models"
SHAPE = (2, 3, 9, 11)


def gradients(model: TrainableModel, x: Array) -> list[Array]:
    graph = emit(plan_step(model, "store-all")).model
    found: list[Array] = make_session(graph, threads=1).run(None, {"x": x})
    return found


@pytest.mark.parametrize(
    "attributes",
    [
        "kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]",
        "kernel_shape=[2,2]",
        "kernel_shape=[3,2], strides=[1,2], dilations=[2,3], pads=[0,1,2,1]",
        "kernel_shape=[3,3], strides=[2,2], ceil_mode=1, storage_order=1",
    ],
)
@pytest.mark.parametrize("kind", ["ties", "one value", "drawn", "not a number"])
def test_ties_go_to_the_same_element_as_with_indices(attributes: str, kind: str):
    body = f"(float{list(SHAPE)} x) => (float total) {{ s = Add (x, w) y = MaxPool<{attributes}> (s) "
    body += "q = Mul (y, y) total = ReduceSum<keepdims=0> (q) }"
    model = read_model(model_of(body, w=np.zeros(SHAPE[1:])), trainable=["w"])
    x = normal(*SHAPE)
    x = {"ties": np.round(x), "one value": np.ones_like(x), "not a number": np.full_like(x, np.nan)}.get(kind, x)
    one, other = gradients(model, x), gradients(by_windows(model), x)
    if kind != "not a number":
        assert np.abs(one[1]).max() > 0
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    else:
        assert not np.isfinite(other[0])


def test_the_plan_takes_the_form_that_needs_less_memory():
    """ResNet-50 at batch 2; in ResNet-18 the windows would need more."""

    def planned(name: str, shape: tuple[int, ...], pools: str | None = None) -> OptimizeResult:
        how: dict[str, Any] = {"input_shapes": {"x": shape}, "solver": "peak", "check": False, "pools": pools}
        return onnxgc.optimize(MODELS / f"{name}.onnx", **how)

    chosen, other = (planned("resnet50", (2, 3, 224, 224), pools) for pools in (None, "indices"))
    assert chosen.options.pools == "windows"
    peaks = [one.report["planned"]["simulated_peak_bytes"] for one in (chosen, other)]
    assert peaks[0] < 0.98 * peaks[1]
    assert planned("resnet18", (8, 3, 64, 64)).options.pools != "windows"


def test_comparing_windows_takes_extra_time():
    how: dict[str, Any] = {"input_shapes": {"x": (2, 3, 224, 224)}, "solver": "peak", "check": False, "provider": "cpu"}
    planned = onnxgc.optimize(MODELS / "resnet50.onnx", pools="indices", **how).planned
    regular = sum(planned.request.durations(planned.traced.step)[0].values())
    timed = replace(planned, solution=replace(planned.solution, time=TimeCost(regular, 0, 0)))

    def within(extra: Fraction) -> PlannedStep:
        return replace(timed, request=BudgetRequest(Budget(max_extra=extra)))

    found = with_least_pools(within(Fraction(1, 5))).solution.time
    assert found is not None
    assert 0 < found.extra < 0.02 * regular
    for kept in (within(Fraction(0)), replace(timed, budget_bytes=10**10)):
        assert with_least_pools(kept) is kept


def test_a_portable_file_has_nothing_that_others_lack(tmp_path: Path):
    onnx.save(digits_network(), tmp_path / "digits.onnx")
    how: dict[str, Any] = {
        "input_shapes": {"image": (32, 1, 8, 8)},
        "optimizer": "adamw",
        "budget": "70%",
        "step_limit": 2,
    }
    for name, portable in (("plain", False), ("portable", True)):
        onnxgc.optimize(tmp_path / "digits.onnx", tmp_path / f"{name}.onnx", portable=portable, **how)
    plain, portable_file = (onnx.load(tmp_path / f"{name}.onnx").graph for name in ("plain", "portable"))

    def lacking(graph: onnx.GraphProto) -> set[str]:
        found = {"indices" for node in graph.node if node.op_type == "MaxPool" and len(node.output) > 1}
        found |= {a.name for node in graph.node for a in node.attribute if a.name.startswith("__")}
        found |= {"a step by HardSigmoid" for n in graph.node for a in n.attribute if a.name == "alpha" and a.f > 1e30}
        found |= {"float64" for v in graph.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE}
        named = [v.name for v in graph.value_info if any(d.dim_param for d in v.type.tensor_type.shape.dim)]
        return found | {"named dimensions" for name in named if "/empty" not in name}

    assert "float64" in lacking(plain)
    assert "named dimensions" in lacking(plain)
    assert "a step by HardSigmoid" in lacking(plain)
    assert any(node.name.endswith("__recompute") for node in portable_file.node)
    assert lacking(portable_file) == set()
    assert onnxgc.verify(tmp_path / "digits.onnx", tmp_path / "portable.onnx", threads=1).holds
    train, _ = digits()
    batch = {name: array[:32] for name, array in train.items()}
    losses = []
    for name in ("plain", "portable"):
        trainer = Trainer(tmp_path / f"{name}.onnx", model=tmp_path / "digits.onnx", threads=1)
        losses.append([trainer.step(batch) for _ in range(3)])
        # A smaller batch is planned in the same form.
        losses[-1].append(trainer.step({key: array[:5] for key, array in batch.items()}))
    # AdamW's bias corrections are computed in float32.
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][0] == losses[1][0]


def test_forms_for_cuda_are_not_portable():
    with pytest.raises(PlanError, match="no forms for CUDA"):
        onnxgc.optimize(digits_network(), portable=True, provider="cuda")
    with pytest.raises(PlanError, match="unknown pools 'mean'"):
        onnxgc.optimize(digits_network(), pools="mean")
