"""Build the light ONNX graphs in `models/`.

A light graph has a network's structure without its weights: each parameter is a ConstantOfShape node whose
output has the parameter's name, as in the light models of the `onnx` package. Parameters have the names of
the published models (torchvision, timm, the code of the DARTS paper), so that trained weights can be inserted
by name. The batch is symbolic. Files are small and byte-for-byte reproducible.

    python scripts/build_models.py           write models/*.onnx; which are not tracked
    python scripts/build_models.py --check   exit with 1 if a file differs from its definition
    python scripts/build_models.py --exports ORIGIN FOLDER   write exports with random weights to FOLDER;
                                             ORIGIN is torch, keras, jax or paddle (see --exports --help)
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx
from onnx import TensorProto, helper

# The checkout itself, for `scripts` when this file is the program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.networks.builder import CLASSES, Builder
from scripts.networks.cells import AMOEBANET_A, DARTS, NASNET_A, Cells
from scripts.networks.chains import alexnet, vgg
from scripts.networks.cifar_cells import CIFAR_CLASSES, cifar_network
from scripts.networks.densenet import densenet
from scripts.networks.inception import inception_v3
from scripts.networks.large_cells import nasnet_a_large
from scripts.networks.residual import mobilenet_v2, resnet

MODELS_DIRECTORY = Path(__file__).resolve().parent.parent / "models"
OPSET = 17
IR_VERSION = 9
MAX_NAMED_NODES = 550
"""Nodes of larger networks have no names, to keep the files small; their outputs do."""


@dataclass(frozen=True, slots=True)
class Network:
    """`define` adds operators from [N, 3, pixels, pixels], the published input, to [N, classes]."""

    define: Callable[[Builder, str], str]
    pixels: int = 224
    classes: int = CLASSES


def cifar(cells: Cells) -> Network:
    return Network(partial(cifar_network, cells=cells), pixels=32, classes=CIFAR_CLASSES)


NETWORKS: dict[str, Network] = {
    "alexnet": Network(alexnet),
    "amoebanet": cifar(AMOEBANET_A),
    "darts": cifar(DARTS),
    "densenet121": Network(partial(densenet, depths=(6, 12, 24, 16), nested=True)),
    "densenet161": Network(partial(densenet, depths=(6, 12, 36, 24), growth=48, nested=True)),
    "densenet169": Network(partial(densenet, depths=(6, 12, 32, 32), nested=True)),
    "densenet201": Network(partial(densenet, depths=(6, 12, 48, 32), nested=True)),
    "inception_v3": Network(inception_v3, pixels=299),
    "mobilenet_v2": Network(mobilenet_v2),
    "nasnet": cifar(NASNET_A),
    "nasnetalarge": Network(nasnet_a_large, pixels=331),
    "resnet18": Network(partial(resnet, depths=(2, 2, 2, 2), bottleneck=False)),
    "resnet34": Network(partial(resnet, depths=(3, 4, 6, 3), bottleneck=False)),
    "resnet50": Network(partial(resnet, depths=(3, 4, 6, 3), bottleneck=True)),
    "resnet101": Network(partial(resnet, depths=(3, 4, 23, 3), bottleneck=True)),
    "resnet152": Network(partial(resnet, depths=(3, 8, 36, 3), bottleneck=True)),
    "vgg11": Network(partial(vgg, depths=(1, 1, 2, 2, 2))),
    "vgg13": Network(partial(vgg, depths=(2, 2, 2, 2, 2))),
    "vgg16": Network(partial(vgg, depths=(2, 2, 3, 3, 3))),
    "vgg19": Network(partial(vgg, depths=(2, 2, 4, 4, 4))),
}


def build(name: str) -> onnx.ModelProto:
    """The light graph of a network: `x` [N, 3, H, W] to `logits` [N, classes]."""
    network = NETWORKS[name]
    net = Builder()
    result = network.define(net, "x")
    if len(net.nodes) <= MAX_NAMED_NODES:
        for node in net.nodes:
            node.name = "/" + node.output[0].replace(".", "/")
    net.nodes[-1].output[0] = "logits"
    assert result not in {i for node in net.nodes for i in node.input}, "the last node computes the output"
    image: list[str | int] = ["N", 3, network.pixels, network.pixels]
    graph = helper.make_graph(
        net.parameters + net.nodes,
        name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, image)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", network.classes])],
        initializer=list(net.initializers.values()),
    )
    opset = helper.make_opsetid("", OPSET)
    return helper.make_model(graph, producer_name="onnxgc", ir_version=IR_VERSION, opset_imports=[opset])


def serialize(model: onnx.ModelProto) -> bytes:
    """The file's content, the same bytes on every run and platform."""
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--exports"]:
        from scripts.exports.__main__ import main as export

        return export(given[1:])
    parser = argparse.ArgumentParser(description="Build the light ONNX graphs in models/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file differs")
    check = parser.parse_args(given).check
    stale = []
    for name in NETWORKS:
        path = MODELS_DIRECTORY / f"{name}.onnx"
        content = serialize(build(name))
        if path.is_file() and path.read_bytes() == content:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    if not stale:
        print("models/ is up to date")
        return 0
    print(f"{'differs' if check else 'wrote'}: {', '.join(stale)}")
    return 1 if check else 0


if __name__ == "__main__":
    sys.exit(main())
