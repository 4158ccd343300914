"""Plans of networks and their training files, which need no card."""

import json
import lzma
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxgc.api import PlannedStep, emit, optimize, store_all_schedule
from onnxgc.api.feeds import feeds_of
from onnxgc.api.read_options import ReadOptions
from onnxgc.model.core.ir import Array
from onnxgc.model.draw_weights import draw_weights
from scripts.gpu_checks.half_precision import computed_in
from scripts.gpu_checks.settings import SEED, SMOKE_SEQUENCES, Json, Network, Sequences, light_model
from scripts.gpu_checks.training_files import BASELINE, PLANNED, Recipe, archive_of, package_version, recipes

SEARCH_SECONDS, SMOKE_SEARCH_SECONDS = 20.0, 2.0
_DURATIONS_OF = "h200"


def make(recipe: Recipe, folder: Path, search_seconds: float = SEARCH_SECONDS) -> None:
    """Plans a network and writes its training files and their description."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        source, batch, options = _forward_model(recipe.source, Path(scratch))
        if recipe.compute_type != "float32":
            source = computed_in(onnx.load(source), recipe.compute_type)
        options.update(provider=recipe.forms, check=False)
        plans = {graph: _planned(source, graph, options, search_seconds) for graph in recipe.graphs[1:]}
        first = next(iter(plans.values()))
        drawn = draw_weights(first.model, SEED)
        feeds = {**feeds_of(first, SEED), **batch, **drawn}
        read = ReadOptions(provider=recipe.forms, has_barriers=recipe.has_barriers)
        emitted = {graph: emit(planned, options=read).model for graph, planned in plans.items()}
        emitted[BASELINE] = emit(first, schedule=store_all_schedule(first), options=read).model
    contents = {graph: _without(emitted[graph], set(drawn)).SerializeToString() for graph in recipe.graphs}
    described = {
        "version": package_version(),
        "loss": first.model.loss,
        "ranges": {name: _range(np.asarray(value)) for name, value in feeds.items()},
        "simulated": {graph: _simulated_peak(emitted[graph]) for graph in recipe.graphs},
        "sizes": {graph: len(content) for graph, content in contents.items()},
    }
    with lzma.open(archive_of(folder, recipe.name), "wb", preset=9) as archive:
        archive.write(b"".join([json.dumps(described).encode(), b"\n", *contents.values()]))


def work_prepare(request: Json, folder: Path) -> Json:
    """Makes the files of one recipe."""
    (recipe,) = (one for one in recipes(request["group"], request["smoke"]) if one.name == request["name"])
    seconds = SMOKE_SEARCH_SECONDS if request["smoke"] else SEARCH_SECONDS
    make(recipe, Path(request["folder"]), seconds)
    return {}


def _forward_model(source: Network | Sequences, scratch: Path) -> tuple[Any, dict[str, Array], Json]:
    """A path, values of its inputs if they are special, and options of `optimize`."""
    if isinstance(source, Network):
        path, shapes = light_model(source)
        return path, {}, {"input_shapes": shapes}
    from scripts.exports.torch_export import Export, export_module
    from scripts.exports.torch_models import Recipe as Exporter
    from scripts.gpu_checks.torch_runs import batch_of, torch_model

    model, small = torch_model(source.model), source in SMOKE_SEQUENCES
    batch = batch_of(source, small)
    path = scratch / "model.onnx"
    export_module(model.module(small), batch, path, Export(Exporter.DYNAMO, dynamic=False))
    return path, {name: value.numpy() for name, value in batch.items()}, {"loss": model.loss}


def _planned(source: Any, graph: str, options: Json, seconds: float) -> PlannedStep:
    if graph == PLANNED:
        return optimize(source, solver="peak", **options).planned
    limit: Json = {"budget": graph, "device": _DURATIONS_OF, "time_limit": seconds}
    return optimize(source, **limit, **options).planned


def _without(model: onnx.ModelProto, drawn: set[str]) -> onnx.ModelProto:
    """The model without initial values of inputs that are drawn, which would be on the card twice."""
    fed = drawn.intersection(value.name for value in model.graph.input)
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in fed]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model


def _range(value: Array) -> tuple[float, float]:
    """The bounds of a uniform distribution like that of the values: of the same mean and deviation."""
    if value.dtype.kind != "f":
        return float(value.min()), float(value.max())
    mean, half = float(value.mean(dtype=np.float64)), math.sqrt(3) * float(value.std(dtype=np.float64))
    return mean - half, mean + half


def _simulated_peak(model: onnx.ModelProto) -> int:
    """Simulated peak in bytes, from the metadata of a training file."""
    properties = {entry.key: entry.value for entry in model.metadata_props}
    return int(properties["onnxgc.simulated_peak_bytes"])
