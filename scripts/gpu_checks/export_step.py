"""The step of the GPU check that compares exports of PyTorch with PyTorch's own step."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

from scripts.gpu_checks.check import Check, Finding
from scripts.gpu_checks.profile_reports import arena_report, counts_line, fallback_report, node_events
from scripts.gpu_checks.settings import GRAPHS, Json, device_of

EXPORTS = ("resnet50", "gpt2", "bert")
# Needs no package except torch.
SMOKE_EXPORTS = ("unet",)


def export_step(check: Check) -> Finding:
    """Both graphs of each export on the card, and PyTorch's step there."""
    rows: dict[str, Json] = {}
    details: Json = {"models": rows}
    check.begin(5, "exports", details)
    for name in SMOKE_EXPORTS if check.options.smoke else EXPORTS:
        rows[name] = check.guarded_row(functools.partial(_row, check, name))
        print(f"    {name}: {_line(rows[name])}", flush=True)
        check.write()
    failed = [f"{name}: {row['error']}" for name, row in rows.items() if row["status"] == "error"]
    reached = [name for name, row in rows.items() if row["status"] != "not reached"]
    return Finding(not failed and bool(reached), "; ".join([f"{len(reached)} models", *failed]), details)


def _row(check: Check, name: str) -> Json:
    folder, options = check.folder / f"export-{name}", check.options
    request = {"name": name, "small": options.smoke, "device": device_of(options.provider)}
    row = check.worker("export", request, folder, check.network_seconds())
    for graph in GRAPHS:
        run = {
            "model": str(folder / f"{graph}.onnx"),
            "feeds": str(folder / "feeds.npz"),
            "names": row["names"],
            "provider": options.provider,
            "threads": options.threads,
        }
        answer = check.worker("run", run, folder / graph)
        events = node_events(Path(answer.pop("profile")))[-1]
        arena = arena_report(events).get(options.provider, {})
        row[graph] = {
            "step_seconds": answer["step_seconds"],
            "measured_peak_bytes": arena.get("requested_peak_bytes"),
            "fallback": fallback_report(events, options.provider),
        }
    row["pytorch"] = check.worker("eager", request, folder / "eager")
    shutil.rmtree(folder, ignore_errors=True)
    return {**row, "status": "held"}


def _line(row: Json) -> str:
    if "error" in row or row["status"] == "not reached":
        return f"{row['status']} {row.get('error', '')}".rstrip()
    parts = []
    for graph in GRAPHS:
        simulated, measured = row["simulated_peak_bytes"][graph], row[graph]["measured_peak_bytes"] or 0
        parts.append(
            f"{graph} {min(row[graph]['step_seconds']) * 1e3:.1f} ms, simulated {simulated / 1e6:.1f} MB, "
            f"measured {measured / 1e6:.1f} MB, compute elsewhere "
            f"{counts_line(row[graph]['fallback']['compute_elsewhere'])}"
        )
    for kind in ("eager", "checkpointed"):
        found = row["pytorch"][kind]
        peak = found.get("allocated_peak_bytes", 0) - found["kept_bytes"]
        parts.append(f"torch {kind} {min(found['step_seconds']) * 1e3:.1f} ms, {peak / 1e6:.1f} MB")
    return "; ".join(parts)
