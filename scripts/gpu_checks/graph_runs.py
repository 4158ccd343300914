"""Training graphs of a network, each measured in a separate process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from onnxgc.api import emit, plan_step, store_all_schedule
from onnxgc.api.feeds import feeds_of
from onnxgc.model.draw_weights import draw_weights
from onnxgc.model.read import read_model
from scripts.gpu_checks.profile_reports import NodeEvent, arena_report, node_events, order_report
from scripts.gpu_checks.settings import GRAPHS, ROOT, RUNS, SEED, CheckError, Json, Network, Options, Setting
from scripts.gpu_checks.worker_process import answer_of_worker, save_arrays


@dataclass(frozen=True, slots=True)
class Prepared:
    """Both training graphs of a network; weights are feeds, not part of the files."""

    network: Network
    folder: Path
    models: Mapping[str, onnx.ModelProto]
    loss: str
    feeds: tuple[str, ...]
    simulated: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one process: profiles of its runs, its answer for the record, and its outputs."""

    runs: tuple[tuple[NodeEvent, ...], ...]
    answer: Json
    outputs: Path
    names: tuple[str, ...]

    @property
    def steady(self) -> tuple[NodeEvent, ...]:
        return self.runs[-1]


def prepare(network: Network, folder: Path, forms: str) -> Prepared:
    """Plans a network and writes both graphs, in the forms of a provider, and their feeds."""
    source = ROOT / "models" / f"{network.name}.onnx"
    (name,) = (value.name for value in onnx.load(source).graph.input)
    model = read_model(source, input_shapes={name: network.shape}, provider=forms)
    planned = plan_step(model)
    folder.mkdir(parents=True)
    models: dict[str, onnx.ModelProto] = {}
    simulated: dict[str, int] = {}
    for graph, schedule in zip(GRAPHS, (store_all_schedule(planned), planned.schedule), strict=True):
        emitted = emit(planned, schedule=schedule).model
        simulated[graph] = simulated_peak_of(emitted)
        models[graph] = _without_fed_initializers(emitted, set(model.weights))
        (folder / f"{graph}.onnx").write_bytes(models[graph].SerializeToString())
    drawn = draw_weights(model, SEED)
    fed = {value.name for value in models["planned"].graph.input}
    feeds = feeds_of(planned, SEED)
    for name, weight in model.weights.items():
        if name in fed:
            feeds[name] = drawn[name] if name in drawn else weight.load()
    save_arrays(folder / "feeds.npz", feeds.values())
    return Prepared(network, folder, models, model.loss, tuple(feeds), simulated)


def simulated_peak_of(model: onnx.ModelProto) -> int:
    """Simulated peak in bytes, from the metadata of a training file."""
    properties = {entry.key: entry.value for entry in model.metadata_props}
    return int(properties["onnxgc.simulated_peak_bytes"])


def measure_graph(
    prepared: Prepared, graph: str, setting: Setting, options: Options, timeout: float
) -> Measured:
    """Runs a graph in a separate process, with inputs, weights and outputs on the device."""
    folder = prepared.folder / f"{graph}-{setting.name}"
    request = {
        "model": str(prepared.folder / f"{graph}.onnx"),
        "feeds": str(prepared.folder / "feeds.npz"),
        "names": list(prepared.feeds),
        "provider": options.provider,
        "threads": options.threads,
        "file_order": setting.file_order,
        "cuda_options": dict(setting.cuda_options),
    }
    answer = answer_of_worker("run", request, folder, timeout)
    runs = tuple(tuple(run) for run in node_events(Path(answer.pop("profile"))))
    if len(runs) != RUNS:
        raise CheckError(f"the profile of '{prepared.network.name}' has {len(runs)} runs instead of {RUNS}")
    return Measured(runs, answer, folder / "outputs.npz", tuple(answer.pop("outputs")))


def graph_figures(prepared: Prepared, measured: Measured, graph: str, provider: str) -> Json:
    """Peaks and times of one graph. The arena's count is exact; device memory includes its slack."""
    arenas = [arena_report(run) for run in measured.runs]
    device = measured.answer["device_growth_bytes"]
    arena = arenas[-1].get(provider, {}).get("requested_peak_bytes", 0)
    order = order_report(prepared.models[graph], measured.steady)
    return {
        "simulated_peak_bytes": prepared.simulated[graph],
        "measured_peak_bytes": arena or (device[-1] if device else 0),
        "measured_by": "arena, requested" if arena else "device memory" if device else "nothing",
        "arena_by_run": arenas,
        "equals_schedule": order["equals_schedule"],
        **measured.answer,
    }


def _without_fed_initializers(model: onnx.ModelProto, weights: set[str]) -> onnx.ModelProto:
    """The graph without initial values of its inputs, which would be on the card twice."""
    fed = weights.intersection(value.name for value in model.graph.input)
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in fed]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model
