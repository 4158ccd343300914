"""Many networks at once, planned and verified, and the paper's table."""

from __future__ import annotations

import csv
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from onnxgc.api import optimize, verify
from onnxgc.errors import OnnxgcError
from scripts.benchmarking.records import BENCHMARKS, MODELS, Progress

LIGHT_FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def light_networks() -> dict[str, Path]:
    """The light models of the `onnx` package, then those of this repository."""
    packaged = {path.stem: path for path in sorted(LIGHT_FOLDER.glob("*.onnx"))}
    return packaged | {f"models/{path.stem}": path for path in sorted(MODELS.glob("*.onnx"))}


def network_shapes(path: Path, batch: int, pixels: int | None) -> dict[str, tuple[int, ...]]:
    """Shapes of inputs for `batch` images; none for the packaged models, which come with a batch of 1."""
    if path.parent != MODELS:
        return {}
    (value,) = onnx.load(path).graph.input
    channels, *size = (dim.dim_value for dim in value.type.tensor_type.shape.dim[1:])
    return {value.name: (batch, channels, *((pixels, pixels) if pixels else size))}


def run_light(
    only: Sequence[str], batch: int, pixels: int | None, threads: int, tell: Progress
) -> list[dict[str, Any]]:
    """Plan and verify each network; one row each, an error in place of figures where one occurs."""
    rows = []
    for name, path in light_networks().items():
        if only and name not in only:
            continue
        tell(name)
        shapes = network_shapes(path, batch, pixels)
        try:
            rows.append({"network": name, **_planned_and_verified(path, shapes, threads)})
        except OnnxgcError as error:
            rows.append({"network": name, "error": str(error)})
    return rows


def _planned_and_verified(path: Path, shapes: dict[str, tuple[int, ...]], threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        training = Path(folder) / "training.onnx"
        result = optimize(path, training, input_shapes=shapes)
        started = time.perf_counter()
        verification = verify(path, training, threads=threads)
        seconds = time.perf_counter() - started
    report = result.report
    model = result.planned.model
    return {
        "inputs": {name: list(model.types[name].shape) for name in model.inputs},
        "vertices": report["vertices"],
        "regular_peak_bytes": report["regular"]["simulated_peak_bytes"],
        "planned_peak_bytes": report["planned"]["simulated_peak_bytes"],
        "regular_activation_peak_bytes": report["regular"]["simulated_activation_peak_bytes"],
        "planned_activation_peak_bytes": report["planned"]["simulated_activation_peak_bytes"],
        "extra_flops_ratio": report["planned"]["extra_flops_ratio"],
        "status": report["status"],
        "seconds": {**report["seconds"], "verify": seconds},
        "verification": verification.as_json(),
    }


def paper_rows(folder: Path = BENCHMARKS) -> dict[str, dict[str, str]]:
    """Table 1 of the paper by network."""
    with (folder / "paper_table1.csv").open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {row["network"]: row for row in rows}
