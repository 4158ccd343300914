"""What docs/reference.md lists, from the code: commands, solvers and operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer.main

from onnxgc.cli.main import app
from onnxgc.gradients.registry import RULES, STOPS
from onnxgc.model.opset.target import EXPANDED_ALWAYS
from onnxgc.model.static_shapes.decompositions import SPELLINGS
from onnxgc.solvers.chain_reversal import ReversalObjective
from onnxgc.solvers.registry import SOLVERS
from scripts.benchmarking.tables import markdown_table


def commands(folder: Path) -> str:
    """Every command with its arguments and options, as `--help` tells them."""
    del folder
    # `Any`: typer gives its own names to what it has from click.
    group: Any = typer.main.get_command(app)
    return "\n\n".join(_command(name, command) for name, command in group.commands.items())


def _command(name: str, command: Any) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    call = " ".join([name, *(_placeholder(argument) for argument in arguments)])
    rows = [[f"`{parameter.name.upper()}`", parameter.help] for parameter in arguments]
    for option in options:
        names = ", ".join(f"`{spelling}`" for spelling in (*option.opts, *option.secondary_opts))
        default = (
            f" [default: {getattr(option.default, 'value', option.default)}]"
            if _shows_default(option)
            else ""
        )
        rows.append([names, f"{option.help}{default}"])
    table = markdown_table(
        ["argument or option", "what it does"],
        [[first, text.replace("|", "\\|")] for first, text in rows],
        figures=False,
    )
    return f"### `onnxgc {call}`\n\n{command.help}\n\n{table}"


def _placeholder(argument: Any) -> str:
    name = f"{argument.name.upper()}{'...' if argument.nargs == -1 else ''}"
    return name if argument.required else f"[{name}]"


def _shows_default(option: Any) -> bool:
    return bool(option.show_default) and option.default not in (None, False, ())


def solvers(folder: Path) -> str:
    """Which solver takes what, and what its plan is optimal for."""
    del folder
    rows = []
    for solver in SOLVERS.values():
        optimal = "no"
        if isinstance(solver.exact_for, ReversalObjective):
            optimal = "as a nested schedule"
        elif solver.exact_for is not None:
            optimal = "always" if solver.exact_on is solver.family else f"on {solver.exact_on.value}"
        accepts = solver.family.value
        if solver.max_vertices is not None:
            accepts = f"graphs of up to {solver.max_vertices} tensors"
        objectives = ", ".join(objective.value for objective in solver.objectives)
        budget = "yes" if solver.takes_budget else ""
        rows.append([f"`{solver.name}`", solver.summary, accepts, objectives, optimal, budget])
    headings = ["solver", "how it chooses", "takes", "objective", "optimal", "takes a budget"]
    return markdown_table(headings, rows, figures=False)


def operators(folder: Path) -> str:
    """Which operators a gradient passes, by a rule or written in others, and which stop it."""
    del folder
    rules = ", ".join(f"`{name}`" for name in sorted(RULES) if "." not in name)
    stops = ", ".join(f"`{name}`" for name in sorted(STOPS))
    written = sorted({*SPELLINGS, *EXPANDED_ALWAYS, "GRU", "If", "LSTM", "Loop", "RNN", "Scan"})
    others = ", ".join(f"`{name}`" for name in written)
    return (
        f"Gradient rules: {rules}.\n\nWritten in other operators while reading: {others}, sequences, and "
        "what ONNX defines by other operators and opset 18 lacks (`Attention`, `Gelu`, `RMSNormalization`, "
        f"`RotaryEmbedding`, `Swish`, ...).\n\nNo gradient flows through {stops}, nor through integers and "
        "Booleans."
    )
