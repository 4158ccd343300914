"""Equality, accuracy, memory and time of one network: ResNet-50 at batch 16."""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxgc.api import PlannedStep, emit, plan_step, store_all_schedule
from onnxgc.api.feeds import feeds_of
from onnxgc.emission.atomic_files import write_model
from onnxgc.model.core.ir import Array
from onnxgc.model.draw_weights import draw_weights
from onnxgc.model.read import read_model
from onnxgc.planning.simulate import simulate
from onnxgc.runtime.measure import Measurement, measure
from onnxgc.runtime.ort import SessionSettings, make_session
from scripts.benchmarking.command_options import CORES
from scripts.benchmarking.gradient_comparison import distances
from scripts.benchmarking.records import MODELS, Progress, Record
from scripts.benchmarking.tables import machine_of, markdown_table, megabytes
from scripts.benchmarking.timing import interleaved_seconds

KINDS = ("regular", "planned")
_MEMORY_RUNS = 3


@dataclass(frozen=True, slots=True)
class Options:
    """The network, its input, and the number of timed steps; other networks and inputs are trials."""

    network: str = "resnet50"
    batch: int = 16
    pixels: int = 224
    threads: int = CORES
    rounds: int = 7
    seed: int = 0


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """All figures of one network."""
    with tempfile.TemporaryDirectory() as folder:
        progress(f"planning {options.network}, batch {options.batch}, {options.pixels}x{options.pixels}")
        setup = _set_up(options, Path(folder))
        settings = {
            "make_session": SessionSettings(threads=options.threads),
            "default": SessionSettings(file_order=False, threads=options.threads),
        }
        found = {
            (name, kind): _measured(setup, kind, settings[name], name, progress) for name in settings for kind in KINDS
        }
        regular, planned = (found["make_session", kind].outputs for kind in KINDS)
        torch_step = _torch_step(options, setup)
        progress("torch reference in float64 and float32")
        accuracy = _accuracy(setup, planned, torch_step)
        times = _times(options, setup, torch_step, progress)
    return {
        "network": options.network,
        "batch": options.batch,
        "input": f"3x{options.pixels}x{options.pixels}",
        "parameter_gradient_bytes": setup.planned.profile.parameter_gradient_bytes,
        "simulated_peak_bytes": dict(setup.simulated),
        "measured": {name: {kind: _peaks(found[name, kind]) for kind in KINDS} for name in settings},
        "memory_runs": _MEMORY_RUNS,
        "identical": _count_identical(setup, regular, planned),
        "accuracy": accuracy,
        "step_seconds": times,
    }


def failures(figures: Mapping[str, Any]) -> list[str]:
    same = figures["identical"]
    counted = [(kind, same[kind], same[f"{kind}_of"]) for kind in ("gradients", "statistics")]
    found = [f"{equal} of {count} {kind} are bit-identical" for kind, equal, count in counted if equal < count]
    return found if same["loss"] else [*found, "the loss is not bit-identical"]


def results_section(record: Record) -> str:
    figures = record["figures"]
    same, accuracy, times = figures["identical"], figures["accuracy"], figures["step_seconds"]
    torch_version = record["environment"]["versions"]["torch"].partition("+")[0]
    to_torch = {kind: times[kind]["minimum"] / times["torch"]["minimum"] for kind in KINDS}
    return "\n\n".join(
        (
            f"**{figures['network']}, batch {figures['batch']}, {figures['input']}**: one training step. "
            f"Peaks are in MB of 10^6 bytes, the highest of {figures['memory_runs']} runs, and include "
            f"{megabytes(figures['parameter_gradient_bytes'])} MB of parameters' gradients:",
            markdown_table(["", "baseline", "planned", "planned / baseline"], _document_rows(figures)),
            f"Compared with the baseline, the loss is {'' if same['loss'] else 'NOT '}bit-identical, and so "
            f"are {same['gradients']} of {same['gradients_of']} gradients. The distance of the gradients to "
            f"torch {torch_version} in float64, as a multiple of the distance of torch float32, is "
            f"{accuracy['ratio_median']:.2f} in the median and at most {accuracy['ratio_max']:.2f}. The "
            "minimum time of a step, as a multiple of torch eager's (the same graph by torch's operators "
            f"and autograd, without recomputation), is {to_torch['regular']:.2f} for the baseline and "
            f"{to_torch['planned']:.2f} for the plan. {machine_of(record)}.",
        )
    )


@dataclass(frozen=True, slots=True)
class _Setup:
    """Both training files of a plan, with their inputs."""

    planned: PlannedStep
    files: Mapping[str, Path]
    simulated: Mapping[str, int]
    feeds: Mapping[str, Array]
    weights: Mapping[str, Array]


def _set_up(options: Options, folder: Path) -> _Setup:
    path = MODELS / f"{options.network}.onnx"
    model = read_model(path, input_shapes={"x": (options.batch, 3, options.pixels, options.pixels)})
    weights = draw_weights(model, options.seed)
    planned = plan_step(model)
    schedules = dict(zip(KINDS, (store_all_schedule(planned), planned.schedule), strict=True))
    files = {kind: folder / f"{kind}.onnx" for kind in schedules}
    for kind, schedule in schedules.items():
        write_model(emit(planned, schedule=schedule, values=weights).model, files[kind])
    simulated = {kind: simulate(schedule, planned.step.graph).peak_bytes for kind, schedule in schedules.items()}
    return _Setup(planned, files, simulated, feeds_of(planned, options.seed), weights)


def _measured(setup: _Setup, kind: str, settings: SessionSettings, label: str, progress: Progress) -> Measurement:
    progress(f"running {kind} under {label} settings, {_MEMORY_RUNS} steps")
    return measure(
        setup.files[kind], setup.feeds, settings=settings, runs=_MEMORY_RUNS, keep_outputs=settings.file_order
    )


def _peaks(measurement: Measurement) -> dict[str, Any]:
    """The highest peak of all runs: workspaces are visible in the first, memory patterns apply from the second."""
    return {"requested_bytes": measurement.requested_peak_bytes, "in_use_bytes": measurement.in_use_peak_bytes}


def _count_identical(setup: _Setup, regular: Mapping[str, Array], planned: Mapping[str, Array]) -> dict[str, Any]:
    """Numbers of outputs of the planned file that are bit-identical to the baseline's."""
    same = {name for name in regular if np.array_equal(regular[name], planned[name])}
    gradients = list(setup.planned.step.parameter_gradients.values())
    updated = [statistic.updated for statistic in setup.planned.model.statistics]
    return {
        "loss": setup.planned.model.loss in same,
        "gradients": sum(name in same for name in gradients),
        "gradients_of": len(gradients),
        "statistics": sum(name in same for name in updated),
        "statistics_of": len(updated),
    }


def _torch_step(options: Options, setup: _Setup) -> Callable[[str], Any]:
    """A step of the network by torch's operators and autograd, in the precision of that name."""
    import torch

    from tests.torch_reference import reference_step

    torch.set_num_threads(options.threads)
    model = onnx.load(MODELS / f"{options.network}.onnx")
    inputs = {name: setup.feeds[name] for name in setup.planned.model.inputs}
    (target,) = setup.planned.model.targets
    return lambda dtype: reference_step(model, setup.weights, inputs, setup.feeds[target], dtype=getattr(torch, dtype))


def _accuracy(setup: _Setup, outputs: Mapping[str, Array], torch_step: Callable[[str], Any]) -> dict[str, Any]:
    """Distances of gradients to torch float64, as multiples of the distances of torch float32."""
    exact, single = (torch_step(dtype).gradients for dtype in ("float64", "float32"))
    gradients = setup.planned.step.parameter_gradients
    return distances({name: outputs[found] for name, found in gradients.items()}, exact, [single])


def _times(options: Options, setup: _Setup, torch_step: Callable[[str], Any], progress: Progress) -> dict[str, Any]:
    """Interleaved times of steps; torch runs the same network eagerly, without recomputation."""
    settings = SessionSettings(threads=options.threads)
    steps: dict[str, Callable[[], object]] = {
        kind: partial(make_session(file, settings=settings).run, None, setup.feeds)
        for kind, file in setup.files.items()
    }
    steps["torch"] = partial(torch_step, "float32")
    seconds = interleaved_seconds(steps, options.rounds, progress)
    return {
        "rounds": options.rounds,
        **{name: {"minimum": min(times), "median": statistics.median(times)} for name, times in seconds.items()},
    }


def _document_rows(figures: Mapping[str, Any]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [_peak_row("simulated", figures["simulated_peak_bytes"])]
    for settings, label in (("make_session", "`make_session()`"), ("default", "all-default session")):
        measured = figures["measured"][settings]
        for key, what in (("requested_bytes", "requested"), ("in_use_bytes", "in use")):
            peaks = {kind: measured[kind][key] for kind in KINDS}
            rows.append(_peak_row(f"measured, {label}, {what}", peaks))
    times = figures["step_seconds"]
    for key in ("minimum", "median"):
        regular, planned, torch = (times[kind][key] for kind in (*KINDS, "torch"))
        label = f"time of a step, {key} of {times['rounds']} (torch eager: {torch:.2f} s)"
        rows.append([label, f"{regular:.2f} s", f"{planned:.2f} s", f"{planned / regular:.2f}"])
    return rows


def _peak_row(label: str, peaks: Mapping[str, int]) -> list[str]:
    regular, planned = (peaks[kind] for kind in KINDS)
    return [label, megabytes(regular), megabytes(planned), f"{planned / regular:.2f}"]
