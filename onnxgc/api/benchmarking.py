"""A model's training step as it runs here: storing everything beside a plan, memory and time."""

from __future__ import annotations

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
from onnxgc.api.budgeting import DEFAULT_DEVICE, BudgetRequest, check_times
from onnxgc.api.feeds import feeds_of, feeds_of_updates
from onnxgc.api.pipeline import (
    OptimizeResult,
    PlannedStep,
    Progress,
    emit,
    optimize,
    store_all_schedule,
)
from onnxgc.emission.write import write_model
from onnxgc.errors import RuntimeFailedError
from onnxgc.model.core.ir import Array
from onnxgc.model.weight_roles.initialization import draw_weights
from onnxgc.planning.order import Order
from onnxgc.planning.schedule import Schedule
from onnxgc.planning.simulate import MemoryProfile, simulate
from onnxgc.runtime.calibration_run import device_name
from onnxgc.runtime.interleaved_timing import seconds_in_turns
from onnxgc.runtime.measure import Measurement, measure
from onnxgc.runtime.ort import SessionSettings, load_onnxruntime, providers_named
from onnxgc.tracing.devices import device as find_device
from onnxgc.tracing.optimizers import Optimizer

REGULAR, PLANNED = "the graph that stores everything", "the planned graph"
# Kernels' workspaces show in the first run, what lasts in every later one.
_MEMORY_RUNS = 2
# Whose data sheet tells the times, where nothing else is given.
_DEVICES = {"CPUExecutionProvider": "cpu"}


@dataclass(frozen=True, slots=True)
class Contender:
    """One training file: what the judge says of its memory, and what was measured.

    Activation peaks are without the parameters' gradients, as the literature has them. What was not
    measured is None, and no seconds: `failure` says why if the file does not run.
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

    def as_json(self, batch: int) -> dict[str, Any]:
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
    """Storing everything beside a plan, both in the plan's order, on one machine.

    `batch` is the first dimension of the first input that has one. `predicted_extra_ratio` is the time of
    what runs again as a share of the step's, by the times that `timing` names. `threads` are None where
    ONNX Runtime chooses their number. `optimizer` is "" where the steps return gradients.
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
        """What the plan's step takes of one that stores everything: the median over the turns.

        On a machine that is not quiet it varies less than ratios of best or of median times do.
        """
        turns = zip(self.planned.step_seconds, self.regular.step_seconds, strict=False)
        ratios = [planned / regular for planned, regular in turns]
        return statistics.median(ratios) if ratios else None

    def as_json(self) -> dict[str, Any]:
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
            "optimizer": {"name": self.optimizer, "state_bytes": self.state_bytes}
            if self.optimizer
            else None,
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
    """Plan a model as `onnxgc.optimize` does, and run a training step that stores everything and the plan's.

    Each peak is measured in a process of its own. Then both files take `warm_up` steps and `runs` that
    are timed, in turns. `provider` is cpu or cuda; without it CUDA where this machine has it. Weights
    that the file does not store are drawn by `seed`, like the data. Where neither `device` nor
    `calibrate` says where predicted times come from, they are the data sheet's of a CPU, or of a card.
    With an `optimizer` both steps update the parameters, in place, and its state is in every peak.
    The other options are those of `optimize`.

    Raises:
        RuntimeUnavailableError: the provider is unknown or not here.
        RuntimeFailedError: the planned file does not run; one that stores everything may fail.
        OnnxgcError: what `optimize` raises.
    """
    tell = progress or (lambda stage: None)
    if runs < 1 or warm_up < 0:
        raise RuntimeFailedError(
            f"{runs} runs after {warm_up} to warm up time nothing; give at least one run"
        )
    check_times(device, calibrate)
    settings = SessionSettings(threads=threads, providers=providers_named(provider))
    if device is None and calibrate is None:
        device = _DEVICES.get(settings.providers[0], DEFAULT_DEVICE)
    result = optimize(
        model,
        dry_run=True,
        input_shapes=input_shapes,
        budget=budget,
        plan=plan,
        solver=solver,
        objective=objective,
        order=order,
        # Else they are for the prediction alone.
        device=None if budget is None else device,
        calibrate=None if budget is None else calibrate,
        time_limit=time_limit,
        step_limit=step_limit,
        loss=loss,
        trainable=trainable,
        freeze=freeze,
        freeze_bn=freeze_bn,
        untie=untie,
        optimizer=optimizer,
        check=check,
        seed=seed,
        progress=tell,
    )
    planned, types = result.planned, result.planned.step.types
    # A plan that was not asked for by memory or time knows of no times.
    request = replace(
        planned.request,
        device=None if device is None else find_device(device),
        calibrate=None if calibrate is None else os.fspath(calibrate),
    )
    extra, timing, note = _predicted(planned, request)
    with tempfile.TemporaryDirectory() as folder:
        tell("writing")
        files = _written(result, Path(folder), seed)
        updates = planned.step.updates
        weights = {} if updates is None else _weights_in(files[PLANNED].path)
        feeds = feeds_of(planned, seed) | feeds_of_updates(planned, weights, seed)
        in_place = {} if updates is None else dict(updates.replaced)
        taken = _Steps(feeds, in_place, settings, runs, warm_up)
        regular, found, failed = _run(files, taken, tell)
    notes = (*result.report["notes"], *_notes_on_order(planned, regular), *filter(None, (note, failed)))
    return Benchmark(
        model=result.report["model"],
        inputs={name: types[name].shape for name in planned.model.inputs},
        provider=settings.providers[0],
        device=device_name(settings.providers[0]),
        threads=threads,
        runs=runs,
        warm_up=warm_up,
        seed=seed,
        solver=planned.solution.solver,
        status=planned.solution.status.value,
        optimizer="" if updates is None else updates.optimizer.name,
        state_bytes=planned.state_bytes,
        budget_bytes=None if planned.budget_bytes is None else planned.budget_bytes + planned.state_bytes,
        predicted_extra_ratio=extra,
        timing=timing,
        regular=regular,
        planned=found,
        versions={
            "onnxgc": __version__,
            "onnxruntime": str(load_onnxruntime().__version__),
            "onnx": version("onnx"),
            "python": platform.python_version(),
        },
        notes=tuple(dict.fromkeys(notes)),
    )


def _predicted(planned: PlannedStep, request: BudgetRequest) -> tuple[float, str, str]:
    """What runs again as a share of the step's time, where the times come from, and a note or ""."""
    durations, timing, note = request.durations(planned.traced.step)
    extra = sum(durations[step.source] for step in planned.schedule.recomputed)
    return extra / max(sum(durations.values()), 1), timing, note


@dataclass(frozen=True, slots=True)
class _File:
    """A training file, the judge's view of it, and which node makes how many bytes of gradients for good.

    Where they are no outputs that is None. `state_bytes` are those of an optimizer.
    """

    name: str
    path: Path
    profile: MemoryProfile
    gradient_bytes: Mapping[str, int] | None
    state_bytes: int

    def failure(self, error: RuntimeFailedError) -> str:
        """What the error says, in words that outlive the file."""
        return str(error).replace(f"'{self.path}'", self.name)


def _written(result: OptimizeResult, folder: Path, seed: int) -> dict[str, _File]:
    planned = result.planned
    values = draw_weights(planned.model, seed, only_constant_filled=True)
    schedules = {REGULAR: store_all_schedule(planned), PLANNED: planned.schedule}
    return {
        name: _file(result, name, schedule, values, folder / f"{number}.onnx")
        for number, (name, schedule) in enumerate(schedules.items())
    }


def _file(
    result: OptimizeResult, name: str, schedule: Schedule, values: Mapping[str, Array], path: Path
) -> _File:
    planned = result.planned
    model = emit(planned, schedule=schedule, values=values, options=result.options).model
    write_model(model, path)
    profile = simulate(schedule, planned.step.graph)
    gradient_bytes = _gradient_bytes(model, planned) if planned.step.updates is None else None
    return _File(name, path, profile, gradient_bytes, planned.state_bytes)


def _weights_in(path: Path) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def _gradient_bytes(model: onnx.ModelProto, planned: PlannedStep) -> dict[str, int]:
    """Bytes of parameters' gradients by the node that makes them."""
    sizes = {name: planned.step.types[name].size_bytes for name in planned.step.parameter_gradients.values()}
    made = {node.name: sum(sizes.get(name, 0) for name in node.output) for node in model.graph.node}
    return {name: size for name, size in made.items() if size}


@dataclass(frozen=True, slots=True)
class _Steps:
    """How steps are taken: what is fed, what is written in place, and how many are timed after how many."""

    feeds: Mapping[str, Array]
    in_place: Mapping[str, str]
    settings: SessionSettings
    runs: int
    warm_up: int

    def seconds(self, paths: Mapping[str, Path]) -> dict[str, tuple[float, ...]]:
        return seconds_in_turns(
            paths,
            self.feeds,
            settings=self.settings,
            runs=self.runs,
            warm_up=self.warm_up,
            in_place=self.in_place,
        )


def _run(files: Mapping[str, _File], taken: _Steps, tell: Progress) -> tuple[Contender, Contender, str]:
    """Both files measured and timed, and a note where that went another way than it should.

    A file that stores everything may take more memory than there is, which is what plans are for.
    """
    contenders: dict[str, Contender] = {}
    for name, file in reversed(list(files.items())):
        tell(f"running {name}")
        try:
            measured = measure(
                file.path, taken.feeds, settings=taken.settings, runs=_MEMORY_RUNS, in_place=taken.in_place
            )
            contenders[name] = _contender(file, measured)
        except RuntimeFailedError as error:
            if name == PLANNED:
                raise RuntimeFailedError(file.failure(error)) from error
            contenders[name] = replace(_simulated(file), failure=file.failure(error))
    tell(f"taking turns, {taken.warm_up} steps to warm up and {taken.runs} that are timed")
    timed = {name: file for name, file in files.items() if not contenders[name].failure}
    seconds, note = _seconds(timed, taken)
    regular, planned = (
        replace(contenders[name], step_seconds=seconds.get(name, ())) for name in (REGULAR, PLANNED)
    )
    return regular, planned, note


def _seconds(files: Mapping[str, _File], taken: _Steps) -> tuple[dict[str, tuple[float, ...]], str]:
    """Seconds of each step in turns or, where the files are too large together, one after the other."""
    paths = {name: file.path for name, file in files.items()}
    with suppress(RuntimeFailedError):
        return taken.seconds(paths), ""
    seconds: dict[str, tuple[float, ...]] = {}
    for name, path in paths.items():
        try:
            seconds |= taken.seconds({name: path})
        except RuntimeFailedError as error:
            raise RuntimeFailedError(files[name].failure(error)) from error
    return seconds, "the two files do not run side by side, so one was timed after the other"


def _simulated(file: _File) -> Contender:
    return Contender(file.profile.peak_bytes + file.state_bytes, file.profile.activation_peak_bytes)


def _contender(file: _File, measured: Measurement) -> Contender:
    found = _simulated(file)
    if not measured.requested_peak_bytes:
        return found
    return replace(
        found,
        requested_peak_bytes=measured.requested_peak_bytes + file.state_bytes,
        in_use_peak_bytes=measured.in_use_peak_bytes + file.state_bytes,
        activation_peak_bytes=None
        if file.gradient_bytes is None
        else measured.requested_peak_without(file.gradient_bytes),
    )


def _notes_on_order(planned: PlannedStep, regular: Contender) -> list[str]:
    own = planned.regular_profile.peak_bytes + planned.state_bytes
    if own == regular.simulated_peak_bytes:
        return []
    return [
        "both run in the plan's order; in the model's own, storing everything takes a simulated "
        f"{own / 1e6:,.1f} MB"
    ]
