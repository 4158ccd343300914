"""Networks, shapes and options of the GPU check."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

ROOT = Path(__file__).resolve().parents[2]
SCHEMA_VERSION = 2
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
SEED = 0
PROFILED_RUNS, TIMED_RUNS = 3, 10
MIN_ROW_SECONDS = 5.0
"""Remaining time below which no further figure is measured."""
Json = dict[str, Any]


class CheckError(Exception):
    """The reason, in one line, why a step failed."""


@dataclass(frozen=True, slots=True)
class Network:
    """A light model of `models/` and its input shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sequences:
    """A transformer of `scripts.exports.torch_models`, with a batch of sequences of `tokens` tokens."""

    model: str
    batch: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.batch}x{self.tokens}"


def network_of_json(given: Json) -> Network | Sequences:
    """The inverse of `dataclasses.asdict`, after JSON."""
    return Sequences(**given) if "tokens" in given else Network(given["name"], tuple(given["shape"]))


def light_model(network: Network) -> tuple[Path, dict[str, tuple[int, ...]]]:
    """The file of a network, and the shape of its input by name."""
    path = ROOT / "models" / f"{network.name}.onnx"
    (value,) = onnx.load(path).graph.input
    return path, {value.name: network.shape}


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution with a square kernel: input [N, C, size, size], padded by `pad` on each side."""

    batch: int
    channels_in: int
    size: int
    channels_out: int
    kernel: int
    stride: int = 1
    pad: int = 0
    groups: int = 1

    @property
    def name(self) -> str:
        groups = f", {self.groups} groups" if self.groups > 1 else ""
        shape = f"{self.batch}x{self.channels_in}x{self.size}x{self.size}"
        return f"{shape} to {self.channels_out}, {self.kernel}x{self.kernel}/{self.stride}{groups}"

    @property
    def output_size(self) -> int:
        return (self.size + 2 * self.pad - self.kernel) // self.stride + 1


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of sessions: onnxgc's own, or with one difference."""

    name: str
    file_order: bool = True
    cuda_options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run; an empty `networks` or `only` means all."""

    out: Path
    smoke: bool = False
    limit_seconds: float = 540.0
    row_limit_seconds: float = 120.0
    networks: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    prepared: Path | None = None

    @property
    def provider(self) -> str:
        return CPU if self.smoke else CUDA

    @property
    def threads(self) -> int | None:
        return 2 if self.smoke else None

    def chosen(self, networks: Sequence[Network]) -> tuple[Network, ...]:
        """Those of `networks` that the user asked for.

        Raises:
            CheckError: the user asked for an unknown one.
        """
        all_networks = SMOKE_NETWORKS if self.smoke else TABLE1_NETWORKS
        known = {network.name: network for network in all_networks}
        for name in self.networks:
            if name not in known:
                raise CheckError(f"unknown network '{name}'; pass one of {', '.join(known)} to --networks")
        return tuple(known[name] for name in self.networks) or tuple(networks)

    @property
    def paper_networks(self) -> tuple[Network, ...]:
        return self.chosen(SMOKE_NETWORKS[:1] if self.smoke else TABLE1_NETWORKS[:5])

    @property
    def table1_networks(self) -> tuple[Network, ...]:
        return self.chosen(SMOKE_NETWORKS if self.smoke else TABLE1_NETWORKS)

    @property
    def sequences(self) -> tuple[Sequences, ...]:
        return SMOKE_SEQUENCES if self.smoke else SEQUENCES


# The paper's batch sizes, most informative networks first, for runs that end early.
TABLE1_NETWORKS = (
    Network("resnet50", (64, 3, 224, 224)),
    Network("densenet121", (32, 3, 224, 224)),
    Network("resnet152", (16, 3, 224, 224)),
    Network("inception_v3", (32, 3, 300, 300)),
    Network("vgg16", (64, 3, 224, 224)),
    Network("alexnet", (1024, 3, 224, 224)),
    Network("resnet18", (256, 3, 224, 224)),
    Network("resnet34", (128, 3, 224, 224)),
    Network("resnet101", (32, 3, 224, 224)),
    Network("densenet161", (16, 3, 224, 224)),
    Network("densenet169", (32, 3, 224, 224)),
    Network("densenet201", (16, 3, 224, 224)),
    Network("vgg11", (64, 3, 224, 224)),
    Network("vgg13", (64, 3, 224, 224)),
    Network("vgg19", (64, 3, 224, 224)),
    Network("nasnet", (64, 3, 32, 32)),
    Network("amoebanet", (64, 3, 32, 32)),
    Network("darts", (64, 3, 32, 32)),
)
# Large enough that activations, not only parameters' gradients, determine the peak.
SMOKE_NETWORKS = (Network("mobilenet_v2", (4, 3, 64, 64)), Network("resnet18", (4, 3, 64, 64)))
SEQUENCES = (
    Sequences("bert", 16, 512),
    Sequences("gpt2", 8, 1024),
    Sequences("llama", 8, 1024),
    Sequences("llama", 4, 2048),
)
SMOKE_SEQUENCES = (Sequences("bert", 8, 48),)

REDUCED_SHAPES = (
    (64, 64, 112, 112), (64, 256, 56, 56), (64, 512, 28, 28), (64, 1024, 14, 14), (64, 2048, 7, 7),
    (32, 128, 56, 56), (8192, 768), (8192, 3072), (16384, 1024),
)  # fmt: skip
SMOKE_REDUCED_SHAPES = ((2, 4, 6, 6), (64, 8))
LAYERS = (
    # resnet50
    Layer(64, 3, 224, 64, 7, 2, 3),
    Layer(64, 64, 56, 64, 1),
    Layer(64, 64, 56, 64, 3, 1, 1),
    Layer(64, 64, 56, 256, 1),
    Layer(64, 256, 56, 64, 1),
    Layer(64, 128, 56, 128, 3, 2, 1),
    Layer(64, 128, 28, 128, 3, 1, 1),
    Layer(64, 512, 28, 128, 1),
    Layer(64, 256, 14, 256, 3, 1, 1),
    Layer(64, 1024, 14, 2048, 1, 2),
    Layer(64, 512, 7, 512, 3, 1, 1),
    Layer(64, 2048, 7, 512, 1),
    # vgg16
    Layer(64, 64, 224, 64, 3, 1, 1),
    Layer(64, 256, 56, 256, 3, 1, 1),
    Layer(64, 512, 28, 512, 3, 1, 1),
    # mobilenet, resnext
    Layer(64, 144, 56, 144, 3, 1, 1, 144),
    Layer(64, 576, 14, 576, 3, 1, 1, 576),
    Layer(64, 128, 56, 128, 3, 1, 1, 32),
)
SMOKE_LAYERS = (
    Layer(2, 3, 16, 4, 7, 2, 3),
    Layer(2, 4, 6, 5, 3, 1, 1),
    Layer(2, 4, 7, 6, 1, 2),
    Layer(2, 4, 7, 4, 3, 2, 1, 4),
    Layer(2, 4, 7, 6, 3, 1, 1, 2),
)

MAKE_SESSION = Setting("make_session")
OTHER_SETTINGS = (
    # ONNX Runtime's defaults: convolutions have workspaces of any size.
    Setting(
        "large_workspace",
        cuda_options={"cudnn_conv_algo_search": "EXHAUSTIVE", "cudnn_conv_use_max_workspace": "1"},
    ),
    Setting("stock", file_order=False),
)


def device_of(provider: str) -> str:
    return "cuda" if provider == CUDA else "cpu"


def median(seconds: Sequence[float]) -> float:
    return float(statistics.median(seconds))


def error_line(error: Exception) -> str:
    return f"{error}" if isinstance(error, CheckError) else f"{type(error).__name__}: {error}"
