"""Gradients of exported models, compared with torch autograd of the module itself.

Each model is exported by torch's exporters, planned, and run for one step in ONNX Runtime. The distance of
every parameter's gradient to torch float64 is compared with the distance of torch float32, and the planned
graph with the baseline. Where rounding moves a unit across its kink, one run does not represent the error of
float32, so that torch's distance is the largest of several runs (`SINGLE_RUNS`).

    python -m scripts.benchmarking.gradients NAME REQUEST RESULT    one model in this process
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from onnxgc.api import optimize
from onnxgc.errors import OnnxgcError
from onnxgc.model.core.ir import Array
from scripts.benchmarking.gradient_comparison import (
    ComparisonOptions,
    comparison_table,
    distances,
    failed_checks,
    failed_rows,
    failures_of,
    is_too_far,
    outputs_of,
    peak_figures,
)
from scripts.benchmarking.processes import rows_of_processes, write_result
from scripts.benchmarking.records import Progress, Record, installed_versions
from scripts.benchmarking.tables import machine_of

if TYPE_CHECKING:
    from scripts.benchmarking.torch_truth import Truth
    from scripts.exports.torch_export import Export
    from scripts.exports.torch_models import TorchModel

SEEDS = (1, 2, 3)
"""Seeds of batches. Another batch is tried where rounding moves a unit across its kink by chance.

A wrong rule fails on all of them.
"""
_USUAL_EXPORTS = ("dynamo-dynamic", "script-static")
_DISTRIBUTIONS = ("torch", "torchvision", "timm", "transformers", "onnxscript")


@dataclass(frozen=True, slots=True)
class Options(ComparisonOptions):
    """With `all_exports`, each exporter writes a static and a symbolic batch; else each writes one of them."""

    small: bool = True
    all_exports: bool = False


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """One row for each export of each model, with an error in place of figures if one occurs."""
    from scripts.exports.torch_models import TORCH_MODELS

    names = [name for name in TORCH_MODELS if not options.only or name in options.only]
    rows = rows_of_processes("gradients", "model", names, options, progress)
    size, versions = "small" if options.small else "full", installed_versions(_DISTRIBUTIONS)
    return {"size": size, "versions": versions, "rows": [{"holds": False, **row} for row in rows]}


def failures(figures: Mapping[str, Any]) -> list[str]:
    return failed_rows(figures["rows"])


def compare_model(
    name: str, options: Options, usual: Sequence[str] = _USUAL_EXPORTS, providers: Sequence[str] = ("cpu",)
) -> list[dict[str, Any]]:
    """The rows of one model, in this process: of each export, with gradients in the forms of each provider."""
    import torch

    from scripts.benchmarking.torch_truth import Truth
    from scripts.exports.torch_export import exports_of
    from scripts.exports.torch_models import TORCH_MODELS

    progress = Progress()
    torch.set_num_threads(options.threads)
    model = TORCH_MODELS[name]

    @cache
    def truth(seed: int) -> Truth:
        progress(f"{name}: torch in float64 and float32, batch {seed}")
        return Truth.of(model, options.small, seed)

    rows: list[dict[str, Any]] = []
    for export in exports_of(model):
        if not options.all_exports and export.suffix not in usual:
            continue
        for provider in providers:
            label = export.suffix if len(providers) == 1 else f"{export.suffix}, {provider} forms"
            progress(f"{name} {label}")
            row: dict[str, Any] = {"export": label}
            try:
                row |= _compared(model, export, provider, truth, options)
            except OnnxgcError as error:
                row |= {"error": str(error), "holds": False}
            rows.append(row)
    return rows


def results_section(record: Record) -> str:
    figures = record["figures"]
    known = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    table = comparison_table("model, export", figures["rows"])
    return (
        f"**Gradients of whole models**, exported from PyTorch in a {figures['size']} size and trained for "
        "one step. *Distance* is the distance of each parameter's gradient to torch float64 of the module "
        "itself, as a multiple of the distance of torch float32. An export *passes* if no distance is above "
        "2 and the planned file is bit-identical to the baseline "
        f"({known}):\n\n{table}\n\n{machine_of(record)}."
    )


def _compared(
    model: TorchModel, export: Export, provider: str, truth: Callable[[int], Truth], options: Options
) -> dict[str, Any]:
    from scripts.exports.torch_export import export_module, match_parameters

    module, batch = model.module(options.small), model.batch(options.small)
    with tempfile.TemporaryDirectory() as folder:
        source, training = Path(folder) / "model.onnx", Path(folder) / "training.onnx"
        try:
            export_module(module, batch, source, export)
        except Exception as error:
            # Exporters raise many kinds of exceptions.
            return {"error": f"not exported: {type(error).__name__}: {str(error)[:200]}", "holds": False}
        proto = onnx.load(source)
        matches = match_parameters(module, proto)
        del module
        row: dict[str, Any] = {}
        shapes = {name: tuple(value.shape) for name, value in batch.items()} if export.dynamic else None
        result = optimize(source, training, loss=model.loss, input_shapes=shapes, provider=provider)
        planned = result.planned
        (target,) = planned.model.targets
        too_far: dict[int, float] = {}
        for seed in SEEDS:
            true = truth(seed)
            outputs = outputs_of(training, {**true.batch, target: true.target}, options.threads)
            loss = float(outputs[planned.model.loss])
            gradients = {name: outputs[found] for name, found in planned.step.parameter_gradients.items()}
            row |= {"batch": seed, "loss_distance": abs(loss - true.loss) / abs(true.loss)}
            row |= distances(_by_parameter(gradients, matches, true.exact), true.exact, true.singles)
            if not is_too_far(row):
                break
            too_far[seed] = row["ratio_max"]
        row["too_far_on_batches"] = too_far
        known = {name for found in matches.values() for name, _ in found}
        row["no_parameters_of_the_module"] = sorted(set(gradients) - known)
        row |= peak_figures(result)
        if options.verify:
            row["verify"] = failed_checks(source, training, options.threads)
    row["holds"] = not failures_of(row)
    return row


def _by_parameter(
    gradients: Mapping[str, Array], matches: Mapping[str, Sequence[tuple[str, bool]]], trained: Container[str]
) -> dict[str, Array]:
    """Gradients by the module's names: the sum where a file has several copies of a tied parameter.

    Parameters that the module froze are excluded: a file does not mark them.
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


if __name__ == "__main__":
    write_result(compare_model, Options)
