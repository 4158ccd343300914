import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
import pytest

from onnxgc.api import OptimizeResult, optimize, verify
from onnxgc.api.budget_plans import with_default_limit
from onnxgc.budget.search import DEFAULT_TIME_LIMIT_SECONDS
from onnxgc.errors import BudgetError, BudgetFormError, DurationError, OutputFileError, PlanError
from onnxgc.solvers.base import SolverOptions
from tests.api.chains import chain

ROOT = Path(__file__).resolve().parent.parent.parent
RESNET18 = ROOT / "models" / "resnet18.onnx"
SMALL = {"x": (8, 3, 64, 64)}


def planned(budget: str | float | None = None, **options: Any) -> OptimizeResult:
    return optimize(chain(), budget=budget, check=False, **{"step_limit": 2, **options})


def peak(result: OptimizeResult) -> int:
    return int(result.report["planned"]["simulated_peak_bytes"])


@pytest.mark.parametrize(
    "budget, order", [("100%", "free"), ("50%", "fixed"), ("30%", "free"), (0.9, "fixed"), (600_000, "free")]
)
def test_a_plan_is_within_its_budget_and_above_its_lower_bound(budget: str | float, order: str):
    report = planned(budget, order=order).report
    found = report["budget"]
    regular = report["regular"]["simulated_peak_bytes"]
    assert report["planned"]["simulated_peak_bytes"] <= (found["bytes"] or 0)
    assert budget != "50%" or found["bytes"] == regular // 2
    assert 0 <= found["lower_bound_ratio"] <= found["extra_time_ratio"]
    assert (report["status"] == "optimal") == (found["gap"] == 0.0)
    total = 1 + found["extra_time_ratio"]
    assert found["gap"] * total == pytest.approx(found["extra_time_ratio"] - found["lower_bound_ratio"])
    assert found["gap_of_extra"] * found["extra_time_ratio"] == pytest.approx(found["gap"] * total)
    assert (report["solver"], report["objective"], found["order"]) == ("budget", "time", order)
    if budget == "100%":
        assert (found["extra_time_ratio"], report["status"]) == (0.0, "optimal")


def test_a_result_with_a_step_limit_is_deterministic():
    one, two = (planned("32%", step_limit=3) for _ in range(2))
    assert one.plan.sequence == two.plan.sequence
    assert one.report["status"] == "feasible"
    assert max(Counter(one.plan.sequence).values()) > 1


def test_the_lowest_peak_is_at_most_the_default_plans():
    least, by_default = planned("min"), optimize(chain(), check=False)
    assert peak(least) <= peak(by_default) < planned("100%").report["regular"]["simulated_peak_bytes"]
    assert peak(least) >= least.report["lower_bound_bytes"]
    assert least.report["budget"]["bytes"] is None
    with pytest.raises(BudgetError):
        planned(least.report["lower_bound_bytes"] - 1)


def test_the_lowest_peak_within_an_extra_time():
    report = planned(extra_time="10%", pareto=True, step_limit=0).report
    found = report["budget"]
    assert found["most_extra_time_ratio"] == pytest.approx(0.1)
    assert found["extra_time_ratio"] <= 0.1
    cheaper = [point for point in report["frontier"] if point["extra_time_ratio"] <= 0.1]
    assert report["planned"]["simulated_peak_bytes"] <= min(p["simulated_peak_bytes"] for p in cheaper)


def test_the_trade_off_is_monotone_and_bounds_the_plan_of_a_budget():
    result = planned("45%", pareto=True, step_limit=1)
    points = result.report["frontier"]
    assert len({point["budget_bytes"] for point in points}) >= 10
    for upper, lower in pairwise(points):
        assert upper["budget_bytes"] > lower["budget_bytes"]
        assert upper["extra_time_ratio"] <= lower["extra_time_ratio"]
        assert upper["lower_bound_ratio"] <= lower["lower_bound_ratio"]
    for point in points:
        assert point["simulated_peak_bytes"] <= point["budget_bytes"]
        assert point["lower_bound_ratio"] <= point["extra_time_ratio"]
    assert points[0]["budget_bytes"] == result.report["regular"]["simulated_peak_bytes"]
    found = result.report["budget"]
    limit = found["bytes"] or 0
    within = [p["extra_time_ratio"] for p in points if p["budget_bytes"] <= limit]
    assert peak(result) <= limit
    assert found["extra_time_ratio"] <= min(within)
    # Without a budget the plan is the last point.
    alone = planned(pareto=True, step_limit=0)
    assert alone.report["budget"]["bytes"] is None
    assert peak(alone) == alone.report["frontier"][-1]["simulated_peak_bytes"]


def test_a_file_with_operators_that_run_three_times_is_verified(tmp_path: Path):
    model, training = chain(), tmp_path / "training.onnx"
    optimize(model, training, budget="30%", step_limit=2, check=False)
    nodes = onnx.load(training).graph.node
    assert any(node.name.endswith("__recompute2") for node in nodes)
    found = verify(model, training)
    assert found.holds, [check for check in found.checks if not check.holds]
    assert {check.name for check in found.checks} >= {"loss", "gradients", "order", "peak", "default session"}


def test_a_damaged_sequence_in_a_file_is_rejected(tmp_path: Path):
    model, training = chain(2), tmp_path / "training.onnx"
    optimize(model, training, budget="100%", check=False)
    written = onnx.load(training)
    entry = next(entry for entry in written.metadata_props if entry.key == "onnxgc.plan")
    plan = json.loads(entry.value)
    entry.value = json.dumps({**plan, "sequence": plan["sequence"][1:]})
    onnx.save(written, training)
    with pytest.raises(PlanError, match="before its inputs"):
        verify(model, training)


def test_an_error_for_too_little_memory_names_the_operator():
    with pytest.raises(BudgetError) as caught:
        planned("10%")
    message = str(caught.value)
    assert caught.value.exit_code == 3
    assert "\n" not in message
    assert "Tanh_h9/grad/Mul" in message
    assert "393,216 bytes" in message
    assert "'h9_grad' 131,072" in message
    # Between the working set of one operator and the lowest peak found.
    with pytest.raises(BudgetError, match=r"no plan within .* was found; no plan is below 393,216"):
        planned(393_216)


def test_the_outputs_of_the_step_must_fit():
    """Parameter gradients are live to the end; each operator alone needs less than half of their bytes."""
    with pytest.raises(BudgetError, match=r"the step's outputs .* take 46,7\d\d,\d\d\d"):
        optimize(RESNET18, input_shapes=SMALL, budget="46MB", check=False)


def test_durations_are_those_of_the_device(tmp_path: Path):
    default, a100, cpu = (planned("60%", device=name).report["budget"] for name in (None, "A100", "cpu"))
    assert a100["timing"] == "data sheet of NVIDIA A100 SXM 80GB"
    assert default["timing"] == cpu["timing"] == "data sheet of one core of a CPU"
    assert default["regular_seconds"] == cpu["regular_seconds"] > a100["regular_seconds"]


def test_durations_are_measured_once_and_saved(tmp_path: Path):
    path = tmp_path / "times.json"
    first = planned("60%", calibrate=path).report["budget"]
    assert first["timing"] == f"measured, kept in '{path}'"
    written = path.read_bytes()
    second = planned("60%", calibrate=path).report["budget"]
    assert path.read_bytes() == written
    assert second == first
    other = optimize(chain(2, width=8), budget="80%", calibrate=path, check=False)
    assert any("another model" in note or "other shapes" in note for note in other.report["notes"])


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"device": "a1000"}, DurationError, "did you mean 'a100'"),
        ({"device": ""}, DurationError, "known: "),
        ({"device": "a100", "calibrate": "times.json"}, PlanError, "give one of them"),
        ({"order": "random"}, PlanError, "free, fixed"),
        ({"solver": "acg"}, PlanError, "leave --solver out"),
        ({"objective": "paper"}, PlanError, "--objective paper"),
        ({"checkpoints": ("h3",)}, PlanError, "--checkpoints"),
        ({"budget": "8Q"}, BudgetFormError, "'8Q'"),
        ({"extra_time": "10%"}, BudgetFormError, "give one"),
        ({"budget": None, "solver": "budget"}, PlanError, "needs --budget"),
    ],
)
def test_contradicting_options_are_rejected(options: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        planned(**{"budget": "60%", **options})


def test_unusable_calibration_files_are_rejected_and_not_changed(tmp_path: Path):
    path = tmp_path / "times.json"
    path.write_bytes(b"\xff\x00")
    with pytest.raises(DurationError, match=r"times\.json"):
        planned("60%", calibrate=path)
    assert path.read_bytes() == b"\xff\x00"
    with pytest.raises(OutputFileError, match="nowhere"):
        planned("60%", calibrate=tmp_path / "nowhere" / "times.json")


class Interrupting:
    """Raises a `KeyboardInterrupt` at the first stage that contains certain words."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.pressed = 0

    def __call__(self, stage: str) -> None:
        if self.words in stage and not self.pressed:
            self.pressed += 1
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "request_options",
    [
        {"budget": "30%"},
        pytest.param({"budget": "min"}, marks=pytest.mark.slow),
        pytest.param({"budget": "28%", "pareto": True}, marks=pytest.mark.slow),
    ],
)
def test_an_interruption_returns_the_best_plan_found(request_options: dict[str, Any]):
    """The search ends at once."""
    press = Interrupting("% extra time")
    report = planned(**request_options, step_limit=None, time_limit=20.0, progress=press).report
    assert press.pressed == 1
    assert any("interrupted" in note for note in report["notes"])
    assert report["seconds"]["total"] < 20
    assert report["planned"]["simulated_peak_bytes"] < report["regular"]["simulated_peak_bytes"]
    if report["budget"]["bytes"] is not None:
        assert report["planned"]["simulated_peak_bytes"] <= report["budget"]["bytes"]


def test_an_interruption_before_the_first_plan_is_raised():
    with pytest.raises(KeyboardInterrupt):
        planned("30%", progress=Interrupting("no plan yet"))


def test_a_search_has_a_default_time_limit():
    assert with_default_limit(SolverOptions()).time_limit_seconds == DEFAULT_TIME_LIMIT_SECONDS
    for limited in (SolverOptions(max_rounds=3), SolverOptions(time_limit_seconds=0.0)):
        assert with_default_limit(limited) == limited
