"""The light networks of the `onnx` package and of models/: planned and verified."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from onnxgc.api import optimize, verify
from onnxgc.errors import OnnxgcError
from onnxgc.report.text.units import shape_text
from scripts.benchmarking.command_options import add_only, add_threads
from scripts.benchmarking.records import MODELS, Progress, Record, write_record
from scripts.benchmarking.tables import machine_of, markdown_table, megabytes, print_table

LIGHT_FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_threads(parser)
    add_only(parser)
    parser.add_argument("--batch", type=int, default=2, help="images, for the networks of models/")
    parser.add_argument("--pixels", type=int, help="image size, for the networks of models/")


def run_command(arguments: argparse.Namespace) -> int:
    """Exit code 1: a check fails, or a network cannot be planned."""
    rows = run_light(arguments.only, arguments.batch, arguments.pixels, arguments.threads, Progress())
    write_record("light", rows, threads=arguments.threads, folder=arguments.record)
    headings = ("tensors", "regular, MB", "planned, MB", "ratio", "s", "verify")
    print_table("light networks", headings, list(map(_terminal_row, rows)))
    return 0 if all(row.get("verification", {}).get("holds") for row in rows) else 1


def light_networks() -> dict[str, Path]:
    """Files by name; names of this repository's networks begin with models/."""
    packaged = {path.stem: path for path in sorted(LIGHT_FOLDER.glob("*.onnx"))}
    return packaged | {f"models/{path.stem}": path for path in sorted(MODELS.glob("*.onnx"))}


def network_shapes(path: Path, batch: int, pixels: int | None) -> dict[str, tuple[int, ...]]:
    """Shapes of inputs for `batch` images; none for the packaged models, whose batch is 1."""
    if path.parent != MODELS:
        return {}
    (value,) = onnx.load(path).graph.input
    channels, *size = (dim.dim_value for dim in value.type.tensor_type.shape.dim[1:])
    return {value.name: (batch, channels, *((pixels, pixels) if pixels else size))}


def run_light(
    only: Sequence[str], batch: int, pixels: int | None, threads: int, progress: Progress
) -> list[dict[str, Any]]:
    """Plans and verifies each network; one row a network, with an error in place of figures if one occurs."""
    rows = []
    for name, path in light_networks().items():
        if only and name not in only:
            continue
        progress(name)
        shapes = network_shapes(path, batch, pixels)
        try:
            rows.append({"network": name, **_planned_and_verified(path, shapes, threads)})
        except OnnxgcError as error:
            rows.append({"network": name, "error": str(error)})
    return rows


def results_section(record: Record) -> str:
    headings = ["network", "input", "tensors", "baseline", "planned", "ratio", "`verify`"]
    table = markdown_table(headings, list(map(_document_row, record["figures"])))
    return (
        "**Light networks**: simulated peaks in MB, parameters' gradients included, and the result of "
        f"`verify` on the planned file.\n\n{table}\n\n{machine_of(record)}."
    )


def _planned_and_verified(path: Path, shapes: dict[str, tuple[int, ...]], threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        training = Path(folder) / "training.onnx"
        result = optimize(path, training, input_shapes=shapes)
        started = time.perf_counter()
        verification = verify(path, training, threads=threads)
        seconds = time.perf_counter() - started
    report, checks = result.report, verification.as_json()
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
        "verification": {
            "holds": checks["holds"],
            "checks": [check for check in checks["checks"] if not check["holds"]],
        },
    }


def _terminal_row(row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return [row["network"], *[""] * 5, row["error"]]
    regular, planned = row["regular_peak_bytes"], row["planned_peak_bytes"]
    return [
        row["network"], str(row["vertices"]), megabytes(regular, 1), megabytes(planned, 1),
        f"{planned / regular:.2f}", f"{row['seconds']['total']:.1f}", _failed_checks(row) or "holds",
    ]  # fmt: skip


def _document_row(row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return [row["network"], *[""] * 5, "cannot be planned"]
    regular, planned = row["regular_peak_bytes"], row["planned_peak_bytes"]
    shapes = ", ".join(map(shape_text, row["inputs"].values()))
    failed = _failed_checks(row)
    return [
        row["network"], shapes, str(row["vertices"]), megabytes(regular), megabytes(planned),
        f"{planned / regular:.2f}", f"fails: {failed}" if failed else "all checks pass",
    ]  # fmt: skip


def _failed_checks(row: Mapping[str, Any]) -> str:
    return ", ".join(check["name"] for check in row["verification"]["checks"] if not check["holds"])
