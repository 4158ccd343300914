"""Memory and time of the baseline and a planned step, measured on this machine."""

import os
import platform
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper

from onnxgc import __version__
from onnxgc.api.budget_plans import DEFAULT_DEVICE, BudgetRequest
from onnxgc.api.feeds import feeds_of, feeds_of_updates
from onnxgc.api.pipeline import OptimizeResult, planned_model
from onnxgc.api.plan_options import PlanOptions, Progress
from onnxgc.api.planned_step import PlannedStep, emit, store_all_schedule
from onnxgc.api.read_options import ReadOptions
from onnxgc.budget.search import ignore_progress
from onnxgc.emission.atomic_files import write_model
from onnxgc.errors import RuntimeFailedError
from onnxgc.model.core.ir import Array
from onnxgc.model.draw_weights import draw_weights
from onnxgc.planning.order_choice import Order
from onnxgc.planning.simulate import simulate
from onnxgc.report.data.bench_report import BenchReport, ContenderFigures
from onnxgc.runtime.calibrate import device_name
from onnxgc.runtime.interleaved_timing import seconds_in_turns
from onnxgc.runtime.measure import Measurement, measure
from onnxgc.runtime.ort import SessionSettings, load_onnxruntime, providers_named
from onnxgc.tracing.optimizers import Optimizer

REGULAR, PLANNED = "the baseline", "the planned graph"
# Workspaces of kernels show in the first run, persistent memory in later ones.
_MEMORY_RUNS = 2
# Devices whose data sheets give durations by default.
_DEVICES = {"CPUExecutionProvider": "cpu"}


@dataclass(frozen=True, slots=True)
class Contender:
    """Simulated and measured figures of one training file.

    Activation peaks exclude parameter gradients, as in the literature. A figure that was not measured is
    None; `failure` is the reason if the file does not run.
    """

    simulated_peak_bytes: int
    simulated_activation_peak_bytes: int
    requested_peak_bytes: int | None = None
    in_use_peak_bytes: int | None = None
    activation_peak_bytes: int | None = None
    step_seconds: tuple[float, ...] = ()
    failure: str = ""

    @property
    def best_seconds(self) -> float | None:
        return min(self.step_seconds, default=None)

    @property
    def median_seconds(self) -> float | None:
        return statistics.median(self.step_seconds) if self.step_seconds else None

    def as_json(self, batch: int) -> ContenderFigures:
        best = self.best_seconds
        return {
            "simulated_peak_bytes": self.simulated_peak_bytes,
            "simulated_activation_peak_bytes": self.simulated_activation_peak_bytes,
            "measured_requested_bytes": self.requested_peak_bytes,
            "measured_in_use_bytes": self.in_use_peak_bytes,
            "measured_activation_bytes": self.activation_peak_bytes,
            "best_seconds": best,
            "median_seconds": self.median_seconds,
            "step_seconds": list(self.step_seconds),
            "samples_per_second": None if best is None else batch / best,
            "failure": self.failure or None,
        }


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The baseline and a plan, both in the plan's order, on one machine.

    `batch` is the first dimension of the first input that has one. `predicted_extra_ratio` is the predicted
    extra time, and `timing` the source of its durations. `threads` is None for ONNX Runtime's choice.
    `optimizer` is "" if the steps return gradients.
    """

    model: str
    inputs: Mapping[str, tuple[int, ...]]
    provider: str
    device: str
    threads: int | None
    runs: int
    warm_up: int
    seed: int
    solver: str
    status: str
    budget_bytes: int | None
    predicted_extra_ratio: float
    timing: str
    regular: Contender
    planned: Contender
    versions: Mapping[str, str]
    notes: tuple[str, ...] = field(default=())
    optimizer: str = ""
    state_bytes: int = 0

    @property
    def batch(self) -> int:
        return next((shape[0] for shape in self.inputs.values() if shape), 1)

    @property
    def time_ratio(self) -> float | None:
        """The planned step's time as a share of the baseline's: the median over pairs of steps.

        On a busy machine it varies less than ratios of best or median times.
        """
        pairs = zip(self.planned.step_seconds, self.regular.step_seconds, strict=False)
        ratios = [planned / regular for planned, regular in pairs]
        return statistics.median(ratios) if ratios else None

    def as_json(self) -> BenchReport:
        ratio = self.time_ratio
        return {
            "model": self.model,
            "inputs": {name: list(shape) for name, shape in self.inputs.items()},
            "batch": self.batch,
            "provider": self.provider,
            "device": self.device,
            "threads": self.threads,
            "cores": os.cpu_count(),
            "runs": self.runs,
            "warm_up": self.warm_up,
            "seed": self.seed,
            "solver": self.solver,
            "status": self.status,
            "optimizer": {"name": self.optimizer, "state_bytes": self.state_bytes} if self.optimizer else None,
            "budget_bytes": self.budget_bytes,
            "regular": self.regular.as_json(self.batch),
            "planned": self.planned.as_json(self.batch),
            "time_ratio": ratio,
            "extra_time_ratio": None if ratio is None else ratio - 1,
            "predicted_extra_time_ratio": self.predicted_extra_ratio,
            "timing": self.timing,
            "versions": dict(self.versions),
            "notes": list(self.notes),
        }


def bench(
    model: Any,
    *,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    budget: str | float | None = None,
    plan: Any = None,
    solver: str | None = None,
    objective: str | None = None,
    order: str = Order.FREE.value,
    device: str | None = None,
    calibrate: str | os.PathLike[str] | None = None,
    time_limit: float | None = None,
    step_limit: int | None = None,
    loss: str = "auto",
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
    freeze_bn: bool = False,
    untie: bool = False,
    optimizer: Optimizer | str | None = None,
    check: bool = True,
    provider: str | None = None,
    threads: int | None = None,
    runs: int = 5,
    warm_up: int = 2,
    seed: int = 0,
    progress: Progress | None = None,
) -> Benchmark:
    """Plan a model as `onnxgc.optimize` does, and measure a step of the baseline and of the plan.

    Each peak is measured in a separate process. Then both files run `warm_up` steps and `runs` timed steps,
    interleaved. `seed` draws the data, and weights that the file does not store. With an `optimizer` both
    steps update the parameters in place, and every peak includes its state.

    `provider` is `cpu` or `cuda`; None for CUDA where available. `threads` are those of each operator; None
    for ONNX Runtime's choice. Predicted durations are from the data sheet of `device`, by default a CPU's or
    on CUDA a card's, unless `calibrate` is given. Other arguments are those of `optimize`.

    Raises:
        RuntimeUnavailableError: the provider is unknown or not available.
        RuntimeFailedError: the planned file does not run; the baseline may fail.
        OnnxgcError: as `optimize`.
    """
    notify = progress or ignore_progress
    if runs < 1 or warm_up < 0:
        raise RuntimeFailedError(f"{runs} runs after {warm_up} warm-up runs measure nothing; give at least one run")
    settings = SessionSettings(threads=threads, providers=providers_named(provider))
    if device is None and calibrate is None:
        device = _DEVICES.get(settings.providers[0], DEFAULT_DEVICE)
    request = BudgetRequest.from_options(budget, order=order, device=device, calibrate=calibrate)
    # Without a budget, durations serve the prediction only.
    wanted = BudgetRequest(order=request.order) if budget is None else request
    how = PlanOptions.from_options(plan, solver, wanted, objective, (), time_limit, step_limit, seed, notify)
    read = ReadOptions.from_options(loss, trainable, freeze, freeze_bn, untie, optimizer, provider)
    result = planned_model(model, input_shapes, read, how, check=check)
    return _measured(result, request, settings, runs, warm_up, seed, notify)


def _measured(
    result: OptimizeResult,
    request: BudgetRequest,
    settings: SessionSettings,
    runs: int,
    warm_up: int,
    seed: int,
    progress: Progress,
) -> Benchmark:
    planned = result.planned
    durations, timing, note = request.durations(planned.traced.step)
    updates = planned.step.updates
    with tempfile.TemporaryDirectory() as folder:
        progress("writing")
        files = _write_files(result, Path(folder), seed)
        weights = {} if updates is None else _weights_in(files[PLANNED].path)
        feeds = feeds_of(planned, seed) | feeds_of_updates(planned, weights, seed)
        in_place = {} if updates is None else dict(updates.replaced)
        steps = _Steps(feeds, in_place, planned.state_bytes, settings, runs, warm_up)
        baseline, measured, failure_note = _run(files, steps, progress)
    notes = (*result.report["notes"], *_notes_on_order(planned, baseline), *filter(None, (note, failure_note)))
    return Benchmark(
        model=result.report["model"],
        inputs={name: planned.step.types[name].shape for name in planned.model.inputs},
        provider=settings.providers[0],
        device=device_name(settings.providers[0]),
        threads=settings.threads,
        runs=runs,
        warm_up=warm_up,
        seed=seed,
        solver=planned.solution.solver,
        status=planned.solution.status.value,
        optimizer="" if updates is None else updates.optimizer.name,
        state_bytes=planned.state_bytes,
        budget_bytes=None if planned.budget_bytes is None else planned.budget_bytes + planned.state_bytes,
        predicted_extra_ratio=planned.extra_time_ratio(durations),
        timing=timing,
        regular=baseline,
        planned=measured,
        versions={
            "onnxgc": __version__,
            "onnxruntime": str(load_onnxruntime().__version__),
            "onnx": version("onnx"),
            "python": platform.python_version(),
        },
        notes=tuple(dict.fromkeys(notes)),
    )


@dataclass(frozen=True, slots=True)
class _File:
    """A training file with its simulated figures.

    `gradient_bytes` are those of parameter gradients by node; None if gradients are not outputs.
    """

    name: str
    path: Path
    simulated: Contender
    gradient_bytes: Mapping[str, int] | None

    def failure(self, error: RuntimeFailedError) -> str:
        """The error's text without the path of the temporary file."""
        return str(error).replace(f"'{self.path}'", self.name)


def _write_files(result: OptimizeResult, folder: Path, seed: int) -> dict[str, _File]:
    planned = result.planned
    values = draw_weights(planned.model, seed, only_constant_filled=True)
    files: dict[str, _File] = {}
    for name, schedule in ((REGULAR, store_all_schedule(planned)), (PLANNED, planned.schedule)):
        model = emit(planned, schedule=schedule, values=values, options=result.options).model
        path = folder / f"{len(files)}.onnx"
        write_model(model, path)
        profile = simulate(schedule, planned.step.graph)
        simulated = Contender(profile.peak_bytes + planned.state_bytes, profile.activation_peak_bytes)
        gradient_bytes = _gradient_bytes(model, planned) if planned.step.updates is None else None
        files[name] = _File(name, path, simulated, gradient_bytes)
    return files


def _weights_in(path: Path) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def _gradient_bytes(model: onnx.ModelProto, planned: PlannedStep) -> dict[str, int]:
    """Bytes of parameter gradients by the node that outputs them."""
    sizes = {name: planned.step.types[name].size_bytes for name in planned.step.parameter_gradients.values()}
    bytes_of = {node.name: sum(sizes.get(name, 0) for name in node.output) for node in model.graph.node}
    return {name: size for name, size in bytes_of.items() if size}


@dataclass(frozen=True, slots=True)
class _Steps:
    """The conditions under which both files run."""

    feeds: Mapping[str, Array]
    in_place: Mapping[str, str]
    state_bytes: int
    settings: SessionSettings
    runs: int
    warm_up: int

    def seconds(self, paths: Mapping[str, Path]) -> dict[str, tuple[float, ...]]:
        return seconds_in_turns(
            paths, self.feeds, settings=self.settings, runs=self.runs, warm_up=self.warm_up, in_place=self.in_place
        )


def _run(files: Mapping[str, _File], steps: _Steps, progress: Progress) -> tuple[Contender, Contender, str]:
    """Figures of the baseline and the plan, and a note on deviations, or "".

    The baseline may fail for lack of memory.
    """
    contenders: dict[str, Contender] = {}
    for name, file in reversed(list(files.items())):
        progress(f"running {name}")
        try:
            measured = measure(
                file.path, steps.feeds, settings=steps.settings, runs=_MEMORY_RUNS, in_place=steps.in_place
            )
            contenders[name] = _contender(file, measured, steps.state_bytes)
        except RuntimeFailedError as error:
            if name == PLANNED:
                raise RuntimeFailedError(file.failure(error)) from error
            contenders[name] = replace(file.simulated, failure=file.failure(error))
    progress(f"timing {steps.runs} steps of each after {steps.warm_up} to warm up")
    timed = {name: file for name, file in files.items() if not contenders[name].failure}
    seconds, note = _seconds(timed, steps)
    baseline, planned = (replace(contenders[name], step_seconds=seconds.get(name, ())) for name in (REGULAR, PLANNED))
    return baseline, planned, note


def _seconds(files: Mapping[str, _File], steps: _Steps) -> tuple[dict[str, tuple[float, ...]], str]:
    """Seconds of interleaved steps, or of one file after the other if both together are too large."""
    paths = {name: file.path for name, file in files.items()}
    with suppress(RuntimeFailedError):
        return steps.seconds(paths), ""
    seconds: dict[str, tuple[float, ...]] = {}
    for name, path in paths.items():
        try:
            seconds |= steps.seconds({name: path})
        except RuntimeFailedError as error:
            raise RuntimeFailedError(files[name].failure(error)) from error
    return seconds, "the two files do not run together, so one was timed after the other"


def _contender(file: _File, measured: Measurement, state_bytes: int) -> Contender:
    if not measured.requested_peak_bytes:
        return file.simulated
    return replace(
        file.simulated,
        requested_peak_bytes=measured.requested_peak_bytes + state_bytes,
        in_use_peak_bytes=measured.in_use_peak_bytes + state_bytes,
        activation_peak_bytes=None
        if file.gradient_bytes is None
        else measured.requested_peak_without(file.gradient_bytes),
    )


def _notes_on_order(planned: PlannedStep, baseline: Contender) -> list[str]:
    own = planned.regular_profile.peak_bytes + planned.state_bytes
    if own == baseline.simulated_peak_bytes:
        return []
    return [
        f"both run in the plan's order; in the model's own order the baseline's simulated peak is {own / 1e6:,.1f} MB"
    ]
