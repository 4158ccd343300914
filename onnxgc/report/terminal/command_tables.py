"""Tables and lines of `optimize`, `inspect`, `verify` and `train`."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Column, Table

from onnxgc.report.data.inspect_report import CardFigures, OperatorFigures, WeightFigures
from onnxgc.report.data.optimize_report import OptimizeReport
from onnxgc.report.data.verify_report import CheckFigures, VerifyReport
from onnxgc.report.text.plan_difference_lines import tensor_list
from onnxgc.report.text.units import bound_text, in_module, megabytes, shape_text


def titled_table(title: str, *columns: Column) -> Table:
    return Table(*columns, title=title, title_justify="left")


def figure_columns(*headings: str) -> list[Column]:
    return [Column(heading, justify="right") for heading in headings]


def _folded_columns(*headings: str) -> list[Column]:
    return [Column(heading, overflow="fold") for heading in headings]


def step_table(report: OptimizeReport) -> Table:
    columns = figure_columns("baseline", "planned", "")
    return titled_table(f"{report['model']}: one training step", Column(""), *columns)


def before_and_after(report: OptimizeReport) -> Table:
    regular, planned = report["regular"], report["planned"]
    table = step_table(report)

    def peak_row(label: str, before: int, after: int) -> None:
        table.add_row(label, megabytes(before), megabytes(after), f"{after / before:.0%}" if before else "")

    peak_row("simulated peak", regular["simulated_peak_bytes"], planned["simulated_peak_bytes"])
    if "optimizer" in report:
        state = megabytes(report["optimizer"]["state_bytes"])
        table.add_row("  optimizer state", state, state)
    before, after = (side["simulated_activation_peak_bytes"] for side in (regular, planned))
    peak_row("  without parameter gradients", before, after)
    table.add_section()
    add_device_memory(table, report)
    table.add_section()
    table.add_row("activations (all tensors)", megabytes(regular["activation_bytes"]), "", "")
    table.add_row("checkpoints", "", megabytes(planned["checkpoint_bytes"]), f"{len(report['checkpoints'])}")
    table.add_row("heaviest segment", "", megabytes(planned["heaviest_segment_bytes"]), "")
    table.add_row("recomputed", "", f"{planned['extra_flops_ratio']:.1%}", "of the step's flops")
    return table


def add_device_memory(table: Table, report: OptimizeReport) -> None:
    """Rows for all memory on a device: in total, and what is there beside the step."""
    memory = report["device_memory"]
    before, after = memory["regular"], memory["planned"]
    share = after["total_bytes"] / before["total_bytes"] if before["total_bytes"] else 0
    if memory["device_bytes"] is not None:
        table.add_row("memory of the device", "", megabytes(memory["device_bytes"]), "")
    table.add_row("all memory", megabytes(before["total_bytes"]), megabytes(after["total_bytes"]), f"{share:.0%}")
    for label, size_bytes in (
        ("weights", memory["weight_bytes"]),
        ("optimizer state", memory["optimizer_state_bytes"]),
        ("inputs", memory["input_bytes"]),
        ("runtime", memory["runtime_bytes"]),
    ):
        if size_bytes:
            table.add_row(f"  {label}", megabytes(size_bytes), megabytes(size_bytes), "")
    margins = (megabytes(side["margin_bytes"]) for side in (before, after))
    table.add_row("  margin for the allocator", *margins, "")


def verdict(report: OptimizeReport) -> str:
    """One line: solver, quality of the plan, objective, and the time of the search."""
    if report["status"] == "optimal":
        quality = "optimal"
    else:
        bound = bound_text(report["lower_bound_bytes"], report["bound_operator"], report["modules"])
        quality = f"feasible; lower bound {bound}"
    return (
        f"{report['solver']}: {quality} for the objective '{report['objective']}' "
        f"({report['vertices']} tensors, {report['operators']} operators); {report['seconds']['total']:.1f} s"
    )


def peak_lines(report: OptimizeReport) -> list[str]:
    planned, modules = report["planned"], report["modules"]
    names = (name + in_module(name, modules) for name in report["checkpoints"])
    return [
        f"peak at '{planned['peak_step']}'{in_module(planned['peak_step'], modules)}; largest live tensors: "
        + tensor_list(planned["largest_at_peak"], modules),
        f"checkpoints: {', '.join(names)}",
    ]


def stages_line(report: OptimizeReport) -> str:
    return ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report["seconds"].items())


_MAX_WEIGHTS = 1000


def weights_table(weights: Sequence[WeightFigures]) -> Table:
    table = titled_table("weights", *_folded_columns("name", "shape", "role", "reason"))
    for weight in weights[:_MAX_WEIGHTS]:
        shape = shape_text(weight["shape"])
        reason = weight["reason"] + (f" ({weight['doubt']})" if weight["doubt"] else "")
        table.add_row(weight["name"], shape, weight["role"], reason)
    if len(weights) > _MAX_WEIGHTS:
        table.add_row(f"... {len(weights) - _MAX_WEIGHTS:,} more; --json lists all")
    return table


_GRADIENTS = {"rule": "supported", "none needed": "not needed"}


def operators_table(operators: Sequence[OperatorFigures]) -> Table:
    nodes, gflop = figure_columns("nodes", "GFLOP")
    table = titled_table("operators", Column("operator"), nodes, Column("gradient"), gflop)
    for use in operators:
        gradient = _GRADIENTS.get(use["gradient"], use["gradient"])
        table.add_row(use["operator"], str(use["count"]), gradient, f"{use['flops'] / 1e9:.3f}")
    return table


def card_table(costs: Sequence[CardFigures]) -> Table:
    columns = figure_columns("nodes", "kernels", "GB", "of slow reductions", "GFLOP", "ms")
    table = titled_table("expected on a card", Column("operator"), *columns)
    for cost in costs:
        row = (cost["moved_bytes"] / 1e9, cost["slow_bytes"] / 1e9, cost["flops"] / 1e9, cost["seconds"] * 1e3)
        figures = (f"{figure:.2f}" for figure in row)
        table.add_row(cost["operator"], f"{cost['nodes']:,}", f"{cost['kernels']:,}", *figures)
    return table


def checks_table(checks: Sequence[CheckFigures]) -> Table:
    table = titled_table("verify", *_folded_columns("check", "", "observed"))
    for check in checks:
        table.add_row(check["name"], "passed" if check["holds"] else "FAILED", check["detail"])
    return table


def measured_line(report: VerifyReport) -> str:
    regular, planned = report["regular"], report["planned"]
    before, after = regular["measured_in_use_bytes"], planned["measured_in_use_bytes"]
    return (
        f"measured peak in use: baseline {megabytes(before)}, planned {megabytes(after)} ({after / max(before, 1):.0%})"
    )


def run_line(described: Mapping[str, Any]) -> str:
    return (
        f"{described['parameters']:,} parameters in {described['tensors']} tensors, "
        f"{described['optimizer']}, batches of {described['batch']}"
        + (f", {described['accumulate']} to an update" if described["accumulate"] > 1 else "")
        + f"; simulated peak {megabytes(described['simulated_peak_bytes'])}, including "
        f"{megabytes(described['state_bytes'])} of optimizer state"
    )


def epochs_table(history: Sequence[Mapping[str, Any]]) -> Table:
    names = [name for name in ("validation_loss", "validation_accuracy") if any(name in e for e in history)]
    measured = (name.replace("_", " ") for name in names)
    table = titled_table("epochs", *figure_columns("epoch", "updates", "loss", *measured, "samples/s"))
    for entry in history:
        speed = entry["samples"] / max(entry["seconds"], 1e-9)
        table.add_row(
            str(entry["epoch"]),
            f"{entry['updates']:,}",
            f"{entry['loss']:.4f}",
            *(_metric(name, entry.get(name)) for name in names),
            f"{speed:,.0f}",
        )
    return table


def _metric(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4f}"
