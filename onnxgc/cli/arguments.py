"""Options that several commands share, their checks, and where output goes."""

import functools
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_type_hints

import typer
from rich.console import Console
from typer import Argument, Option

from onnxgc.api.budget_plans import DEFAULT_DEVICE, DEFAULT_SECONDS
from onnxgc.budget.search import DEFAULT_TIME_LIMIT_SECONDS
from onnxgc.emission.atomic_files import check_writable, write_text
from onnxgc.errors import NoParametersError, OutputFileError, PlanError, ShapeError
from onnxgc.report.terminal.fitted_table import FittedTable
from onnxgc.report.terminal.safe_console import SafeConsole
from onnxgc.report.text.text_table import Cells
from onnxgc.tracing.devices import DEVICES

MODEL, PLAN, DURATIONS, SEARCH, RUN, FILES, REPORT = (
    "Model", "Plan", "Durations (with a budget)", "Search", "Run", "Files", "Report"
)  # fmt: skip
"""Groups of options in `--help`."""


class Options:
    """Options that a command receives together: annotated attributes with a `typer.Option` each.

    Their group in `--help` is `panel` unless they state another. A boolean option is a flag.
    """

    panel = ""

    def __init_subclass__(cls, panel: str = "") -> None:
        cls.panel = panel or cls.panel

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)

    def values(self, *excluded: str) -> dict[str, Any]:
        """The options by name, except `excluded` ones; names of an enumeration are text."""
        found = {name: value for name, value in vars(self).items() if name not in excluded}
        return {name: value.value if isinstance(value, Enum) else value for name, value in found.items()}

    @classmethod
    def parameters(cls) -> Iterator[inspect.Parameter]:
        """The options as parameters of a command."""
        for name, kind in get_type_hints(cls).items():
            option = copy(getattr(cls, name))
            default = inspect.Parameter.empty if option.default is ... else option.default
            option.default = ...
            option.rich_help_panel = option.rich_help_panel or cls.panel
            if kind is bool and not option.param_decls:
                option.param_decls = (f"--{name.replace('_', '-')}",)
            yield inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
            )


def with_flat_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer reads it: the options of its `Options` are parameters of its own."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Options]] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if inspect.isclass(parameter.annotation) and issubclass(parameter.annotation, Options):
            groups[name] = parameter.annotation
            parameters += parameter.annotation.parameters()
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group({option.name: values.pop(option.name) for option in group.parameters()})
        command(**values)

    flat.__dict__["__signature__"] = inspect.Signature(parameters)
    return flat


def finite(value: float | None) -> float | None:
    """The number of an option; a lower limit alone admits infinity.

    Raises:
        typer.BadParameter: the number is not finite.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"'{value}' is not a finite number")
    return value


def time_limit_option(default: str = "") -> Any:
    text = f"Time limit of the solver in seconds{default and f' [default: {default}]'}."
    return Option(None, min=0.0, callback=finite, rich_help_panel=SEARCH, help=text)


class ProviderName(StrEnum):
    """An execution provider of ONNX Runtime."""

    CPU = "cpu"
    CUDA = "cuda"


class OptimizerName(StrEnum):
    """An optimizer whose updates a training file contains."""

    NONE = "none"
    SGD = "sgd"
    ADAMW = "adamw"
    ADAM = "adam"
    RMSPROP = "rmsprop"
    ADAGRAD = "adagrad"
    LION = "lion"


BUDGET_HELP = (
    "Minimise recomputation time within this memory budget: 8GiB, 500MB, 60% (of the baseline's peak), or "
    "min for the lowest peak found."
)
Model = Annotated[str, Argument(help="Forward ONNX model, exported by any framework.")]
LOSS = Option(
    "auto",
    help="Loss: auto, cross-entropy, mse, bce, l1, huber, smooth-l1, focal, cosine, with settings as in "
    "'cross-entropy(smoothing=0.1)', or the name of a scalar output.",
)
LOSS_MODEL = Option(
    None,
    rich_help_panel=MODEL,
    help="Loss from a second model: its only output, a scalar; its inputs are outputs of MODEL, and targets.",
)
TRAINABLE = Option(
    None,
    help="Train only the weights that match this glob; +GLOB trains them in addition, @FILE has one a line. "
    "Repeatable.",
)
FREEZE = Option(None, help="Do not train weights that match this glob; @FILE has one a line. Repeatable.")
FREEZE_BN = Option(False, help="Normalise by the file's running statistics and keep them; scale and shift still train.")
INPUT_SHAPES = Option(None, help="Shape of an input, such as x:64,3,224,224. Repeatable.")
BUDGET = Option(None, rich_help_panel=PLAN, help=BUDGET_HELP)
PLAN_FILE = Option(None, rich_help_panel=PLAN, help="Take the plan of a plan file or training file; no search.")
ORDER = Option(
    None,
    help="The order of operators: free (may differ from the model's) or fixed [default: free with a "
    "budget, else fixed].",
)
DEVICE = Option(
    None,
    rich_help_panel=DURATIONS,
    help=f"Durations from a data sheet: {', '.join(DEVICES)} [default: cpu, or on cuda {DEFAULT_DEVICE}].",
)
TIME_LIMIT_WITH_BUDGET = time_limit_option(
    f"{DEFAULT_SECONDS:.0f}, or {DEFAULT_TIME_LIMIT_SECONDS:.0f} with a budget and no --step-limit"
)
STEP_LIMIT = Option(
    None,
    min=0,
    rich_help_panel=SEARCH,
    help="With a budget, end the search after this many rounds: the result depends on the seed only.",
)
SEED = Option(0, min=0, max=2**32 - 1, rich_help_panel=SEARCH, help="Random seed.")
THREADS = Option(None, min=1, max=1024, rich_help_panel=RUN, help="Threads of each operator.")
UPDATES = Option(
    OptimizerName.NONE,
    rich_help_panel=FILES,
    help="Put this optimizer's updates into the file, with PyTorch's default settings; with none the file "
    "returns gradients.",
)
MARKDOWN = Option(False, rich_help_panel=REPORT, help="Print tables as Markdown.")
JSON = Option(None, "--json", rich_help_panel=REPORT, help="Write the figures as JSON; - for stdout.")
QUIET = Option(False, "--quiet", "-q", rich_help_panel=REPORT, help="Print errors only, and JSON where requested.")


class ReadArguments(TypedDict):
    """Arguments of the package's functions for reading a model."""

    loss: str
    trainable: Sequence[str]
    freeze: Sequence[str]
    freeze_bn: bool
    untie: bool
    input_shapes: Mapping[str, tuple[int, ...]]


class Reading(Options, panel=MODEL):
    """How a model is read."""

    loss: str = LOSS
    trainable: list[str] | None = TRAINABLE
    freeze: list[str] | None = FREEZE
    freeze_bn: bool = FREEZE_BN
    untie: bool = Option(
        False, help="Give each node its own copy of a parameter that several nodes use in the same role."
    )
    input_shapes: list[str] | None = INPUT_SHAPES

    def arguments(self) -> ReadArguments:
        """The options as arguments of the package's functions.

        Raises:
            ShapeError: the shapes are not valid.
        """
        return {
            "loss": self.loss,
            "trainable": globs_in(self.trainable),
            "freeze": globs_in(self.freeze),
            "freeze_bn": self.freeze_bn,
            "untie": self.untie,
            "input_shapes": parse_shapes(self.input_shapes or []),
        }


class CheckedReading(Reading):
    """How a model is read and tried."""

    no_check: bool = Option(False, help="Skip the trial run of the forward model before planning.")


def globs_in(texts: Sequence[str] | None) -> tuple[str, ...]:
    """The globs of an option; `@names.txt` stands for the lines of that file, except empty ones and comments (#).

    Raises:
        NoParametersError: the file cannot be read or has no names.
    """
    globs: list[str] = []
    for text in texts or ():
        if not text.startswith("@"):
            globs.append(text)
            continue
        try:
            lines = Path(text[1:]).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise NoParametersError(f"the list of weights '{text[1:]}' cannot be read: {reason}") from error
        names = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not names:
            raise NoParametersError(f"the list of weights '{text[1:]}' has no names; write one a line")
        globs += names
    return tuple(globs)


def names_in(text: str) -> tuple[str, ...]:
    """The names in a text such as `a,b,c`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


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
    return SafeConsole(
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
    console = SafeConsole(file=sys.stderr)
    if not console.is_terminal:
        yield lambda stage: None
        return
    with console.status("starting") as status:
        yield lambda stage: status.update(stage)
