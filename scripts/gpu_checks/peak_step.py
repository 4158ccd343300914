"""The step of the GPU check that compares measured and simulated peaks."""

from __future__ import annotations

import functools
import time

import numpy as np

from onnxgc.model.core.ir import Array
from scripts.gpu_checks.check import Check, Finding
from scripts.gpu_checks.graph_runs import Measured, graph_figures
from scripts.gpu_checks.settings import GRAPHS, MAKE_SESSION, OTHER_SETTINGS, Json, Setting
from scripts.gpu_checks.worker_process import load_arrays


def peak_step(check: Check) -> Finding:
    """Each network in turn, while time is left; each row is recorded at once."""
    rows: dict[str, Json] = {}
    other: dict[str, Json] = {}
    details: Json = {"networks": rows, "other_settings": other}
    check.begin(4, "peak", details)
    for name in check.options.networks:
        rows[name] = check.guarded_row(functools.partial(_network_row, check, name))
        _print_row(name, rows[name])
        check.write()
    first = check.options.networks[0]
    for setting in OTHER_SETTINGS:
        if check.options.smoke and setting.cuda_options:
            continue
        other[setting.name] = check.guarded_row(functools.partial(_network_row, check, first, setting))
        _print_row(f"{first} ({setting.name})", other[setting.name])
        check.write()
    reached = [row for row in rows.values() if row["status"] != "not reached"]
    holds = bool(reached) and all(row["status"] == "held" for row in reached)
    failed = [f"{name}: {row['error']}" for name, row in rows.items() if row["status"] == "error"]
    below = [name for name, row in rows.items() if row["status"] == "held"]
    line = f"{len(reached)} of {len(rows)} networks reached, planned below baseline in {len(below)}"
    return Finding(holds, "; ".join([line, *failed]), details)


def _network_row(check: Check, name: str, setting: Setting = MAKE_SESSION) -> Json:
    network = check.options.network(name)
    end = time.perf_counter() + check.network_seconds()
    prepared = check.prepared(network)
    row: Json = {"shape": list(network.shape), "setting": setting.name}
    measured: dict[str, Measured] = {}
    for graph in GRAPHS:
        measured[graph] = check.measured(network, graph, setting, end - time.perf_counter())
        row[graph] = graph_figures(prepared, measured[graph], graph, check.options.provider)
    regular, planned = row["regular"], row["planned"]
    row["simulated_ratio"] = planned["simulated_peak_bytes"] / regular["simulated_peak_bytes"]
    row["measured_ratio"] = planned["measured_peak_bytes"] / max(regular["measured_peak_bytes"], 1)
    row["time_ratio"] = min(planned["step_seconds"]) / min(regular["step_seconds"])
    row["distance"] = _distance(measured["regular"], measured["planned"], prepared.loss)
    is_smaller = row["measured_ratio"] < 1 and row["simulated_ratio"] < 1
    row["status"] = "held" if is_smaller and row["distance"]["loss_is_finite"] else "not held"
    if network != check.first_network():
        check.forget(network)
    return row


def _distance(regular: Measured, planned: Measured, loss: str) -> Json:
    """Relative distances of all outputs by norm; kernels of a GPU need not be deterministic."""
    expected = load_arrays(regular.outputs, regular.names)
    actual = load_arrays(planned.outputs, planned.names)
    distances = {name: _relative(expected[name], actual[name]) for name in expected}
    gradients = {name: far for name, far in distances.items() if name != loss and np.isfinite(far)}
    worst = max(gradients, key=lambda name: gradients[name], default=None)
    is_finite_loss = bool(np.isfinite(distances[loss]))
    return {
        "loss": distances[loss] if is_finite_loss else None,
        "loss_value": float(expected[loss]) if is_finite_loss else None,
        "loss_is_finite": is_finite_loss,
        "largest": None if worst is None else gradients[worst],
        "largest_of": worst,
        "median": float(np.median(list(gradients.values()))) if gradients else None,
        "not_finite": sum(not np.isfinite(far) for far in distances.values()),
        "bit_equal": sum(np.array_equal(expected[name], actual[name]) for name in expected),
        "outputs": len(expected),
    }


def _relative(expected: Array, actual: Array) -> float:
    one, two = expected.astype(np.float64), actual.astype(np.float64)
    return float(np.linalg.norm(one - two)) / (float(np.linalg.norm(one)) or 1.0)


def _print_row(name: str, row: Json) -> None:
    if "error" in row or row["status"] == "not reached":
        print(f"    {name}: {row['status']} {row.get('error', '')}".rstrip(), flush=True)
        return
    for graph in GRAPHS:
        figures = row[graph]
        print(
            f"    {name} {graph}: simulated {figures['simulated_peak_bytes'] / 1e6:.1f} MB, measured "
            f"{figures['measured_peak_bytes'] / 1e6:.1f} MB ({figures['measured_by']}), "
            f"step {min(figures['step_seconds']) * 1e3:.1f} ms, in order: {figures['equals_schedule']}",
            flush=True,
        )
    distance = row["distance"]
    loss, largest = (
        "none" if distance[key] is None else f"{distance[key]:.1e}" for key in ("loss", "largest")
    )
    print(
        f"    {name}: relative distance of the loss {loss}, of gradients at most {largest}; "
        f"{distance['bit_equal']} of {distance['outputs']} outputs bit-identical",
        flush=True,
    )
