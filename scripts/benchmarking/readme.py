"""The parts of README.md that are written from recorded figures and from the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxgc.gradients.registry import RULES, STOPS
from scripts.benchmarking.picture import draw
from scripts.benchmarking.records import BENCHMARKS, ROOT, read_record

README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "memory.svg"
MEGABYTE = 10**6


def render_readme(text: str, folder: Path = BENCHMARKS) -> str:
    """`text` with every generated block as it should be now."""
    for name, block in BLOCKS.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"README.md has no block '{begin}' ... '{end}'")
        text = f"{before}{begin}\n{block(folder)}\n{end}{after}"
    return text


def render_picture(folder: Path = BENCHMARKS) -> str | None:
    """The SVG of the recorded timelines, or None where none are recorded."""
    record = read_record("memory", folder)
    return None if record is None else draw(record["figures"])


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are figures."""
    lines = [headings, ["---", *("---:" for _ in headings[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mb(size_bytes: float) -> str:
    return f"{size_bytes / MEGABYTE:,.0f}"


def _results(folder: Path) -> str:
    parts = [part for part in (_resnet50(folder), _light(folder), _paper(folder)) if part]
    return (
        "\n\n".join(parts)
        or "No figures are recorded yet; `python scripts/benchmark.py resnet50` records them."
    )


def _where(record: Mapping[str, Any]) -> str:
    found = record["environment"]
    versions = found["versions"]
    runtime = versions.get("onnxruntime-gpu") or versions.get("onnxruntime")
    return (
        f"{found['cpu']}, {found['threads']} threads of {found['cores']} cores, ONNX Runtime {runtime} "
        f"(CPU provider), {found['date']}"
    )


def _resnet50(folder: Path) -> str:
    record = read_record("resnet50", folder)
    if record is None:
        return ""
    figures = record["figures"]
    rows = []
    simulated = figures["simulated_peak_bytes"]
    rows.append(_peak_row("simulated", simulated["regular"], simulated["planned"]))
    for settings, label in (("make_session", "`make_session()`"), ("default", "all-default session")):
        measured = figures["measured"][settings]
        for key, what in (("requested_bytes", "requested"), ("in_use_bytes", "in use")):
            row = _peak_row(f"measured, {label}, {what}", measured["regular"][key], measured["planned"][key])
            rows.append(row)
    times = figures["step_seconds"]
    for key in ("minimum", "median"):
        regular, planned, torch = (times[kind][key] for kind in ("regular", "planned", "torch"))
        rows.append(
            [
                f"time of a step, {key} of {times['rounds']} (torch eager: {torch:.2f} s)",
                f"{regular:.2f} s",
                f"{planned:.2f} s",
                f"{planned / regular:.2f}",
            ]
        )
    same, accuracy = figures["identical"], figures["accuracy"]
    torch_version = record["environment"]["versions"]["torch"].partition("+")[0]
    sentences = [
        f"**{figures['network']}, batch {figures['batch']}, {figures['input']}**, one training step "
        f"(peaks in MB of 10^6 bytes, the highest of {figures['memory_runs']} runs, parameters' gradients of "
        f"{_mb(figures['parameter_gradient_bytes'])} MB included):",
        markdown_table(["", "storing everything", "planned", "planned / storing everything"], rows),
        f"Planned against storing everything: the loss is {'' if same['loss'] else 'NOT '}"
        f"bit-identical, and so are {same['gradients']} of {same['gradients_of']} gradients. Distance of the "
        f"gradients to torch {torch_version} in float64, as a multiple of torch float32's own distance: "
        f"median {accuracy['ratio_median']:.2f}, largest {accuracy['ratio_max']:.2f}. "
        "Time against torch eager (the "
        "same graph by torch's operators and autograd, storing everything): "
        f"{times['regular']['minimum'] / times['torch']['minimum']:.2f} (storing everything) and "
        f"{times['planned']['minimum'] / times['torch']['minimum']:.2f} (planned), by minima. "
        f"{_where(record)}.",
    ]
    return "\n\n".join(sentences)


def _peak_row(label: str, regular: int, planned: int) -> list[str]:
    return [label, _mb(regular), _mb(planned), f"{planned / regular:.2f}"]


def _light(folder: Path) -> str:
    record = read_record("light", folder)
    if record is None:
        return ""
    rows = []
    for figures in record["figures"]:
        if "error" in figures:
            rows.append([figures["network"], *[""] * 5, "cannot be planned"])
            continue
        regular, planned = figures["regular_peak_bytes"], figures["planned_peak_bytes"]
        shapes = ", ".join("x".join(map(str, shape)) for shape in figures["inputs"].values())
        rows.append(
            [
                figures["network"], shapes, str(figures["vertices"]), _mb(regular), _mb(planned),
                f"{planned / regular:.2f}",
                "all hold" if figures["verification"]["holds"] else _failed(figures["verification"]),
            ]
        )  # fmt: skip
    headings = ["network", "input", "tensors", "storing everything", "planned", "ratio", "checks of `verify`"]
    title = "**Light networks**: simulated peak in MB, parameters' gradients included, and whether the file "
    return f"{title}keeps its promises when it runs.\n\n{markdown_table(headings, rows)}\n\n{_where(record)}."


def _failed(verification: Mapping[str, Any]) -> str:
    return "fails: " + ", ".join(check["name"] for check in verification["checks"] if not check["holds"])


def _paper(folder: Path) -> str:
    record = read_record("paper", folder)
    if record is None:
        return ""
    rows = [
        [
            f"{row['network']}, {row['batch']}",
            _mb(row["regular_bytes"]),
            _mb(row["planned_bytes"]),
            f"{row['planned_bytes'] / row['regular_bytes']:.2f}",
            f"{row['paper_regular_mb']:,}",
            f"{row['paper_optimal_mb']:,}",
            f"{row['paper_optimal_mb'] / row['paper_regular_mb']:.2f}",
        ]
        for row in record["figures"]
    ]
    headings = [
        "network, batch", "simulated, storing everything", "planned", "ratio",
        "paper, regular", "paper, optimal", "ratio",
    ]  # fmt: skip
    return (
        "**Beside the paper's Table 1**, at its batch sizes and inputs: simulated here for the CPU (MB of "
        "10^6 bytes, parameters and their gradients left out), measured there on a GPU in PyTorch 1.5 (MB as "
        "printed, weights left out). Ratios can be compared, megabytes only roughly.\n\n"
        + markdown_table(headings, rows)
    )


def _operators(folder: Path) -> str:
    del folder
    rules = ", ".join(f"`{name}`" for name in sorted(RULES) if "." not in name)
    stops = ", ".join(f"`{name}`" for name in sorted(STOPS))
    return (
        f"Gradient rules: {rules}.\n\nNo gradient flows through {stops}, nor through integers and Booleans."
    )


BLOCKS: Mapping[str, Callable[[Path], str]] = {"results": _results, "operators": _operators}
