"""`onnxgc compare`: solvers on one model, two plans, or one network from several frameworks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from onnxgc.api.budgeting import DEFAULT_DEVICE
from onnxgc.api.comparison import RULES, compare
from onnxgc.api.memory_pages import page_of_comparison
from onnxgc.cli.arguments import (
    FiguresAsJson,
    Freeze,
    FreezeBn,
    InputShapes,
    Loss,
    Markdown,
    OrderAsInOptimize,
    Quiet,
    Say,
    Seed,
    Trainable,
    Untie,
    check_json_target,
    check_talk,
    check_target,
    check_with_budget,
    console_for,
    finite,
    parse_shapes,
    stages,
    write_json,
    writer,
)
from onnxgc.emission.plan_files import write_plan
from onnxgc.emission.write import write_text
from onnxgc.errors import BudgetError, ModelFileError, OutputFileError, PlanError
from onnxgc.model.files.load import check_model_file, files_of
from onnxgc.planning.order import Order
from onnxgc.report.comparison import (
    checkpoints_table,
    detail_lines,
    difference_lines,
    difference_table,
    file_label,
    file_lines,
    files_table,
    left_out_lines,
    overview_lines,
    overview_table,
    pair_lines,
    plans_lines,
    plans_table,
)
from onnxgc.solvers.registry import SOLVERS
from onnxgc.tracing.devices import DEVICES

MOST_WORKERS = 2
ALL = "all"
_ROWS = (*(name for name in SOLVERS if name != "manual"), *RULES)


def compare_command(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Forward ONNX models; several are one network.")
    ],
    each: Annotated[
        bool, typer.Option("--each", help="Several models are different networks: compare plans for each.")
    ] = False,
    solvers: Annotated[
        str | None,
        typer.Option(
            help=f"Rows, as a,b,c: {', '.join(_ROWS)}, or all, which is the default; "
            "with several models it implies --each."
        ),
    ] = None,
    plans: Annotated[
        list[str] | None,
        typer.Option(
            "--plan",
            help="A plan file or training file as a row; repeatable, two are compared. With several files of "
            "one network the plan of the first.",
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="As in optimize: a row for the least extra time in so much memory.")
    ] = None,
    order: OrderAsInOptimize = None,
    device: Annotated[
        str | None,
        typer.Option(help=f"Times of a card, {', '.join(DEVICES)} [default: {DEFAULT_DEVICE}]."),
    ] = None,
    loss: Loss = "auto",
    trainable: Trainable = None,
    freeze: Freeze = None,
    freeze_bn: FreezeBn = False,
    untie: Untie = False,
    input_shapes: InputShapes = None,
    time_limit: Annotated[
        float | None,
        typer.Option(min=0.0, callback=finite, help="Seconds for each solver [default: peak 60, budget 30]."),
    ] = None,
    seed: Seed = 0,
    carry_over: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Write the first file's plan for each of the others there."),
    ] = None,
    markdown: Markdown = False,
    json_target: FiguresAsJson = None,
    page_target: Annotated[
        str | None,
        typer.Option("--report", help="A page, as HTML: tables, and memory curves of a model or network."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="What each row is, and why others are missing.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Solvers side by side on a model, two plans, or one network from several frameworks."""
    check_talk(quiet, verbose)
    shapes = parse_shapes(input_shapes or [])
    named = () if solvers is None else _names(solvers)
    wanted = None if solvers is None or ALL in named else named
    is_each = each or (solvers is not None and len(models) > 1)
    for model in models:
        check_model_file(model)
    check_with_budget(budget is not None, {"--order": order}, "--budget; give one, such as --budget 60%")
    if carry_over is not None and (is_each or len(models) == 1):
        raise PlanError(
            "--carry-over takes a plan from one file to others; give several files of one network"
        )
    read = [file for model in models for file in files_of(model)]
    check_json_target(json_target, *read, *(plans or []))
    check_target("--report", page_target, *read, *(plans or []), json_target)
    written = [] if carry_over is None else _carried_names(carry_over, models[1:])
    for target in written:
        check_target("--carry-over", target, *read, *(plans or []), json_target, page_target)
    with stages() as tell:
        found = compare(
            *models,
            each=is_each,
            solvers=wanted,
            plans=tuple(plans or ()),
            budget=budget,
            order=(order or Order.FREE).value,
            device=device,
            loss=loss,
            input_shapes=shapes,
            trainable=tuple(trainable or ()),
            freeze=tuple(freeze or ()),
            freeze_bn=freeze_bn,
            untie=untie,
            time_limit=time_limit,
            seed=seed,
            workers=min(MOST_WORKERS, os.cpu_count() or 1),
            progress=tell,
        )
    say = writer(console_for(json_target, is_quiet=quiet), markdown=markdown)
    show = {"plans": _show_plans, "each": _show_each, "networks": _show_networks}
    show[found.report["kind"]](found.report, say, verbose)
    for target, model in zip(written, models[1:], strict=False):
        write_plan(found.plans[model], target, solver=f"carried over from {models[0]}", model=model)
        say(f"wrote {target}")
        for line in _needed_shapes(found.report, model):
            say(line)
    if page_target is not None:
        write_text(page_of_comparison(found), page_target)
        say(f"wrote {page_target}")
    write_json(found.report, json_target)
    failed = [one for one in found.report.get("comparisons", ()) if "error" in one]
    if failed:
        raise ModelFileError(
            f"{len(failed)} of {len(models)} models were not compared, the first since {failed[0]['error']}"
        )
    missed = [_why_no_fit(one) for one in found.report.get("comparisons", [found.report])]
    if missed and all(missed):
        more = "" if len(missed) == 1 else f"for none of {len(missed)} networks a plan fits, the first since "
        raise BudgetError(f"{more}{missed[0]}")


def _why_no_fit(report: Mapping[str, Any]) -> str:
    """Why no plan for a model is within the budget; "" where there is one, or no budget."""
    budget_bytes = report.get("budget_bytes")
    if budget_bytes is None or any(row["simulated_peak_bytes"] <= budget_bytes for row in report["rows"]):
        return ""
    return next((item["reason"] for item in report["left_out"] if item["name"] == "budget"), "")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise PlanError("--solvers is empty; give names as a,b,c, or all")
    return names


def _carried_names(folder: str, models: list[str]) -> list[str]:
    """A plan file for each model; the folder is made where it is not there."""
    names = [f"{Path(model).stem}-plan.json" for model in models]
    if len(set(names)) < len(names):
        raise PlanError("--carry-over names plans by their models, of which two have one name; rename a file")
    try:
        Path(folder).mkdir(exist_ok=True)
    except OSError as error:
        raise OutputFileError(
            f"--carry-over: '{folder}' is no folder and cannot be made: {error.strerror}"
        ) from error
    return [os.path.join(folder, name) for name in names]


def _needed_shapes(report: Mapping[str, Any], model: str) -> list[str]:
    """What `optimize` has to be told with a plan for a file that was read for another batch than its own."""
    (file,) = (file for file in report["files"][1:] if file["model"] == model)
    if not file["is_rebatched"]:
        return []
    shapes = [f"--input-shapes {name}:{','.join(map(str, size))}" for name, size in file["inputs"].items()]
    return [f"with it optimize needs {' '.join(shapes)}"]


def _show_plans(report: Mapping[str, Any], say: Say, verbose: bool) -> None:
    say(plans_table(report))
    for line in plans_lines(report):
        say(line)
    if verbose:
        for line in detail_lines(report):
            say(line)
    for line in left_out_lines(report, every=verbose):
        say(line)
    if report["difference"]:
        say(difference_table(report["difference"], **({"most": None} if verbose else {})))
        for line in difference_lines(report["difference"]):
            say(line)
    for note in report["notes"]:
        say(f"note: {note}")


def _show_each(report: Mapping[str, Any], say: Say, verbose: bool) -> None:
    if verbose:
        for one in report["comparisons"]:
            if "error" not in one:
                _show_plans(one, say, verbose)
    say(overview_table(report, all_columns=verbose))
    for line in overview_lines(report, all_columns=verbose):
        say(line)


def _show_networks(report: Mapping[str, Any], say: Say, verbose: bool) -> None:
    say(files_table(report))
    for place, file in enumerate(report["files"]):
        # Of the other notes, which files of one network mostly have alike, there are many.
        for note in file["notes"] if verbose else file["notes"][: file["is_rebatched"]]:
            say(f"{file_label(place)}: {note}")
    for line in file_lines(report):
        say(line)
    for number in range(len(report["pairs"])):
        say(checkpoints_table(report, number))
        for line in pair_lines(report, number):
            say(line)
