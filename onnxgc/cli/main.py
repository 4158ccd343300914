"""The `onnxgc` command: commands, and errors as one line and an exit code."""

from __future__ import annotations

import sys
from typing import Any

import typer

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

app = typer.Typer(
    name="onnxgc",
    help="Optimal gradient checkpoints for ONNX models: train larger networks in the memory you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("optimize")(optimize_command)
app.command("inspect")(inspect_command)
app.command("compare")(compare_command)
app.command("solve")(solve_command)
app.command("verify")(verify_command)
app.command("bench")(bench_command)
app.command("train")(train_command)

_INTERRUPTED = 130


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
        _say(f"{error.format_message().rstrip('.')}; see `onnxgc --help`")
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _say("interrupted")
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        sys.exit(1)


def _say(message: str) -> None:
    print(f"onnxgc: {' '.join(message.split())}", file=sys.stderr)


if __name__ == "__main__":
    main()
