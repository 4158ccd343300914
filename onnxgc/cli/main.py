"""The `onnxgc` command: commands, and errors as one line and an exit code."""

from __future__ import annotations

import sys

import typer

from onnxgc.cli.inspect import inspect_command
from onnxgc.cli.optimize import optimize_command
from onnxgc.cli.verify import verify_command
from onnxgc.errors import OnnxgcError

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
app.command("verify")(verify_command)


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
        app()
    except OnnxgcError as error:
        print(f"onnxgc: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
