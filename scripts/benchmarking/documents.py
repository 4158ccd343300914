"""The generated parts of README.md and docs/: from recorded figures, and from the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.benchmarking import (
    bindings,
    budgets,
    card,
    chain_picture,
    cuda_results,
    default_plans,
    exactness,
    gradients,
    growth,
    growth_picture,
    light_networks,
    memory_picture,
    peaks,
    reference,
    resnet50,
    step,
    summary,
    table1,
    torch_plans,
    training,
    twins,
)
from scripts.benchmarking.records import BENCHMARKS, ROOT, Record, read_records

README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results.md"
REFERENCE = ROOT / "docs" / "reference.md"
SECTIONS: Mapping[str, Callable[[Record], str]] = {
    "resnet50": resnet50.results_section,
    "peaks": peaks.results_section,
    "budgets": budgets.results_section,
    "gpu": cuda_results.results_section,
    "card": card.results_section,
    "gradients": gradients.results_section,
    "gradients_cuda": gradients.results_section,
    "step": step.results_section,
    "torch": torch_plans.results_section,
    "training": training.results_section,
    "bindings": bindings.results_section,
    "twins": twins.results_section,
    "light": light_networks.results_section,
    "table1": table1.results_section,
    "default": default_plans.results_section,
    "growth": growth.results_section,
    "exactness": exactness.results_section,
}
"""Sections of the results, by the name of their record."""


def render(path: Path, text: str, folder: Path = BENCHMARKS) -> str:
    """The document's `text` with every generated block brought up to date."""
    for name, block in BLOCKS[path].items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{path.name} has no block '{begin}' ... '{end}'")
        text = f"{before}{begin}\n{block(folder)}\n{end}{after}"
    return text


def render_pictures(folder: Path = BENCHMARKS) -> dict[Path, str]:
    """The SVGs by path: of a small chain, and of records."""
    drawn = {chain_picture.PICTURE: chain_picture.draw()}
    for record in read_records("memory", folder):
        drawn[memory_picture.PICTURE] = memory_picture.draw(record["figures"])
    for record in read_records("growth", folder):
        drawn[growth_picture.PICTURE] = growth_picture.draw(record["figures"]["graphs"])
    return drawn


def results(folder: Path) -> str:
    """All sections whose benchmark is recorded."""
    parts = [section(record) for name, section in SECTIONS.items() for record in read_records(name, folder)]
    return "\n\n".join(filter(None, parts)) or (
        "No figures are recorded yet; `python scripts/benchmark.py resnet50` records them."
    )


BLOCKS: Mapping[Path, Mapping[str, Callable[[Path], str]]] = {
    README: {"summary": summary.summary},
    RESULTS: {"results": results},
    REFERENCE: {
        "commands": lambda folder: reference.commands(),
        "solvers": lambda folder: reference.solvers(),
        "operators": lambda folder: reference.operators(),
    },
}
