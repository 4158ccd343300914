"""Gradients of ONNX files whose module is unknown, compared with gradients that use none of onnxgc's rules.

Gradients come from torch float64 over the file where `tests/torch_reference.py` has its operators, else from
torch over the forward graph that onnxgc reads, else from differences of that graph's loss in float64 by
ONNX's reference evaluator.

    python -m scripts.benchmarking.file_gradients FILE REQUEST RESULT    one file in this process
"""

import json
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from onnxgc.api import PlannedStep, optimize
from onnxgc.api.feeds import feeds_of
from onnxgc.errors import OnnxgcError
from onnxgc.model.core.ir import Array, TrainableModel
from onnxgc.model.files.forward_file import to_proto
from scripts.benchmarking.gradient_comparison import (
    ComparisonOptions,
    comparison_table,
    distances,
    failed_checks,
    failed_rows,
    failures_of,
    outputs_of,
    peak_figures,
)
from scripts.benchmarking.processes import rows_of_processes, write_result
from scripts.benchmarking.records import Progress, Record

SHAPES = "shapes.json"
"""File in a folder of models: `{file: {input: shape}}` for inputs with symbolic shapes."""
STEP = 1e-6
MAX_MOVED_PARAMETERS = 16
"""Number of parameters that differences move, one at a time."""
DIFFERENCE_TOLERANCE = 2e-2
SMALLEST_SHARE = 1e-5
"""A smaller gradient, relative to the largest, is measured against this share: float32's noise dominates
it."""
LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Options(ComparisonOptions):
    """`folder` contains the files."""

    folder: str = "models"


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """One row for each file below the folder, with an error in place of figures if one occurs."""
    paths = [str(path) for path in sorted(Path(options.folder).rglob("*.onnx"))]
    chosen = [path for path in paths if not options.only or Path(path).stem in options.only]
    rows = rows_of_processes("file_gradients", "file", chosen, options, progress)
    return {"rows": [{"holds": False, **row} for row in rows]}


def failures(figures: Mapping[str, Any]) -> list[str]:
    return failed_rows(figures["rows"])


def results_section(record: Record) -> str:
    table = comparison_table("file", record["figures"]["rows"])
    return (
        "**Gradients of files** of other exporters: as above, or relative errors of central differences where no"
        f" operators of torch compute the file:\n\n{table}"
    )


def compare_file(path: str | Path, options: ComparisonOptions) -> dict[str, Any]:
    """The row of one file, in this process."""
    path = Path(path)
    shapes_file = path.parent / SHAPES
    shapes = json.loads(shapes_file.read_text(encoding="utf-8")) if shapes_file.exists() else {}
    given = {name: tuple(shape) for name, shape in shapes.get(path.name, {}).items()}
    try:
        return _compared(path, given, options)
    except OnnxgcError as error:
        return {"error": str(error), "holds": False}


def _compared(path: Path, shapes: Mapping[str, tuple[int, ...]], options: ComparisonOptions) -> dict[str, Any]:
    source = _without_dropout(onnx.load(path))
    with tempfile.TemporaryDirectory() as folder:
        given, training = Path(folder) / "model.onnx", Path(folder) / "training.onnx"
        onnx.save(source, given)
        result = optimize(given, training, input_shapes=shapes)
        planned = result.planned
        feeds = feeds_of(planned, 0)
        outputs = outputs_of(training, feeds, options.threads)
        loss = float(outputs[planned.model.loss])
        gradients = {name: outputs[found] for name, found in planned.step.parameter_gradients.items()}
        row = _against_truth(_Step(source, planned, feeds, loss, gradients)) | peak_figures(result)
        if options.verify:
            row["verify"] = failed_checks(given, training, options.threads)
    row["holds"] = not failures_of(row) and row.get("difference_max", 0.0) <= DIFFERENCE_TOLERANCE
    return row


def _without_dropout(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model without Dropout, whose masks no reference can reproduce."""
    for node in proto.graph.node:
        if node.op_type == "Dropout" and len(node.output) == 1:
            node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output[:1], name=node.name))
    return proto


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of a file, with its results."""

    source: onnx.ModelProto
    planned: PlannedStep
    feeds: Mapping[str, Array]
    loss: float
    gradients: Mapping[str, Array]


def _against_truth(step: _Step) -> dict[str, Any]:
    """Comparison with the first truth that finds the same loss, and the reasons why others do not."""
    passed: dict[str, str] = {}
    for name, truth in _TRUTHS.items():
        try:
            found = truth(step)
        except Exception as error:
            # A truth may lack an operator, or fail on it.
            passed[name] = f"{type(error).__name__}: {str(error)[:150]}"
            continue
        if abs(found["true_loss"] - step.loss) <= LOSS_TOLERANCE * max(abs(step.loss), 1.0):
            return {"truth": name, **found, "other_truths": passed}
        passed[name] = f"its loss is {found['true_loss']}"
    return {"error": f"no truth: {passed}"}


def _torch_over_source(step: _Step) -> dict[str, Any]:
    return _by_torch(step, step.source)


def _torch_over_forward(step: _Step) -> dict[str, Any]:
    model = step.planned.model
    nodes = tuple(node for node in model.nodes if node.origin != "loss")
    computed = {output for node in nodes for output in node.outputs}
    proto = to_proto(replace(model, nodes=nodes, statistics=()))
    kept = [value for value in proto.graph.output if value.name in computed]
    del proto.graph.output[:]
    proto.graph.output.extend(kept)
    if model.loss_kind == "cross-entropy":
        _put_classes_second(proto, _class_axis(model), len(model.types[model.outputs[0]].shape))
    return _by_torch(step, proto)


def _class_axis(model: TrainableModel) -> int:
    """The axis of the output that the labels lack; the second if several are possible."""
    logits, labels = (model.types[name].shape for name in (model.outputs[0], model.targets[0]))
    axes = [axis for axis in range(1, len(logits)) if logits[:axis] + logits[axis + 1 :] == labels]
    return axes[0] if axes else 1


def _put_classes_second(proto: onnx.ModelProto, class_axis: int, rank: int) -> None:
    """Transposes an output whose classes are on another axis, as in language models."""
    if class_axis == 1:
        return
    order = [0, class_axis, *(axis for axis in range(1, rank) if axis != class_axis)]
    name = proto.graph.output[0].name
    proto.graph.node.append(helper.make_node("Transpose", [name], [f"{name}_classes_second"], perm=order))
    proto.graph.output[0].name += "_classes_second"


def _by_torch(step: _Step, forward: onnx.ModelProto) -> dict[str, Any]:
    import torch

    from scripts.benchmarking.torch_truth import torch_kernels
    from tests.torch_reference import reference_step

    model = step.planned.model
    target = step.feeds[model.targets[0]] if model.targets else np.zeros(0)
    loss = model.loss if model.loss_kind == "output" else model.loss_kind
    inputs = {name: step.feeds[name] for name in model.inputs}
    exact = reference_step(forward, {}, inputs, target, loss=loss)
    known = {name: value for name, value in exact.gradients.items() if name in step.gradients}
    if missing := sorted(set(step.gradients) - set(known)):
        raise KeyError(f"no gradient of {missing[:3]}")

    def single(weights: Mapping[str, Array]) -> Mapping[str, Array]:
        return reference_step(forward, weights, inputs, target, loss=loss, dtype=torch.float32).gradients

    singles = [single({})]
    with torch_kernels(onednn=False):
        singles.append(single({}))
    singles.append(single({name: _perturbed(model.weights[name].load(), name) for name in known}))
    found = distances(step.gradients, known, singles)
    return {"true_loss": exact.loss, **found, "no_parameters_of_the_module": []}


def _perturbed(value: Array, name: str) -> Array:
    """Values moved by one rounding of float32."""
    from scripts.benchmarking.torch_truth import ROUNDING

    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return (value * (1 + ROUNDING * generator.standard_normal(value.shape))).astype(value.dtype)


def _differences(step: _Step) -> dict[str, Any]:
    """Central differences of each moved parameter, along its gradient plus a random direction."""
    from tests.gradients.finite_differences import in_float64

    proto = in_float64(to_proto(step.planned.model))
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    norms = {name: float(np.linalg.norm(value)) for name, value in step.gradients.items()}
    least = SMALLEST_SHARE * max(norms.values())
    moved = _evenly_spaced(list(norms))
    for name in moved:
        kind = helper.np_dtype_to_tensor_dtype(weights[name].dtype)
        proto.graph.input.append(helper.make_tensor_value_info(name, kind, weights[name].shape))
    evaluator = ReferenceEvaluator(proto)
    feeds = {name: value.astype(np.float64) if value.dtype.kind == "f" else value for name, value in step.feeds.items()}

    def loss(name: str, value: Array) -> float:
        fed = feeds | {other: weights[other] for other in moved} | {name: value}
        return float(np.asarray(evaluator.run([step.planned.model.loss], fed)).item())

    generator = np.random.default_rng(0)
    errors = {}
    for name in moved:
        gradient = step.gradients[name].astype(np.float64)
        drawn = generator.standard_normal(gradient.shape)
        direction = gradient / (norms[name] or 1.0) + drawn / np.linalg.norm(drawn)
        scale = STEP * max(float(np.linalg.norm(weights[name])), 1.0)
        found = loss(name, weights[name] + scale * direction) - loss(name, weights[name] - scale * direction)
        expected = float(np.sum(gradient * direction))
        errors[name] = abs(found / (2 * scale) - expected) / max(norms[name], least)
    worst = max(errors, key=lambda name: errors[name])
    return {
        "true_loss": loss(moved[0], weights[moved[0]]),
        "parameters": len(errors),
        "parameters_of": len(step.gradients),
        "difference_max": errors[worst],
        "difference_max_parameter": worst,
    }


def _evenly_spaced(names: list[str]) -> list[str]:
    """At most `MAX_MOVED_PARAMETERS` of the names."""
    count = min(len(names), MAX_MOVED_PARAMETERS)
    return [names[index * len(names) // count] for index in range(count)]


_TRUTHS: Mapping[str, Callable[[_Step], dict[str, Any]]] = {
    "torch, source file": _torch_over_source,
    "torch, forward graph": _torch_over_forward,
    "differences": _differences,
}


if __name__ == "__main__":
    write_result(compare_file, Options)
