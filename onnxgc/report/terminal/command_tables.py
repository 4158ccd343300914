"""Tables and lines of `optimize`, `inspect` and `verify`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from onnxgc.report.data.inspect_report import OperatorFigures, WeightFigures
from onnxgc.report.data.optimize_report import OptimizeReport
from onnxgc.report.data.verify_report import CheckFigures, VerifyReport
from onnxgc.report.text.units import megabytes, shape_text


def before_and_after(report: OptimizeReport) -> Table:
    """The baseline and the plan."""
    regular, planned = report["regular"], report["planned"]
    table = Table(title=f"{report['model']}: one training step", title_justify="left")
    table.add_column("")
    table.add_column("baseline", justify="right")
    table.add_column("planned", justify="right")
    table.add_column("", justify="right")

    def peak_row(label: str, before: int, after: int) -> None:
        table.add_row(label, megabytes(before), megabytes(after), f"{after / before:.0%}" if before else "")

    peak_row("simulated peak", regular["simulated_peak_bytes"], planned["simulated_peak_bytes"])
    if "optimizer" in report:
        state = megabytes(report["optimizer"]["state_bytes"])
        table.add_row("  optimizer state", state, state)
    before, after = (side["simulated_activation_peak_bytes"] for side in (regular, planned))
    peak_row("  without parameter gradients", before, after)
    table.add_section()
    table.add_row("activations (all tensors)", megabytes(regular["activation_bytes"]), "", "")
    table.add_row("checkpoints", "", megabytes(planned["checkpoint_bytes"]), f"{len(report['checkpoints'])}")
    table.add_row("heaviest segment", "", megabytes(planned["heaviest_segment_bytes"]), "")
    table.add_row("recomputed", "", f"{planned['extra_flops_ratio']:.1%}", "of the step's flops")
    return table


def verdict(report: OptimizeReport) -> str:
    """One line: solver, quality of the plan, objective, and the time of the search."""
    if report["status"] == "optimal":
        quality = "optimal"
    else:
        quality = f"feasible; lower bound {megabytes(report['lower_bound_bytes'])}"
        if report["bound_operator"]:
            quality += f" (the working set of '{report['bound_operator']}')"
    return (
        f"{report['solver']}: {quality} for the objective '{report['objective']}' "
        f"({report['vertices']} tensors, {report['operators']} operators); {report['seconds']['total']:.1f} s"
    )


def stages_line(report: OptimizeReport) -> str:
    """The time of each stage."""
    return ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report["seconds"].items())


def weights_table(weights: Sequence[WeightFigures]) -> Table:
    """Every weight with its role and the reason."""
    table = Table(title="weights", title_justify="left")
    for heading in ("name", "shape", "role", "reason"):
        table.add_column(heading, overflow="fold")
    for weight in weights:
        shape = shape_text(weight["shape"])
        reason = weight["reason"] + (f" ({weight['doubt']})" if weight["doubt"] else "")
        table.add_row(weight["name"], shape, weight["role"], reason)
    return table


_GRADIENTS = {"rule": "supported", "none needed": "not needed"}


def operators_table(operators: Sequence[OperatorFigures]) -> Table:
    """Operators of the forward graph with their gradient support."""
    table = Table(title="operators", title_justify="left")
    table.add_column("operator")
    table.add_column("nodes", justify="right")
    table.add_column("gradient")
    table.add_column("GFLOP", justify="right")
    for use in operators:
        gradient = _GRADIENTS.get(use["gradient"], use["gradient"])
        table.add_row(use["operator"], str(use["count"]), gradient, f"{use['flops'] / 1e9:.3f}")
    return table


def checks_table(checks: Sequence[CheckFigures]) -> Table:
    """The checks of `verify`."""
    table = Table(title="verify", title_justify="left")
    for heading in ("check", "", "observed"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        table.add_row(check["name"], "passed" if check["holds"] else "FAILED", check["detail"])
    return table


def measured_line(report: VerifyReport) -> str:
    """The memory of both graphs, as the runtime's allocator reports it."""
    regular, planned = report["regular"], report["planned"]
    before, after = regular["measured_in_use_bytes"], planned["measured_in_use_bytes"]
    return (
        f"measured peak in use: baseline {megabytes(before)}, planned {megabytes(after)} "
        f"({after / max(before, 1):.0%})"
    )
