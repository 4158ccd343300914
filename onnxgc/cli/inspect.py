"""`onnxgc inspect`: the contents of a model, and the obstacles to training it."""

from enum import StrEnum

from rich.console import Console
from typer import Option

from onnxgc.api import inspect
from onnxgc.api.budget_plans import DEFAULT_DEVICE
from onnxgc.cli.arguments import (
    JSON,
    QUIET,
    REPORT,
    Model,
    Options,
    Reading,
    check_json_target,
    check_verbosity,
    console_for,
    progress_line,
    with_flat_options,
    write_json,
)
from onnxgc.errors import DurationError
from onnxgc.model.files.load import model_files
from onnxgc.model.weight_roles.classify import NOT_FLOATING
from onnxgc.report.data.inspect_report import InspectReport
from onnxgc.report.terminal.command_tables import card_table, operators_table, weights_table
from onnxgc.report.text.units import megabytes, shape_text
from onnxgc.runtime.other_runtimes import EFFECTS, RUNTIMES


class RuntimeName(StrEnum):
    """An execution provider of ONNX Runtime, or another runtime."""

    CPU = "cpu"
    CUDA = "cuda"
    WEB = "web"
    WEBGPU = "webgpu"
    OPENVINO = "openvino"
    IREE = "iree"


class _Report(Options, panel=REPORT):
    """The report."""

    json_target: str | None = JSON
    quiet: bool = QUIET
    provider: RuntimeName = Option(
        RuntimeName.CPU,
        help="With cuda, also show what a planned step makes a card do, and its expected time; with web (wasm), "
        "webgpu, openvino or iree, what that runtime cannot run.",
    )
    device: str | None = Option(None, help=f"With cuda, the card by its data sheet [default: {DEFAULT_DEVICE}].")
    verbose: bool = Option(False, "--verbose", "-v", help="List weights of other than floating types too.")


@with_flat_options
def inspect_command(model: Model, reading: Reading, shown: _Report) -> None:
    """Show weights, operators, peaks and obstacles to training.

    Of a training file, show its nodes, weights and peak.
    """
    check_verbosity(shown.quiet, shown.verbose)
    read = reading.arguments()
    check_json_target(shown.json_target, *model_files(model))
    if shown.device is not None and shown.provider is not RuntimeName.CUDA:
        raise DurationError("--device names a card; give --provider cuda with it, or leave it out")
    with progress_line() as notify:
        notify("inspecting")
        report = inspect(model, **read, provider=shown.provider, device=shown.device).as_json()
    console = console_for(shown.json_target, is_quiet=shown.quiet)
    _print(report, console, verbose=shown.verbose)
    if shown.provider in RUNTIMES:
        _print_limits(report, console, shown.provider)
    write_json(report, shown.json_target)


def _print_limits(report: InspectReport, console: Console, runtime: str) -> None:
    for effect, counts in report["limits"].items():
        listed = ", ".join(f"{name} ({count})" for name, count in counts.items())
        console.print(f"{runtime} {EFFECTS[effect]}: {listed}", markup=False)
    if not report["limits"]:
        console.print(f"{runtime} runs all operators of the step")
    elif report["limits"].keys() & {"fails", "wrong"}:
        console.print("`onnxgc optimize --portable` avoids MaxPool's indices, float64 and steep HardSigmoid")


def _print(report: InspectReport, console: Console, *, verbose: bool) -> None:
    # Shapes, axes and indices are never candidates for training.
    shown = [weight for weight in report["weights"] if weight["reason"] != NOT_FLOATING]
    console.print(weights_table(report["weights"] if verbose else shown))
    if report["operators"]:
        console.print(operators_table(report["operators"]))
    if report["card"]:
        console.print(card_table(report["card"]))
    for note in report["notes"]:
        console.print(f"note: {note}", markup=False)
    for fault in report["runtime_faults"]:
        console.print(f"wrong in a default session: {fault['detail']}", markup=False)
    for name, shape in report["inputs"].items():
        console.print(f"input {name}: {shape_text(shape)}", markup=False)
    roles = [weight["role"] for weight in shown]
    trained = sum(weight["bytes"] for weight in report["weights"] if weight["role"] == "parameter")
    console.print(f"parameters: {roles.count('parameter')} of {len(roles)} float weights, {megabytes(trained)}")
    baseline, planned = (report[step]["simulated_peak_bytes"] for step in ("regular", "planned"))
    if baseline is not None and planned is not None:
        console.print(f"simulated peak: baseline {megabytes(baseline)}, planned {megabytes(planned)} or less")
    elif planned is not None:
        console.print(f"simulated peak: {megabytes(planned)}")
    if report["left_to_the_cpu"]:
        listed = ", ".join(f"{name} ({count})" for name, count in report["left_to_the_cpu"].items())
        console.print(f"without a CUDA kernel at opset {report['opset']}: {listed}", markup=False)
    for obstacle in report["obstacles"]:
        console.print(f"obstacle: {obstacle}", markup=False)
