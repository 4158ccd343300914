"""The lists of docs/reference.md: commands, solvers and operators, from the code."""

from typing import Any

import typer.main

from onnxgc.cli.main import app
from onnxgc.gradients.registry import RULES, STOPS
from onnxgc.model.opset.convert_opset import EXPANDED_ALWAYS
from onnxgc.model.static_shapes.decompositions import DECOMPOSITIONS
from onnxgc.solvers.base import Solver
from onnxgc.solvers.registry import SOLVERS
from onnxgc.solvers.reversal_schedule import ReversalObjective
from scripts.benchmarking.tables import markdown_table

_EXPANDED_WHILE_READING = ("GRU", "If", "LSTM", "Loop", "RNN", "Scan")


def commands() -> str:
    """Every command with its arguments and purpose, as in `--help`."""
    # `Any`: typer renames classes of click.
    group: Any = typer.main.get_command(app)
    rows = []
    for name, command in group.commands.items():
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        call = " ".join([name, *(_placeholder(argument) for argument in arguments)])
        rows.append([f"`onnxgc {call}`", command.help.splitlines()[0]])
    return markdown_table(["command", "purpose"], rows, figures=False)


def solvers() -> str:
    """Every solver with the graphs that it accepts, its objectives and its optimality."""
    rows = [
        [
            f"`{solver.name}`",
            solver.summary,
            _accepted_graphs(solver),
            ", ".join(objective.value for objective in solver.objectives),
            _optimality(solver),
            "yes" if solver.takes_budget else "",
        ]
        for solver in SOLVERS.values()
    ]
    headings = ["solver", "method", "graphs", "objectives", "optimal", "budget"]
    return markdown_table(headings, rows, figures=False)


def operators() -> str:
    """Operators with a gradient, by a rule or by decomposition, and operators without one."""
    expanded = {*DECOMPOSITIONS, *EXPANDED_ALWAYS, *_EXPANDED_WHILE_READING}
    rules, stops, others = (
        ", ".join(f"`{name}`" for name in sorted(names))
        for names in ([name for name in RULES if "." not in name], STOPS, expanded)
    )
    return (
        f"Gradient rules: {rules}.\n\nDecomposed into other operators when a model is read: {others}, "
        "sequences, and functions of ONNX that opset 18 lacks (`Attention`, `Gelu`, `RMSNormalization`, "
        f"`RotaryEmbedding`, `Swish`, ...).\n\nNo gradient flows through {stops}, nor through integers and "
        "Booleans."
    )


def _placeholder(argument: Any) -> str:
    name = f"{argument.name.upper()}{'...' if argument.nargs == -1 else ''}"
    return name if argument.required else f"[{name}]"


def _accepted_graphs(solver: Solver) -> str:
    if solver.max_vertices is not None:
        return f"up to {solver.max_vertices} tensors"
    return solver.family.value


def _optimality(solver: Solver) -> str:
    if isinstance(solver.exact_for, ReversalObjective):
        return "as a nested schedule"
    if solver.exact_for is None:
        return "no"
    return "always" if solver.exact_on is solver.family else f"on {solver.exact_on.value}"
