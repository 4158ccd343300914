"""Twin networks by PyTorch's exporters, with and without optimisation.

python -m scripts.exports.torch_twins FOLDER
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scripts.exports.export_all import main
from scripts.exports.twins import BATCH, CLASSES, ENCODER, EPSILON, PIXELS, value_of


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = ENCODER.width
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.first, self.second = (nn.LayerNorm(width, eps=EPSILON) for _ in range(2))
        self.inner = nn.Linear(width, ENCODER.inner)
        self.outer = nn.Linear(ENCODER.inner, width)

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], ENCODER.length, ENCODER.heads, ENCODER.width // ENCODER.heads)
        q, k, v = (part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.first(x + self.out(mixed))
        result: Tensor = self.second(x + self.outer(nn.functional.gelu(self.inner(x))))
        return result


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(ENCODER.words, ENCODER.width)
        self.position = nn.Parameter(torch.zeros(ENCODER.length, ENCODER.width))
        self.norm = nn.LayerNorm(ENCODER.width, eps=EPSILON)
        self.block = nn.Sequential(*(_Block() for _ in range(ENCODER.blocks)))
        self.head = nn.Linear(ENCODER.width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.block(self.norm(self.word(tokens) + self.position))
        result: Tensor = self.head(x.mean(dim=1))
        return result


def _image() -> Tensor:
    return torch.zeros(BATCH, 3, PIXELS, PIXELS)


def _tokens() -> Tensor:
    return torch.zeros(BATCH, ENCODER.length, dtype=torch.int64)


def _vision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module: nn.Module = getattr(import_module("torchvision.models"), name)(num_classes=CLASSES)
        return module

    return build


NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "resnet50": (_vision("resnet50"), _image),
    "mobilenet_v2": (_vision("mobilenet_v2"), _image),
    "encoder": (_Encoder, _tokens),
}
EXPORTERS: Mapping[str, dict[str, Any]] = {
    "dynamo": {"dynamo": True, "optimize": False},
    "dynamo-optimized": {"dynamo": True, "optimize": True},
    "script": {"dynamo": False, "opset_version": 17, "do_constant_folding": True},
    "script-train": {
        "dynamo": False,
        "opset_version": 17,
        "do_constant_folding": False,
        "training": torch.onnx.TrainingMode.TRAINING,
    },
}


def exports() -> Iterator[tuple[str, Callable[[Path], object]]]:
    for name, (build, inputs) in NETWORKS.items():
        module = build().eval()
        for key, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.from_numpy(value_of(key, tuple(tensor.shape))))
        for exporter in EXPORTERS:
            yield f"{name}-torch-{exporter}", partial(_export, module, inputs(), exporter)


def _export(module: nn.Module, x: Tensor, exporter: str, path: Path) -> None:
    options = EXPORTERS[exporter]
    # An export in training updates running statistics.
    state = {key: value.clone() for key, value in module.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.train("training" in options),
            (x,),
            str(path),
            input_names=["x"],
            output_names=["output"],
            external_data=False,
            **options,
        )
    module.load_state_dict(state)


if __name__ == "__main__":
    main(exports)
