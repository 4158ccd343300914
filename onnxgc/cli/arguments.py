"""Options that several commands share, their checks, and where output goes."""

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

from onnxgc.api.budget_plans import DEFAULT_DEVICE
from onnxgc.emission.atomic_files import check_writable, write_text
from onnxgc.errors import OutputFileError, PlanError, ShapeError
from onnxgc.planning.order_choice import Order
from onnxgc.report.terminal.fitted_table import FittedTable
from onnxgc.report.text.text_table import Cells
from onnxgc.tracing.devices import DEVICES


def finite(value: float | None) -> float | None:
    """The number of an option; a lower limit alone admits infinity.

    Raises:
        typer.BadParameter: the number is not finite.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"'{value}' is not a finite number")
    return value


MODEL, PLAN, DURATIONS, SEARCH, RUN, FILES, REPORT = (
    "Model", "Plan", "Durations (with a budget)", "Search", "Run", "Files", "Report"
)  # fmt: skip
"""Groups of options in `--help`."""


def budget_option(more: str = "") -> Any:
    return typer.Option(
        rich_help_panel=PLAN,
        help="Minimise recomputation time within this memory budget: 8GiB, 500MB, 60% (of the baseline's "
        f"peak), or min for the lowest peak found.{more}",
    )


def time_limit_option(default: str) -> Any:
    return typer.Option(
        min=0.0,
        callback=finite,
        rich_help_panel=SEARCH,
        help=f"Time limit of the solver in seconds{default and f' [default: {default}]'}.",
    )


Model = Annotated[str, typer.Argument(help="Forward ONNX model, exported by any framework.")]
Loss = Annotated[
    str,
    typer.Option(
        rich_help_panel=MODEL,
        help="Loss: auto, cross-entropy, mse, bce, l1, or the name of a scalar output.",
    ),
]
Trainable = Annotated[
    list[str] | None,
    typer.Option(
        rich_help_panel=MODEL,
        help="Train only the weights that match this glob; +GLOB trains them in addition. Repeatable.",
    ),
]
Freeze = Annotated[
    list[str] | None,
    typer.Option(rich_help_panel=MODEL, help="Do not train weights that match this glob. Repeatable."),
]
FreezeBn = Annotated[
    bool,
    typer.Option(
        "--freeze-bn",
        rich_help_panel=MODEL,
        help="Normalise by the file's running statistics and keep them; scale and shift still train.",
    ),
]
Untie = Annotated[
    bool,
    typer.Option(
        "--untie",
        rich_help_panel=MODEL,
        help="Give each node its own copy of a parameter that several nodes use in the same role.",
    ),
]
InputShapes = Annotated[
    list[str] | None,
    typer.Option(rich_help_panel=MODEL, help="Shape of an input, such as x:64,3,224,224. Repeatable."),
]
Plan = Annotated[
    str | None,
    typer.Option(rich_help_panel=PLAN, help="Take the plan of a plan file or training file; no search."),
]
Device = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=DURATIONS,
        help=f"Durations from a data sheet: {', '.join(DEVICES)} [default: {DEFAULT_DEVICE}].",
    ),
]
OrderWithBudget = Annotated[
    Order | None,
    typer.Option(
        "--order",
        rich_help_panel=PLAN,
        help="With a budget, the order of operators: free (may differ from the model's) or fixed "
        "[default: free].",
    ),
]
StepLimit = Annotated[
    int | None,
    typer.Option(
        min=0,
        rich_help_panel=SEARCH,
        help="With a budget, end the search after this many rounds: the result depends on the seed only.",
    ),
]


class OptimizerName(StrEnum):
    """An optimizer whose updates a training file contains."""

    NONE = "none"
    SGD = "sgd"
    ADAMW = "adamw"


Updates = Annotated[
    OptimizerName,
    typer.Option(
        rich_help_panel=FILES,
        help="Put this optimizer's updates into the file, with PyTorch's default settings; with none the "
        "file returns gradients.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, rich_help_panel=SEARCH, help="Random seed.")]
Threads = Annotated[
    int | None, typer.Option(min=1, max=1024, rich_help_panel=RUN, help="Threads of each operator.")
]
NoCheck = Annotated[
    bool,
    typer.Option(
        "--no-check", rich_help_panel=MODEL, help="Skip the trial run of the forward model before planning."
    ),
]
Markdown = Annotated[
    bool, typer.Option("--markdown", rich_help_panel=REPORT, help="Print tables as Markdown.")
]
JsonTarget = Annotated[
    str | None,
    typer.Option("--json", rich_help_panel=REPORT, help="Write the figures as JSON; - for stdout."),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", rich_help_panel=REPORT, help="Print errors only, and JSON where requested."
    ),
]
MAX_DIMENSION = 2**31 - 1
_SHAPE = re.compile(r"(?P<name>.+):(?P<shape>([0-9]+([,x][0-9]+)*)?)")


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shapes by input; blanks separate several in one text.

    >>> parse_shapes(["x:64,3,224,224 y:64x10"])
    {'x': (64, 3, 224, 224), 'y': (64, 10)}

    Raises:
        ShapeError: the text has another form, a dimension is out of range, or an input has two shapes.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for given in texts:
        # A name may contain blanks: they separate shapes only where each part is one.
        parts = given.split()
        for text in parts if all(_SHAPE.fullmatch(part) for part in parts) else [given]:
            match = _SHAPE.fullmatch(text)
            if match is None:
                raise ShapeError(f"'{text}' is not a valid shape; write x:64,3,224,224 or x:64x3x224x224")
            name = match["name"]
            shape = tuple(int(size) for size in re.findall("[0-9]+", match["shape"]))
            if any(not 1 <= size <= MAX_DIMENSION for size in shape):
                raise ShapeError(f"the shape '{text}' has a dimension that is not from 1 to {MAX_DIMENSION}")
            if name in shapes:
                raise ShapeError(f"input '{name}' has two shapes; give --input-shapes once for each input")
            shapes[name] = shape
    return shapes


def console_for(json_target: str | None, *, is_quiet: bool = False) -> Console:
    """A console on stdout, or on stderr if JSON goes to stdout; it prints nothing if quiet."""
    # Names of tensors and files may contain brackets, which are not markup.
    return Console(
        file=sys.stderr if json_target == "-" else sys.stdout,
        soft_wrap=False,
        highlight=False,
        markup=False,
        quiet=is_quiet,
    )


Writer = Callable[[str | Cells], None]


def writer_to(console: Console, *, markdown: bool) -> Writer:
    """A function that prints lines and tables, as Markdown where requested."""

    def write(item: str | Cells) -> None:
        if isinstance(item, str):
            # A star at the start of a line would begin a nested list.
            line = f"- \\{item}" if item.startswith("*") else f"- {item}"
            console.print(line if markdown else item, markup=False, soft_wrap=markdown)
        elif markdown:
            console.print(f"\n{item.markdown()}\n", markup=False, soft_wrap=True)
        else:
            console.print(item.title, markup=False)
            console.print(FittedTable(item))

    return write


def check_json_target(target: str | None, *others: str | None) -> None:
    """Fail before any work if the JSON file is not writable or is one of the `others`."""
    if target != "-":
        check_target("--json", target, *others)


def check_target(option: str, target: str | None, *others: str | None) -> None:
    """Fail before any work if the file of an option is not writable or is one of the `others`."""
    if target is not None:
        check_distinct(option, target, *others)
        check_writable(target)


def check_distinct(option: str, target: str | None, *others: str | None) -> None:
    """Fail before any work if the file of an option is `-` or one of the `others`."""
    if target == "-":
        raise OutputFileError(f"{option} '-': only --json writes to standard output; give a file name")
    for other in filter(None, others):
        if target is not None and os.path.realpath(target) == os.path.realpath(other):
            raise OutputFileError(
                f"{option} '{target}' is one of the files that are read or written; give another name"
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


def check_needs_budget(has_budget: bool, given: Mapping[str, object], remedy: str) -> None:
    """Fail before any work if options that apply to a budget are given without one.

    `remedy` names the options that set a budget, with an example.
    """
    for option, value in given.items():
        if value is not None and not has_budget:
            raise PlanError(f"{option} applies to a budget only; add {remedy}")


def check_verbosity(quiet: bool, verbose: bool) -> None:
    if quiet and verbose:
        raise PlanError("--quiet prints nothing and --verbose prints more; drop one of them")


def given_options(context: typer.Context, *excluded: str) -> tuple[tuple[str, str], ...]:
    """The options given on the command line with their values, except those with `excluded` names."""
    given: list[tuple[str, str]] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        if name in excluded or parameter.param_type_name != "option":
            continue
        source = context.get_parameter_source(name)
        # By name: Typer has its own enumeration of sources.
        if source is not None and source.name == "COMMANDLINE":
            given.append((parameter.opts[0], _as_text(context.params[name])))
    return tuple(given)


def _as_text(value: object) -> str:
    if value is True:
        return ""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A function that shows the current stage in a line on stderr, if stderr is a terminal."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with console.status("starting") as status:
        yield lambda stage: status.update(stage)
