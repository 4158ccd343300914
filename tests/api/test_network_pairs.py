from pathlib import Path
from typing import Any

import onnx
import pytest

from onnxgc import compare, optimize
from onnxgc.api.plan_transfer import CLOSE_FACTOR
from onnxgc.api.verification import verify
from onnxgc.errors import PlanError
from tests.api.chains import chain
from tests.matching.networks import Network

_BATCH, _CHANNELS, _EXTENT = 8, 4, 16


def _network(is_folded: bool, blocks: int = 6) -> onnx.ModelProto:
    """Convolutions with a normalisation after each or folded into its weights, and a Swish in two forms."""
    net, x = Network(), "x"
    for _ in range(blocks):
        weight = net.weight(_CHANNELS, _CHANNELS, 3, 3)
        if is_folded:
            y = net.node("Conv", x, weight, net.weight(_CHANNELS), pads=[1] * 4)
            active = net.node("Mul", y, net.node("Sigmoid", y))
        else:
            y = net.node("Conv", x, weight, pads=[1] * 4)
            y = net.node("BatchNormalization", y, *(net.ones(_CHANNELS) for _ in range(4)))
            half = net.node("Mul", y, net.constant(0.5))
            active = net.node("Add", half, net.node("Mul", half, net.node("Tanh", half)))
        x = net.node("Add", x, active)
    pooled = net.node("ReduceMean", x, net.ints(2, 3), keepdims=0)
    shape = (_BATCH, _CHANNELS, _EXTENT, _EXTENT)
    return net.model(net.node("MatMul", pooled, net.weight(_CHANNELS, 3)), shape, (_BATCH, 3))


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, id="to decomposed", marks=pytest.mark.slow), pytest.param(False, id="to folded")],
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("pair")
    for is_folded in (True, False):
        onnx.save(_network(is_folded), folder / f"{is_folded}.onnx")
    source, target = folder / f"{request.param}.onnx", folder / f"{not request.param}.onnx"
    return target, compare(source, target, freeze_bn=True)


def test_a_plan_is_adapted_to_a_file_with_other_kept_activations(found: tuple[Path, Any]):
    _, done = found
    (pair,) = done.report["pairs"]
    assert pair["is_same_network"]
    carried = pair["carried_over"]
    assert carried["undecided"] > 0
    assert carried["simulated_peak_bytes"] < carried["as_it_is_simulated_peak_bytes"]
    assert carried["simulated_peak_bytes"] < carried["regular_simulated_peak_bytes"]


def test_a_transferred_plan_trains_the_other_file(found: tuple[Path, Any], tmp_path: Path):
    target, done = found
    training = tmp_path / "training.onnx"
    plan = done.plans[str(target)]
    report = optimize(target, training, plan=plan, freeze_bn=True).report
    carried = done.report["pairs"][0]["carried_over"]
    assert report["planned"]["simulated_peak_bytes"] == carried["simulated_peak_bytes"]
    assert verify(target, training).holds


def test_a_transferred_plan_is_close_to_the_files_own(tmp_path: Path):
    """Adaptation alone would end at 1.3 times the peak, since the layers differ."""
    files = []
    for layers in (12, 30):
        files.append(tmp_path / f"{layers}.onnx")
        onnx.save(chain(layers), files[-1])
    carried = compare(*files).report["pairs"][0]["carried_over"]
    assert carried["simulated_peak_bytes"] <= CLOSE_FACTOR * carried["own_simulated_peak_bytes"]
    assert carried["overruled"] <= carried["decided"]


def test_a_given_plan_of_the_first_file_is_transferred(found: tuple[Path, Any]):
    target, _ = found
    source = target.with_name(f"{target.stem == 'False'}.onnx")
    made = [
        optimize(source, dry_run=True, freeze_bn=True, solver="acg"),
        optimize(source, dry_run=True, freeze_bn=True, budget="90%", time_limit=1),
    ]
    for plan in made:
        done = compare(source, target, plans=[plan], freeze_bn=True)
        planned = plan.report["planned"]["simulated_peak_bytes"]
        assert done.report["files"][0]["planned"]["simulated_peak_bytes"] == planned
        assert done.plans[str(source)] == plan.plan
        carried = done.report["pairs"][0]["carried_over"]
        assert carried["simulated_peak_bytes"] <= CLOSE_FACTOR * carried["own_simulated_peak_bytes"]
        assert not done.plans[str(target)].sequence
        assert carried["is_without_sequence"] == bool(plan.plan.sequence)
    with pytest.raises(PlanError, match="is not one of the graph's"):
        compare(target, source, plans=made[:1], freeze_bn=True)
    with pytest.raises(PlanError, match="a plan is for one model"):
        compare(source, target, plans=made, freeze_bn=True)
