"""The light graphs in `models/` are the published networks."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from scripts import build_models
from tests.torch_reference import random_weights, weight_shapes, with_fed_weights

MODELS = Path(__file__).resolve().parent.parent / "models"

# Parameters as published with torchvision (Inception v3 without its auxiliary classifier).
PARAMETER_COUNTS = {
    "alexnet": 61_100_840,
    "densenet121": 7_978_856,
    "inception_v3": 23_834_568,
    "mobilenet_v2": 3_504_872,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
}

# The first logits of the published torchvision models in float64 evaluation, with the weights of
# `random_weights` and the image of `image_batch(name, 1)`, computed with torchvision 0.28.0.
TORCHVISION_LOGITS = {
    "alexnet": (0.0593587, 1.238703, 1.862387, 1.279971),
    "densenet121": (-2.655641, -0.3586792, 1.424558, -0.7173733),
    "inception_v3": (0.5649902, 0.6139911, 0.5452339, 0.9407144),
    "mobilenet_v2": (1.691262, -4.47411, -2.033149, 2.556504),
    "resnet18": (-4.031911, -1.625462, 28.45356, 3.772541),
    "resnet50": (2701.624, -3216.509, 2021.317, -982.5827),
    "resnet152": (50873990000.0, -62839850000.0, 14464120000.0, -22913370000.0),
    "vgg16": (-0.8001121, 3.699048, -0.2159891, -0.3824159),
}

# SHA-256 (first 16 digits) of the lines "name [shape]" of their state_dict, in its order and
# without num_batches_tracked.
TORCHVISION_PARAMETERS = {
    "alexnet": "23c3b8d4a3e86dc8",
    "densenet121": "15ed04ae26fa489b",
    "inception_v3": "3219087b3cf73148",
    "mobilenet_v2": "4b95e93207941e6b",
    "resnet18": "1d65cf9f331909f4",
    "resnet50": "6487a6e40bc7989f",
    "resnet152": "5d46027bfdfce40f",
    "vgg16": "8a41c838cadbc3e0",
}

# AlexNet and VGG-16 have fully connected layers for the published input; the others take less.
PIXELS = {"alexnet": 224, "vgg16": 224, "inception_v3": 96}
SMALL_PIXELS = 64


def load(name: str) -> onnx.ModelProto:
    return onnx.load(MODELS / f"{name}.onnx")


def load_small(name: str) -> onnx.ModelProto:
    """The network for an input of few pixels, if it takes one."""
    model = load(name)
    for dimension in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        dimension.dim_value = PIXELS.get(name, SMALL_PIXELS)
    return model


def image_batch(name: str, batch: int) -> np.ndarray:
    pixels = PIXELS.get(name, SMALL_PIXELS)
    return np.random.default_rng(7).random((batch, 3, pixels, pixels), dtype=np.float32) - np.float32(0.5)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["logits"], feeds)[0]


def test_every_network_has_a_file() -> None:
    assert (
        {path.stem for path in MODELS.glob("*.onnx")} == set(build_models.NETWORKS) == set(PARAMETER_COUNTS)
    )


@pytest.mark.parametrize("name", PARAMETER_COUNTS)
def test_file_is_what_the_script_builds(name: str) -> None:
    assert (MODELS / f"{name}.onnx").read_bytes() == build_models.serialize(build_models.build(name))


def test_check_tells_a_stale_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_models, "MODELS_DIRECTORY", tmp_path)
    assert build_models.main(["--check"]) == 1
    assert build_models.main([]) == 0
    assert build_models.main(["--check"]) == 0
    (tmp_path / "resnet18.onnx").write_bytes(b"")
    assert build_models.main(["--check"]) == 1


def test_files_are_small() -> None:
    assert sum(path.stat().st_size for path in MODELS.glob("*.onnx")) < 700_000


@pytest.mark.parametrize("name", PARAMETER_COUNTS)
def test_graph_is_valid(name: str) -> None:
    model = load(name)
    onnx.checker.check_model(model, full_check=True)
    assert (model.ir_version, model.opset_import[0].version) == (9, 17)
    operators = [node for node in model.graph.node if node.op_type != "ConstantOfShape"]
    assert all(node.name for node in operators)
    assert len({node.name for node in operators}) == len(operators)


@pytest.mark.parametrize("name", PARAMETER_COUNTS)
def test_parameter_count(name: str) -> None:
    sizes = {
        parameter: math.prod(shape)
        for parameter, shape in weight_shapes(load(name)).items()
        if parameter.endswith((".weight", ".bias"))
    }
    assert sum(sizes.values()) == PARAMETER_COUNTS[name]


@pytest.mark.parametrize("name", PARAMETER_COUNTS)
def test_runs_as_it_is(name: str) -> None:
    logits = run(load_small(name), {"x": image_batch(name, batch=2)})
    assert logits.shape == (2, 1000)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("name", PARAMETER_COUNTS)
def test_parameters_are_named_and_shaped_as_torchvision_does(name: str) -> None:
    shapes = weight_shapes(load(name))
    lines = [f"{n} {list(s)}" for n, s in shapes.items() if not n.startswith(("relu6_", "dropout_"))]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == TORCHVISION_PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETER_COUNTS)
def test_computes_what_torchvision_does(name: str) -> None:
    model = load_small(name)
    weights = random_weights(model)
    logits = run(with_fed_weights(model, weights), {"x": image_batch(name, batch=1), **weights})
    expected = np.array(TORCHVISION_LOGITS[name])
    assert np.abs(logits[0, :4] - expected).max() < 2e-5 * np.abs(expected).max()
