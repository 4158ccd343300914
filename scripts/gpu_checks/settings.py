"""Networks, shapes and options of the GPU check."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

ROOT = Path(__file__).resolve().parents[2]
SCHEMA_VERSION = 2
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
SEED = 0
PROFILED_RUNS, TIMED_RUNS = 3, 10
MIN_ROW_SECONDS, MAX_ROW_SECONDS = 5.0, 120.0
"""Remaining time below which no further row is measured, and the limit of one process."""
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
class Options:
    """The options of a run; an empty `only` means all steps."""

    out: Path
    smoke: bool = False
    limit_seconds: float = 540.0
    only: tuple[str, ...] = ()
    prepared: Path | None = None

    @property
    def provider(self) -> str:
        return CPU if self.smoke else CUDA

    @property
    def threads(self) -> int | None:
        return 2 if self.smoke else None

    @property
    def table1_networks(self) -> tuple[Network, ...]:
        return SMOKE_NETWORKS if self.smoke else TABLE1_NETWORKS

    @property
    def paper_networks(self) -> tuple[Network, ...]:
        return SMOKE_NETWORKS[:1] if self.smoke else TABLE1_NETWORKS[:5]

    @property
    def sequences(self) -> tuple[Sequences, ...]:
        return SMOKE_SEQUENCES if self.smoke else SEQUENCES


def _table1() -> tuple[Network, ...]:
    """The networks of the paper's Table 1 with its batch sizes, most informative first."""
    lines = (ROOT / "benchmarks" / "paper_table1.csv").read_text().splitlines()
    _, *rows = [line.split(",") for line in lines if not line.startswith("#")]
    shapes = {name: (int(batch), *map(int, image.split("x"))) for name, batch, image, *_ in rows}
    first = ("resnet50", "densenet121", "resnet152", "inception_v3", "vgg16")
    return tuple(Network(name, shapes[name]) for name in dict.fromkeys((*first, *shapes)))


TABLE1_NETWORKS = _table1()
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
LAYERS = tuple(
    Layer(*sizes)
    for sizes in (
        # resnet50
        (64, 3, 224, 64, 7, 2, 3), (64, 64, 56, 64, 1), (64, 64, 56, 64, 3, 1, 1), (64, 64, 56, 256, 1),
        (64, 256, 56, 64, 1), (64, 128, 56, 128, 3, 2, 1), (64, 128, 28, 128, 3, 1, 1), (64, 512, 28, 128, 1),
        (64, 256, 14, 256, 3, 1, 1), (64, 1024, 14, 2048, 1, 2), (64, 512, 7, 512, 3, 1, 1),
        (64, 2048, 7, 512, 1),
        # vgg16
        (64, 64, 224, 64, 3, 1, 1), (64, 256, 56, 256, 3, 1, 1), (64, 512, 28, 512, 3, 1, 1),
        # mobilenet, resnext
        (64, 144, 56, 144, 3, 1, 1, 144), (64, 576, 14, 576, 3, 1, 1, 576), (64, 128, 56, 128, 3, 1, 1, 32),
    )
)  # fmt: skip
SMOKE_LAYERS = (
    Layer(2, 3, 16, 4, 7, 2, 3),
    Layer(2, 4, 6, 5, 3, 1, 1),
    Layer(2, 4, 7, 6, 1, 2),
    Layer(2, 4, 7, 4, 3, 2, 1, 4),
    Layer(2, 4, 7, 6, 3, 1, 1, 2),
)


def network_named(name: str, smoke: bool) -> Network | Sequences:
    """The network of a name, also of a transformer's."""
    networks, sequences = (SMOKE_NETWORKS, SMOKE_SEQUENCES) if smoke else (TABLE1_NETWORKS, SEQUENCES)
    named: dict[str, Network | Sequences] = {one.name: one for one in networks}
    return (named | {one.name: one for one in sequences})[name]


def device_of(provider: str) -> str:
    return "cuda" if provider == CUDA else "cpu"


def median(seconds: Sequence[float]) -> float:
    return float(statistics.median(seconds))


def error_line(error: Exception) -> str:
    return f"{error}" if isinstance(error, CheckError) else f"{type(error).__name__}: {error}"
