"""Training files in the forms for CUDA: what they avoid, and that planning leaves values and peaks alone."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgc.api import PlannedStep, emit, optimize, plan_step, store_all_schedule, verify
from onnxgc.api.card import step_costs
from onnxgc.api.feeds import feeds_of
from onnxgc.api.read_options import ReadOptions
from onnxgc.errors import PlanError, RuntimeUnavailableError
from onnxgc.gradients.weight_gradient import WEIGHT_FORMS
from onnxgc.model.core.ir import Array
from onnxgc.model.draw_weights import draw_weights
from onnxgc.model.operators.reductions import MAX_ORDERED_ROWS
from onnxgc.model.read import read_model
from onnxgc.runtime.ort import make_session
from onnxgc.tracing.card_costs import OperatorCost
from onnxgc.tracing.devices import device
from scripts.benchmarking.cuda_results import networks_in_forms, step_seconds
from tests.model.model_helpers import model_of
from tests.training.networks import digits_network

MODELS = Path(__file__).parents[2] / "models"
SHAPES = {"x": (4, 3, 64, 64)}
CPU = ("CPUExecutionProvider",)


def planned_step(provider: str, solver: str | None = None, batch: int = 4) -> PlannedStep:
    shapes = {"x": (batch, *SHAPES["x"][1:])}
    return plan_step(read_model(MODELS / "resnet18.onnx", input_shapes=shapes, provider=provider), solver or "peak")


def outputs(planned: PlannedStep, *, baseline: bool = False, has_barriers: bool = True) -> Mapping[str, Array]:
    options = ReadOptions(provider=planned.model.provider, has_barriers=has_barriers)
    drawn = draw_weights(planned.model, 0)
    schedule = store_all_schedule(planned) if baseline else None
    model = emit(planned, schedule=schedule, values=drawn, options=options).model
    session = make_session(model, providers=CPU, threads=1)
    fed = {value.name for value in session.get_inputs()}
    feeds = {name: value for name, value in feeds_of(planned, 0).items() if name in fed}
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def total(planned: PlannedStep, *, has_barriers: bool = False) -> OperatorCost:
    return step_costs(planned.step, planned.schedule, device("h200"), has_barriers=has_barriers)[-1]


def test_the_forms_have_fewer_nodes_and_bytes_and_no_slow_reduction_or_large_filter():
    cpu, cuda = (total(planned_step(provider, "store-all")) for provider in ("cpu", "cuda"))
    assert cuda.nodes < 0.65 * cpu.nodes
    assert cuda.kernels < 0.75 * cpu.kernels
    assert cuda.moved_bytes < 0.95 * cpu.moved_bytes
    assert cpu.slow_bytes > 0 < cpu.large_filters
    assert cuda.slow_bytes == 0 == cuda.large_filters


def test_the_expected_time_is_near_the_recorded_one():
    """Of the forms for CPUs, which ran on an H200."""
    record = json.loads((MODELS.parent / "benchmarks/gpu/nvidia-h200.json").read_text())
    recorded = networks_in_forms(record, "cpu")["resnet50"]
    model = read_model(MODELS / "resnet50.onnx", input_shapes={"x": tuple(recorded["shape"])})
    expected = total(plan_step(model, "store-all")).seconds
    assert expected == pytest.approx(step_seconds(recorded["regular"]), rel=0.1)


def test_plans_and_barriers_change_no_bit_and_both_forms_agree():
    planned = planned_step("cuda")
    assert planned.profile.peak_bytes < planned.regular_profile.peak_bytes
    assert total(planned).nodes < total(planned, has_barriers=True).nodes
    one = outputs(planned)
    for other in (outputs(planned, baseline=True), outputs(planned, has_barriers=False)):
        assert all(np.array_equal(one[name], value) for name, value in other.items())
    cpu = outputs(planned_step("cpu"))
    assert one.keys() == cpu.keys()
    for name, value in cpu.items():
        assert np.linalg.norm(one[name] - value) <= 2e-4 * np.linalg.norm(value) + 1e-6, name


@pytest.mark.slow
def test_running_statistics_of_a_large_batch_agree():
    """Above the rows that CUDA adds in a fixed order, sums are transposed."""
    batch = MAX_ORDERED_ROWS + 1
    one, other = (outputs(planned_step(provider, batch=batch)) for provider in ("cpu", "cuda"))
    names = [name for name in one if "running" in name]
    assert len(names) == 40
    for name in names:
        np.testing.assert_allclose(other[name], one[name], rtol=1e-5, atol=1e-6)


def test_columns_take_free_memory_and_leave_the_peaks(monkeypatch: pytest.MonkeyPatch):
    planned = planned_step("cuda")
    with monkeypatch.context() as patched:
        patched.setattr("onnxgc.api.planned_step._with_free_memory_used", lambda lean: lean)
        lean = planned_step("cuda")
    assert total(planned).nodes < total(lean).nodes
    assert planned.profile.peak_bytes <= lean.profile.peak_bytes <= 1.03 * planned_step("cpu").profile.peak_bytes
    assert planned.regular_profile.peak_bytes <= lean.regular_profile.peak_bytes


def test_sums_over_many_images_have_a_fixed_order():
    """No ReduceSum over the first axis has more rows than CUDA adds in a fixed order."""
    step = planned_step("cuda", "store-all", batch=2 * MAX_ORDERED_ROWS + 2).step
    rows = [
        step.types[node.inputs[0]].shape[0]
        for node in step.differentiated.backward
        if node.op == "ReduceSum" and 0 in step.constants[node.inputs[1]]
        if step.types[node.inputs[0]].shape[0] < step.types[node.inputs[0]].element_count
    ]
    assert rows
    assert max(rows) <= MAX_ORDERED_ROWS


@pytest.mark.parametrize(
    "weight, attributes, form",
    [
        ((4, 4, 1, 1), "", "pointwise"),
        ((4, 1, 3, 3), "<group=4>", "depthwise"),
        ((4, 2, 3, 3), "<group=2>", "by columns"),
        ((4, 4, 7, 7), "<strides=[2,2]>", "by columns"),
    ],
)
def test_the_form_of_a_weight_gradient(weight: tuple[int, ...], attributes: str, form: str):
    assert [entry.name for entry in WEIGHT_FORMS["cuda"]] == ["pointwise", "depthwise", "by columns"]
    body = f"(float[2, 4, 8, 8] x) => (float[a,b,c,d] y) {{ y = Conv{attributes}(x, w) }}"
    model = read_model(model_of(body, w=weight), provider="cuda")
    operators = {node.op for node in plan_step(model, "store-all").step.differentiated.backward}
    assert ("Gather" in operators) == (form == "by columns")


def test_the_file_records_its_provider_and_is_verified(tmp_path: Path):
    file = tmp_path / "training.onnx"
    source = tmp_path / "digits.onnx"
    onnx.save(digits_network(), source)
    optimize(
        source, file, input_shapes={"image": (8, 1, 8, 8)}, provider="cuda", barriers="none", solver="peak", check=False
    )
    properties = {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    assert '"provider": "cuda"' in properties["onnxgc.options"]
    assert '"has_barriers": false' in properties["onnxgc.options"]
    assert not any("barrier" in node.name for node in onnx.load(file).graph.node)
    checked = verify(source, file)
    assert checked.holds, [check for check in checked.checks if not check.holds]


def test_unknown_names_are_refused():
    with pytest.raises(RuntimeUnavailableError, match="unknown provider 'tpu'"):
        optimize(MODELS / "resnet18.onnx", provider="tpu")
    with pytest.raises(PlanError, match="unknown barriers 'some'"):
        optimize(MODELS / "resnet18.onnx", barriers="some")
