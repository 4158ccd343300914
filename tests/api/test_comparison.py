from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from onnxgc.api import plan_table
from onnxgc.api.comparison import compare
from onnxgc.api.pipeline import optimize
from onnxgc.emission.plan_files import write_plan
from onnxgc.errors import ModelFileError, OnnxgcError, PlanError, ShapeError
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.solvers.registry import SOLVERS
from tests.api.chains import chain
from tests.tracing.encoders import encoder

MODELS = Path(__file__).resolve().parent.parent.parent / "models"
SMALL = {"x": (16, 3, 64, 64)}
FAST = ("acg", "chen-sqrt", "store-all")


def rows(report: Any) -> dict[str, Any]:
    return {row["name"]: row for row in report["rows"]}


@pytest.fixture(scope="module")
def compared() -> Any:
    return compare(chain(5), time_limit=5.0, budget=0.7).report


def test_figures_are_those_of_optimize(compared: Any):
    found = rows(compared)
    found.pop("torch-budget", None)
    assert set(found) == {*(name for name in SOLVERS if name != "manual")} - {"bptt", "revolve"}
    for name, row in found.items():
        how: dict[str, Any] = {"budget": 0.7} if name == "budget" else {"solver": name}
        report: Any = optimize(chain(5), check=False, time_limit=5.0, **how).report
        planned = report["planned"]
        assert row["simulated_peak_bytes"] == planned["simulated_peak_bytes"], name
        for key in ("checkpoint_bytes", "heaviest_segment_bytes", "extra_flops_ratio", "peak_step"):
            assert row[key] == planned[key], (name, key)
        assert row["checkpoints"] == report["checkpoints"], name
        if name != "store-all":
            for key in ("objective", "status", "lower_bound_bytes", "gap"):
                assert row[key] == report[key], (name, key)
        if name == "budget":
            assert row["extra_time_ratio"] == report["budget"]["extra_time_ratio"]
            assert row["lower_bound_ratio"] == report["budget"]["lower_bound_ratio"]
        assert report["regular"] == {key: value for key, value in compared["regular"].items() if key != "seconds"}


def test_rows_are_sorted_and_no_peak_is_below_the_lower_bound(compared: Any):
    peaks = [row["simulated_peak_bytes"] for row in compared["rows"]]
    assert peaks == sorted(peaks)
    assert [row["best"] for row in compared["rows"]] == [True] + [False] * (len(peaks) - 1)
    assert 0 < compared["lower_bound_bytes"] <= peaks[0]
    assert compared["lower_bound_bytes"] >= rows(compared)["peak"]["lower_bound_bytes"]
    assert compared["rows"][0]["peak_gap"] == pytest.approx(1 - compared["lower_bound_bytes"] / peaks[0])
    stored = rows(compared)["store-all"]
    assert (stored["extra_time_ratio"], stored["share_of_regular"]) == (0.0, 1.0)


def test_a_missing_row_has_a_reason(compared: Any):
    reasons = {item["name"]: item["reason"] for item in compared["left_out"]}
    assert set(reasons) == {"revolve", "bptt", "per-block", "layer-wise"}
    assert "chains of equal states only" in reasons["revolve"]
    report = compare(chain(5), solvers=FAST, budget="1KB", time_limit=1.0).report
    assert "no plan fits 1,000 bytes" in {item["name"]: item["reason"] for item in report["left_out"]}["budget"]


def test_a_model_is_read_and_traced_once(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            calls.append(name)
            return function(*given)

        return call

    for name in ("read_with_options", "trace_problem"):
        monkeypatch.setattr(plan_table, name, counted(name, getattr(plan_table, name)))
    compare(chain(4), plans=[["h1"], ["h2"]], solvers=("acg", "chen-greedy", "per-block"), budget=0.9)
    assert calls == ["read_with_options", "trace_problem"]


def test_blocks_and_transformer_layers_have_rows():
    report = compare(encoder(4), solvers=("per-block", "layer-wise")).report
    found = rows(report)
    blocks = compare(MODELS / "resnet18.onnx", input_shapes=SMALL, solvers=["per-block"]).report
    assert rows(blocks)["per-block"]["detail"].startswith("8 blocks like layer#.#")
    assert set(found) == {"per-block", "layer-wise", "store-all"}
    assert found["per-block"]["detail"].startswith("4 blocks like encoder.layers.#")
    for name in ("per-block", "layer-wise"):
        assert found[name]["simulated_peak_bytes"] < found["store-all"]["simulated_peak_bytes"]
        assert found[name]["extra_time_ratio"] > 0
        assert found[name]["solve_seconds"] is None


def test_plans_from_files_are_simulated_like_any_other(tmp_path: Path):
    found = optimize(chain(6), tmp_path / "training.onnx", solver="chen-sqrt", check=False)
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        write_plan(found.plan, tmp_path / folder / "a.json", solver="chen-sqrt")
    paths = [tmp_path / "one" / "a.json", tmp_path / "other" / "a.json", tmp_path / "training.onnx", ["h1"]]
    done = compare(chain(6), plans=paths, solvers=["chen-sqrt"])
    names = ["a.json", str(paths[1]), "training.onnx", "plan 4"]
    assert set(rows(done.report)) == {"store-all", "chen-sqrt", *names}
    peaks = {rows(done.report)[name]["simulated_peak_bytes"] for name in ("chen-sqrt", *names[:3])}
    assert peaks == {found.report["planned"]["simulated_peak_bytes"]}
    assert done.plans["a.json"] == found.plan


def test_the_difference_between_two_plans():
    plans = {"before": ["h1", "h4"], "after": ["h1", "h2", "h6"]}
    report = compare(chain(8), plans=plans, solvers=["acg"]).report
    difference, found = report["difference"], rows(report)
    before, after = difference["plans"]

    def names(items: Any) -> set[str]:
        return {item["tensor"] for item in items}

    assert (before["name"], after["name"]) == ("before", "after")
    # Neither plan recomputes its last segment: both keep h6, and only the first keeps h5.
    fates = {item["tensor"]: item["fates"] for item in difference["tensors"]}
    assert fates == {
        "h2": ["again", "checkpoint"],
        "h4": ["checkpoint", "again"],
        "h5": ["held", "again"],
        "h6": ["held", "checkpoint"],
    }
    assert (names(before["kept_here_only"]), names(after["kept_here_only"])) == ({"h4", "h5"}, {"h2"})
    assert names(before["computed_again_here_only"]) == {"h2"}
    assert names(after["computed_again_here_only"]) == {"h4", "h5"}
    assert all(item["bytes"] == 2048 * 16 * 4 for item in after["kept_here_only"])
    change = found["after"]["simulated_peak_bytes"] - found["before"]["simulated_peak_bytes"]
    assert difference["peak_change_bytes"] == change
    for side in (before, after):
        for key in ("peak_step", "peak_step_number", "steps"):
            assert side[key] == found[side["name"]][key]
        assert 1 <= side["peak_step_number"] <= side["steps"]
        live = [item["bytes"] for item in side["largest_at_peak"]]
        assert live == sorted(live, reverse=True)


def renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    for node in model.graph.node:
        node.input[:] = [f"other_{name}" for name in node.input]
        node.output[:] = [f"other_{name}" for name in node.output]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.name = f"other_{value.name}"
    return model


def test_a_plan_is_transferred_to_a_renamed_network():
    done = compare(encoder(4), renamed(encoder(4)))
    (pair,) = done.report["pairs"]
    assert pair["is_same_network"]
    for side in ("a", "b"):
        fate = pair["checkpoints"][side]
        assert fate["count"] == fate["same_tensor"] == fate["kept_by_both"] > 2
        assert [fate[key] for key in ("ambiguous", "one_side", "parted")] == [[], [], []]
        assert pair["read_by_backward_here_only"][side] == []
    carried = pair["carried_over"]
    assert carried["lost"] == []
    assert carried["simulated_peak_bytes"] == carried["own_simulated_peak_bytes"]
    assert carried["simulated_peak_bytes"] < carried["regular_simulated_peak_bytes"]
    own = optimize(encoder(4), check=False, solver="peak").report
    assert carried["simulated_peak_bytes"] == own["planned"]["simulated_peak_bytes"]


def test_a_file_with_another_batch_size_is_read_with_the_first_ones():
    report = compare(chain(5, batch=512), renamed(chain(5, batch=2048))).report
    assert report["files"][1]["is_rebatched"]
    assert "read with batch size 512" in report["files"][1]["notes"][0]
    assert report["files"][1]["inputs"] == {"other_x": [512, 16]}
    peaks = [file["regular"]["simulated_peak_bytes"] for file in report["files"]]
    assert peaks[0] == peaks[1]
    # Unless its shape is given.
    with pytest.raises(ShapeError, match="batches of 512 and 1024"):
        compare(
            chain(5, batch=512), renamed(chain(5, batch=2048)), input_shapes={"x": (512, 16), "other_x": (1024, 16)}
        )


def test_a_divergence_is_reported():
    report = compare(chain(6), chain(8)).report
    (pair,) = report["pairs"]
    assert not pair["is_same_network"]
    assert pair["part_behind"]
    fate = pair["checkpoints"]["a"]
    others = (*fate["ambiguous"], *fate["one_side"], *fate["parted"])
    assert fate["same_tensor"] + len(others) == fate["count"]
    assert set(others) == set(pair["carried_over"]["lost"])


def test_each_of_several_networks_has_its_rows_and_one_may_be_unreadable(tmp_path: Path):
    (tmp_path / "none.onnx").write_bytes(b"nothing")
    models = [chain(4), encoder(2)]
    broken, *others = compare(tmp_path / "none.onnx", *models, each=True, solvers=FAST).report["comparisons"]
    assert "none.onnx" in broken["error"]
    for one, model in zip(others, models, strict=True):
        alone = compare(model, solvers=FAST).report
        assert one["lower_bound_bytes"] == alone["lower_bound_bytes"]
        figures = [[(row["name"], row["simulated_peak_bytes"]) for row in found["rows"]] for found in (one, alone)]
        assert figures[0] == figures[1]


@pytest.mark.parametrize(
    "others, arguments, words",
    [
        ((), {"solvers": ["chen"]}, "unknown solver 'chen'; did you mean 'chen-sqrt'"),
        ((), {"solvers": ["manual"]}, r"give its plan as a file \(--plan\)"),
        ((), {"solvers": ["budget"]}, "needs --budget"),
        ((), {"plans": {"acg": ["h1"]}}, "the name 'acg' of a plan"),
        ((), {"plans": [["nowhere"]]}, "plan 'plan 1' does not fit this model: checkpoint 'nowhere'"),
        ((), {"plans": [CheckpointPlan((), (), False, ("zzz",))]}, "which is not an operator of the step"),
        ((chain(2),), {"plans": [["h1"], ["h0"]]}, "a plan is for one model"),
        ((chain(2),), {"plans": [["h1"]], "each": True}, "a plan is for one model"),
        ((chain(2),), {"solvers": ["acg"]}, "add --each"),
        ((chain(2),), {"each": True, "input_shapes": {"y": (1,)}}, ""),
    ],
)
def test_contradicting_options_are_rejected(others: Any, arguments: Any, words: str):
    if not words:
        (found, _) = compare(chain(2), *others, **arguments).report["comparisons"]
        assert "--input-shapes names 'y', but the inputs of 'g' are 'x'" in found["error"]
        return
    with pytest.raises(PlanError, match=words) as caught:
        compare(chain(2), *others, **arguments)
    assert isinstance(caught.value, OnnxgcError)
    assert "\n" not in str(caught.value)


def test_several_networks_have_the_row_of_pytorch_only_if_named():
    named = compare(chain(2), chain(3), each=True, solvers=["torch-budget"]).report["comparisons"]
    names_of = [{*(row["name"] for row in one["rows"]), *(item["name"] for item in one["left_out"])} for one in named]
    assert all("torch-budget" in names for names in names_of)
    others = compare(chain(2), chain(3), each=True).report["comparisons"]
    assert not any(row["name"] == "torch-budget" for one in others for row in one["rows"])


def test_a_training_file_is_not_a_forward_model(tmp_path: Path):
    optimize(chain(2), tmp_path / "training.onnx", check=False)
    with pytest.raises(ModelFileError, match="is already a training file; give the forward model"):
        compare(tmp_path / "training.onnx")
