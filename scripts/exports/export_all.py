"""Runs exporters that may fail; the models and their exporters are in other modules."""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

Exports = Iterable[tuple[Path, Callable[[Path], object]]]
"""Files, each with the function that writes it."""


def main(exports: Callable[[], Iterator[tuple[str, Callable[[Path], object]]]]) -> None:
    """The program of an origin: writes exports, named without `.onnx`, to the folder of the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    sys.exit(export_all((folder / f"{name}.onnx", export) for name, export in exports()))


def export_all(exports: Exports) -> int:
    """Runs exports, and prints the file or the error of each; returns the exit code.

    Exporters raise many kinds of errors, none of which stops the other exports.
    """
    failed = 0
    for path, export in exports:
        try:
            export(path)
            print(path, flush=True)
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            print(f"{path.stem}: {type(error).__name__}: {reason}", flush=True)
            failed += 1
    return 1 if failed else 0
