"""The generated parts of README.md and docs/: from recorded figures, and from the code."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from scripts.benchmarking import (
    bindings,
    budgets,
    card,
    chain_picture,
    compiled,
    cuda_results,
    default_plans,
    exactness,
    file_gradients,
    gradients,
    gradients_cuda,
    growth,
    growth_picture,
    memory_picture,
    peaks,
    reference,
    resnet50,
    scale,
    step,
    summary,
    table1,
    torch_plans,
    training,
    twins,
)
from scripts.benchmarking.records import BENCHMARKS, ROOT, Progress, Record, read_records


class Benchmark(Protocol):
    """A module with the options of a command, its run, and the section of its record.

    `failures` are lines about equalities and checks of the figures that do not hold.
    """

    __doc__: str | None
    Options: type[Any]

    def run(self, options: Any, progress: Progress) -> Any: ...
    def failures(self, figures: Any) -> list[str]: ...
    def results_section(self, record: Record) -> str: ...


KINDS: Mapping[str, Benchmark] = {
    "resnet50": resnet50,
    "peaks": peaks,
    "budgets": budgets,
    "card": card,
    "gradients": gradients,
    "gradients_cuda": gradients_cuda,
    "gradients_of_files": file_gradients,
    "step": step,
    "torch": torch_plans,
    "compile": compiled,
    "training": training,
    "bindings": bindings,
    "twins": twins,
    "table1": table1,
    "default": default_plans,
    "growth": growth,
    "scale": scale,
    "exactness": exactness,
    "memory": memory_picture,
}
"""Benchmarks by the names of their commands and records, in the order of docs/results.md."""
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results.md"
REFERENCE = ROOT / "docs" / "reference.md"


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
    sections = {name: benchmark.results_section for name, benchmark in KINDS.items()}
    names = list(sections)
    # Expectations follow what cards measured.
    names.insert(names.index("card"), "gpu")
    sections["gpu"] = cuda_results.results_section
    parts = [sections[name](record) for name in names for record in read_records(name, folder)]
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
