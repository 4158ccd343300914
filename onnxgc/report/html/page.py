"""The page of `optimize --report`, and the frame of all pages."""

import base64
import hashlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata, resources
from typing import TypeAlias

from onnxgc import __version__
from onnxgc.graph.computation_graph import Vertex
from onnxgc.planning.schedule import Schedule
from onnxgc.report.data.memory_curve import forward_operators, memory_curve, operator_kinds
from onnxgc.report.data.optimize_report import OptimizeReport
from onnxgc.report.html.curves import alive_table, memory_figure, roles_table
from onnxgc.report.html.network_strip import checkpoints_table, network_figure, segments_table
from onnxgc.report.html.payload import payload
from onnxgc.report.html.tables import kinds_table, tensors_table
from onnxgc.report.html.tags import Html, bullets, definitions, joined, tag
from onnxgc.report.html.trade_off import trade_off_figure, trade_off_table
from onnxgc.report.text.units import bound_text, duration, megabytes, percent
from onnxgc.tracing.step_graph import TrainingStep

Section: TypeAlias = tuple[str, str, Sequence[Html]]
"""The name, the heading and the parts of a section."""
PLANNED, REGULAR = "planned", "baseline"
_PACKAGES = ("numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "highspy", "numba")


@dataclass(frozen=True, slots=True)
class PageData:
    """The data of a page: a planned step with its figures.

    `durations_ns` are durations of operators by name, and `timing` their source; `settings` are the user's
    options with their values.
    """

    report: OptimizeReport
    step: TrainingStep
    schedule: Schedule
    regular_step: TrainingStep
    regular_schedule: Schedule
    checkpoints: Sequence[Vertex]
    durations_ns: Mapping[str, int]
    timing: str
    settings: Sequence[tuple[str, str]]


def page(shown: PageData) -> str:
    """The HTML of the page, in ASCII: the same bytes for the same result."""
    report = shown.report
    curves = [
        memory_curve(PLANNED, shown.step, shown.schedule),
        memory_curve(REGULAR, shown.regular_step, shown.regular_schedule),
    ]
    network = forward_operators(shown.step, shown.schedule, curves[0], shown.checkpoints)
    sections: list[Section] = [
        ("memory-section", "Memory over the step", [
            memory_figure(curves, report["budget"]["bytes"] if "budget" in report else None),
            roles_table(curves),
            alive_table(curves[0]),
        ]),
        *([("trade-off", "Extra time against peak", [trade_off_figure(report), trade_off_table(report)])]
          if report.get("frontier") else []),
        ("network-section", "The network", [
            network_figure(network),
            tag("details", tag("summary", "Checkpoints"), checkpoints_table(network)),
            tag("details", tag("summary", "Segments"), segments_table(network)),
        ]),
        ("operators", "Operators", [
            kinds_table(operator_kinds(shown.step, curves[0], shown.durations_ns), PLANNED)
        ]),
        ("tensors", "Largest tensors", [tensors_table(curves[0], network)]),
        ("assumed", "Assumptions", _assumed(shown)),
    ]  # fmt: skip
    title = f"{os.path.basename(report['model'])}: memory of one training step"
    return document(title, _main_figures(report), sections, payload(curves, network))


def document(title: str, figures: Sequence[tuple[str, str]], sections: Sequence[Section], data: str) -> str:
    """A page with its main figures in large type, the given sections, and the data of its script."""
    links = [tag("a", heading, href=f"#{name}") for name, heading, _ in sections]
    contents = tag("nav", bullets(links), aria_label="Contents")
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag("header", tag("h1", title), definitions(figures, "headline"), contents),
        tag("main", *(_section(*section) for section in sections), id="content", tabindex=-1),
        tag("footer", tag("p", f"Written by onnxgc {__version__}. Sizes are MB of 10^6 bytes, simulated.")),
        _patterns(),
        tag("script", Html(data), type="application/octet-stream", id="data"),
        tag("script", Html(_file("script.js"))),
    )
    written = joined(Html("<!DOCTYPE html>"), tag("html", _head(title), body, lang="en"))
    return f"{written}\n".encode("ascii", "xmlcharrefreplace").decode("ascii")


def _head(title: str) -> Html:
    script, style = _file("script.js"), _file("style.css")
    policy = f"default-src 'none'; img-src data:; script-src {_hash(script)}; style-src {_hash(style)}"
    policy += "; base-uri 'none'; form-action 'none'"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Html(style)),
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="ascii")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _patterns() -> Html:
    """Fillings that distinguish areas without colour."""

    def pattern(name: str, size: int, *shapes: Html) -> Html:
        ground = tag("rect", width=size, height=size, class_="ground")
        return tag("pattern", ground, *shapes, id=name, width=size, height=size, patternUnits="userSpaceOnUse")

    def stroke(path: str) -> Html:
        return tag("path", d=path, class_="hatch")

    return tag(
        "svg",
        tag(
            "defs",
            pattern("pattern-state", 8, stroke("M0 0L8 8M0 8L8 0")),
            pattern("pattern-again", 8, stroke("M-2 2L2 -2M0 8L8 0M6 10L10 6")),
            pattern("pattern-gradient", 6, stroke("M0 3H6")),
            pattern("pattern-parameter", 7, tag("circle", cx=3, cy=3, r=1.2, class_="dot")),
            pattern("pattern-passing", 6, stroke("M3 0V6")),
        ),
        class_="patterns",
        width=0,
        height=0,
        aria_hidden="true",
    )


def _section(name: str, heading: str, parts: Sequence[Html]) -> Html:
    label = f"{name}-heading"
    return tag("section", tag("h2", heading, id=label), *parts, id=name, aria_labelledby=label)


def _main_figures(report: OptimizeReport) -> list[tuple[str, str]]:
    baseline, planned = (report[kind]["simulated_peak_bytes"] for kind in ("regular", "planned"))
    budget = report.get("budget")
    figures = [
        ("peak, baseline", megabytes(baseline)),
        ("peak, planned", megabytes(planned) + (f" ({planned / baseline:.0%})" if baseline else "")),
    ]
    if budget is None:
        figures.append(("recomputed, of the step's flops", f"{report['planned']['extra_flops_ratio']:.1%}"))
    else:
        if budget["bytes"] is not None:
            figures.append(("budget", megabytes(budget["bytes"])))
        figures.append(("extra time", percent(budget["extra_time_ratio"])))
    return [*figures, ("plan", report["status"])]


def _assumed(shown: PageData) -> list[Html]:
    notes = shown.report["notes"]
    listed = bullets(notes) if notes else tag("p", "None.")
    return [definitions(_facts(shown), "facts"), tag("h3", "Notes"), listed]


def _facts(shown: PageData) -> list[tuple[str, str]]:
    report, parameters = shown.report, shown.report["parameters"]
    settings = "; ".join(f"{option} {value}".strip() for option, value in shown.settings)
    return [
        ("model", report["model"]),
        ("loss", report["loss"]),
        ("parameters that train", f"{parameters['count']:,}, {megabytes(parameters['bytes'])}"),
        ("objective", report["objective"]),
        ("solver", f"{report['solver']}: {report['status']}"),
        *_bound(report),
        ("durations", shown.timing),
        ("settings", settings or "all default"),
        ("versions", ", ".join(_versions())),
        ("memory", "tensors as allocated, excluding inputs and parameters"),
    ]


def _bound(report: OptimizeReport) -> list[tuple[str, str]]:
    budget = report.get("budget")
    on_peak = (
        "lower bound on the peak",
        bound_text(report["lower_bound_bytes"], report["bound_operator"], report["modules"]),
    )
    if budget is None:
        return [on_peak, ("gap", percent(report["gap"]) if report["gap"] > 0 else "none: the plan is optimal")]
    limit = "none: the lowest peak" if budget["bytes"] is None else megabytes(budget["bytes"])
    gap = f"{percent(budget['gap'])} of the time, {percent(budget['gap_of_extra'])} of the extra time"
    facts = [("budget", limit), ("operator order", budget["order"])]
    if budget["bytes"] is None:
        facts.append(on_peak)
    if budget["most_extra_time_ratio"] is not None:
        facts.append(("extra time allowed", percent(budget["most_extra_time_ratio"])))
    return [
        *facts,
        ("time of the baseline", duration(budget["regular_seconds"])),
        ("extra time", percent(budget["extra_time_ratio"])),
        ("lower bound on extra time", percent(budget["lower_bound_ratio"])),
        ("gap", gap if budget["gap"] > 0 else "none"),
    ]


def _versions() -> Iterator[str]:
    yield f"onnxgc {__version__}"
    yield f"Python {platform.python_version()}"
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"
