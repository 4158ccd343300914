"""Gradients of exported models, compared with torch autograd of the module itself.

Each model is exported by torch's exporters, planned, and run for one step in ONNX Runtime. The distance of
every parameter's gradient to torch float64 is compared with the distance of torch float32, and the planned
graph with the baseline. With `--cuda-forms`, one export of a model has the forms for CUDA beside those for
CPUs, on the CPU provider. Where rounding moves a unit across its kink, one run does not represent the error of
float32, so that torch's distance is the largest of several runs (`SINGLE_RUNS`).

    python -m scripts.benchmarking.gradients NAME REQUEST RESULT    one model in this process
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from onnxgc.api import optimize
from onnxgc.errors import OnnxgcError
from onnxgc.model.core.ir import Array
from scripts.benchmarking import file_gradients
from scripts.benchmarking.command_options import add_only, add_threads
from scripts.benchmarking.gradient_comparison import (
    Options,
    cells,
    distances,
    failed_checks,
    failures,
    is_too_far,
    outputs_of,
    peak_figures,
    versions,
)
from scripts.benchmarking.processes import result_of_process, write_result
from scripts.benchmarking.records import Progress, Record, write_record
from scripts.benchmarking.tables import machine_of, markdown_table, print_table

if TYPE_CHECKING:
    from scripts.benchmarking.torch_truth import Truth
    from scripts.exports.torch_export import Export
    from scripts.exports.torch_models import TorchModel

SEEDS = (1, 2, 3)
"""Seeds of batches. Another batch is tried where rounding moves a unit across its kink by chance.

A wrong rule fails on all of them.
"""
HEADINGS = (
    "model, export", "parameters", "distance: median", "largest", "planned / baseline", "passes",
)  # fmt: skip
_USUAL_EXPORTS = ("dynamo-dynamic", "script-static")
_IN_CUDA_FORMS = ("resnet50", "densenet121", "inception_v3", "vgg16", "vit_b_16", "bert", "gpt2")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_threads(parser)
    add_only(parser, "a model")
    parser.add_argument("--full", action="store_true", help="models in their published size")
    parser.add_argument("--no-verify", action="store_true", help="omit `onnxgc verify`")
    parser.add_argument("--all-exports", action="store_true", help="static and symbolic batch by each exporter")
    parser.add_argument("--cuda-forms", action="store_true", help="forms for CPUs and for CUDA of some models")
    parser.add_argument("--files", type=Path, help="ONNX files below this folder in place of PyTorch models")


def run_command(arguments: argparse.Namespace) -> int:
    """Exit code 1: a comparison fails."""
    only = tuple(arguments.only) or (_IN_CUDA_FORMS if arguments.cuda_forms else ())
    verify, exports = not arguments.no_verify, arguments.all_exports
    options = Options(only, not arguments.full, arguments.threads, verify, exports, arguments.cuda_forms)
    if arguments.files:
        name, figures = ("gradients_of_files", file_gradients.run_files(arguments.files, options, Progress()))
    else:
        name = "gradients_cuda" if options.cuda_forms else "gradients"
        figures = run_gradients(options, Progress())
    write_record(name, figures, threads=options.threads, folder=arguments.record)
    headings = ("parameters", "median", "max", "of", "planned", "fails")
    rows = [[row.get("file") or f"{row['model']} {row.get('export', '')}", *cells(row)] for row in figures["rows"]]
    title = "distance to torch float64, as a multiple of torch float32's"
    print_table(title, headings, rows, width=180)
    return 0 if all(row["holds"] for row in figures["rows"]) else 1


def run_gradients(options: Options, progress: Callable[[str], None]) -> dict[str, Any]:
    """One row for each export of each model, with an error in place of figures if one occurs."""
    from scripts.exports.torch_models import TORCH_MODELS

    rows: list[dict[str, Any]] = []
    for name in TORCH_MODELS:
        if options.only and name not in options.only:
            continue
        progress(name)
        found = result_of_process("scripts.benchmarking.gradients", name, options)
        rows += [{"model": name, **found, "holds": False}] if "error" in found else found
    return {"size": "small" if options.small else "full", "versions": versions(), "rows": rows}


def compare_model(name: str, options: Options) -> list[dict[str, Any]]:
    """The rows of one model, in this process."""
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
    usual, forms = (_USUAL_EXPORTS[:1], ("cpu", "cuda")) if options.cuda_forms else (_USUAL_EXPORTS, ("cpu",))
    for export in exports_of(model):
        if not options.all_exports and export.suffix not in usual:
            continue
        for provider in forms:
            label = f"{export.suffix}, {provider} forms" if options.cuda_forms else export.suffix
            progress(f"{name} {label}")
            row: dict[str, Any] = {"model": name, "export": label}
            try:
                row |= _compared(model, export, provider, truth, options)
            except OnnxgcError as error:
                row |= {"error": str(error), "holds": False}
            if options.cuda_forms and "distance_median" in row:
                in_cpu_forms = row if provider == "cpu" else rows[-1]
                row["of_cpu_forms"] = row["distance_median"] / in_cpu_forms.get("distance_median", np.nan)
                row["holds"] = not failures(row)
            rows.append(row)
    return rows


def results_section(record: Record) -> str:
    figures = record["figures"]
    known = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    table = markdown_table(HEADINGS, list(map(_document_row, figures["rows"])))
    ratios = [row["of_cpu_forms"] for row in figures["rows"] if "of_cpu_forms" in row]
    if ratios:
        return (
            "**Gradients in the forms for CUDA**, computed by the CPU provider, as above. The median distance "
            f"of a model's gradients is at most {max(ratios):.2f} times that of the forms for CPUs:"
            f"\n\n{table}\n\n{machine_of(record)}."
        )
    return (
        f"**Gradients of whole models**, exported from PyTorch in a {figures['size']} size and trained for "
        "one step. *Distance* is the distance of each parameter's gradient to torch float64 of the module "
        "itself, as a multiple of the distance of torch float32. An export *passes* if no distance is above "
        "2 and the planned file is bit-identical to the baseline "
        f"({known}):\n\n{table}\n\n{machine_of(record)}."
    )


def _document_row(row: Mapping[str, Any]) -> list[str]:
    label = f"{row['model']}, {row['export']}"
    if "error" in row:
        return [label, "", "", "", "", row["error"]]
    ratios = (f"{row[key]:.2f}" for key in ("ratio_median", "ratio_max", "planned_of_regular"))
    parameters = f"{row['parameters']} of {row['parameters_of']}"
    return [label, parameters, *ratios, "yes" if row["holds"] else "NO"]


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
        row: dict[str, Any] = {
            "opset": next(entry.version for entry in proto.opset_import if not entry.domain),
            "nodes": len(proto.graph.node),
        }
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
            row |= {"batch": seed, "loss": loss, "loss_distance": abs(loss - true.loss) / abs(true.loss)}
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
    row["holds"] = not failures(row)
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
