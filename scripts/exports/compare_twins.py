"""Matches the tensors of all pairs of twin exports, and checks the matches by values.

`build_models.py --exports ORIGIN FOLDER --twins` writes the files. Networks are compared with fixed running
statistics and, where no normalisation is folded, in training. Dropout is off during the comparison of values.
`python scripts/benchmark.py twins FOLDER` records the results, and transferred plans.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from onnxgc.api.step_planning import plan_step
from onnxgc.matching.match import Matching, Reason, match
from onnxgc.model.core.ir import Array, TrainableModel
from onnxgc.model.files.forward_file import to_proto
from onnxgc.model.read import read_model
from onnxgc.runtime.ort import load_onnxruntime
from onnxgc.solvers.base import SolverOptions
from scripts.exports.twins import BATCH, CLASSES, ENCODER, PIXELS

# Exporters that fold normalisations into convolutions, and exporters that write new running statistics.
_FOLDED = ("torch-script", "torch-dynamo-optimized", "keras-keras", "keras-tf2onnx")
_OF_TRAINING = ("torch-script-train", "keras-tf2onnx-train")
_TOLERANCE = 2e-3
MAX_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class TwinComparison:
    """The matching of two exports, the number of wrong matches, and checkpoints: matched, and with a counterpart."""

    matching: Matching
    wrong: int
    checkpoints: tuple[int, int]


def input_shapes(model: onnx.ModelProto, batch: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's inputs at a batch."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return {
        value.name: (batch, *(size.dim_value for size in value.type.tensor_type.shape.dim[1:]))
        for value in model.graph.input
        if value.name not in weights
    }


@cache
def _read(path: Path, freeze_bn: bool) -> TrainableModel:
    shapes = input_shapes(onnx.load(path, load_external_data=False), BATCH)
    return read_model(path, freeze_bn=freeze_bn, input_shapes=shapes)


@cache
def _values(path: Path, freeze_bn: bool) -> dict[str, Array]:
    return tensor_values(_read(path, freeze_bn))


def tensor_values(model: TrainableModel) -> dict[str, Array]:
    """The values of all tensors of the forward graph, for inputs that are the same in all files."""
    proto = to_proto(model)
    for node in proto.graph.node:
        if node.op_type == "Dropout":
            # Masks of two files differ. Without its third input, Dropout is the identity.
            del node.input[2:]
    names = [name for node in model.nodes if not node.once for name in node.outputs if name]
    known = {value.name for value in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    draw = np.random.default_rng(0)
    image = draw.normal(size=(BATCH, 3, PIXELS, PIXELS))
    tokens = draw.integers(0, ENCODER.words, (BATCH, ENCODER.length))
    feeds: dict[str, Array] = {name: np.arange(1, BATCH + 1) % CLASSES for name in model.targets}
    for name in model.inputs:
        kind = model.types[name]
        value = image if len(kind.shape) == 4 else tokens
        value = value if value.shape == kind.shape else np.moveaxis(value, 1, -1)
        feeds[name] = value.astype(helper.tensor_dtype_to_np_dtype(kind.dtype))
    runtime = load_onnxruntime()
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    return dict(zip(names, session.run(names, feeds), strict=True)) | feeds


@cache
def _checkpoints(path: Path, freeze_bn: bool) -> frozenset[str]:
    planned = plan_step(_read(path, freeze_bn), options=SolverOptions(time_limit_seconds=MAX_SECONDS))
    return frozenset(map(str, planned.solution.plan.checkpoints))


def have_equal_elements(one: Array, other: Array, factor: float) -> bool:
    """Whether two arrays are equal in some order of dimensions, or of elements."""
    if one.size != other.size:
        return False
    here, there = np.asarray(one, np.float64).squeeze() * factor, np.asarray(other, np.float64).squeeze()
    limit = _TOLERANCE * (np.abs(here).max() + 1e-12)
    orders = (there.transpose(order) for order in itertools.permutations(range(there.ndim)))
    if any(t.shape == here.shape and np.abs(t - here).max() < limit for t in orders):
        return True
    return bool(np.abs(np.sort(here, axis=None) - np.sort(there, axis=None)).max() < limit)


def compare_pair(paths: tuple[Path, Path], freeze_bn: bool) -> TwinComparison:
    found = match(*(_read(path, freeze_bn) for path in paths))
    values = [_values(path, freeze_bn) for path in paths]
    wrong = sum(
        not have_equal_elements(values[0][pair.a], values[1][pair.b], pair.factor)
        for pair in found.pairs
        if pair.is_same_function and pair.a in values[0] and pair.b in values[1]
    )
    matched_count = count = 0
    for path, matched, rest in zip(
        paths, (found.of_a, found.of_b), (found.unmatched_a, found.unmatched_b), strict=True
    ):
        with_counterpart = matched.keys() | {u.tensor for u in rest if u.reason is not Reason.ONE_SIDE}
        kept = _checkpoints(path, freeze_bn)
        count += len(kept & with_counterpart)
        matched_count += len(kept & matched.keys())
    return TwinComparison(found, wrong, (matched_count, count))


def comparable_pairs(folder: Path) -> Iterator[tuple[bool, tuple[Path, Path]]]:
    """All pairs of exports with comparable values, and whether running statistics are fixed."""
    paths = sorted(folder.glob("*-*.onnx"))
    for freeze_bn, pair in itertools.product((True, False), itertools.combinations(paths, 2)):
        networks, exports = zip(*(path.stem.split("-", 1) for path in pair), strict=True)
        excluded = () if networks[0] == "encoder" else _OF_TRAINING if freeze_bn else _FOLDED
        is_repeated = networks[0] == "encoder" and not freeze_bn
        if len(set(networks)) == 1 and not is_repeated and not set(exports) & set(excluded):
            yield freeze_bn, pair


def clear_caches() -> None:
    """Releases the memory of the compared files."""
    for cached in (_read, _values, _checkpoints):
        cached.cache_clear()
