"""The `onnxgc` command: commands, and errors as one line and an exit code."""

import os
import sys
from typing import Any, cast

import typer
from typer.core import TyperCommand

from onnxgc.cli.bench import bench_command
from onnxgc.cli.compare import compare_command
from onnxgc.cli.export import export_command
from onnxgc.cli.inspect import inspect_command
from onnxgc.cli.optimize import optimize_command
from onnxgc.cli.solve import solve_command
from onnxgc.cli.train import train_command
from onnxgc.cli.verify import verify_command
from onnxgc.errors import OnnxgcError
from onnxgc.report.text.printable import printable

# Base of typer's errors for wrong options and arguments; it has no public name.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[2]


class _Command(TyperCommand):
    """A command that rejects empty values and shows its options in groups."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        remaining = super().parse_args(ctx, args)
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            texts = value if isinstance(value, list | tuple) else (value,)
            # An empty list of checkpoints is a plan.
            if parameter.name != "checkpoints" and any(isinstance(t, str) and not t.strip() for t in texts):
                raise typer.BadParameter("the value is empty", ctx=ctx, param=cast(Any, parameter))
        return remaining

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            is_argument = parameter.param_type_name == "argument"
            name = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or "Options"
            if record is not None:
                groups.setdefault(name, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


app = typer.Typer(
    name="onnxgc",
    help="Train larger ONNX models in the memory you have, by optimal gradient checkpoints.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    # Rich's panels are too narrow for the options of `optimize`; `_Command` groups them as plain text.
    rich_markup_mode=None,
)
app.command("optimize", cls=_Command)(optimize_command)
app.command("inspect", cls=_Command)(inspect_command)
app.command("compare", cls=_Command)(compare_command)
app.command("solve", cls=_Command)(solve_command)
app.command("verify", cls=_Command)(verify_command)
app.command("bench", cls=_Command)(bench_command)
app.command("train", cls=_Command)(train_command)
app.command("export", cls=_Command)(export_command)

_INTERRUPTED = 130
_NO_RESOURCES = 1
_WRONG_VALUES = {
    "value_error": "{error}",
    "int_parsing": "'{input}' is not an integer",
    "int_parsing_size": "'{input}' is not an integer",
    "float_parsing": "'{input}' is not a number",
    "greater_than_equal": "'{input}' is not at least {ge:.15g}",
    "less_than_equal": "'{input}' is not at most {le:.15g}",
}
"""Messages for values that typer rejects, by kind of error."""


def _version(wanted: bool) -> None:
    if wanted:
        from onnxgc import __version__

        print(f"onnxgc {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options of `onnxgc` itself."""


def main() -> None:
    """Run the command line; an `OnnxgcError` becomes one line on stderr and its exit code."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
        if code == _INTERRUPTED:
            raise KeyboardInterrupt  # typer returns an exit code instead.
        sys.exit(code)
    except OnnxgcError as error:
        _print_error(str(error))
        sys.exit(error.exit_code)
    except _USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            sys.exit(error.exit_code)
        _print_error(_usage_text(error))
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _print_error("interrupted")
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        _discard_output()
        sys.exit(1)
    except MemoryError:
        _print_error("there is not enough memory; raise the limit of memory, or choose a smaller model")
        sys.exit(_NO_RESOURCES)
    except OSError as error:
        _discard_output()
        _print_error(f"{error.filename or 'the output'}: {error.strerror or error}")
        sys.exit(_NO_RESOURCES)


def _discard_output() -> None:
    """Redirects standard output, which cannot be written, so that the interpreter's last flush succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _usage_text(error: Any) -> str:
    """A usage error as one sentence that names the command's help."""
    details: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    for detail in details[:1]:
        # The messages of typer's validator name its internals.
        message = _WRONG_VALUES.get(detail["type"], "{msg}")
        error.message = message.format(**{**detail, **detail.get("ctx", {})})
    context = error.ctx
    command = "" if context is None or context.parent is None else f" {context.info_name}"
    return f"{error.format_message().rstrip('.')}; see `onnxgc{command} --help`"


def _print_error(message: str) -> None:
    print(f"onnxgc: {printable(' '.join(message.split()))}", file=sys.stderr)


if __name__ == "__main__":
    main()
