"""Networks, graphs and session settings of the GPU check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCHEMA_VERSION = 1
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
GRAPHS = ("regular", "planned")
SEED = 0
RUNS, TIMED_RUNS = 3, 3
LAST_STEPS_SECONDS = 30.0
"""Time that the networks of step 4 leave for later steps."""
MIN_STEP_SECONDS = 5.0
Json = dict[str, Any]


class CheckError(Exception):
    """The reason, in one line, why a step failed."""


@dataclass(frozen=True, slots=True)
class Network:
    """A light model and its input shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of sessions: onnxgc's own, or with one difference."""

    name: str
    file_order: bool = True
    cuda_options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run; `only` has numbers of steps."""

    out: Path
    smoke: bool
    limit_seconds: float
    network_limit_seconds: float
    networks: tuple[str, ...]
    only: tuple[int, ...]

    @property
    def provider(self) -> str:
        return CPU if self.smoke else CUDA

    @property
    def threads(self) -> int | None:
        return 2 if self.smoke else None

    def network(self, name: str) -> Network:
        known = {network.name: network for network in (SMOKE_NETWORKS if self.smoke else PAPER_NETWORKS)}
        if name not in known:
            raise CheckError(f"unknown network '{name}'; pass one of {', '.join(known)} to --networks")
        return known[name]


# The paper's batch sizes, most informative networks first, for runs that end early.
PAPER_NETWORKS = (
    Network("resnet50", (64, 3, 224, 224)),
    Network("densenet121", (32, 3, 224, 224)),
    Network("resnet152", (16, 3, 224, 224)),
    Network("inception_v3", (32, 3, 300, 300)),
    Network("vgg16", (64, 3, 224, 224)),
)
# Large enough that activations, not only parameters' gradients, determine the peak.
SMOKE_NETWORKS = (Network("resnet18", (8, 3, 64, 64)), Network("mobilenet_v2", (8, 3, 64, 64)))
MAKE_SESSION = Setting("make_session")
OTHER_SETTINGS = (
    # ONNX Runtime's defaults: convolutions try all algorithms, with workspaces of any size.
    Setting(
        "large_workspace",
        cuda_options={"cudnn_conv_algo_search": "EXHAUSTIVE", "cudnn_conv_use_max_workspace": "1"},
    ),
    Setting("stock", file_order=False),
)


def device_of(provider: str) -> str:
    return "cuda" if provider == CUDA else "cpu"


def error_line(error: Exception) -> str:
    return f"{error}" if isinstance(error, CheckError) else f"{type(error).__name__}: {error}"
