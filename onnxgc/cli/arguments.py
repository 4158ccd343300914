"""What command-line arguments have in common: parsing, and where output goes."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from onnxgc.emission.write import check_writable, write_text
from onnxgc.errors import OutputFileError, ShapeError
from onnxgc.report.comparison import Cells

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing but errors, and JSON where it is asked for.")
]
LARGEST_DIMENSION = 2**31 - 1
_SHAPE = re.compile(r"(?P<name>.+):(?P<shape>([0-9]+([,x][0-9]+)*)?)")


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """`x:64,3,224,224` or `x:64x3x224x224`, several separated by blanks or by repeating the option.

    Raises:
        ShapeError: the text has another form, or a dimension is no positive number.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for given in texts:
        # A name may hold blanks: they separate shapes only where each part is one.
        parts = given.split()
        for text in parts if all(_SHAPE.fullmatch(part) for part in parts) else [given]:
            match = _SHAPE.fullmatch(text)
            if match is None:
                raise ShapeError(
                    f"cannot read the shape '{text}'; write it as x:64,3,224,224 or x:64x3x224x224"
                )
            name = match["name"]
            shape = tuple(int(size) for size in re.findall("[0-9]+", match["shape"]))
            if any(not 1 <= size <= LARGEST_DIMENSION for size in shape):
                raise ShapeError(
                    f"the shape '{text}' has a dimension that is not from 1 to {LARGEST_DIMENSION}"
                )
            if name in shapes:
                raise ShapeError(f"input '{name}' has two shapes; give --input-shapes once for each input")
            shapes[name] = shape
    return shapes


def console_for(json_target: str | None, *, is_quiet: bool = False) -> Console:
    """Where people read: stdout, unless JSON goes there; nowhere for those who want it quiet."""
    # Names of tensors and files are no markup, whatever brackets they have.
    return Console(
        file=sys.stderr if json_target == "-" else sys.stdout,
        soft_wrap=False,
        highlight=False,
        markup=False,
        quiet=is_quiet,
    )


Say = Callable[[str | Cells], None]


def writer(console: Console, *, markdown: bool) -> Say:
    """Prints lines, and tables in the form that was asked for."""

    def say(what: str | Cells) -> None:
        if isinstance(what, str):
            # A star at the start of a line would begin a list of its own.
            told = f"- \\{what}" if what.startswith("*") else f"- {what}"
            console.print(told if markdown else what, markup=False, soft_wrap=markdown)
        elif markdown:
            console.print(f"\n{what.markdown()}\n", markup=False, soft_wrap=True)
        else:
            console.print(what.title, markup=False)
            console.print(what.for_terminal())

    return say


def check_json_target(target: str | None, *others: str | None) -> None:
    """Fail before any work if the JSON file could not be written, or is one of the other files."""
    if target != "-":
        check_target("--json", target, *others)


def check_target(option: str, target: str | None, *others: str | None) -> None:
    """Fail before any work if the file of an option could not be written, or is one of the other files."""
    if target is not None:
        check_apart(option, target, *others)
        check_writable(target)


def check_apart(option: str, target: str | None, *others: str | None) -> None:
    """Fail before any work if the file of an option is one of the other files."""
    for other in filter(None, others):
        if target is not None and os.path.realpath(target) == os.path.realpath(other):
            raise OutputFileError(
                f"{option} '{target}' is one of the files that are read or written; give it a name of its own"
            )


def write_json(value: Any, target: str | None) -> None:
    """JSON to a file, or to stdout for `-`."""
    if target is None:
        return
    text = json.dumps(value, indent=2)
    if target == "-":
        print(text)
    else:
        write_text(text + "\n", target)


def settings_of(context: typer.Context, *but: str) -> tuple[tuple[str, str], ...]:
    """The options of a call that were given, with their values; without those named in `but`."""
    given: list[tuple[str, str]] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        if name in but or parameter.param_type_name != "option":
            continue
        source = context.get_parameter_source(name)
        # By name: Typer brings an enumeration of its own.
        if source is not None and source.name == "COMMANDLINE":
            given.append((parameter.opts[0], _as_given(context.params[name])))
    return tuple(given)


def _as_given(value: object) -> str:
    if value is True:
        return ""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being done, while it is done; nothing if nobody looks."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with console.status("starting") as status:
        yield lambda stage: status.update(stage)
