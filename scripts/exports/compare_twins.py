"""Matches the tensors of every two twin exports of one network, and checks the matches by values.

    python -m scripts.exports.compare_twins FOLDER

FOLDER holds what `build_models.py --exports ORIGIN FOLDER --twins` wrote. Networks are compared with the
running statistics of their files and, where no normalisation is folded, in training; dropout is off while
values are compared. `python scripts/benchmark.py twins FOLDER` records this, and plans carried over.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from onnxgc.api.pipeline import plan_step
from onnxgc.matching.match import Matching, Reason, match
from onnxgc.model.core.ir import Array, TrainableModel
from onnxgc.model.files.forward_file import to_proto
from onnxgc.model.read import read_model
from onnxgc.runtime.ort import load_onnxruntime
from onnxgc.solvers.base import SolverOptions
from scripts.exports.twins import BATCH, CLASSES, ENCODER, PIXELS

# Their exporters put normalisations into convolutions, or write new running statistics.
_FOLDED = ("torch-script", "torch-dynamo-optimized", "keras-keras", "keras-tf2onnx")
_OF_TRAINING = ("torch-script-train", "keras-tf2onnx-train")
_TOLERANCE = 2e-3
_MOST_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Compared:
    """Two exports: how many matches are wrong, and how many tensors with a counterpart are matched.

    The latter among a plan's checkpoints and among what backward reads, of both sides.
    """

    names: tuple[str, str]
    matching: Matching
    wrong: int
    checkpoints: tuple[int, int]
    read_by_backward: tuple[int, int]


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
    return values_of(_read(path, freeze_bn))


def values_of(model: TrainableModel) -> dict[str, Array]:
    """What every tensor of the forward graph holds, for the same inputs in all files."""
    proto = to_proto(model)
    for node in proto.graph.node:
        if node.op_type == "Dropout":
            # Two files draw two masks, or leave it out: without its third input it does nothing.
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
def _plan(path: Path, freeze_bn: bool) -> tuple[frozenset[str], frozenset[str]]:
    """The checkpoints of a plan, and what backward reads where everything is stored."""
    planned = plan_step(_read(path, freeze_bn), options=SolverOptions(time_limit_seconds=_MOST_SECONDS))
    chunks = planned.traced.step.graph.chunks
    read = frozenset(name for chunk in chunks for operator in chunk for name in operator.inputs)
    return frozenset(map(str, planned.solution.plan.checkpoints)), read


def hold_the_same(one: Array, other: Array, factor: float) -> bool:
    """Whether there is an order of dimensions, or at least of elements, in which they are equal."""
    if one.size != other.size:
        return False
    here, there = np.asarray(one, np.float64).squeeze() * factor, np.asarray(other, np.float64).squeeze()
    limit = _TOLERANCE * (np.abs(here).max() + 1e-12)
    orders = (there.transpose(order) for order in itertools.permutations(range(there.ndim)))
    if any(t.shape == here.shape and np.abs(t - here).max() < limit for t in orders):
        return True
    return bool(np.abs(np.sort(here, axis=None) - np.sort(there, axis=None)).max() < limit)


def compared(paths: tuple[Path, Path], freeze_bn: bool) -> Compared:
    found = match(*(_read(path, freeze_bn) for path in paths))
    values = [_values(path, freeze_bn) for path in paths]
    wrong = sum(
        not hold_the_same(values[0][pair.a], values[1][pair.b], pair.factor)
        for pair in found.pairs
        if pair.is_same_function and pair.a in values[0] and pair.b in values[1]
    )
    counts: Counter[str] = Counter()
    for path, matched, rest in zip(
        paths, (found.of_a, found.of_b), (found.unmatched_a, found.unmatched_b), strict=True
    ):
        with_counterpart = matched.keys() | {u.tensor for u in rest if u.reason is not Reason.ONE_SIDE}
        for kind, names in zip(("kept", "read"), _plan(path, freeze_bn), strict=True):
            counts[kind] += len(names & with_counterpart)
            counts[f"{kind}, matched"] += len(names & matched.keys())
    return Compared(
        (paths[0].stem, paths[1].stem),
        found,
        wrong,
        (counts["kept, matched"], counts["kept"]),
        (counts["read, matched"], counts["read"]),
    )


def comparisons(folder: Path) -> Iterator[tuple[bool, tuple[Path, Path]]]:
    """Every two exports whose values can be compared, and whether running statistics are kept."""
    paths = sorted(folder.glob("*-*.onnx"))
    for freeze_bn, pair in itertools.product((True, False), itertools.combinations(paths, 2)):
        networks, exports = zip(*(path.stem.split("-", 1) for path in pair), strict=True)
        left_out = () if networks[0] == "encoder" else _OF_TRAINING if freeze_bn else _FOLDED
        is_repeated = networks[0] == "encoder" and not freeze_bn
        if len(set(networks)) == 1 and not is_repeated and not set(exports) & set(left_out):
            yield freeze_bn, pair


def forget() -> None:
    """Give back the memory of the files that were compared."""
    for kept in (_read, _values, _plan):
        kept.cache_clear()


def main(folder: Path) -> None:
    pairs = wrong = 0
    for freeze_bn, paths in comparisons(folder):
        result = compared(paths, freeze_bn)
        pairs += len(result.matching.pairs)
        wrong += result.wrong
        print(
            *result.names,
            "statistics kept" if freeze_bn else "training",
            "same" if result.matching.is_same_network else "not the same",
            f"checkpoints {'/'.join(map(str, result.checkpoints))}",
            f"read by backward {'/'.join(map(str, result.read_by_backward))}",
            f"wrong {result.wrong} of {len(result.matching.pairs)}",
            sep="  ",
            flush=True,
        )
    print(f"wrong {wrong} of {pairs}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
