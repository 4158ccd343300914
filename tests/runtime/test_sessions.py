"""Training files in ONNX Runtime, measured: order, recomputation, peaks.

The chain is the one on which barriers were found: MatMul and ReLU in turn, 32 layers of equal size.
"""

import functools
import importlib.metadata
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgc.api import OptimizeResult, emit, optimize, store_all_schedule
from onnxgc.errors import RuntimeFailedError, RuntimeUnavailableError
from onnxgc.model.core.ir import Array
from onnxgc.runtime.measure import Measurement, executed_order, measure
from onnxgc.runtime.ort import SessionSettings, load_onnxruntime, make_session
from scripts.benchmarking.arena import ARENA, simulate_arena
from tests.model.model_helpers import model_of, normal

MODELS = Path(__file__).resolve().parent.parent.parent / "models"
BATCH, WIDTH, LAYERS = 1024, 512, 16
# Three segments of four layers are dropped; the operator that makes a checkpoint is in none.
RECOMPUTED = 3 * 3 * 2
FILE_ORDER = SessionSettings(threads=1)
STOCK = SessionSettings(file_order=False, threads=1)


def chain_model() -> onnx.ModelProto:
    tensors = ["x", *(f"y{layer}" for layer in range(LAYERS))]
    layers = " ".join(
        f"[matmul{n}] h{n} = MatMul({tensors[n]}, w{n}) [relu{n}] y{n} = Relu(h{n})" for n in range(LAYERS)
    )
    shape = f"float[{BATCH},{WIDTH}]"
    scale = np.float32(np.sqrt(2 / WIDTH))
    weights = {f"w{n}": normal(WIDTH, WIDTH, seed=n) * scale for n in range(LAYERS)}
    return model_of(f"({shape} x) => ({shape} {tensors[-1]}) {{ {layers} }}", **weights)


@functools.cache
def planned_chain() -> OptimizeResult:
    return optimize(chain_model(), loss="mse", checkpoints=["y3", "y7", "y11"])


def feeds() -> dict[str, Array]:
    generator = np.random.default_rng(1)
    return {name: generator.standard_normal((BATCH, WIDTH)).astype(np.float32) for name in ("x", "target")}


def images(count: int, pixels: int) -> dict[str, Array]:
    value = np.random.default_rng(0).standard_normal((count, 3, pixels, pixels)).astype(np.float32)
    return {"x": value, "labels": np.arange(count)}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Measurement]:
    folder = tmp_path_factory.mktemp("chain")
    result = planned_chain()
    files = {
        "planned": result.training_graph.model,
        "regular": emit(result.planned, schedule=store_all_schedule(result.planned)).model,
    }
    found = {}
    for name, model in files.items():
        onnx.save(model, folder / f"{name}.onnx")
        for settings in (FILE_ORDER, STOCK):
            found[name, settings.file_order] = measure(
                folder / f"{name}.onnx", feeds(), settings=settings, keep_outputs=True
            )
    return found


def test_the_measured_peak_equals_the_simulated_peak(measured: dict[tuple[str, bool], Measurement]):
    planned = planned_chain().planned
    for name, profile in (("planned", planned.profile), ("regular", planned.regular_profile)):
        first, *_, last = measured[name, True].runs
        assert first.requested_peak_bytes == last.requested_peak_bytes
        requested = measured[name, True].requested_peak_bytes
        assert requested == pytest.approx(profile.peak_bytes, rel=0.01), name
        assert measured[name, True].in_use_peak_bytes == pytest.approx(requested, rel=0.1), name


def test_bytes_in_use_equal_the_arenas_model(tmp_path: Path):
    source, file = MODELS / "mobilenet_v2.onnx", tmp_path / "step.onnx"
    result = optimize(source, file, input_shapes={"x": (2, 3, 64, 64)}, solver="peak", check=False)
    found = measure(file, images(2, 64), settings=FILE_ORDER, runs=2)
    planned = result.planned
    arena = simulate_arena(planned.schedule, planned.step.graph, ARENA, steps=2)
    assert found.requested_peak_bytes == pytest.approx(planned.profile.peak_bytes, rel=0.001)
    assert found.in_use_peak_bytes > 1.02 * found.requested_peak_bytes, "no slack that could be foretold"
    assert arena.peak_bytes == pytest.approx(found.in_use_peak_bytes, rel=0.005)


def test_prepacked_parameters_are_not_counted(tmp_path: Path):
    """Frozen matrices are constants, of which the runtime makes copies in the order its kernels like."""
    frozen = [f"w{layer}" for layer in range(1, LAYERS)]
    result = optimize(chain_model(), tmp_path / "step.onnx", loss="mse", freeze=frozen, solver="peak", check=False)
    found = measure(tmp_path / "step.onnx", feeds(), settings=FILE_ORDER, runs=1)
    assert found.requested_peak_bytes == pytest.approx(result.planned.profile.peak_bytes, rel=0.01)


def test_default_settings_keep_the_saving(measured: dict[tuple[str, bool], Measurement]):
    planned = measured["planned", False]
    assert planned.in_use_peak_bytes <= 0.75 * measured["regular", False].in_use_peak_bytes
    # Before memory patterns set in, the barriers alone give the promised peak.
    first = planned.runs[0].requested_peak_bytes
    assert first == pytest.approx(planned_chain().planned.profile.peak_bytes, rel=0.02)


def test_results_are_bit_identical(measured: dict[tuple[str, bool], Measurement]):
    regular, planned = measured["regular", True].outputs, measured["planned", True].outputs
    assert list(regular) == list(planned)
    for name, value in regular.items():
        np.testing.assert_array_equal(planned[name], value, err_msg=name)


def test_file_order_is_executed_order_and_recomputation_survives(measured: dict[tuple[str, bool], Measurement]):
    model = planned_chain().training_graph.model
    order = measured["planned", True].steady.order
    names = [node.name for node in model.graph.node]
    assert list(order) == [name for name in names if name in set(order)]
    recomputed = {name for name in names if name.endswith("__recompute")}
    assert len(recomputed) == RECOMPUTED
    for stock in (True, False):
        assert recomputed <= set(measured["planned", stock].steady.order)


def test_without_barriers_default_settings_lose_the_saving(
    measured: dict[tuple[str, bool], Measurement], tmp_path: Path
):
    """The control: it is the barriers that keep the order, nothing else about the file."""
    bare = onnx.ModelProto()
    bare.CopyFrom(planned_chain().training_graph.model)
    views = {
        node.output[0]: node.input[0]
        for node in bare.graph.node
        if node.op_type == "Reshape" and "/held" in node.output[0]
    }
    kept = [node for node in bare.graph.node if node.output[0] not in views]
    for node in kept:
        node.input[:] = [views.get(name, name) for name in node.input]
    del bare.graph.node[:]
    bare.graph.node.extend(kept)
    onnx.save(bare, tmp_path / "bare.onnx")
    without = measure(tmp_path / "bare.onnx", feeds(), settings=STOCK)
    assert without.in_use_peak_bytes > 1.2 * measured["planned", False].in_use_peak_bytes


@pytest.mark.parametrize("attribute", [True, False])
def test_the_attribute_keeps_recomputation_from_being_merged(attribute: bool):
    """Without barriers, `__recompute` alone decides whether stock settings merge the copies.

    The nodes are renamed: the runtime spares some by their name, and files may be renamed by tools.
    """
    bare = onnx.ModelProto()
    bare.CopyFrom(planned_chain().training_graph.model)
    pairs = set()
    for node in bare.graph.node:
        node.input[:] = [name.split("/held")[0] for name in node.input]
        if node.name.endswith("__recompute"):
            original = node.name.removesuffix("__recompute")
            node.name = f"{original}_again"
            pairs |= {original, node.name}
        if not attribute:
            for found in [a for a in node.attribute if a.name == "__recompute"]:
                node.attribute.remove(found)
    ran = pairs & set(executed_order(bare, feeds(), STOCK).order)
    assert len(pairs) == 2 * RECOMPUTED
    assert len(ran) == (2 if attribute else 1) * RECOMPUTED


def test_only_requested_outputs_are_kept(tmp_path: Path):
    onnx.save(planned_chain().training_graph.model, tmp_path / "chain.onnx")
    found = measure(tmp_path / "chain.onnx", feeds(), settings=FILE_ORDER, runs=1, keep_outputs=["loss"])
    assert list(found.outputs) == ["loss"]


def test_a_file_that_does_not_run_is_reported_in_one_line(tmp_path: Path):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"nothing of the kind")
    with pytest.raises(RuntimeFailedError, match="does not run on ONNX Runtime"):
        measure(broken, {}, settings=FILE_ORDER)


def test_two_builds_of_onnxruntime_are_reported_in_one_line(monkeypatch: pytest.MonkeyPatch):
    class Installed:
        def locate_file(self, path: str) -> Path:
            return Path("site-packages")

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    with pytest.raises(RuntimeUnavailableError, match="both installed"):
        load_onnxruntime()
    # One of them, in another folder, comes first on the path.
    folders = iter(["first", "second"])
    monkeypatch.setattr(Installed, "locate_file", lambda self, path: Path(next(folders)))
    assert load_onnxruntime().__name__ == "onnxruntime"


def test_make_session_accepts_every_form_of_a_model(tmp_path: Path):
    model = planned_chain().training_graph.model
    path = tmp_path / "chain.onnx"
    onnx.save(model, path)
    losses = [
        make_session(source, threads=1).run(["loss"], feeds())[0]
        for source in (model, model.SerializeToString(), path, str(path))
    ]
    assert all(loss == losses[0] for loss in losses)


@pytest.mark.parametrize(
    "name, shape", [("resnet18", (16, 3, 64, 64)), pytest.param("mobilenet_v2", (8, 3, 96, 96), marks=pytest.mark.slow)]
)
def test_default_settings_start_at_the_simulated_peak(name: str, shape: tuple[int, ...], tmp_path: Path):
    """Buffers with equal symbolic dimensions would be reused across steps; each has a unique one."""
    source, file = MODELS / f"{name}.onnx", tmp_path / "step.onnx"
    result = optimize(source, file, input_shapes={"x": shape}, solver="peak", check=False)
    found = measure(tmp_path / "step.onnx", images(shape[0], shape[2]), settings=STOCK, runs=1)
    assert found.requested_peak_bytes <= 1.1 * result.planned.profile.peak_bytes
