"""What command-line arguments have in common: parsing, and where output goes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from onnxgc.emission.write import check_writable, write_text
from onnxgc.errors import ShapeError


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """`x:64,3,224,224` or `x:64x3x224x224`, several separated by blanks or by repeating the option.

    Raises:
        ShapeError: the text has another form, or a dimension is no positive number.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for text in (part for given in texts for part in given.split()):
        name, colon, dimensions = text.rpartition(":")
        parts = dimensions.replace("x", ",").split(",") if dimensions else []
        if not colon or not name or not all(part.isdigit() for part in parts):
            raise ShapeError(f"cannot read the shape '{text}'; write it as x:64,3,224,224 or x:64x3x224x224")
        if any(int(part) == 0 for part in parts):
            raise ShapeError(f"the shape '{text}' has a dimension of 0; every dimension must be at least 1")
        if name in shapes:
            raise ShapeError(f"input '{name}' has two shapes; give --input-shapes once for each input")
        shapes[name] = tuple(int(part) for part in parts)
    return shapes


def console_for(json_target: str | None) -> Console:
    """Where people read: stdout, unless JSON goes there."""
    return Console(file=sys.stderr if json_target == "-" else sys.stdout, soft_wrap=False, highlight=False)


def check_json_target(target: str | None) -> None:
    """Fail before any work if the JSON file could not be written."""
    if target is not None and target != "-":
        check_writable(target)


def write_json(value: Any, target: str | None) -> None:
    """JSON to a file, or to stdout for `-`."""
    if target is None:
        return
    text = json.dumps(value, indent=2)
    if target == "-":
        print(text)
    else:
        write_text(text + "\n", target)


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being done, while it is done; nothing if nobody looks."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with console.status("starting") as status:
        yield lambda stage: status.update(stage)
