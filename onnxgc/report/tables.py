"""Tables and lines that the command line shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

MEGABYTE = 10**6


def megabytes(size_bytes: float) -> str:
    """Bytes as MB (10^6), with as many digits as say something."""
    size = size_bytes / MEGABYTE
    return f"{size:,.0f} MB" if size >= 100 else f"{size:.1f} MB" if size >= 1 else f"{size:.3f} MB"


def before_and_after(report: Mapping[str, Any]) -> Table:
    """The result of `optimize`: storing everything against the plan."""
    regular, planned = report["regular"], report["planned"]
    table = Table(title=f"{report['model']}: one training step", title_justify="left")
    table.add_column("")
    table.add_column("stores everything", justify="right")
    table.add_column("planned", justify="right")
    table.add_column("", justify="right")
    for label, key in (
        ("simulated peak", "simulated_peak_bytes"),
        ("  without parameters' gradients", "simulated_activation_peak_bytes"),
    ):
        share = f"{planned[key] / regular[key]:.0%}" if regular[key] else ""
        table.add_row(label, megabytes(regular[key]), megabytes(planned[key]), share)
        if key == "simulated_peak_bytes" and "optimizer" in report:
            state = megabytes(report["optimizer"]["state_bytes"])
            table.add_row("  optimizer's state", state, state)
    table.add_section()
    table.add_row("activations (all tensors)", megabytes(regular["activation_bytes"]), "", "")
    table.add_row("checkpoints", "", megabytes(planned["checkpoint_bytes"]), f"{len(report['checkpoints'])}")
    table.add_row("heaviest segment", "", megabytes(planned["heaviest_segment_bytes"]), "")
    table.add_row("computed again", "", f"{planned['extra_flops_ratio']:.1%}", "of the step's flops")
    return table


def verdict(report: Mapping[str, Any]) -> str:
    """One line: how good the plan is, by which objective, found by whom, how fast."""
    if report["status"] == "optimal":
        quality = "optimal"
    else:
        quality = f"feasible; no plan is below {megabytes(report['lower_bound_bytes'])}"
        if report["bound_operator"]:
            quality += f", which '{report['bound_operator']}' alone takes"
    return (
        f"{report['solver']}: {quality} for the objective '{report['objective']}' "
        f"({report['vertices']} tensors, {report['operators']} operators); {report['seconds']['total']:.1f} s"
    )


def stages_line(report: Mapping[str, Any]) -> str:
    """Where the time went."""
    return ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report["seconds"].items())


def weights_table(weights: Sequence[Mapping[str, Any]]) -> Table:
    """Every weight, what it was taken for, and why."""
    table = Table(title="weights", title_justify="left")
    for heading in ("name", "shape", "role", "reason"):
        table.add_column(heading, overflow="fold")
    for weight in weights:
        shape = "x".join(map(str, weight["shape"])) or "scalar"
        reason = weight["reason"] + (f" ({weight['doubt']})" if weight["doubt"] else "")
        table.add_row(weight["name"], shape, weight["role"], reason)
    return table


def operators_table(operators: Sequence[Mapping[str, Any]]) -> Table:
    """Operators of the forward graph and whether each has a gradient rule."""
    table = Table(title="operators", title_justify="left")
    table.add_column("operator")
    table.add_column("nodes", justify="right")
    table.add_column("gradient")
    table.add_column("GFLOP", justify="right")
    for use in operators:
        table.add_row(use["operator"], str(use["count"]), use["gradient"], f"{use['flops'] / 1e9:.3f}")
    return table


def checks_table(checks: Iterable[Mapping[str, Any]]) -> Table:
    """The checks of `verify`."""
    table = Table(title="verify", title_justify="left")
    for heading in ("check", "", "what was seen"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        table.add_row(check["name"], "holds" if check["holds"] else "FAILS", check["detail"])
    return table


def measured_line(verification: Mapping[str, Any]) -> str:
    """What the runtime's allocator saw, both graphs."""
    regular, planned = verification["regular"], verification["planned"]
    before, after = regular["measured_in_use_bytes"], planned["measured_in_use_bytes"]
    return (
        f"measured peak in use: {megabytes(before)} storing everything, "
        f"{megabytes(after)} planned ({after / max(before, 1):.0%})"
    )
