from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onnxgc.api import optimize, verify
from onnxgc.errors import ModelFileError
from onnxgc.model.core.ir import Array
from onnxgc.model.draw_weights import draw_weights
from onnxgc.runtime.ort import make_session
from tests.torch_reference import reference_step

MODELS = Path(__file__).resolve().parent.parent.parent / "models"
LIGHT = sorted((Path(onnx.__file__).parent / "backend" / "test" / "data" / "light").glob("*.onnx"))


FAST = ("light_squeezenet",)


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=[] if path.stem in FAST else pytest.mark.slow) for path in LIGHT]
)
def test_light_models_are_optimized_and_verified(path: Path, tmp_path: Path):
    training = tmp_path / "training.onnx"
    result = optimize(path, training)
    assert result.report["objective"] == "time"
    assert result.report["lower_bound_bytes"] <= result.report["planned"]["simulated_peak_bytes"]
    onnx.checker.check_model(str(training), full_check=True)
    verification = verify(path, training, threads=1)
    assert verification.holds, [check for check in verification.checks if not check.holds]


@pytest.mark.parametrize(
    "name, shape",
    [
        ("resnet18", (4, 3, 64, 64)),
        pytest.param("resnet50", (4, 3, 64, 64), marks=pytest.mark.slow),
        pytest.param("densenet121", (4, 3, 64, 64), marks=pytest.mark.slow),
        pytest.param("inception_v3", (4, 3, 139, 139), marks=pytest.mark.slow),
        pytest.param("mobilenet_v2", (4, 3, 64, 64), marks=pytest.mark.slow),
    ],
)
def test_gradients_are_as_close_to_float64_as_torchs_own(name: str, shape: tuple[int, ...]):
    """Relative distance of norms per parameter.

    At this size one ReLU whose sign is wrong in float32 changes all earlier gradients, so the median distance
    is compared with torch's largest; an error of 1 % in a rule still shows. scripts/benchmark.py has the full
    size and a stricter criterion.
    """
    source = onnx.load(MODELS / f"{name}.onnx")
    result = optimize(MODELS / f"{name}.onnx", input_shapes={"x": shape})
    model, emitted = result.planned.model, with_masks(result.training_graph.model)
    weights = draw_weights(model, 0)
    generator = np.random.default_rng(0)
    x = generator.standard_normal(shape).astype(np.float32)
    labels = generator.integers(0, 1000, shape[0])
    session = make_session(emitted, threads=1)
    fed = {value.name for value in emitted.graph.input}
    feeds = {"x": x, "labels": labels, **{key: value for key, value in weights.items() if key in fed}}
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(names, feeds), strict=True))
    masks = {
        node.output[0]: found[node.output[1]]
        for node in emitted.graph.node
        if node.op_type == "Dropout" and not node.name.endswith("__recompute")
    }
    truth, single = (
        reference_step(source, weights, {"x": x}, labels, dtype=dtype, masks=masks)
        for dtype in (torch.float64, torch.float32)
    )

    assert float(found["loss"]) == pytest.approx(truth.loss, rel=1e-4)
    assert set(result.training_graph.gradient_of) == set(truth.gradients)
    # The gradient of a bias that a batch normalisation removes is rounding only: it is measured by others.
    floor = 1e-6 * max(float(np.linalg.norm(exact)) for exact in truth.gradients.values())
    distances = [
        distance(found[gradient], truth.gradients[parameter], floor)
        for parameter, gradient in result.training_graph.gradient_of.items()
    ]
    own = [distance(single.gradients[name], exact, floor) for name, exact in truth.gradients.items()]
    assert np.median(distances) < 2 * max(own)
    assert max(distances) < 0.1
    for statistic in model.statistics:
        np.testing.assert_allclose(
            found[statistic.updated], truth.batch_statistics[statistic.name], rtol=1e-3, atol=1e-4
        )


def with_masks(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the masks of its Dropouts as further outputs."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    for node in shown.graph.node:
        if node.op_type == "Dropout":
            if len(node.output) == 1:
                node.output.append(f"{node.output[0]}/mask")
            shown.graph.output.append(onnx.helper.make_tensor_value_info(node.output[1], onnx.TensorProto.BOOL, None))
    return shown


def distance(value: Array, exact: Array, floor: float) -> float:
    return float(np.linalg.norm(value - exact) / max(float(np.linalg.norm(exact)), floor))


def test_planning_reads_no_weights(tmp_path: Path):
    """A dry run needs neither the files of weights nor memory for them."""
    source = onnx.load(MODELS / "resnet18.onnx")
    constants = {node.output[0]: node for node in source.graph.node if node.op_type == "ConstantOfShape"}
    shapes = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in source.graph.initializer}
    kept = [node for node in source.graph.node if node.op_type != "ConstantOfShape"]
    for name, node in constants.items():
        value = np.full(shapes[node.input[0]], 0.02, np.float32)
        source.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    del source.graph.node[:]
    source.graph.node.extend(kept)
    path = tmp_path / "external.onnx"
    onnx.save(source, path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    (tmp_path / "weights.bin").unlink()
    how: dict[str, Any] = {"input_shapes": {"x": (2, 3, 64, 64)}, "dry_run": True, "solver": "peak"}
    report = optimize(path, **how).report
    light = optimize(MODELS / "resnet18.onnx", **how).report
    assert report["planned"] == light["planned"]
    with pytest.raises(ModelFileError, match="cannot be read"):
        optimize(path, tmp_path / "out.onnx", input_shapes={"x": (2, 3, 64, 64)})
    assert not (tmp_path / "out.onnx").exists()
