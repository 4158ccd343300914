"""ONNX files without the module that they came from, against truths that share no rule with onnxgc.

The truth is torch float64 over the file itself where `tests/torch_reference.py` has its operators,
else over the forward graph that was read from it, else differences of that graph's loss in
float64 by ONNX's reference evaluator.

    python -m scripts.benchmarking.file_gradients FILE RESULT REQUEST    one file in this process
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from onnxgc.api import PlannedStep, optimize, verify
from onnxgc.errors import OnnxgcError
from onnxgc.model.core.ir import Array, TrainableModel, dtype_name
from onnxgc.model.files.forward_file import to_proto
from onnxgc.runtime.measure import random_feeds
from scripts.benchmarking.gradients import (
    ROUNDING,
    Options,
    distances,
    holds,
    kernels,
    outputs_of,
    versions,
)
from scripts.benchmarking.records import ROOT, Progress

SHAPES = "shapes.json"
"""Beside the files: `{file: {input: shape}}` for those whose inputs have symbolic shapes."""
STEP = 1e-6
MOST_PARAMETERS = 16
"""So many parameters are moved, one at a time, where the truth is differences."""
DIFFERENCE_TOLERANCE = 2e-2
SMALLEST_SHARE = 1e-5
"""A gradient below this share of the largest is measured against that share: float32 leaves noise there."""
LOSS_TOLERANCE = 1e-3


def run_files(folder: Path, options: Options, tell: Progress) -> dict[str, Any]:
    """One row for each file below a folder; the error in place of figures where one occurs."""
    rows = []
    for path in sorted(folder.rglob("*.onnx")):
        if options.only and path.stem not in options.only:
            continue
        tell(str(path))
        with tempfile.TemporaryDirectory() as scratch:
            result = Path(scratch) / "row.json"
            command = [sys.executable, "-m", "scripts.benchmarking.file_gradients", str(path), str(result)]
            status = subprocess.run([*command, json.dumps(asdict(options))], cwd=ROOT).returncode
            row: dict[str, Any] = {"error": f"the process ended with status {status}", "holds": False}
            if not status:
                row = json.loads(result.read_text(encoding="utf-8"))
        rows.append({"file": str(path.relative_to(folder)), **row})
    return {"versions": versions(), "rows": rows}


def compare_file(path: Path, options: Options) -> dict[str, Any]:
    """The row of one file, in this process."""
    shapes_file = path.parent / SHAPES
    shapes = json.loads(shapes_file.read_text(encoding="utf-8")) if shapes_file.exists() else {}
    given = {name: tuple(shape) for name, shape in shapes.get(path.name, {}).items()}
    try:
        return _compared(path, given, options)
    except OnnxgcError as error:
        return {"error": str(error), "holds": False}


def _compared(path: Path, shapes: Mapping[str, tuple[int, ...]], options: Options) -> dict[str, Any]:
    source = _without_dropout(onnx.load(path))
    row: dict[str, Any] = {
        "opset": next(entry.version for entry in source.opset_import if entry.domain in ("", "ai.onnx")),
        "nodes": len(source.graph.node),
    }
    with tempfile.TemporaryDirectory() as folder:
        given, training = Path(folder) / "model.onnx", Path(folder) / "training.onnx"
        onnx.save(source, given)
        result = optimize(given, training, input_shapes=shapes)
        planned = result.planned
        feeds = _feeds(planned)
        outputs = outputs_of(training, feeds, options.threads)
        loss = float(outputs[planned.model.loss])
        gradients = {name: outputs[found] for name, found in planned.step.parameter_gradients.items()}
        row |= {"loss": loss, "loss_kind": planned.model.loss_kind}
        row |= _against_truth(source, planned, feeds, loss, gradients)
        report = result.report
        row["regular_peak_bytes"] = report["regular"]["simulated_peak_bytes"]
        row["planned_peak_bytes"] = report["planned"]["simulated_peak_bytes"]
        row["planned_of_regular"] = row["planned_peak_bytes"] / row["regular_peak_bytes"]
        if options.verify:
            checks = verify(given, training, threads=options.threads).checks
            row["verify"] = {check.name: check.detail for check in checks if not check.holds}
    if "error" in row:
        row["holds"] = False
    elif "difference_max" in row:
        row["holds"] = row["difference_max"] <= DIFFERENCE_TOLERANCE and not row.get("verify")
    else:
        row["holds"] = holds(row)
    return row


def _feeds(planned: PlannedStep, seed: int = 0) -> dict[str, Array]:
    model = planned.model
    described = {
        name: (dtype_name(model.types[name].dtype), model.types[name].shape)
        for name in (*model.inputs, *model.targets)
    }
    return random_feeds(described, seed, _classes(model))


def _classes(model: TrainableModel) -> int:
    """How many classes there are: more labels would not be valid. 2 where there are none."""
    if model.loss_kind != "cross-entropy":
        return 2
    axis = _class_axis(model)
    return model.types[model.outputs[0]].shape[axis]


def _class_axis(model: TrainableModel) -> int:
    """The axis of the output that the labels do not have; the second where several would do."""
    logits, labels = (model.types[name].shape for name in (model.outputs[0], model.targets[0]))
    axes = [axis for axis in range(1, len(logits)) if logits[:axis] + logits[axis + 1 :] == labels]
    return axes[0] if axes else 1


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a truth is asked about."""

    source: onnx.ModelProto
    planned: PlannedStep
    feeds: Mapping[str, Array]
    loss: float
    gradients: Mapping[str, Array]


def _against_truth(
    source: onnx.ModelProto,
    planned: PlannedStep,
    feeds: Mapping[str, Array],
    loss: float,
    gradients: Mapping[str, Array],
) -> dict[str, Any]:
    """The first truth that finds the same loss; the reasons of those that do not."""
    asked = _Asked(source, planned, feeds, loss, gradients)
    passed: dict[str, str] = {}
    for name, truth in _TRUTHS.items():
        try:
            found = truth(asked)
        except Exception as error:
            # A truth that lacks an operator, or fails on it, is none; its reason is told.
            passed[name] = f"{type(error).__name__}: {str(error)[:150]}"
            continue
        if abs(found["true_loss"] - loss) <= LOSS_TOLERANCE * max(abs(loss), 1.0):
            return {"truth": name, **found, "other_truths": passed}
        passed[name] = f"its loss is {found['true_loss']}"
    return {"error": f"no truth: {passed}"}


def _torch_over_source(asked: _Asked) -> dict[str, Any]:
    return _by_torch(asked, asked.source)


def _torch_over_forward(asked: _Asked) -> dict[str, Any]:
    model = asked.planned.model
    nodes = tuple(node for node in model.nodes if node.origin != "loss")
    computed = {output for node in nodes for output in node.outputs}
    proto = to_proto(replace(model, nodes=nodes, statistics=()))
    kept = [value for value in proto.graph.output if value.name in computed]
    del proto.graph.output[:]
    proto.graph.output.extend(kept)
    if model.loss_kind == "cross-entropy":
        _put_classes_second(proto, _class_axis(model), len(model.types[model.outputs[0]].shape))
    return _by_torch(asked, proto)


def _put_classes_second(proto: onnx.ModelProto, class_axis: int, rank: int) -> None:
    """A transposed output where the classes are on another axis, as language models have them."""
    if class_axis == 1:
        return
    order = [0, class_axis, *(axis for axis in range(1, rank) if axis != class_axis)]
    name = proto.graph.output[0].name
    proto.graph.node.append(helper.make_node("Transpose", [name], [f"{name}_classes_second"], perm=order))
    proto.graph.output[0].name += "_classes_second"


def _by_torch(asked: _Asked, forward: onnx.ModelProto) -> dict[str, Any]:
    import torch

    from tests.torch_reference import reference_step

    model = asked.planned.model
    target = asked.feeds[model.targets[0]] if model.targets else np.zeros(0)
    loss = model.loss if model.loss_kind == "output" else model.loss_kind
    inputs = {name: asked.feeds[name] for name in model.inputs}
    exact = reference_step(forward, {}, inputs, target, loss=loss)
    single = reference_step(forward, {}, inputs, target, loss=loss, dtype=torch.float32)
    with kernels(onednn=False):
        native = reference_step(forward, {}, inputs, target, loss=loss, dtype=torch.float32)
    known = {name: value for name, value in exact.gradients.items() if name in asked.gradients}
    rounded = reference_step(
        forward,
        {name: _moved_by_a_rounding(model.weights[name].load(), name) for name in known},
        inputs,
        target,
        loss=loss,
        dtype=torch.float32,
    )
    if missing := sorted(set(asked.gradients) - set(known)):
        raise KeyError(f"no gradient of {missing[:3]}")
    found = distances(asked.gradients, known, (single.gradients, native.gradients, rounded.gradients))
    return {"true_loss": exact.loss, **found, "no_parameters_of_the_module": []}


def _moved_by_a_rounding(value: Array, name: str) -> Array:
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return (value * (1 + ROUNDING * generator.standard_normal(value.shape))).astype(value.dtype)


def _differences(asked: _Asked) -> dict[str, Any]:
    """Moves some parameters, one at a time, along their gradient and at random."""
    from tests.gradients.finite_differences import in_float64

    proto = in_float64(to_proto(asked.planned.model))
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    norms = {name: float(np.linalg.norm(value)) for name, value in asked.gradients.items()}
    least = SMALLEST_SHARE * max(norms.values())
    chosen = _spread_out(list(norms))
    for name in chosen:
        kind = helper.np_dtype_to_tensor_dtype(weights[name].dtype)
        proto.graph.input.append(helper.make_tensor_value_info(name, kind, weights[name].shape))
    evaluator = ReferenceEvaluator(proto)
    feeds = {
        name: value.astype(np.float64) if value.dtype.kind == "f" else value
        for name, value in asked.feeds.items()
    }

    def loss(name: str, value: Array) -> float:
        moved = {other: weights[other] for other in chosen} | {name: value}
        return float(np.asarray(evaluator.run([asked.planned.model.loss], {**feeds, **moved})).item())

    generator = np.random.default_rng(0)
    errors = {}
    for name in chosen:
        gradient = asked.gradients[name].astype(np.float64)
        drawn = generator.standard_normal(gradient.shape)
        direction = gradient / (norms[name] or 1.0) + drawn / np.linalg.norm(drawn)
        scale = STEP * max(float(np.linalg.norm(weights[name])), 1.0)
        found = loss(name, weights[name] + scale * direction) - loss(name, weights[name] - scale * direction)
        expected = float(np.sum(gradient * direction))
        errors[name] = abs(found / (2 * scale) - expected) / max(norms[name], least)
    worst = max(errors, key=lambda name: errors[name])
    return {
        "true_loss": loss(chosen[0], weights[chosen[0]]),
        "parameters": len(errors),
        "parameters_of": len(asked.gradients),
        "difference_max": errors[worst],
        "difference_max_parameter": worst,
    }


def _without_dropout(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Without the masks that nobody can draw again."""
    for node in proto.graph.node:
        if node.op_type == "Dropout" and len(node.output) == 1:
            node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output[:1], name=node.name))
    return proto


def _spread_out(names: list[str]) -> list[str]:
    """At most `MOST_PARAMETERS`, evenly from the whole."""
    if len(names) <= MOST_PARAMETERS:
        return names
    return [names[index * len(names) // MOST_PARAMETERS] for index in range(MOST_PARAMETERS)]


_TRUTHS: Mapping[str, Callable[[_Asked], dict[str, Any]]] = {
    "torch, source file": _torch_over_source,
    "torch, forward graph": _torch_over_forward,
    "differences": _differences,
}


def main(path: str, result: str, request: str) -> None:
    row = compare_file(Path(path), Options(**json.loads(request)))
    Path(result).write_text(json.dumps(row), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
