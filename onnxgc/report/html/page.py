"""The page of `optimize --report`, and the frame of all pages."""

from __future__ import annotations

import base64
import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources

from onnxgc import __version__
from onnxgc.graph.computation_graph import Vertex
from onnxgc.planning.schedule import Schedule
from onnxgc.report.data.memory_curve import forward_operators, memory_curve, operator_kinds
from onnxgc.report.data.optimize_report import OptimizeReport
from onnxgc.report.html.curves import alive_table, memory_figure, roles_table
from onnxgc.report.html.network_strip import checkpoints_table, network_figure, segments_table
from onnxgc.report.html.payload import payload
from onnxgc.report.html.tables import kinds_table, tensors_table
from onnxgc.report.html.tags import Html, joined, tag
from onnxgc.report.html.trade_off import trade_off_figure, trade_off_table
from onnxgc.report.text.units import duration, megabytes, percent
from onnxgc.tracing.step_graph import TrainingStep

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
    sections = [
        ("memory-section", "Memory over the step", [
            memory_figure(curves, report["budget"]["bytes"] if "budget" in report else None),
            roles_table(curves),
            alive_table(curves[0]),
        ]),
        *([("trade-off", "Extra time against peak", [trade_off_figure(report), trade_off_table(report)])]
          if report.get("frontier") else []),
        ("network-section", "The network", [
            network_figure(network),
            _folded("Checkpoints", checkpoints_table(network)),
            _folded("Segments", segments_table(network)),
        ]),
        ("operators", "Operators", [
            kinds_table(operator_kinds(shown.step, curves[0], shown.durations_ns), PLANNED)
        ]),
        ("tensors", "Largest tensors", [tensors_table(curves[0], network)]),
        ("assumed", "Assumptions", _assumed(shown)),
    ]  # fmt: skip
    title = f"{os.path.basename(report['model'])}: memory of one training step"
    return document(title, _headline(report), sections, payload(curves, network))


def document(
    title: str, headline: Html, sections: Sequence[tuple[str, str, Sequence[Html]]], data: str
) -> str:
    """A page with the given sections (name, heading, parts) and the data of its script."""
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag("header", tag("h1", title), headline, _contents(sections)),
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
        return tag(
            "pattern", ground, *shapes, id=name, width=size, height=size, patternUnits="userSpaceOnUse"
        )

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


def _contents(sections: Sequence[tuple[str, str, Sequence[str]]]) -> Html:
    links = [tag("li", tag("a", heading, href=f"#{name}")) for name, heading, _ in sections]
    return tag("nav", tag("ul", *links), aria_label="Contents")


def _section(name: str, heading: str, parts: Sequence[str]) -> Html:
    return tag(
        "section",
        tag("h2", heading, id=f"{name}-heading"),
        *parts,
        id=name,
        aria_labelledby=f"{name}-heading",
    )


def _folded(summary: str, content: Html) -> Html:
    return tag("details", tag("summary", summary), content)


def _headline(report: OptimizeReport) -> Html:
    """The main figures, in large type."""
    regular, planned = (report[kind]["simulated_peak_bytes"] for kind in ("regular", "planned"))
    found = report.get("budget")
    figures = [
        ("peak, baseline", megabytes(regular)),
        ("peak, planned", megabytes(planned) + (f" ({planned / regular:.0%})" if regular else "")),
    ]
    if found is None:
        figures.append(("recomputed, of the step's flops", f"{report['planned']['extra_flops_ratio']:.1%}"))
    else:
        if found["bytes"] is not None:
            figures.append(("budget", megabytes(found["bytes"])))
        figures.append(("extra time", percent(found["extra_time_ratio"])))
    figures.append(("plan", report["status"]))
    return tag(
        "dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in figures), class_="headline"
    )


def _assumed(shown: PageData) -> list[Html]:
    notes = shown.report["notes"]
    return [
        tag(
            "dl",
            *(tag("div", tag("dt", name), tag("dd", value)) for name, value in _facts(shown)),
            class_="facts",
        ),
        tag("h3", "Notes"),
        tag("ul", *(tag("li", note) for note in notes)) if notes else tag("p", "None."),
    ]


def _facts(shown: PageData) -> list[tuple[str, str]]:
    report = shown.report
    return [
        ("model", report["model"]),
        ("loss", report["loss"]),
        (
            "parameters that train",
            f"{report['parameters']['count']:,}, {megabytes(report['parameters']['bytes'])}",
        ),
        ("objective", report["objective"]),
        ("solver", f"{report['solver']}: {report['status']}"),
        *_bound(report),
        ("durations", shown.timing),
        (
            "settings",
            "; ".join(f"{option} {value}".strip() for option, value in shown.settings) or "all default",
        ),
        ("versions", ", ".join(f"{name} {version}" for name, version in _versions())),
        ("memory", "tensors as allocated, excluding inputs and parameters"),
    ]


def _bound(report: OptimizeReport) -> list[tuple[str, str]]:
    found = report.get("budget")
    least = megabytes(report["lower_bound_bytes"])
    operator = f" (the working set of '{report['bound_operator']}')" if report["bound_operator"] else ""
    if found is None:
        return [
            ("lower bound on the peak", f"{least}{operator}"),
            ("gap", percent(report["gap"]) if report["gap"] > 0 else "none: the plan is optimal"),
        ]
    budget = "none: the lowest peak" if found["bytes"] is None else megabytes(found["bytes"])
    gap = f"{percent(found['gap'])} of the time, {percent(found['gap_of_extra'])} of the extra time"
    facts = [("budget", budget), ("operator order", found["order"])]
    if found["bytes"] is None:
        facts.append(("lower bound on the peak", f"{least}{operator}"))
    if found["most_extra_time_ratio"] is not None:
        facts.append(("extra time allowed", percent(found["most_extra_time_ratio"])))
    facts += [
        ("time of the baseline", duration(found["regular_seconds"])),
        ("extra time", percent(found["extra_time_ratio"])),
        ("lower bound on extra time", percent(found["lower_bound_ratio"])),
        ("gap", gap if found["gap"] > 0 else "none"),
    ]
    return facts


def _versions() -> list[tuple[str, str]]:
    versions = [("onnxgc", __version__), ("Python", platform.python_version())]
    for name in _PACKAGES:
        try:
            versions.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return versions
