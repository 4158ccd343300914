"""Records the project's figures and writes them into the documents.

    python scripts/benchmark.py resnet50    equality, accuracy, memory and time on ResNet-50
    python scripts/benchmark.py light       light models of the onnx package and models/: planned, verified
    python scripts/benchmark.py peaks       simulated peaks and arenas against ONNX Runtime's allocator
    python scripts/benchmark.py budgets     extra time and lower bounds under budgets, partly measured
    python scripts/benchmark.py table1      sums, simulated peaks and times against the paper's Table 1
    python scripts/benchmark.py default     plans without options beside those of the solver `peak`
    python scripts/benchmark.py growth      growth of solve times with the graph
    python scripts/benchmark.py step        time of a step of exported models against torch eager
    python scripts/benchmark.py torch       PyTorch modules against manual checkpointing and PyTorch's budget
    python scripts/benchmark.py gradients   exports of whole models against torch float64 of their modules
    python scripts/benchmark.py twins F     one network in files of several frameworks, from folder F
    python scripts/benchmark.py training    memory, time and accuracy of training on ONNX Runtime
    python scripts/benchmark.py bindings    memory of a training step in Node and wasm
    python scripts/benchmark.py card        kernels, bytes and expected times on a GPU, without one
    python scripts/benchmark.py exactness   solvers against exhaustive searches on small random graphs
    python scripts/benchmark.py picture     simulated memory over one step, in docs/memory.svg
    python scripts/benchmark.py render      README.md, docs/ and pictures from the recorded figures

Each but the last records a JSON file in benchmarks/ (or in the folder of --record) and prints a table;
progress goes to stderr. Every figure is measured or simulated by the run that records it, except figures of
the paper and of its code (`scripts/benchmarking/paper_graphs.py` and `growth.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

# The checkout, for `tests.torch_reference`, and for `scripts` when this file is the program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.benchmarking import (
    bindings,
    budgets,
    card,
    default_plans,
    documents,
    exactness,
    gradients,
    growth,
    light_networks,
    memory_picture,
    peaks,
    resnet50,
    step,
    table1,
    torch_plans,
    training,
    twins,
)
from scripts.benchmarking.command_options import add_record_folder


class Benchmark(Protocol):
    """A module with the options of a command and its run, which returns the exit code."""

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...
    def run_command(self, arguments: argparse.Namespace) -> int: ...


BENCHMARKS: Mapping[str, Benchmark] = {
    "resnet50": resnet50,
    "light": light_networks,
    "peaks": peaks,
    "budgets": budgets,
    "table1": table1,
    "default": default_plans,
    "growth": growth,
    "step": step,
    "torch": torch_plans,
    "gradients": gradients,
    "twins": twins,
    "training": training,
    "card": card,
    "bindings": bindings,
    "exactness": exactness,
    "picture": memory_picture,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; exit code 1: an equality or a check does not hold, or a document is stale."""
    parsed = _parser().parse_args(arguments)
    run: Any = parsed.run
    return int(run(parsed))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, benchmark in BENCHMARKS.items():
        command = commands.add_parser(name)
        benchmark.add_options(command)
        add_record_folder(command)
        command.set_defaults(run=benchmark.run_command)
    command = commands.add_parser("render", help="README.md, docs/ and pictures from the recorded figures")
    command.add_argument("--check", action="store_true", help="write nothing; exit with 1 if one is stale")
    command.set_defaults(run=_render)
    return parser


def _render(arguments: argparse.Namespace) -> int:
    wanted = {path: documents.render(path, path.read_text(encoding="utf-8")) for path in documents.BLOCKS}
    wanted |= documents.render_pictures()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not arguments.check:
            path.write_text(wanted[path], encoding="utf-8")
        print(f"{'stale' if arguments.check else 'wrote'}: {path.name}")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
