"""Comparison of gradients with exact ones: options, distances, failures and tables, of modules and of files."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxgc.api import OptimizeResult, verify
from onnxgc.model.core.ir import Array
from onnxgc.runtime.ort import SessionSettings, make_session
from scripts.benchmarking.command_options import CORES
from scripts.benchmarking.tables import markdown_table

MAX_DISTANCE_RATIO = 2.0
"""Largest distance of a gradient to float64, as a multiple of torch float32's."""
MAX_CUDA_RATIO = 1.5
"""Largest median distance of gradients in the forms for CUDA, as a multiple of the forms for CPUs."""
FLOOR = 1e-6
"""Smaller distances are float32's rounding in any implementation."""
VANISHING_SHARE = 1e-6
"""A gradient below this share of the largest is vanishing: distances are relative to the share."""
VANISHING_FLOOR = 1e-2
"""As `FLOOR`, for vanishing gradients, which consist of rounding."""
_HEADINGS = ("parameters", "distance: median", "largest", "planned / baseline", "passes")


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """Models or files by name."""

    only: tuple[str, ...] = ()
    threads: int = CORES
    verify: bool = True


def outputs_of(training: Path, feeds: Mapping[str, Array], threads: int) -> dict[str, Array]:
    """The outputs of one step of a training file; feeds without an input are ignored."""
    session = make_session(training, settings=SessionSettings(threads=threads))
    fed = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    values = session.run(names, {name: value for name, value in feeds.items() if name in fed})
    return dict(zip(names, values, strict=True))


def distances(
    ours: Mapping[str, Array], exact: Mapping[str, Array], singles: Sequence[Mapping[str, Array]]
) -> dict[str, Any]:
    """Relative distances of gradients to exact ones by norm, and their ratios to the largest of `singles`.

    A parameter that `ours` lacks is missing unless its exact gradient is zero.
    """
    norms = {name: float(np.linalg.norm(value)) for name, value in exact.items()}
    least = VANISHING_SHARE * max(norms.values())
    ratios, mine = {}, {}
    for name, value in ours.items():
        scale = max(norms[name], least)
        mine[name] = _apart(value, exact[name]) / scale
        own = max(_apart(single[name], exact[name]) for single in singles) / scale
        floor = FLOOR if norms[name] >= least else VANISHING_FLOOR
        ratios[name] = mine[name] / max(own, floor)
    # NaN is the worst of all.
    worst = max(ratios, key=lambda name: ratios[name] if np.isfinite(ratios[name]) else np.inf)
    return {
        "parameters": len(ratios),
        "parameters_of": len(exact),
        "missing": [name for name in exact if name not in ours and norms[name] > 0],
        "distance_median": statistics.median(mine.values()),
        "ratio_median": statistics.median(ratios.values()),
        "ratio_max": ratios[worst],
        "ratio_max_parameter": worst,
        "vanishing": [name for name in ours if norms[name] < least],
    }


def peak_figures(result: OptimizeResult) -> dict[str, Any]:
    """Simulated peaks of a plan and of the baseline."""
    regular, planned = (result.report[kind]["simulated_peak_bytes"] for kind in ("regular", "planned"))
    return {"regular_peak_bytes": regular, "planned_peak_bytes": planned, "planned_of_regular": planned / regular}


def failed_checks(source: Path, training: Path, threads: int) -> dict[str, str]:
    """Checks of `onnxgc verify` that fail, with their details."""
    checks = verify(source, training, threads=threads).checks
    return {check.name: check.detail for check in checks if not check.holds}


def failures_of(row: Mapping[str, Any]) -> list[str]:
    """Short reasons why a comparison fails; none if it holds."""
    if "error" in row:
        return [row["error"]]
    found = [f"{check}: {detail}" for check, detail in row.get("verify", {}).items()]
    if "ratio_max" not in row:
        return found
    found += [f"no gradient of {name}" for name in row["missing"]]
    found += [f"{name} is not a parameter" for name in row["no_parameters_of_the_module"]]
    if is_too_far(row) or not row.get("of_cpu_forms", 0.0) <= MAX_CUDA_RATIO:
        found.append("too far from float64")
    return found


def is_too_far(row: Mapping[str, Any]) -> bool:
    return not (row["ratio_median"] <= MAX_DISTANCE_RATIO and row["ratio_max"] <= MAX_DISTANCE_RATIO)


def cells(row: Mapping[str, Any]) -> list[str]:
    """Cells of a table: parameters, median and largest ratio, peak ratio, and `yes` or the failures."""
    verdict = "yes" if row["holds"] else ", ".join(failures_of(row)) or "NO"
    if "error" in row:
        return ["", "", "", "", verdict]
    ratios = [f"{row[key]:.2f}" if key in row else "" for key in ("ratio_median", "ratio_max")]
    if "difference_max" in row:
        ratios[1] = f"differences {row['difference_max']:.1e}"
    return [f"{row['parameters']} of {row['parameters_of']}", *ratios, f"{row['planned_of_regular']:.2f}", verdict]


def comparison_table(first: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A row for each file or model; exports of a model with equal figures share one."""
    exports: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        subject, _, export = label_of(row).partition(", ")
        exports.setdefault((subject, *cells(row)), []).append(export)
    labels = [", ".join(filter(None, (subject, " and ".join(equal)))) for (subject, *_), equal in exports.items()]
    return markdown_table(
        (first, *_HEADINGS), [[label, *figures] for label, (_, *figures) in zip(labels, exports, strict=True)]
    )


def failed_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{label_of(row)} fails" for row in rows if not row["holds"]]


def label_of(row: Mapping[str, Any]) -> str:
    """A file, or a model and its export."""
    return ", ".join(row[key] for key in ("file", "model", "export") if key in row)


def _apart(value: Array, exact: Array) -> float:
    return float(np.linalg.norm(value.astype(np.float64) - exact))
