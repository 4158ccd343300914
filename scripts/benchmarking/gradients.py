"""Whole models against a truth that shares nothing with onnxgc: torch autograd of the module itself.

Each model is exported by torch's exporters, planned, and run for one step in ONNX Runtime. Every
parameter's gradient is compared with torch float64 of the module that was exported, beside what
torch float32 is away from it, and the planned graph with the one that stores everything. Where
rounding moves a unit across its kink, one run says little of how far float32 is from float64, so
torch's own distance is the largest of several runs: see `SINGLE_RUNS`.

    python -m scripts.benchmarking.gradients NAME RESULT    one model in this process
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from onnxgc.api import PlannedStep, optimize, verify
from onnxgc.errors import OnnxgcError
from onnxgc.model.core.ir import Array
from onnxgc.runtime.ort import SessionSettings, make_session
from scripts.benchmarking.records import ROOT, Progress

if TYPE_CHECKING:
    import torch

    from scripts.exports.torch_export import Export
    from scripts.exports.torch_models import TorchModel

MOST_TIMES_TORCH = 2.0
"""A gradient may be this many times as far from float64 as torch float32's is."""
FLOOR = 1e-6
"""Distances below it are float32's own, whoever computes."""
VANISHING_SHARE = 1e-6
"""A gradient below this share of the largest is measured against that share instead of itself."""
VANISHING_FLOOR = 1e-2
"""As `FLOOR`, for such a gradient: what is left of it is rounding alone."""
SINGLE_RUNS = ("onednn", "native", "rounded")
"""Torch in float32: by oneDNN's kernels, by its own, and with all values moved by one rounding."""
ROUNDING = 2.0**-24
SEEDS = (1, 2, 3)
"""Of batches: where rounding moves a unit across its kink by chance, another batch is tried.

A wrong rule is wrong on each.
"""
_USUAL_EXPORTS = ("dynamo-dynamic", "script-static")
_DISTRIBUTIONS = ("torch", "torchvision", "timm", "transformers", "onnxscript")


@dataclass(frozen=True, slots=True)
class Options:
    """What is compared; `small` is the size of each model.

    Without `all_exports` it is one export by each exporter: one with a symbolic batch and one
    without.
    """

    only: tuple[str, ...] = ()
    small: bool = True
    threads: int = 2
    verify: bool = True
    all_exports: bool = False


def run_gradients(options: Options, tell: Progress) -> dict[str, Any]:
    """One row for each export of each model; the error in place of figures where one occurs."""
    from scripts.exports.torch_models import TORCH_MODELS

    rows: list[dict[str, Any]] = []
    for name in TORCH_MODELS:
        if not options.only or name in options.only:
            tell(name)
            rows += _in_own_process(name, options)
    return {"size": "small" if options.small else "full", "versions": versions(), "rows": rows}


def _in_own_process(name: str, options: Options) -> list[dict[str, Any]]:
    """The rows of one model; its memory goes back to the system with the process."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        request = json.dumps(asdict(options))
        command = [sys.executable, "-m", "scripts.benchmarking.gradients", name, str(result), request]
        status = subprocess.run(command, cwd=ROOT).returncode
        if status:
            return [{"model": name, "error": f"the process ended with status {status}", "holds": False}]
        rows: list[dict[str, Any]] = json.loads(result.read_text(encoding="utf-8"))
        return rows


def compare_model(name: str, options: Options, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows of one model, in this process."""
    import torch

    from scripts.exports.torch_export import exports_of
    from scripts.exports.torch_models import TORCH_MODELS

    torch.set_num_threads(options.threads)
    model = TORCH_MODELS[name]

    @cache
    def truth(seed: int) -> Truth:
        tell(f"{name}: torch in float64 and float32, batch {seed}")
        return Truth.of(model, options.small, seed)

    rows: list[dict[str, Any]] = []
    for export in exports_of(model):
        if not options.all_exports and export.suffix not in _USUAL_EXPORTS:
            continue
        tell(f"{name} {export.suffix}")
        row: dict[str, Any] = {"model": name, "export": export.suffix}
        try:
            row |= _compared(model, export, truth, options)
        except OnnxgcError as error:
            row |= {"error": str(error), "holds": False}
        rows.append(row)
    return rows


@dataclass(frozen=True, slots=True)
class Truth:
    """The gradients of a module's parameters by torch: in double precision, and `SINGLE_RUNS`."""

    batch: Mapping[str, Array]
    target: Array
    loss: float
    exact: Mapping[str, Array]
    singles: tuple[Mapping[str, Array], ...]

    @classmethod
    def of(cls, model: TorchModel, small: bool, seed: int = SEEDS[0]) -> Truth:
        import torch

        batch = model.batch(small, seed)
        module = model.module(small)
        with torch.no_grad():
            target = model.target(module(*batch.values()))
        loss, exact = _torch_step(model, small, batch, target, "double")
        singles = tuple(_torch_step(model, small, batch, target, run)[1] for run in SINGLE_RUNS)
        arrays = {name: value.numpy() for name, value in batch.items()}
        return cls(arrays, target.numpy(), loss, exact, singles)


def _torch_step(
    model: TorchModel, small: bool, batch: Mapping[str, torch.Tensor], target: torch.Tensor, run: str
) -> tuple[float, dict[str, Array]]:
    """Loss and gradients of one step of a fresh module in training mode: `double`, or a single run."""
    import torch

    dtype = torch.float64 if run == "double" else torch.float32
    module = model.module(small).to(dtype)
    inputs = [value.to(dtype) if value.is_floating_point() else value for value in batch.values()]
    if run == "rounded":
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1 + ROUNDING * torch.randn(parameter.shape, generator=generator))
        inputs = [
            value * (1 + ROUNDING * torch.randn(value.shape, generator=generator))
            if value.is_floating_point()
            else value
            for value in inputs
        ]
    with _all_in(dtype), kernels(onednn=run != "native"):
        loss = model.loss_of(module(*inputs), target)
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    return float(loss.detach()), {name: gradient.numpy() for name, gradient in gradients.items()}


@contextlib.contextmanager
def kernels(*, onednn: bool) -> Iterator[None]:
    """Torch on oneDNN's kernels, or on its own."""
    import torch

    with warnings.catch_warnings():
        # Of options that no CPU has.
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=onednn):
            yield


def _all_in(dtype: torch.dtype) -> Any:
    """A context in which what a module casts to float32 by itself, as norms do, is `dtype` instead."""
    import torch
    from torch.overrides import TorchFunctionMode

    def swapped(value: Any) -> Any:
        return dtype if value is torch.float32 else value

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.float:
                return args[0].to(dtype)
            named = {key: swapped(value) for key, value in (kwargs or {}).items()}
            return func(*map(swapped, args), **named)

    return Mode()


def _compared(
    model: TorchModel, export: Export, truth: Callable[[int], Truth], options: Options
) -> dict[str, Any]:
    from scripts.exports.torch_export import export_module, match_parameters

    module, batch = model.module(options.small), model.batch(options.small)
    with tempfile.TemporaryDirectory() as folder:
        source, training = Path(folder) / "model.onnx", Path(folder) / "training.onnx"
        try:
            export_module(module, batch, source, export)
        except Exception as error:
            # Exporters fail in many ways of their own.
            return {"error": f"not exported: {type(error).__name__}: {str(error)[:200]}", "holds": False}
        proto = onnx.load(source)
        matches = match_parameters(module, proto)
        del module
        row: dict[str, Any] = {
            "opset": next(entry.version for entry in proto.opset_import if not entry.domain),
            "nodes": len(proto.graph.node),
        }
        shapes = {name: tuple(value.shape) for name, value in batch.items()} if export.dynamic else None
        result = optimize(source, training, loss=model.loss, input_shapes=shapes)
        step = result.planned.step
        by_chance: dict[int, float] = {}
        for seed in SEEDS:
            outputs = _outputs_of_step(result.planned, training, truth(seed), options.threads)
            loss = float(outputs[result.planned.model.loss])
            gradients = {name: outputs[gradient] for name, gradient in step.parameter_gradients.items()}
            true = truth(seed)
            row |= {"batch": seed, "loss": loss, "loss_distance": abs(loss - true.loss) / abs(true.loss)}
            row |= distances(_by_parameter(gradients, matches, true.exact), true.exact, true.singles)
            if not _too_far(row):
                break
            by_chance[seed] = row["ratio_max"]
        row["too_far_on_batches"] = by_chance
        known = {name for found in matches.values() for name, _ in found}
        row["no_parameters_of_the_module"] = sorted(set(gradients) - known)
        report = result.report
        row["regular_peak_bytes"] = report["regular"]["simulated_peak_bytes"]
        row["planned_peak_bytes"] = report["planned"]["simulated_peak_bytes"]
        row["planned_of_regular"] = row["planned_peak_bytes"] / row["regular_peak_bytes"]
        if options.verify:
            checks = verify(source, training, threads=options.threads).checks
            row["verify"] = {check.name: check.detail for check in checks if not check.holds}
    row["holds"] = holds(row)
    return row


def _outputs_of_step(planned: PlannedStep, training: Path, truth: Truth, threads: int) -> dict[str, Array]:
    (target,) = planned.model.targets
    return outputs_of(training, {**truth.batch, target: truth.target}, threads)


def outputs_of(training: Path, feeds: Mapping[str, Array], threads: int) -> dict[str, Array]:
    """One step of a training file; what it does not take is not fed."""
    session = make_session(training, settings=SessionSettings(threads=threads))
    fed = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    values = session.run(names, {name: value for name, value in feeds.items() if name in fed})
    return dict(zip(names, values, strict=True))


def _by_parameter(
    gradients: Mapping[str, Array],
    matches: Mapping[str, Sequence[tuple[str, bool]]],
    trained: Container[str],
) -> dict[str, Array]:
    """Gradients by the module's names: summed where a file has a tied parameter more than once.

    A parameter that the module froze is none of them: a file does not say so.
    """
    found: dict[str, Array] = {}
    for parameter, initializers in matches.items():
        parts = [
            gradients[name].T if transposed else gradients[name]
            for name, transposed in initializers
            if name in gradients
        ]
        if parts and parameter in trained:
            found[parameter] = reduce(np.add, parts)
    return found


def distances(
    ours: Mapping[str, Array], exact: Mapping[str, Array], singles: Sequence[Mapping[str, Array]]
) -> dict[str, Any]:
    """How far gradients are from the exact ones by norm, relatively, beside the farthest of `singles`.

    A parameter that `ours` does not have counts as missing unless its exact gradient is zero.
    """
    norms = {name: float(np.linalg.norm(value)) for name, value in exact.items()}
    least = VANISHING_SHARE * max(norms.values())
    mine, theirs, ratios = {}, {}, {}
    for name, value in ours.items():
        scale = max(norms[name], least)
        mine[name] = _apart(value, exact[name]) / scale
        theirs[name] = max(_apart(single[name], exact[name]) for single in singles) / scale
        floor = FLOOR if norms[name] >= least else VANISHING_FLOOR
        ratios[name] = mine[name] / max(theirs[name], floor)
    # NaN is the worst of all.
    worst = max(ratios, key=lambda name: ratios[name] if np.isfinite(ratios[name]) else np.inf)
    return {
        "parameters": len(ratios),
        "parameters_of": len(exact),
        "missing": [name for name in exact if name not in ours and norms[name] > 0],
        "ratio_median": statistics.median(ratios.values()),
        "ratio_max": ratios[worst],
        "ratio_max_parameter": worst,
        "ratio_max_distance": mine[worst],
        "distance_median": statistics.median(mine.values()),
        "distance_max": max(mine.values()),
        "torch_float32_distance_median": statistics.median(theirs.values()),
        "torch_float32_distance_max": max(theirs.values()),
        "vanishing": [name for name in ours if norms[name] < least],
    }


def _apart(value: Array, exact: Array) -> float:
    return float(np.linalg.norm(value.astype(np.float64) - exact))


def holds(row: Mapping[str, Any]) -> bool:
    """Whether all parameters are there, as exact as torch's, and the plan changes nothing."""
    return not failures(row)


def failures(row: Mapping[str, Any]) -> list[str]:
    """Why a row does not hold, in short."""
    if "error" in row:
        return [row["error"]]
    found = [f"{check}: {detail}" for check, detail in row.get("verify", {}).items()]
    if "ratio_max" not in row:
        return found
    found += [f"no gradient of {name}" for name in row["missing"]]
    found += [f"{name} is no parameter" for name in row["no_parameters_of_the_module"]]
    if _too_far(row):
        found.append("too far from float64")
    return found


def _too_far(row: Mapping[str, Any]) -> bool:
    return not (row["ratio_median"] <= MOST_TIMES_TORCH and row["ratio_max"] <= MOST_TIMES_TORCH)


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row in a table: parameters, median and largest ratio, the worst, planned over regular, failures."""
    failed = ", ".join(failures(row))
    if "error" in row:
        return ("", "", "", "", "", failed)
    parameters, planned = f"{row['parameters']}/{row['parameters_of']}", f"{row['planned_of_regular']:.2f}"
    if "difference_max" in row:
        error = f"differences {row['difference_max']:.1e}"
        return (parameters, "", error, row["difference_max_parameter"][-40:], planned, failed)
    ratios = (f"{row['ratio_median']:.2f}", f"{row['ratio_max']:.2f}", row["ratio_max_parameter"][-40:])
    return (parameters, *ratios, planned, failed)


def versions() -> dict[str, str]:
    """Of the packages that the models and their exports come from."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main(name: str, result: str, request: str) -> None:
    options = Options(**json.loads(request))
    rows = compare_model(name, options, Progress())
    Path(result).write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
