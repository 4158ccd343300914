"""The figures that the project promises, on ResNet-50: equality, accuracy, memory, time."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxgc.api import PlannedStep, emit, plan_step, store_all_schedule
from onnxgc.emission.write import write_model
from onnxgc.model.core.ir import Array, dtype_name
from onnxgc.model.read import read_model
from onnxgc.model.weight_roles.initialization import draw_weights
from onnxgc.planning.simulate import simulate
from onnxgc.runtime.measure import Measurement, measure, random_feeds
from onnxgc.runtime.ort import SessionSettings
from scripts.benchmarking.contenders import Contender, in_turns
from scripts.benchmarking.records import MODELS, Progress

_MEMORY_RUNS = 3


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured; everything but `network`, `batch` and `pixels` as they are is a trial."""

    network: str = "resnet50"
    batch: int = 16
    pixels: int = 224
    threads: int = 1
    rounds: int = 5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Setup:
    """The two training files, what they are fed with, and where they came from."""

    planned: PlannedStep
    files: Mapping[str, Path]
    simulated: Mapping[str, int]
    feeds: Mapping[str, Array]
    weights: Mapping[str, Array]


def measure_network(options: Options, tell: Progress) -> dict[str, Any]:
    """All figures of one network."""
    with tempfile.TemporaryDirectory() as folder:
        tell(f"planning {options.network}, batch {options.batch}, {options.pixels}x{options.pixels}")
        setup = _setup(options, Path(folder))
        under = {
            "make_session": SessionSettings(threads=options.threads),
            "default": SessionSettings(file_order=False, threads=options.threads),
        }
        found = {
            (settings, kind): _measured(setup, kind, under[settings], settings, tell)
            for settings in under
            for kind in setup.files
        }
        regular, planned = (found["make_session", kind].outputs for kind in ("regular", "planned"))
        accuracy = _accuracy(options, setup, planned, tell)
        times = _times(options, setup, Path(folder), tell)
    return {
        "network": options.network,
        "batch": options.batch,
        "input": f"3x{options.pixels}x{options.pixels}",
        "seed": options.seed,
        "checkpoints": len(setup.planned.solution.plan.checkpoints),
        "solver": setup.planned.solution.solver,
        "status": setup.planned.solution.status.value,
        "extra_flops_ratio": setup.planned.extra_flops_ratio,
        "parameter_gradient_bytes": setup.planned.profile.parameter_gradient_bytes,
        "simulated_peak_bytes": dict(setup.simulated),
        "measured": {
            settings: {kind: _peaks(found[settings, kind]) for kind in setup.files} for settings in under
        },
        "memory_runs": _MEMORY_RUNS,
        "identical": _identical(setup, regular, planned),
        "accuracy": accuracy,
        "step_seconds": times,
    }


def _setup(options: Options, folder: Path) -> _Setup:
    path = MODELS / f"{options.network}.onnx"
    model = read_model(path, input_shapes={"x": (options.batch, 3, options.pixels, options.pixels)})
    weights = draw_weights(model, options.seed)
    planned = plan_step(model)
    schedules = {"regular": store_all_schedule(planned), "planned": planned.schedule}
    files = {kind: folder / f"{kind}.onnx" for kind in schedules}
    for kind, schedule in schedules.items():
        write_model(emit(planned, schedule=schedule, values=weights).model, files[kind])
    described = {
        name: (dtype_name(model.types[name].dtype), model.types[name].shape)
        for name in (*model.inputs, *model.targets)
    }
    classes = model.types[model.outputs[0]].shape[1]
    simulated = {
        kind: simulate(schedule, planned.step.graph).peak_bytes for kind, schedule in schedules.items()
    }
    return _Setup(planned, files, simulated, random_feeds(described, options.seed, classes), weights)


def _measured(setup: _Setup, kind: str, settings: SessionSettings, label: str, tell: Progress) -> Measurement:
    tell(f"running {kind} under {label} settings, {_MEMORY_RUNS} steps")
    return measure(
        setup.files[kind], setup.feeds, settings=settings, runs=_MEMORY_RUNS, keep_outputs=settings.file_order
    )


def _peaks(measurement: Measurement) -> dict[str, Any]:
    """The highest of all runs, and each run's.

    Kernels' workspaces show only where they raise the arena's maximum, which is mostly in the first
    run, and memory patterns act from the second on.
    """
    return {
        "requested_bytes": measurement.requested_peak_bytes,
        "in_use_bytes": measurement.in_use_peak_bytes,
        "requested_bytes_by_run": [run.requested_peak_bytes for run in measurement.runs],
        "in_use_bytes_by_run": [run.in_use_peak_bytes for run in measurement.runs],
    }


def _identical(setup: _Setup, regular: Mapping[str, Array], planned: Mapping[str, Array]) -> dict[str, Any]:
    """How many outputs of the planned file have the very bits of the one that stores everything."""
    same = {name for name in regular if np.array_equal(regular[name], planned[name])}
    gradients = list(setup.planned.step.parameter_gradients.values())
    statistics_ = [statistic.updated for statistic in setup.planned.model.statistics]
    return {
        "loss": setup.planned.model.loss in same,
        "gradients": sum(name in same for name in gradients),
        "gradients_of": len(gradients),
        "statistics": sum(name in same for name in statistics_),
        "statistics_of": len(statistics_),
    }


def _accuracy(
    options: Options, setup: _Setup, outputs: Mapping[str, Array], tell: Progress
) -> dict[str, Any]:
    """Distance of each parameter's gradient to float64, as a multiple of torch float32's own."""
    import torch

    from tests.torch_reference import reference_step

    torch.set_num_threads(options.threads)
    model = onnx.load(MODELS / f"{options.network}.onnx")
    inputs = {name: setup.feeds[name] for name in setup.planned.model.inputs}
    (target,) = setup.planned.model.targets
    exact: dict[str, Array] = {}
    single: dict[str, Array] = {}
    for dtype, gradients in ((torch.float64, exact), (torch.float32, single)):
        tell(f"torch reference in {dtype}")
        step = reference_step(model, setup.weights, inputs, setup.feeds[target], dtype=dtype)
        gradients.update(step.gradients)
    ours, theirs, ratios = {}, {}, {}
    for parameter, gradient in setup.planned.step.parameter_gradients.items():
        ours[parameter] = _distance(outputs[gradient], exact[parameter])
        theirs[parameter] = _distance(single[parameter], exact[parameter])
        ratios[parameter] = ours[parameter] / theirs[parameter] if theirs[parameter] else float("inf")
    worst = max(ratios, key=lambda name: ratios[name])
    return {
        "parameters": len(ratios),
        "ratio_median": statistics.median(ratios.values()),
        "ratio_max": ratios[worst],
        "ratio_max_parameter": worst,
        "distance_median": statistics.median(ours.values()),
        "torch_float32_distance_median": statistics.median(theirs.values()),
        "torch_float32_distance_max": max(theirs.values()),
    }


def _distance(value: Array, exact: Array) -> float:
    """Relative distance by norm."""
    return float(np.linalg.norm(value.astype(np.float64) - exact) / np.linalg.norm(exact))


def _times(options: Options, setup: _Setup, folder: Path, tell: Progress) -> dict[str, Any]:
    """Step times in turns; torch runs the same network eagerly and stores everything."""
    tell("warming up: regular, planned, torch")
    feeds = {"feeds": setup.feeds}
    contenders: dict[str, Contender] = {}
    try:
        for kind, file in setup.files.items():
            request = {"kind": "onnxruntime", "model": str(file), "threads": options.threads}
            contenders[kind] = Contender(folder / f"run-{kind}", request, feeds)
        request = {
            "kind": "torch",
            "model": str(MODELS / f"{options.network}.onnx"),
            "threads": options.threads,
        }
        contenders["torch"] = Contender(folder / "run-torch", request, {**feeds, "weights": setup.weights})
        tell(f"timing {options.rounds} rounds")
        return {"rounds": options.rounds, **in_turns(contenders, options.rounds)}
    finally:
        for contender in contenders.values():
            contender.close()
