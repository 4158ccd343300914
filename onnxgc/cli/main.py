"""The `onnxgc` command: commands, and errors as one line and an exit code."""

from __future__ import annotations

import sys
from typing import Any, cast

import typer
from typer.core import TyperCommand

from onnxgc.cli.bench import bench_command
from onnxgc.cli.compare import compare_command
from onnxgc.cli.inspect import inspect_command
from onnxgc.cli.optimize import optimize_command
from onnxgc.cli.solve import solve_command
from onnxgc.cli.train import train_command
from onnxgc.cli.verify import verify_command
from onnxgc.errors import OnnxgcError

# What typer raises for a wrong option or argument; it has no public name.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[2]


class _Command(TyperCommand):
    """A command in which empty text is no value, but for a list of checkpoints that has none."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        left = super().parse_args(ctx, args)
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            texts = value if isinstance(value, list | tuple) else (value,)
            if parameter.name != "checkpoints" and any(isinstance(t, str) and not t.strip() for t in texts):
                raise typer.BadParameter("it is empty", ctx=ctx, param=cast(Any, parameter))
        return left


app = typer.Typer(
    name="onnxgc",
    help="Optimal gradient checkpoints for ONNX models: train larger networks in the memory you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("optimize", cls=_Command)(optimize_command)
app.command("inspect", cls=_Command)(inspect_command)
app.command("compare", cls=_Command)(compare_command)
app.command("solve", cls=_Command)(solve_command)
app.command("verify", cls=_Command)(verify_command)
app.command("bench", cls=_Command)(bench_command)
app.command("train", cls=_Command)(train_command)

_INTERRUPTED = 130
_WRONG_VALUES = {
    "value_error": "{error}",
    "int_parsing": "'{input}' is no whole number",
    "int_parsing_size": "'{input}' is no whole number",
    "float_parsing": "'{input}' is no number",
    "greater_than_equal": "'{input}' is not at least {ge:.15g}",
    "less_than_equal": "'{input}' is not at most {le:.15g}",
}
"""Kinds of values that typer refuses, in words."""


def _version(wanted: bool) -> None:
    if wanted:
        from onnxgc import __version__

        print(f"onnxgc {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Train networks that do not fit in memory, from any framework, without touching the model's code."""


def main() -> None:
    """Run the command line; an `OnnxgcError` becomes one line on stderr and its exit code."""
    try:
        code = app(standalone_mode=False)
        if code == _INTERRUPTED:
            raise KeyboardInterrupt  # typer has made an exit code of it.
        sys.exit(code)
    except OnnxgcError as error:
        _say(str(error))
        sys.exit(error.exit_code)
    except _USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            sys.exit(error.exit_code)
        _say(_usage(error))
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _say("interrupted")
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        sys.exit(1)


def _usage(error: Any) -> str:
    """A wrong use as one sentence, with the command whose help says more."""
    details: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    for found in details[:1]:
        # What typer checks values by speaks of its own insides.
        words = _WRONG_VALUES.get(found["type"], "{msg}")
        error.message = words.format(**{**found, **found.get("ctx", {})})
    context = error.ctx
    command = "" if context is None or context.parent is None else f" {context.info_name}"
    return f"{error.format_message().rstrip('.')}; see `onnxgc{command} --help`"


def _say(message: str) -> None:
    print(f"onnxgc: {' '.join(message.split())}", file=sys.stderr)


if __name__ == "__main__":
    main()
