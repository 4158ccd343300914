from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxgc.api import largest_size, optimize, verify
from onnxgc.api.device_memory import DeviceMemory, parse_device_memory
from onnxgc.errors import BudgetError, BudgetFormError, PlanError, ShapeError
from tests.api.chains import chain
from tests.model.model_helpers import model_of

DRY: dict[str, Any] = {"provider": "cpu", "check": False, "loss": "mse", "dry_run": True}


@pytest.mark.parametrize("optimizer", [pytest.param(None, marks=pytest.mark.slow), "adamw"])
def test_the_parts_add_up_and_the_plan_fits(optimizer: str | None, tmp_path: Path):
    how: dict[str, Any] = {"provider": "cpu", "check": False, "optimizer": optimizer}
    free = optimize(chain(8), dry_run=True, solver="store-all", **how).report["device_memory"]
    weights = 4 * (8 * 16 * 16 + 16 * 4)
    assert free["input_bytes"] == 4 * 2048 * 16 + 8 * 2048
    assert free["weight_bytes"] >= weights
    assert free["optimizer_state_bytes"] == (2 * weights if optimizer else 0)
    limit = 2 * free["planned"]["total_bytes"] // 3
    file = tmp_path / "training.onnx"
    result = optimize(chain(8), file, device_memory=limit, time_limit=0.5, **how)
    memory = result.report["device_memory"]
    step = result.planned.profile.peak_bytes
    fixed = memory["weight_bytes"] + memory["optimizer_state_bytes"] + memory["input_bytes"]
    assert memory["planned"]["total_bytes"] == fixed + step + memory["planned"]["margin_bytes"] <= limit
    assert memory["planned"]["margin_bytes"] == step // 10 + 256 * len(result.planned.step.graph.operators)
    assert result.planned.schedule.recomputed
    for given, holds in ((limit, True), (fixed + step // 2, False)):
        checks = {check.name: check.holds for check in verify(chain(8), file, device_memory=given).checks}
        assert checks.pop("device memory") is holds
        assert all(checks.values())


def test_cuda_holds_its_context_and_a_larger_margin():
    parts = [
        DeviceMemory.of_step(optimize(chain(2), dry_run=True, provider=name, check=False).planned.step)
        for name in ("cpu", "cuda")
    ]
    assert parts[0].runtime == 0 < parts[1].runtime
    assert parts[0].margin < parts[1].margin


def test_a_device_without_room_for_the_step_is_named():
    with pytest.raises(BudgetError, match=r"weights take .* inputs .* give more memory"):
        optimize(chain(2), dry_run=True, device_memory=100_000, check=False)
    with pytest.raises(PlanError, match="leave out --budget"):
        optimize(chain(2), dry_run=True, device_memory="1GiB", budget="60%", check=False)


def test_sizes_and_names_of_devices():
    assert parse_device_memory("8GiB") == 8 * 2**30
    assert parse_device_memory("H100") == 80 * 10**9
    for wrong in ("60%", "min", "cpu", "much"):
        with pytest.raises(BudgetFormError, match="is not the memory of a device"):
            parse_device_memory(wrong)


def symbolic() -> object:
    body = "{ a = MatMul(x, v) b = Tanh(a) c = MatMul(b, w) d = Tanh(c) e = MatMul(d, v) y = Tanh(e) }"
    return model_of(f"(float[N,T,8] x) => (float[N,T,8] y) {body}", v=np.eye(8), w=np.eye(8))


@pytest.mark.parametrize("dimension", [None, pytest.param("x:1", marks=pytest.mark.slow)])
def test_the_largest_size_is_near_that_of_an_exhaustive_search(dimension: str | None):
    how: dict[str, Any] = {"provider": "cpu", "check": False, "loss": "mse"}
    limit = 16_000
    found = largest_size(
        symbolic(), limit, dimension=dimension, extra_time="25%", dry_run=True, input_shapes={"x": (2, 3, 8)}, **how
    )
    assert found.points[-1].size == found.size
    assert [point.size for point in found.points] == sorted({point.size for point in found.points})
    assert all(point.total_bytes <= limit and point.extra_time_ratio <= 0.25 for point in found.points)
    assert found.result.report["device_memory"]["planned"]["total_bytes"] <= limit
    fixed = 3 if dimension is None else 2

    def fits(size: int) -> bool:
        shape = (size, fixed, 8) if dimension is None else (fixed, size, 8)
        planned = optimize(symbolic(), extra_time="25%", step_limit=2, dry_run=True, input_shapes={"x": shape}, **how)
        total: int = planned.report["device_memory"]["planned"]["total_bytes"]
        return total <= limit

    most = next(size for size in range(found.size, 4 * found.size) if not fits(size + 1))
    assert found.size >= 0.95 * most


def test_inputs_of_another_size_keep_it():
    """Only axes of one name, or as long in the file, are the batch."""
    text = "(float[N,8] x, float[1,8] p) => (float[N,8] y) { a = Add(x, p) y = MatMul(a, w) }"
    model = model_of(text, w=np.eye(8))
    found = largest_size(model, 20_000, time_limit=0.1, **DRY)
    assert found.dimension == "batch (x)"
    assert found.result.report["device_memory"]["device_bytes"] == 20_000
    with pytest.raises(PlanError, match="solver does not apply"):
        largest_size(model, 20_000, solver="peak", **DRY)


def test_a_resolution_begins_at_that_of_the_file():
    """A network may have no output for an image of one pixel."""
    text = "(float[2,3,H,W] x) => (float[2,4,1,1] y) { a = Conv(x, w) b = Relu(a) y = GlobalAveragePool(b) }"
    model = model_of(text, w=np.ones((4, 3, 7, 7)))
    shapes = {"x": (2, 3, 12, 12)}
    found = largest_size(model, "1MB", dimension="x:2,3", input_shapes=shapes, time_limit=0.1, **DRY)
    assert found.size > 24
    with pytest.raises(ShapeError, match="static shape"):
        largest_size(model, "1kB", dimension="x:2,3", input_shapes=shapes, time_limit=0.1, **DRY)


def test_dimensions_are_checked():
    cases = {"y:0": "is not a dimension", "x:first": "is not a dimension", "x:3": "no axis 3"}
    for wrong, words in cases.items():
        with pytest.raises(ShapeError, match=words):
            largest_size(symbolic(), "1MB", dimension=wrong, check=False)
    with pytest.raises(BudgetError, match="no size of batch"):
        largest_size(symbolic(), 1000, check=False, loss="mse", provider="cpu")
