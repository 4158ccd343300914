"""`onnxgc compare`: plans for one model, two plans, or one network in files of several frameworks."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from onnxgc.api.comparison import compare
from onnxgc.api.html_pages import page_of_comparison
from onnxgc.api.plan_candidates import RULES
from onnxgc.api.plan_table import Comparison
from onnxgc.cli.arguments import (
    BUDGET_HELP,
    DEVICE,
    FILES,
    JSON,
    MARKDOWN,
    ORDER,
    PLAN,
    QUIET,
    REPORT,
    SEED,
    Options,
    Reading,
    Writer,
    check_json_target,
    check_needs_budget,
    check_target,
    check_verbosity,
    console_for,
    names_in,
    progress_line,
    time_limit_option,
    with_flat_options,
    write_json,
    writer_to,
)
from onnxgc.emission.atomic_files import write_text
from onnxgc.emission.plan_files import write_plan
from onnxgc.errors import BudgetError, ModelFileError, OutputFileError, PlanError
from onnxgc.graph.graph_sources import is_bare_graph
from onnxgc.model.files.load import check_model_file, model_files
from onnxgc.planning.order_choice import Order
from onnxgc.report.data.compare_report import EachReport, GraphReport, NetworksReport, PlansReport
from onnxgc.report.text.graph_rows import graph_table
from onnxgc.report.text.network_pair_lines import checkpoints_table, file_label, file_lines, files_table, pair_lines
from onnxgc.report.text.networks_overview import overview_lines, overview_table
from onnxgc.report.text.plan_difference_lines import difference_lines, difference_table
from onnxgc.report.text.plan_rows import detail_lines, left_out_lines, plans_lines, plans_table
from onnxgc.solvers.registry import SOLVERS

MAX_WORKERS = 2
ALL = "all"
_ROWS = (*(name for name in SOLVERS if name != "manual"), *RULES)


class _Rows(Options, panel=PLAN):
    """The plans to compare."""

    each: bool = Option(False, help="Several models are different networks; compare plans of each.")
    solvers: str | None = Option(
        None, help=f"Rows, as a,b,c: {', '.join(_ROWS)}, or all (the default). With several models it implies --each."
    )
    plans: list[str] | None = Option(
        None,
        "--plan",
        help="A plan file or training file as a row; two are compared. With several files of one network, "
        "the plan of the first. Repeatable.",
    )
    budget: str | None = Option(None, help=f"{BUDGET_HELP} Adds a row.")
    order: Order | None = ORDER
    device: str | None = DEVICE
    time_limit: float | None = time_limit_option("per solver, 60 for peak, 30 for a budget")
    seed: int = SEED

    def names(self) -> tuple[str, ...] | None:
        """The requested rows; None for all.

        Raises:
            PlanError: none are given.
        """
        names = names_in(self.solvers or ALL)
        if not names:
            raise PlanError("--solvers is empty; give names as a,b,c, or all")
        return None if ALL in names else names


class _Output(Options, panel=REPORT):
    """The files that are written, and the report."""

    carry_over: str | None = Option(
        None,
        metavar="FOLDER",
        rich_help_panel=FILES,
        help="Transfer the first file's plan to each of the others and write the plans to this folder.",
    )
    markdown: bool = MARKDOWN
    json_target: str | None = JSON
    page_target: str | None = Option(None, "--report", help="Write an HTML page with tables and memory curves.")
    verbose: bool = Option(False, "--verbose", "-v", help="Also describe each row, and state why others are missing.")
    quiet: bool = QUIET

    def check(self, models: Sequence[str], plans: Sequence[str]) -> list[str]:
        """Check all files before any work; returns the files for transferred plans."""
        read = [*(file for model in models for file in model_files(model)), *plans]
        check_json_target(self.json_target, *read)
        check_target("--report", self.page_target, *read, self.json_target)
        targets = [] if self.carry_over is None else _plan_files(self.carry_over, models[1:])
        for target in targets:
            check_target("--carry-over", target, *read, self.json_target, self.page_target)
        return targets


@with_flat_options
def compare_command(
    models: Annotated[
        list[str],
        Argument(metavar="MODEL...", help="Forward ONNX models, several of one network; or a bare graph (JSON)."),
    ],
    rows: _Rows,
    reading: Reading,
    output: _Output,
) -> None:
    """Compare plans for a model, or one network across frameworks."""
    check_verbosity(output.quiet, output.verbose)
    read, solvers = reading.arguments(), rows.names()
    is_each = rows.each or (rows.solvers is not None and len(models) > 1)
    for model in models:
        if not is_bare_graph(model):
            check_model_file(model)
        elif output.page_target is not None or len(models) > 1:
            raise PlanError(f"'{model}' is a bare graph, which is compared alone and has no --report; drop the others")
    check_needs_budget(rows.budget is not None, {"--order": rows.order}, "--budget, such as --budget 60%")
    if output.carry_over is not None and (is_each or len(models) == 1):
        raise PlanError("--carry-over transfers a plan from one file to others; give several files of one network")
    plans = tuple(rows.plans or ())
    targets = output.check(models, plans)
    with progress_line() as notify:
        comparison = compare(
            *models,
            **read,
            **rows.values("each", "solvers", "plans", "order"),
            each=is_each,
            solvers=solvers,
            plans=plans,
            order=(rows.order or Order.FREE).value,
            workers=min(MAX_WORKERS, os.cpu_count() or 1),
            progress=notify,
        )
    _show(comparison, models, targets, output)
    write_json(comparison.report, output.json_target)
    _raise_failures(comparison.report, len(models))


def _show(comparison: Comparison, models: Sequence[str], targets: Sequence[str], output: _Output) -> None:
    write = writer_to(console_for(output.json_target, is_quiet=output.quiet), markdown=output.markdown)
    show: Mapping[str, Callable[[Any, Writer, bool], None]] = {
        "plans": _show_plans,
        "each": _show_each,
        "networks": _show_networks,
        "graph": _show_graph,
    }
    show[comparison.report["kind"]](comparison.report, write, output.verbose)
    for target, model in zip(targets, models[1:], strict=False):
        write_plan(comparison.plans[model], target, solver=f"carried over from {models[0]}", model=model)
        write(f"wrote {target}")
        for line in _needed_shapes(comparison.report, model):
            write(line)
    if output.page_target is not None:
        write_text(page_of_comparison(comparison), output.page_target)
        write(f"wrote {output.page_target}")


def _raise_failures(report: Mapping[str, Any], count: int) -> None:
    """Raise if a model was not compared, or if a budget fits no model."""
    failed = [one for one in report.get("comparisons", ()) if "error" in one]
    if failed:
        raise ModelFileError(
            f"{len(failed)} of {count} models were not compared, the first because {failed[0]['error']}"
        )
    if report["kind"] == "graph":
        return
    reasons = [_why_no_fit(one) for one in report.get("comparisons", [report])]
    if reasons and all(reasons):
        summary = f"no plan fits for any of {len(reasons)} networks, the first because "
        raise BudgetError(f"{summary if len(reasons) > 1 else ''}{reasons[0]}")


def _why_no_fit(report: Mapping[str, Any]) -> str:
    """Why no plan for a model is within the budget; "" if one is, or without a budget."""
    budget_bytes = report.get("budget_bytes")
    if budget_bytes is None or any(row["simulated_peak_bytes"] <= budget_bytes for row in report["rows"]):
        return ""
    return next((item["reason"] for item in report["left_out"] if item["name"] == "budget"), "")


def _plan_files(folder: str, models: Sequence[str]) -> list[str]:
    """A plan file for each model, in a folder that is created if necessary."""
    names = [f"{Path(model).stem}-plan.json" for model in models]
    if len(set(names)) < len(names):
        raise PlanError("--carry-over names plans after their models, and two models have the same name; rename one")
    try:
        Path(folder).mkdir(exist_ok=True)
    except OSError as error:
        raise OutputFileError(
            f"--carry-over: '{folder}' is not a folder and cannot be created: {error.strerror}"
        ) from error
    return [os.path.join(folder, name) for name in names]


def _needed_shapes(report: Mapping[str, Any], model: str) -> list[str]:
    """Options that `optimize` needs with a plan for a file that was read with another batch size."""
    (file,) = (file for file in report["files"][1:] if file["model"] == model)
    if not file["is_rebatched"]:
        return []
    shapes = [f"--input-shapes {name}:{','.join(map(str, size))}" for name, size in file["inputs"].items()]
    return [f"use it with optimize {' '.join(shapes)}"]


def _show_plans(report: PlansReport, write: Writer, verbose: bool) -> None:
    write(plans_table(report))
    for line in plans_lines(report):
        write(line)
    if verbose:
        for line in detail_lines(report):
            write(line)
    for line in left_out_lines(report, every=verbose):
        write(line)
    if report["difference"]:
        write(difference_table(report["difference"], **({"most": None} if verbose else {})))
        for line in difference_lines(report["difference"]):
            write(line)
    for note in report["notes"]:
        write(f"note: {note}")


def _show_graph(report: GraphReport, write: Writer, verbose: bool) -> None:
    write(graph_table(report))
    for item in report["left_out"] if verbose or len(report["rows"]) < 2 else ():
        write(f"{item['name']}: {item['reason']}")


def _show_each(report: EachReport, write: Writer, verbose: bool) -> None:
    if verbose:
        for one in report["comparisons"]:
            if "error" not in one:
                _show_plans(one, write, verbose)
    write(overview_table(report, all_columns=verbose))
    for line in overview_lines(report, all_columns=verbose):
        write(line)


def _show_networks(report: NetworksReport, write: Writer, verbose: bool) -> None:
    write(files_table(report))
    for index, file in enumerate(report["files"]):
        # Files of one network share most of their other notes, of which there are many.
        for note in file["notes"] if verbose else file["notes"][: file["is_rebatched"]]:
            write(f"{file_label(index)}: {note}")
    for line in file_lines(report):
        write(line)
    for number in range(len(report["pairs"])):
        write(checkpoints_table(report, number))
        for line in pair_lines(report, number):
            write(line)
