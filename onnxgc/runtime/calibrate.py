"""Calibration: times of a model's forward operators on this machine, and the file that stores them."""

import json
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnxgc.emission.atomic_files import check_writable, write_model, write_text
from onnxgc.errors import DurationError
from onnxgc.model.core.ir import Array, TrainableModel, dtype_name
from onnxgc.model.draw_weights import draw_weights
from onnxgc.model.files.forward_file import to_proto
from onnxgc.planning.schedule import Compute, build_schedule
from onnxgc.runtime.measure import Measurement, measure, random_feeds
from onnxgc.runtime.ort import SessionSettings, default_providers, load_onnxruntime
from onnxgc.tracing.calibrated_durations import Calibration, MeasuredOperator
from onnxgc.tracing.durations import Work, forward_works
from onnxgc.tracing.step_graph import TrainingStep

SCHEMA_VERSION = 1
DEFAULT_RUNS = 5
_SEED = 0
# The profiler times the call of a kernel, which on CUDA returns before the kernel has finished.
_SYNCHRONOUS = {"CUDA_LAUNCH_BLOCKING": "1"}


def calibration_in(
    path: str | os.PathLike[str],
    step: TrainingStep,
    *,
    providers: Sequence[str] | None = None,
    threads: int | None = None,
    runs: int = DEFAULT_RUNS,
) -> tuple[Calibration, str]:
    """The calibration in a file, or a new one written to it; and a note, or "".

    A calibration of another model or of other shapes is used by its rates, and the note says so.

    Raises:
        DurationError: the file is not a calibration.
        OutputFileError: the file does not exist and cannot be written.
        RuntimeFailedError, RuntimeUnavailableError: the model cannot be run here.
    """
    if os.path.exists(path):
        found = read_calibration(path)
        return found, _note(found, step, path)
    check_writable(path)
    made = calibrate(step, providers=providers, threads=threads, runs=runs)
    write_calibration(made, path)
    return made, ""


def calibrate(
    step: TrainingStep, *, providers: Sequence[str] | None = None, threads: int | None = None, runs: int = DEFAULT_RUNS
) -> Calibration:
    """Times each forward operator over `runs` runs, after one warm-up run.

    Weights and inputs are random: durations do not depend on them. `providers` defaults to CUDA where
    this machine has it, `threads` to ONNX Runtime's choice.

    Raises:
        RuntimeFailedError, RuntimeUnavailableError: the model cannot be run here.
    """
    settings = SessionSettings(threads=threads, providers=tuple(providers) if providers else default_providers())
    model = _forward(step)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "forward.onnx"
        write_model(to_proto(model, draw_weights(model, _SEED)), file)
        measured = measure(file, _feeds(step), settings=settings, runs=runs + 1, environment=_SYNCHRONOUS)
    median_ns = _medians(measured)
    return Calibration(
        step.model.name,
        settings.providers[0],
        device_name(settings.providers[0]),
        threads,
        str(load_onnxruntime().__version__),
        runs,
        tuple(
            MeasuredOperator(work, median_ns[work.name])
            for work in forward_works(step)
            if work.name in median_ns and not work.is_free
        ),
    )


def _forward(step: TrainingStep) -> TrainableModel:
    """The forward part as in the step: with outputs that backward reads, without unused ones."""
    schedule = build_schedule(step.graph, frozenset(), str)
    nodes = tuple(
        step.nodes[item.operator.name].with_changes(outputs=item.operator.outputs)
        for item in schedule.instructions
        if isinstance(item, Compute) and item.chunk is None
    )
    return replace(step.model, nodes=nodes, types=step.types, outputs=())


def _feeds(step: TrainingStep) -> dict[str, Array]:
    def described(names: Sequence[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: (dtype_name(step.types[name].dtype), step.types[name].shape) for name in names}

    # Integer inputs are masks or table indices; labels are class 0, which every model has.
    inputs = random_feeds(described(step.model.inputs), _SEED, 2)
    draw = described(tuple(filter(None, [step.model.draw])))
    return inputs | random_feeds(described(step.model.targets) | draw, _SEED + 1, 1)


def _medians(measured: Measurement) -> dict[str, int]:
    """The median of each node's times over all runs but the first."""
    times: dict[str, list[int]] = {}
    for run in measured.runs[1:]:
        for name, nanoseconds in zip(run.order, run.kernel_ns, strict=True):
            times.setdefault(name, []).append(nanoseconds)
    return {name: round(statistics.median(found)) for name, found in times.items()}


def device_name(provider: str) -> str:
    """Name of the device behind a provider, as the machine reports it."""
    if provider == "CUDAExecutionProvider":
        return _first_line_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "CUDA"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _first_line_of(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return result.stdout.partition("\n")[0].strip()


def _note(calibration: Calibration, step: TrainingStep, path: str | os.PathLike[str]) -> str:
    """A note if the calibration was measured on another model or at other shapes, else ""."""
    # Every model's loss has the same few operators.
    works = [work for work in forward_works(step) if not work.is_free and work.origin != "loss"]
    found = [calibration.measured(work) for work in works]
    known = len(works) - found.count(None)
    if 2 * known < len(works):
        return (
            f"'{os.fspath(path)}' was measured on another model ('{calibration.model}', with {known} of "
            f"these {len(works)} operators): durations are estimated by its rates; delete it to measure again"
        )
    same = sum(one is not None and one.work == work for one, work in zip(found, works, strict=True))
    if 2 * same < len(works):
        return (
            f"'{os.fspath(path)}' was measured at other shapes or types, so its durations are "
            "scaled; delete it to measure again"
        )
    return ""


def write_calibration(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Writes a calibration as JSON, atomically.

    Raises:
        OutputFileError: the file cannot be written.
    """
    heads = ("model", "provider", "device", "threads", "onnxruntime", "runs")
    head = {"schema": SCHEMA_VERSION, **{name: getattr(calibration, name) for name in heads}}
    operators = [
        {
            "name": found.work.name,
            "origin": found.work.origin,
            "kind": found.work.kind,
            "dtype": found.work.dtype,
            "flops": found.work.flops,
            "bytes": found.work.moved_bytes,
            "median_ns": found.median_ns,
        }
        for found in calibration.operators
    ]
    write_text(json.dumps({**head, "operators": operators}, indent=1) + "\n", path)


def read_calibration(path: str | os.PathLike[str]) -> Calibration:
    """The calibration that `write_calibration` wrote.

    Raises:
        DurationError: the file cannot be read or is not a calibration.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if int(found["schema"]) != SCHEMA_VERSION:
            raise DurationError(
                f"'{os.fspath(path)}' has schema {found['schema']}, this onnxgc reads {SCHEMA_VERSION}; "
                "delete it to measure again"
            )
        return _calibration_of(found)
    except OSError as error:
        raise DurationError(f"cannot read '{os.fspath(path)}': {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise DurationError(
            f"'{os.fspath(path)}' is not a calibration: {reason}; delete it to measure again"
        ) from error


def _calibration_of(found: Mapping[str, Any]) -> Calibration:
    threads = found["threads"]
    if any(int(one["bytes"]) < 1 or int(one["median_ns"]) < 0 for one in found["operators"]):
        raise ValueError("an operator has wrong bytes or time")
    operators = tuple(
        MeasuredOperator(
            Work(
                str(one["name"]),
                str(one["origin"]),
                str(one["kind"]),
                str(one["dtype"]),
                int(one["flops"]),
                int(one["bytes"]),
            ),
            int(one["median_ns"]),
        )
        for one in found["operators"]
    )
    return Calibration(
        str(found["model"]),
        str(found["provider"]),
        str(found["device"]),
        None if threads is None else int(threads),
        str(found["onnxruntime"]),
        int(found["runs"]),
        operators,
    )
