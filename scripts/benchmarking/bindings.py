"""Memory of a training step in JavaScript: Node by session settings, and the heap of wasm.

Needs node, and the packages of docs/examples (`npm ci --ignore-scripts` there).
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxgc.api import optimize
from onnxgc.model.draw_weights import draw_weights
from onnxgc.model.read import read_model
from scripts.benchmarking.records import MODELS, ROOT, Progress, Record
from scripts.benchmarking.tables import machine_of, markdown_table, megabytes

PACKAGES = ROOT / "docs" / "examples" / "node_modules"
PLANS: Mapping[str, Mapping[str, Any]] = {"baseline": {"solver": "store-all"}, "planned": {"time_limit": 10}}
NETWORKS = ("mobilenet_v2", "transformer")
_STEPS = 4
_NO_PATTERNS = {"enableMemPattern": False}
SETTINGS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, str]]] = {
    "Node, defaults": ("onnxruntime-node", {}, {}),
    "Node, patterns off": ("onnxruntime-node", _NO_PATTERNS, {}),
    "Node, patterns and arena off": ("onnxruntime-node", {**_NO_PATTERNS, "enableCpuMemArena": False}, {}),
    "the same, glibc returns blocks above 64 KiB": (
        "onnxruntime-node",
        {**_NO_PATTERNS, "enableCpuMemArena": False},
        {"MALLOC_MMAP_THRESHOLD_": "65536"},
    ),
    "wasm, defaults": ("onnxruntime-web", {}, {}),
    "wasm, patterns off": ("onnxruntime-web", _NO_PATTERNS, {}),
}
"""By name: package, session options, and environment."""


@dataclass(frozen=True, slots=True)
class Options:
    """`only` has names of networks."""

    only: tuple[str, ...] = ()
    threads: int = 1


def run(options: Options, progress: Progress) -> dict[str, Any]:
    networks = {name: _measured(name, progress) for name in options.only or NETWORKS}
    return {"steps": _STEPS, "networks": networks}


def failures(figures: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}, {setting}: the plan takes more memory than the baseline"
        for name, network in figures["networks"].items()
        for setting, measured in network["settings"].items()
        if measured["planned"] >= measured["baseline"]
    ]


def _measured(name: str, progress: Progress) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        source, shapes = _source(name, Path(made))
        values = draw_weights(read_model(source, input_shapes=shapes), 0, only_constant_filled=True)
        found: dict[str, Any] = {"plans": {}, "settings": {setting: {} for setting in SETTINGS}}
        for plan, how in PLANS.items():
            progress(f"{name}: {plan}")
            file = Path(made) / f"{plan}.onnx"
            options: dict[str, Any] = {"optimizer": "sgd", "state": "inputs", "values": values, "check": False, **how}
            report = optimize(source, file, input_shapes=shapes, **options).report
            found["plans"][plan] = report["planned"]["simulated_peak_bytes"]
            for setting in SETTINGS:
                found["settings"][setting][plan] = _run(file, setting)
                progress(f"{name}: {plan}: {setting}: {found['settings'][setting][plan]}")
        return found


def _source(name: str, folder: Path) -> tuple[Path, Mapping[str, tuple[int, ...]] | None]:
    if name != "transformer":
        return MODELS / f"{name}.onnx", {"x": (16, 3, 96, 96)}
    import torch
    from torch import nn

    from scripts.exports.torch_export import Export, export_module
    from scripts.exports.torch_models import Recipe

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(192, 4, 768, batch_first=True)
    module = nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(192, 64))
    path = folder / "transformer.onnx"
    export_module(module, {"input": torch.randn(16, 256, 192)}, path, Export(Recipe.DYNAMO, dynamic=False))
    return path, None


def _run(file: Path, setting: str) -> int:
    package, options, environment = SETTINGS[setting]
    script = Path(__file__).with_suffix(".mjs")
    files: list[str | Path] = [script, PACKAGES / package, file]
    command = ["node", "--expose-gc", *files, json.dumps(options), str(_STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise RuntimeError(f"{setting}: {done.stderr}")
    return int(json.loads(done.stdout))


_HEADINGS = ("network, settings", "baseline", "planned", "planned / baseline")


def results_section(record: Record) -> str:
    table = markdown_table(_HEADINGS, _rows(record["figures"]))
    steps = record["figures"]["steps"]
    return (
        f"**Training in JavaScript**: memory of {steps} steps with SGD in MB of 10^6 bytes, by packages 1.30.0: of "
        "Node, the peak of resident memory over that before the session, loading excluded; of wasm, the whole heap."
        f"\n\n{table}\n\n({machine_of(record)})"
    )


def _rows(figures: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for name, network in figures["networks"].items():
        plans = network["plans"]
        sizes = [plans[plan] for plan in PLANS]
        rows.append([f"{name}: simulated", *map(megabytes, sizes), f"{sizes[1] / sizes[0]:.2f}"])
        for setting, measured in network["settings"].items():
            one, two = (measured[plan] for plan in PLANS)
            rows.append([f"{name}: {setting}", megabytes(one), megabytes(two), f"{two / one:.2f}"])
    return rows
