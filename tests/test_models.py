import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from scripts import build_models
from scripts.benchmarking.paper_graphs import CIFAR_NETWORKS
from tests.torch_reference import random_weights, weight_shapes, with_fed_weights

MODELS = Path(__file__).resolve().parent.parent / "models"


@dataclass(frozen=True, slots=True)
class Published:
    """Facts of a published network and its light graph.

    Attributes:
        file: the first 64 bits of the light graph's SHA-256.
        names: the first 64 bits of the SHA-256 of the lines "name [shape]" of the published state_dict, in
            its order and without num_batches_tracked.
        logits: the first ones in float64 evaluation, with the weights of `random_weights` and the image of
            `image_batch(name, 1)`, computed with torchvision 0.29.1, timm 1.0.31 (the two large searched
            networks) and, for CIFAR networks, a torch module independent of `scripts/networks/`.
    """

    file: str
    names: str
    logits: tuple[float, ...]


TABLE = """
alexnet 9503bfffce9b419f 23c3b8d4a3e86dc8 0.0593587 1.238703 1.862387 1.279971
amoebanet 790bccd264d6033c baaa99f8f8329db9 -417429800.0 77115780.0 269277300.0 -55662110.0
darts 3ff20f0059b2068b 804c690bfd000b11 187839300.0 490761700.0 51751350.0 213064400.0
densenet121 3101971e90bf292a 15ed04ae26fa489b -2.655641 -0.3586792 1.424558 -0.7173733
densenet161 1907479024ae3e05 4fe287e106c09e85 2.492476 -3.304358 1.613785 0.8570518
densenet169 532b06419daafdbd c3aa1fbb15286057 0.4641171 -0.3308203 1.930977 0.4461155
densenet201 36061f0f08db5dde c6ef2ec937dea95b 1.594923 -0.7028054 1.692945 1.387638
inception_v3 9944f83388fce9d2 3219087b3cf73148 0.5649902 0.6139911 0.5452339 0.9407144
mobilenet_v2 7163284f0c25acec 4b95e93207941e6b 1.691262 -4.47411 -2.033149 2.556504
nasnet 87f3f52f9041a840 a4c333a2406bd822 -276571.5 -688797.7 -1177372.0 205677.3
nasnetalarge 758790544672314e dd62ecd175e65c0b -44791.93 12122.73 52623.31 21381.92
resnet18 40e0937041c6b0c3 1d65cf9f331909f4 -4.031911 -1.625462 28.45356 3.772541
resnet34 66043916952005ca bb56633e30bfd9c7 -9.748612 -142.8835 1013.736 132.2473
resnet50 992941f7a4c31cf1 6487a6e40bc7989f 2701.624 -3216.509 2021.317 -982.5827
resnet101 124394f72c1d37a0 ee2915e4454c6772 10675780.0 -8417109.0 6207523.0 -1694980.0
resnet152 68dd7dffd133c1b8 5d46027bfdfce40f 50873990000.0 -62839850000.0 14464120000.0 -22913370000.0
vgg11 4bc2010e151470a1 ddb4b3f56e9755a6 -0.2046477 2.97443 0.820142 -1.065258
vgg13 070c5490a0fd8470 08687bab35dc8767 0.0861908 4.062664 -0.1589 -1.387155
vgg16 6e87d3dd49944e89 8a41c838cadbc3e0 -0.8001121 3.699048 -0.2159891 -0.3824159
vgg19 37ef4e96928babb8 5319ee52249b66d1 1.159251 3.993515 0.2758843 0.2483893
"""
NETWORKS = {
    name: Published(file, names, tuple(map(float, logits)))
    for name, file, names, *logits in map(str.split, TABLE.strip().splitlines())
}

# The hashes of all files are tested, so results can change with ONNX Runtime only: the others are slow tests.
QUICK = ("darts", "mobilenet_v2", "resnet18")
runs = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS]
)

# Fully connected layers of AlexNet and VGG need the published input; other networks take smaller ones.
PIXELS = {"inception_v3": 96} | dict.fromkeys(CIFAR_NETWORKS, 32)
PIXELS |= dict.fromkeys(("alexnet", "vgg11", "vgg13", "vgg16", "vgg19"), 224)
SMALL_PIXELS = 64


def load(name: str) -> onnx.ModelProto:
    return onnx.load(MODELS / f"{name}.onnx")


def load_small(name: str) -> onnx.ModelProto:
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


def test_every_network_has_a_file():
    assert {path.stem for path in MODELS.glob("*.onnx")} == set(build_models.NETWORKS) == set(NETWORKS)


@pytest.mark.parametrize("name", NETWORKS)
def test_definitions_give_known_files(name: str):
    """Recorded figures refer to these files."""
    content = build_models.serialize(build_models.build(name))
    assert (MODELS / f"{name}.onnx").read_bytes() == content
    assert hashlib.sha256(content).hexdigest()[:16] == NETWORKS[name].file


def test_check_reports_stale_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build_models, "MODELS_DIRECTORY", tmp_path)
    assert build_models.main(["--check"]) == 1
    assert build_models.main([]) == 0
    assert build_models.main(["--check"]) == 0
    (tmp_path / "resnet18.onnx").write_bytes(b"")
    assert build_models.main(["--check"]) == 1


def test_files_are_small():
    assert sum(path.stat().st_size for path in MODELS.glob("*.onnx")) < 2_400_000


@pytest.mark.parametrize("name", NETWORKS)
def test_graph_is_valid(name: str):
    model = load(name)
    onnx.checker.check_model(model, full_check=True)
    assert (model.ir_version, model.opset_import[0].version) == (9, 17)
    operators = [node for node in model.graph.node if node.op_type != "ConstantOfShape"]
    names = {node.name for node in operators}
    if len(operators) > build_models.MAX_NAMED_NODES:
        assert names == {""}
    else:
        assert "" not in names
        assert len(names) == len(operators)


@runs
def test_runs_without_weights(name: str):
    logits = run(load_small(name), {"x": image_batch(name, batch=2)})
    assert logits.shape == (2, 10 if name in CIFAR_NETWORKS else 1000)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_have_published_names_and_shapes(name: str):
    shapes = weight_shapes(load(name))
    lines = [f"{n} {list(s)}" for n, s in shapes.items() if not n.startswith(("relu6_", "dropout_"))]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == NETWORKS[name].names


@runs
def test_logits_equal_the_published_network(name: str):
    model = load_small(name)
    weights = random_weights(model)
    logits = run(with_fed_weights(model, weights), {"x": image_batch(name, batch=1), **weights})
    expected = np.array(NETWORKS[name].logits)
    assert np.abs(logits[0, :4] - expected).max() < 2e-5 * np.abs(expected).max()
