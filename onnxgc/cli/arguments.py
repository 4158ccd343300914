"""What command-line arguments have in common: parsing, and where output goes."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console

from onnxgc.emission.write import check_writable, write_text
from onnxgc.errors import OutputFileError, PlanError, ShapeError
from onnxgc.planning.order import Order
from onnxgc.report.comparison import Cells


def finite(value: float | None) -> float | None:
    """A number of an option, which a lower limit does not keep from being infinite.

    Raises:
        typer.BadParameter: it is not finite.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"'{value}' is no finite number")
    return value


def _time_limit(text: str) -> Any:
    return Annotated[float | None, typer.Option(min=0.0, callback=finite, help=text)]


Model = Annotated[str, typer.Argument(help="A forward ONNX model, from any framework.")]
Loss = Annotated[str, typer.Option(help="As in optimize.")]
Trainable = Annotated[
    list[str] | None,
    typer.Option(help="Glob of the weights that train, alone; +GLOB: in addition. Repeatable."),
]
Freeze = Annotated[list[str] | None, typer.Option(help="Glob of weights that do not; repeatable.")]
FreezeBn = Annotated[bool, typer.Option("--freeze-bn", help="As in optimize.")]
Untie = Annotated[bool, typer.Option("--untie", help="As in optimize.")]
InputShapes = Annotated[
    list[str] | None, typer.Option(help="Shape of an input, as x:64,3,224,224; repeatable.")
]
Plan = Annotated[
    str | None, typer.Option(help="A plan file, or a training file: its plan, in place of a search.")
]
OrderAsInOptimize = Annotated[
    Order | None, typer.Option("--order", help="With a budget, as in optimize [default: free].")
]


class OptimizerName(StrEnum):
    """What updates the parameters."""

    NONE = "none"
    SGD = "sgd"
    ADAMW = "adamw"


Updates = Annotated[
    OptimizerName,
    typer.Option(help="Updates of the parameters in the file, with PyTorch's settings; else gradients."),
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything that is drawn.")]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="Threads of each operator.")]
NoCheck = Annotated[
    bool, typer.Option("--no-check", help="Do not run the forward model once before planning.")
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Tables as Markdown.")]
FiguresAsJson = Annotated[str | None, typer.Option("--json", help="Figures as JSON, - for stdout.")]
AllAsJson = Annotated[str | None, typer.Option("--json", help="All of it as JSON, - for stdout.")]
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
    """Fail before any work if the file of an option is one of the other files, or none."""
    if target == "-":
        raise OutputFileError(f"{option} '-': only --json writes to standard output; give a file name")
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


def check_with_budget(is_asked: bool, given: Mapping[str, object], ways: str) -> None:
    """Fail before any work if options are given that say something of a budget, and there is none.

    `ways` are the options that ask for one, with an example.
    """
    for option, value in given.items():
        if value is not None and not is_asked:
            raise PlanError(f"{option} goes with {ways}")


def check_talk(quiet: bool, verbose: bool) -> None:
    """Fail where both nothing and more than usual is to be printed."""
    if quiet and verbose:
        raise PlanError("--quiet prints nothing and --verbose prints more; drop one of them")


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
