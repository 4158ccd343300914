"""Runs exporters that may fail; the models and their exporters are in other modules."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def output_folder(arguments: Sequence[str] | None, description: str | None) -> Path:
    """The folder that a command line names; creates it."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def export_all(exports: Iterable[tuple[str, Callable[[], Path]]]) -> int:
    """Runs named exports, and prints the file or the error of each; returns the exit code.

    Exporters raise many kinds of errors, none of which stops the other exports.
    """
    failed = 0
    for name, export in exports:
        try:
            print(export(), flush=True)
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            print(f"{name}: {type(error).__name__}: {reason}", flush=True)
            failed += 1
    return 1 if failed else 0
