"""Records the project's figures and writes them into the documents.

    python scripts/benchmark.py COMMAND

Each command but `render` records a JSON file in benchmarks/ (or in the folder of --record) and prints its
section of docs/results.md; progress goes to stderr. Every figure is measured or simulated by the run that
records it, except figures of the paper and of its code (`scripts/benchmarking/paper_graphs.py` and `growth.py`).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The checkout, for `tests.torch_reference`, and for `scripts` when this file is the program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.benchmarking import documents
from scripts.benchmarking.command_options import add_options, add_record_folder, options_of
from scripts.benchmarking.records import BENCHMARKS, Progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; exit code 1: an equality or a check does not hold, or a document is stale."""
    parsed = _parser().parse_args(arguments)
    run: Any = parsed.run
    return int(run(parsed))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, benchmark in documents.KINDS.items():
        command = commands.add_parser(name, help=(benchmark.__doc__ or "").partition("\n")[0])
        add_options(command, benchmark.Options)
        add_record_folder(command, BENCHMARKS)
        command.set_defaults(run=_run)
    command = commands.add_parser("render", help="README.md, docs/ and pictures from the recorded figures")
    command.add_argument("--check", action="store_true", help="write nothing; exit with 1 if one is stale")
    command.set_defaults(run=_render)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    benchmark = documents.KINDS[arguments.command]
    options = options_of(benchmark.Options, arguments)
    progress = Progress(arguments.command, arguments.record, getattr(options, "threads", None))
    record = progress.record(benchmark.run(options, progress))
    wrong = benchmark.failures(record["figures"])
    print(benchmark.results_section(record), *wrong, sep="\n\n")
    return 1 if wrong else 0


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
