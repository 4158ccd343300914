"""Answer, on one card and within eight minutes, what only a GPU can answer.

    1. the CUDA build of ONNX Runtime loads, finds its libraries, and runs a MatMul on the card
    2. which operators of an emitted training graph fall back to the CPU, and what is copied for it
    3. whether the executed order is the schedule, and what the barriers cost
    4. measured against simulated peak, and the step time, storing everything and planned
    5. the same for exports of PyTorch, beside PyTorch eager and checkpointed by hand
    6. in-place updates through IO binding, and DLPack exchange with torch without a copy
    7. every gradient rule in float32, float16 and bfloat16 against torch float64
    8. the weight gradients of convolutions in other forms

Needs numpy, onnx, torch and onnxruntime-gpu; the rest of the repository as it lies.

    python scripts/gpu_check.py --out benchmarks/gpu     one JSON record, named after the card
    python scripts/gpu_check.py --out FOLDER --smoke     tiny networks on the CPU provider, no CUDA claim

The record is written again after each step and each network: a run that is cut short leaves what
it knows. Whatever touches the card runs in a process of its own, so that a crash or a hang costs
one figure, and so that no two figures share an arena. Exit code 1: a step failed or did not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import functools
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from onnxgc import __version__
from onnxgc.api import emit, plan_step, store_all_schedule
from onnxgc.emission.barriers import ZERO
from onnxgc.model.core.ir import Array, dtype_name
from onnxgc.model.read import read_model
from onnxgc.model.weight_roles.initialization import draw_weights
from onnxgc.runtime import ort as runtime_ort
from onnxgc.runtime.measure import random_feeds
from onnxgc.runtime.ort import SessionSettings, make_session

ROOT = Path(__file__).resolve().parent.parent
SCHEMA_VERSION = 1
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
SEED = 0
RUNS, TIMED_RUNS = 3, 3
LAST_STEPS_SECONDS = 30.0
"""What the networks of step 4 leave for the steps behind it."""
SMALLEST_STEP_SECONDS = 5.0
_KERNEL = "_kernel_time"
_MEMCPY = ("MemcpyToHost", "MemcpyFromHost")
# No shape has more entries; longer integer vectors are data.
_MOST_DIMENSIONS = 8
_NAMES_SHOWN = 4

Json = dict[str, Any]


class CheckError(Exception):
    """What a step could not do, in one line."""


# --- What is checked ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Network:
    """A light model and the shape it is checked at."""

    name: str
    shape: tuple[int, ...]


# The paper's batch sizes, most telling first: a short run still compares the main ones.
PAPER_NETWORKS = (
    Network("resnet50", (64, 3, 224, 224)),
    Network("densenet121", (32, 3, 224, 224)),
    Network("resnet152", (16, 3, 224, 224)),
    Network("inception_v3", (32, 3, 300, 300)),
    Network("vgg16", (64, 3, 224, 224)),
)
# Large enough that activations, not only the gradients of all parameters, decide the peak.
SMOKE_NETWORKS = (Network("resnet18", (8, 3, 64, 64)), Network("mobilenet_v2", (8, 3, 64, 64)))


@dataclass(frozen=True, slots=True)
class Setting:
    """How sessions are made: onnxgc's own way, or with one thing changed to see what it does."""

    name: str
    file_order: bool = True
    cuda_options: Mapping[str, str] = field(default_factory=dict)


MAKE_SESSION = Setting("make_session")
OTHER_SETTINGS = (
    # As ONNX Runtime has it by default: convolutions try all algorithms and take the workspace they like.
    Setting(
        "large_workspace",
        cuda_options={"cudnn_conv_algo_search": "EXHAUSTIVE", "cudnn_conv_use_max_workspace": "1"},
    ),
    Setting("stock", file_order=False),
)
GRAPHS = ("regular", "planned")


@dataclass(frozen=True, slots=True)
class Options:
    out: Path
    smoke: bool
    limit_seconds: float
    network_limit_seconds: float
    networks: tuple[str, ...]
    only: tuple[int, ...]

    @property
    def provider(self) -> str:
        return CPU if self.smoke else CUDA

    @property
    def threads(self) -> int | None:
        return 2 if self.smoke else None

    def network(self, name: str) -> Network:
        known = {network.name: network for network in (SMOKE_NETWORKS if self.smoke else PAPER_NETWORKS)}
        if name not in known:
            raise CheckError(f"network '{name}' is none of {', '.join(known)}; pass one to --networks")
        return known[name]


# --- What a profile says --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """One executed node. `seconds` is host time: on CUDA, mostly that of the launch.

    `outputs` holds element type and shape of each output; `memory` the arena's figures at the
    node's end, of the arena of its provider.
    """

    name: str
    operator: str
    provider: str
    seconds: float
    outputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_copy(self) -> bool:
        return self.operator in _MEMCPY

    @property
    def is_shape_arithmetic(self) -> bool:
        """Whether it makes nothing but shapes, flags or empty tensors: cheap wherever it runs."""
        sizes = [(kind, int(np.prod(shape, dtype=np.int64))) for kind, shape in self.outputs]
        return bool(sizes) and all(
            size == 0 or (size <= _MOST_DIMENSIONS and not kind.startswith(("float", "double", "bfloat")))
            for kind, size in sizes
        )


def node_events(profile: Path) -> list[list[NodeEvent]]:
    """The executed nodes of each run in an ONNX Runtime profile."""
    runs: list[list[NodeEvent]] = [[]]
    for event in json.loads(profile.read_text()):
        if event.get("cat") == "Node" and event.get("name", "").endswith(_KERNEL):
            runs[-1].append(_node_event(event))
        elif event.get("name") == "model_run":
            runs.append([])
    return [run for run in runs if run]


def _node_event(event: Mapping[str, Any]) -> NodeEvent:
    arguments = event["args"]
    outputs = tuple(
        (kind, tuple(shape))
        for described in arguments.get("output_type_shape", ())
        for kind, shape in described.items()
    )
    memory = {key: int(value) for key, value in arguments.items() if key.startswith("mem_")}
    return NodeEvent(
        event["name"].removesuffix(_KERNEL),
        arguments.get("op_name", ""),
        arguments.get("provider", ""),
        float(event["dur"]) / 1e6,
        outputs,
        memory,
    )


def arena_report(events: Sequence[NodeEvent]) -> Json:
    """Peaks of one run by provider, less what the arena held before the run began.

    They are taken at the end of each node, so a node's own workspace is in `high_water_bytes` alone,
    which is the most in use since the process began. A provider whose events carry no figures, or
    only zeros, is left out.
    """
    report: Json = {}
    for provider in sorted({event.provider for event in events}):
        own = [event for event in events if event.provider == provider and any(event.memory.values())]
        if not own:
            continue
        first = own[0].memory
        figures: Json = {}
        for name, key, delta in (
            ("requested", "mem_bytes_requested_in_use", "mem_requested_in_use_delta"),
            ("in_use", "mem_bytes_in_use", "mem_in_use_delta"),
        ):
            before = first.get(key, 0) - first.get(delta, 0)
            figures[f"{name}_before_bytes"] = before
            figures[f"{name}_peak_bytes"] = max(event.memory.get(key, 0) for event in own) - before
        figures["high_water_bytes"] = max(event.memory.get("mem_in_use_peak", 0) for event in own)
        figures["held_bytes"] = max(event.memory.get("mem_arena_held", 0) for event in own)
        report[provider] = figures
    return report


def fallback_report(events: Sequence[NodeEvent], provider: str) -> Json:
    """Which nodes ran elsewhere than on `provider`, shape arithmetic told from real work."""
    elsewhere = [event for event in events if event.provider != provider and not event.is_copy]
    compute = [event for event in elsewhere if not event.is_shape_arithmetic]
    shapes = [event for event in elsewhere if event.is_shape_arithmetic]
    copies = [event for event in events if event.is_copy]
    return {
        "nodes": len(events),
        "nodes_by_provider": dict(sorted(Counter(event.provider for event in events).items())),
        "compute_elsewhere": _by_operator(compute),
        "shape_arithmetic_elsewhere": _by_operator(shapes),
        "copies": _by_operator(copies),
        "copies_of_data": _by_operator([event for event in copies if not event.is_shape_arithmetic]),
    }


def _by_operator(events: Iterable[NodeEvent]) -> Json:
    groups: dict[str, list[NodeEvent]] = {}
    for event in events:
        groups.setdefault(event.operator, []).append(event)
    return {
        operator: {
            "count": len(group),
            "host_seconds": sum(event.seconds for event in group),
            "names": [event.name for event in group[:_NAMES_SHOWN]],
            "outputs": [f"{kind}{list(shape)}" for kind, shape in group[0].outputs],
        }
        for operator, group in sorted(groups.items())
    }


def barrier_nodes(model: onnx.ModelProto) -> frozenset[str]:
    """Names of the nodes that hold others back: what depends on the opaque zero, up to the view."""
    tainted = {value.name for value in model.graph.input if value.name.startswith(ZERO)}
    found: list[str] = []
    for node in model.graph.node:
        touched = tainted.intersection(node.input)
        if node.op_type in ("Slice", "Shape", "Add") and touched:
            tainted.update(node.output)
            found.append(node.name)
        elif node.op_type == "Reshape" and touched:
            found.append(node.name)
    return frozenset(found)


def order_report(model: onnx.ModelProto, events: Sequence[NodeEvent]) -> Json:
    """The executed order against the file's, and what ran that the file does not have.

    A node is late if it ran behind one that follows it in the file. Shape arithmetic, which holds no
    memory and which ONNX Runtime puts first, makes no other node late.
    """
    position = {node.name: index for index, node in enumerate(model.graph.node)}
    executed = [event.name for event in events if event.name in position]
    ran = set(executed)
    moving = barrier_nodes(model) | {event.name for event in events if event.is_shape_arithmetic}
    latest, late, largest_delay = -1, [], 0
    for name in executed:
        if name in moving:
            continue
        if position[name] < latest:
            late.append(name)
            largest_delay = max(largest_delay, latest - position[name])
        latest = max(latest, position[name])
    recomputed = [node.name for node in model.graph.node if _role(node) == "recompute"]
    lost = [name for name in recomputed if name not in ran]
    unknown = [event for event in events if event.name not in position and not event.is_copy]
    return {
        "equals_schedule": not late and not lost,
        "executed": len(executed),
        "not_executed": _some([name for name in position if name not in ran]),
        "late": {**_some(late), "largest_delay_nodes": largest_delay},
        "recomputed": len(recomputed),
        "lost_recomputed": _some(lost),
        "unknown": _some([event.name for event in unknown]),
    }


def barrier_report(model: onnx.ModelProto, events: Sequence[NodeEvent]) -> Json:
    """What the barriers take: their share of host time, and the copies that run beside them."""
    barriers = barrier_nodes(model)
    own = [event for event in events if event.name in barriers]
    total = sum(event.seconds for event in events)
    beside = [
        event
        for before, event, after in _with_neighbours(events)
        if event.is_copy and any(other is not None and other.name in barriers for other in (before, after))
    ]
    seconds = sum(event.seconds for event in own)
    copies = Counter(event.operator for event in beside)
    return {
        "in_file": len(barriers),
        "executed": len(own),
        "by_provider": dict(sorted(Counter(event.provider for event in own).items())),
        "host_seconds": seconds,
        "host_time_share": seconds / total if total else 0.0,
        "slowest_host_seconds": max((event.seconds for event in own), default=0.0),
        # A copy to the host waits for the card.
        "copies_beside": dict(sorted(copies.items())),
        "copies_beside_host_seconds": sum(event.seconds for event in beside),
    }


def _with_neighbours(
    events: Sequence[NodeEvent],
) -> Iterator[tuple[NodeEvent | None, NodeEvent, NodeEvent | None]]:
    padded = [None, *events, None]
    for index, event in enumerate(events):
        yield padded[index], event, padded[index + 2]


def _role(node: onnx.NodeProto) -> str:
    return next((entry.value for entry in node.metadata_props if entry.key == "onnxgc.role"), "")


def _some(names: Sequence[str]) -> Json:
    return {"count": len(names), "names": list(names[:_NAMES_SHOWN])}


# --- Preparing and running one graph --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepared:
    """A network's two training graphs, without weights in the files: those are bound."""

    network: Network
    folder: Path
    models: Mapping[str, onnx.ModelProto]
    loss: str
    feeds: tuple[str, ...]
    simulated: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one process reported of one graph. `runs` are profiled; `answer` is as recorded."""

    runs: tuple[tuple[NodeEvent, ...], ...]
    answer: Json
    outputs: Path
    names: tuple[str, ...]

    @property
    def steady(self) -> tuple[NodeEvent, ...]:
        return self.runs[-1]


def prepare(network: Network, folder: Path) -> Prepared:
    """Plan a network and write both graphs and what is fed to them."""
    source = ROOT / "models" / f"{network.name}.onnx"
    (name,) = (value.name for value in onnx.load(source).graph.input)
    model = read_model(source, input_shapes={name: network.shape})
    planned = plan_step(model)
    folder.mkdir(parents=True)
    models: dict[str, onnx.ModelProto] = {}
    simulated: dict[str, int] = {}
    for graph, schedule in zip(GRAPHS, (store_all_schedule(planned), planned.schedule), strict=True):
        emitted = emit(planned, schedule=schedule).model
        properties = {entry.key: entry.value for entry in emitted.metadata_props}
        simulated[graph] = int(properties["onnxgc.simulated_peak_bytes"])
        models[graph] = _with_bound_parameters(emitted, set(model.weights))
        (folder / f"{graph}.onnx").write_bytes(models[graph].SerializeToString())
    drawn = draw_weights(model, SEED)
    fed = {value.name for value in models["planned"].graph.input}
    described = {
        name: (dtype_name(model.types[name].dtype), model.types[name].shape)
        for name in (*model.inputs, *model.targets)
    }
    feeds = random_feeds(described, SEED, model.types[model.outputs[0]].shape[1])
    for name, weight in model.weights.items():
        if name in fed:
            feeds[name] = drawn[name] if name in drawn else weight.load()
    _save(folder / "feeds.npz", feeds.values())
    return Prepared(network, folder, models, model.loss, tuple(feeds), simulated)


def _with_bound_parameters(model: onnx.ModelProto, weights: set[str]) -> onnx.ModelProto:
    """The graph without initial values of what is fed: they would lie on the card a second time."""
    fed = weights.intersection(value.name for value in model.graph.input)
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in fed]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model


def measure_graph(
    prepared: Prepared, graph: str, setting: Setting, options: Options, timeout: float
) -> Measured:
    """Run a graph in a process of its own, with inputs, weights and outputs on the device."""
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
    answer = in_process("run", request, folder, timeout)
    runs = tuple(tuple(run) for run in node_events(Path(answer.pop("profile"))))
    if len(runs) != RUNS:
        raise CheckError(f"the profile of '{prepared.network.name}' holds {len(runs)} runs instead of {RUNS}")
    return Measured(runs, answer, folder / "outputs.npz", tuple(answer.pop("outputs")))


def in_process(work: str, request: Json, folder: Path, timeout: float) -> Json:
    """What a worker answers. One that answered and then crashed on its way out has answered."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "request.json").write_text(json.dumps(request))
    answer = folder / "answer.json"
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", work, str(folder)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=max(timeout, 1.0))
    except subprocess.TimeoutExpired:
        raise CheckError(f"'{work}' took longer than {timeout:.0f} s and was stopped") from None
    if not answer.exists():
        raise CheckError(f"'{work}' ended with status {result.returncode}: {_reason(result.stderr)}")
    found: Json = json.loads(answer.read_text())
    return {**found, "exit_status": result.returncode}


def _reason(stderr: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stderr)
    told = [line.strip() for line in plain.splitlines() if re.match(r"\S", line)]
    return " | ".join(line for line in told if not line.startswith("Traceback"))[-800:] or "it said nothing"


def _save(path: Path, values: Iterable[Array]) -> None:
    np.savez(path, *values)


def _load(path: Path, names: Sequence[str]) -> dict[str, Array]:
    with np.load(path) as stored:
        return {name: stored[f"arr_{index}"] for index, name in enumerate(names)}


# --- The steps ------------------------------------------------------------------------------------


class Check:
    """One run of the script: its options, its clock, its record, and what was already measured."""

    def __init__(self, options: Options, work: Path) -> None:
        self.options = options
        self._work = work
        self._started = time.perf_counter()
        self._prepared: dict[str, Prepared] = {}
        self._measured: dict[tuple[str, str, str], Measured | CheckError] = {}
        self.record: Json = {
            "schema": SCHEMA_VERSION,
            "smoke": options.smoke,
            "provider": options.provider,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **machine(options.smoke),
            "threads": options.threads,
            "steps": {},
        }
        card = "cpu-smoke" if options.smoke else self.record["card"] or "unknown-card"
        self._path = options.out / f"{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}.json"

    def seconds_left(self) -> float:
        return self.options.limit_seconds - (time.perf_counter() - self._started)

    def write(self) -> None:
        """Write the record whole: a run may be cut at any time."""
        self.record["seconds"] = time.perf_counter() - self._started
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.record, indent=1) + "\n")
        os.replace(unfinished, self._path)

    def worker(self, work: str) -> Json:
        request = {"provider": self.options.provider, "threads": self.options.threads}
        return in_process(work, request, self._work / work, self.seconds_left())

    def first_network(self) -> Network:
        return self.options.network(self.options.networks[0])

    def prepared(self, network: Network) -> Prepared:
        if network.name not in self._prepared:
            self._prepared[network.name] = prepare(network, self._work / network.name)
        return self._prepared[network.name]

    def measured(
        self, network: Network, graph: str, setting: Setting = MAKE_SESSION, timeout: float | None = None
    ) -> Measured:
        """A graph's run; what failed once is not tried again by a later step.

        Raises:
            CheckError: the process failed or took longer than `timeout` (or the network's limit).
        """
        key = (network.name, graph, setting.name)
        prepared = self.prepared(network)
        if key not in self._measured:
            limit = min(self.options.network_limit_seconds, self.seconds_left())
            try:
                self._measured[key] = measure_graph(
                    prepared, graph, setting, self.options, limit if timeout is None else timeout
                )
            except CheckError as error:
                self._measured[key] = error
        found = self._measured[key]
        if isinstance(found, CheckError):
            raise found
        return found

    @property
    def folder(self) -> Path:
        """Where workers may write."""
        return self._work

    def forget(self, network: Network) -> None:
        """Free the disk of a network that is done."""
        self._prepared.pop(network.name, None)
        shutil.rmtree(self._work / network.name, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Finding:
    """A step's answer: whether what it asks for held, one line, and the figures."""

    holds: bool
    line: str
    details: Json


def runtime_step(check: Check) -> Finding:
    answer = check.worker("load")
    provider = check.options.provider
    holds = answer["matmul"]["provider"] == provider and answer["matmul"]["largest_error"] < 1e-2
    line = (
        f"onnxruntime {answer['onnxruntime']}, libraries by {answer['libraries']['found_by']}, "
        f"MatMul on {answer['matmul']['provider']}, off by {answer['matmul']['largest_error']:.1e}"
    )
    return Finding(holds, line, answer)


def fallback_step(check: Check) -> Finding:
    network, provider = check.first_network(), check.options.provider
    reports = {graph: fallback_report(check.measured(network, graph).steady, provider) for graph in GRAPHS}
    planned = reports["planned"]
    line = (
        f"{network.name} planned: {planned['nodes']} nodes, "
        f"compute elsewhere {_counts(planned['compute_elsewhere'])}, "
        f"shape arithmetic elsewhere {_counts(planned['shape_arithmetic_elsewhere'])}, "
        f"copies {_counts(planned['copies'])}, of data {_counts(planned['copies_of_data'])}"
    )
    # A question, not a promise: whatever falls back is told, and nothing is held against it.
    return Finding(True, line, {"network": network.name, **reports})


def _counts(groups: Mapping[str, Json]) -> str:
    return ", ".join(f"{operator} {group['count']}" for operator, group in groups.items()) or "none"


def order_step(check: Check) -> Finding:
    network = check.first_network()
    reports: dict[str, Json] = {}
    for graph in GRAPHS:
        model, events = check.prepared(network).models[graph], check.measured(network, graph).steady
        reports[graph] = {**order_report(model, events), "barriers": barrier_report(model, events)}
    planned = reports["planned"]
    barriers = planned["barriers"]
    beside = sum(barriers["copies_beside"].values())
    line = (
        f"{network.name} planned: {planned['executed']} nodes, late {planned['late']['count']}, "
        f"lost {planned['lost_recomputed']['count']} of {planned['recomputed']} recomputed, "
        f"unknown {planned['unknown']['count']}; {barriers['executed']} barrier nodes take "
        f"{barriers['host_time_share']:.1%} of host time, {beside} copies beside them"
    )
    holds = all(report["equals_schedule"] for report in reports.values())
    return Finding(holds, line, {"network": network.name, **reports})


def peak_step(check: Check) -> Finding:
    """Every network in turn, as far as the time goes; each is in the record as soon as it is known."""
    rows: dict[str, Json] = {}
    other: dict[str, Json] = {}
    details: Json = {"networks": rows, "other_settings": other}
    check.record["steps"]["4"] = {"name": "peak", "status": "unfinished", **details}
    for name in check.options.networks:
        rows[name] = _guarded_row(check, functools.partial(_network_row, check, name))
        _print_row(name, rows[name])
        check.write()
    first = check.options.networks[0]
    for setting in OTHER_SETTINGS:
        if check.options.smoke and setting.cuda_options:
            continue
        measure = functools.partial(_network_row, check, first, setting)
        other[setting.name] = _guarded_row(check, measure)
        _print_row(f"{first} ({setting.name})", other[setting.name])
        check.write()
    reached = [row for row in rows.values() if row["status"] != "not reached"]
    holds = bool(reached) and all(row["status"] == "held" for row in reached)
    failed = [f"{name}: {row['error']}" for name, row in rows.items() if row["status"] == "error"]
    below = [name for name, row in rows.items() if row["status"] == "held"]
    told = f"{len(reached)} of {len(rows)} networks reached, planned below regular in {len(below)}"
    return Finding(holds, "; ".join([told, *failed]), details)


def _guarded_row(check: Check, measure: Callable[[], Json]) -> Json:
    if check.seconds_left() < LAST_STEPS_SECONDS + SMALLEST_STEP_SECONDS:
        return {"status": "not reached"}
    try:
        return measure()
    except Exception as error:
        return {"status": "error", "error": _told(error)}


def _network_row(check: Check, name: str, setting: Setting = MAKE_SESSION) -> Json:
    network = check.options.network(name)
    seconds = min(check.options.network_limit_seconds, check.seconds_left() - LAST_STEPS_SECONDS)
    end = time.perf_counter() + seconds
    prepared = check.prepared(network)
    row: Json = {"shape": list(network.shape), "setting": setting.name}
    measured: dict[str, Measured] = {}
    for graph in GRAPHS:
        measured[graph] = check.measured(network, graph, setting, end - time.perf_counter())
        row[graph] = _figures(prepared, measured[graph], graph, check.options.provider)
    regular, planned = row["regular"], row["planned"]
    row["simulated_ratio"] = planned["simulated_peak_bytes"] / regular["simulated_peak_bytes"]
    row["measured_ratio"] = planned["measured_peak_bytes"] / max(regular["measured_peak_bytes"], 1)
    row["time_ratio"] = min(planned["step_seconds"]) / min(regular["step_seconds"])
    row["distance"] = _distance(measured["regular"], measured["planned"], prepared.loss)
    smaller = row["measured_ratio"] < 1 and row["simulated_ratio"] < 1
    row["status"] = "held" if smaller and row["distance"]["loss_is_finite"] else "not held"
    if network != check.first_network():
        check.forget(network)
    return row


def _figures(prepared: Prepared, measured: Measured, graph: str, provider: str) -> Json:
    """Peaks of one graph. The arena's own count is exact; device memory includes its slack."""
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


def _distance(regular: Measured, planned: Measured, loss: str) -> Json:
    """Norm-wise relative distances of all outputs; equality is not promised on a GPU."""
    expected = _load(regular.outputs, regular.names)
    actual = _load(planned.outputs, planned.names)
    distances = {name: _relative(expected[name], actual[name]) for name in expected}
    gradients = {name: far for name, far in distances.items() if name != loss and np.isfinite(far)}
    worst = max(gradients, key=lambda name: gradients[name], default=None)
    finite_loss = bool(np.isfinite(distances[loss]))
    return {
        "loss": distances[loss] if finite_loss else None,
        "loss_value": float(expected[loss]) if finite_loss else None,
        "loss_is_finite": finite_loss,
        "largest": None if worst is None else gradients[worst],
        "largest_of": worst,
        "median": float(np.median(list(gradients.values()))) if gradients else None,
        "not_finite": sum(not np.isfinite(far) for far in distances.values()),
        "bit_equal": sum(np.array_equal(expected[name], actual[name]) for name in expected),
        "outputs": len(expected),
    }


def _relative(expected: Array, actual: Array) -> float:
    one, two = expected.astype(np.float64), actual.astype(np.float64)
    return float(np.linalg.norm(one - two)) / (float(np.linalg.norm(one)) or 1.0)


def _print_row(name: str, row: Json) -> None:
    if "error" in row or row["status"] == "not reached":
        print(f"    {name}: {row['status']} {row.get('error', '')}".rstrip(), flush=True)
        return
    for graph in GRAPHS:
        figures = row[graph]
        print(
            f"    {name} {graph}: simulated {figures['simulated_peak_bytes'] / 1e6:.1f} MB, measured "
            f"{figures['measured_peak_bytes'] / 1e6:.1f} MB ({figures['measured_by']}), "
            f"step {min(figures['step_seconds']) * 1e3:.1f} ms, in order: {figures['equals_schedule']}",
            flush=True,
        )
    distance = row["distance"]
    apart = {
        key: distance[key] if distance[key] is None else f"{distance[key]:.1e}" for key in ("loss", "largest")
    }
    print(
        f"    {name}: loss apart by {apart['loss']}, gradients by at most {apart['largest']}; "
        f"{distance['bit_equal']} of {distance['outputs']} outputs bit-equal",
        flush=True,
    )


def exchange_step(check: Check) -> Finding:
    answer = check.worker("exchange")
    facts = {name: value for name, value in answer.items() if isinstance(value, bool)}
    told = ", ".join(f"{name.replace('_', ' ')} {'yes' if held else 'NO'}" for name, held in facts.items())
    return Finding(all(facts.values()), told, answer)


EXPORTS = ("resnet50", "gpt2", "bert")
# Needs no package beside torch.
SMOKE_EXPORTS = ("unet",)


def export_step(check: Check) -> Finding:
    """Exports of PyTorch: both graphs on the card, and PyTorch's own step there."""
    rows: dict[str, Json] = {}
    details: Json = {"models": rows}
    check.record["steps"]["5"] = {"name": "exports", "status": "unfinished", **details}
    for name in SMOKE_EXPORTS if check.options.smoke else EXPORTS:
        rows[name] = _guarded_row(check, functools.partial(_export_row, check, name))
        print(f"    {name}: {_export_line(rows[name])}", flush=True)
        check.write()
    failed = [f"{name}: {row['error']}" for name, row in rows.items() if row["status"] == "error"]
    reached = [name for name, row in rows.items() if row["status"] != "not reached"]
    return Finding(not failed and bool(reached), "; ".join([f"{len(reached)} models", *failed]), details)


def _export_row(check: Check, name: str) -> Json:
    folder, options = check.folder / f"export-{name}", check.options
    request = {"name": name, "small": options.smoke, "device": device_of(options.provider)}
    limit = min(options.network_limit_seconds, check.seconds_left() - LAST_STEPS_SECONDS)
    row = in_process("export", request, folder, limit)
    for graph in GRAPHS:
        run = {
            "model": str(folder / f"{graph}.onnx"),
            "feeds": str(folder / "feeds.npz"),
            "names": row["names"],
            "provider": options.provider,
            "threads": options.threads,
        }
        answer = in_process("run", run, folder / graph, check.seconds_left())
        events = node_events(Path(answer.pop("profile")))[-1]
        arena = arena_report(events).get(options.provider, {})
        row[graph] = {
            "step_seconds": answer["step_seconds"],
            "measured_peak_bytes": arena.get("requested_peak_bytes"),
            "fallback": fallback_report(events, options.provider),
        }
    row["pytorch"] = in_process("eager", request, folder / "eager", check.seconds_left())
    shutil.rmtree(folder, ignore_errors=True)
    return {**row, "status": "held"}


def _export_line(row: Json) -> str:
    if "error" in row or row["status"] == "not reached":
        return f"{row['status']} {row.get('error', '')}".rstrip()
    told = []
    for graph in GRAPHS:
        simulated, measured = row["simulated_peak_bytes"][graph], row[graph]["measured_peak_bytes"] or 0
        told.append(
            f"{graph} {min(row[graph]['step_seconds']) * 1e3:.1f} ms, simulated {simulated / 1e6:.1f} MB, "
            f"measured {measured / 1e6:.1f} MB, compute elsewhere "
            f"{_counts(row[graph]['fallback']['compute_elsewhere'])}"
        )
    for kind in ("eager", "checkpointed"):
        found = row["pytorch"][kind]
        peak = found.get("allocated_peak_bytes", 0) - found["kept_bytes"]
        told.append(f"torch {kind} {min(found['step_seconds']) * 1e3:.1f} ms, {peak / 1e6:.1f} MB")
    return "; ".join(told)


def forms_step(check: Check) -> Finding:
    """The first network with other forms of the convolutions' weight gradients."""
    from scripts.gpu_checks.forms import VARIANTS, forms_of

    network = check.first_network()
    rows: dict[str, Json] = {}
    told = []
    # The last one changes all that the others change.
    for variant in list(VARIANTS)[-1:] if check.options.smoke else VARIANTS:
        if check.seconds_left() < LAST_STEPS_SECONDS:
            break
        folder = check.folder / f"forms-{variant.replace(' ', '-')}"
        with forms_of(variant):
            prepared = prepare(network, folder)
        rows[variant] = {"nodes": {graph: len(prepared.models[graph].graph.node) for graph in GRAPHS}}
        for graph in GRAPHS:
            measured = measure_graph(prepared, graph, MAKE_SESSION, check.options, check.seconds_left())
            figures = _figures(prepared, measured, graph, check.options.provider)
            kept = ("simulated_peak_bytes", "measured_peak_bytes", "step_seconds")
            rows[variant][graph] = {key: figures[key] for key in kept}
        told.append(
            f"{variant} "
            + ", ".join(
                f"{graph} {min(rows[variant][graph]['step_seconds']) * 1e3:.1f} ms "
                f"{rows[variant][graph]['measured_peak_bytes'] / 1e6:.0f} of "
                f"{rows[variant][graph]['simulated_peak_bytes'] / 1e6:.0f} MB"
                for graph in GRAPHS
            )
        )
        print(f"    {told[-1]}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    return Finding(bool(rows), "; ".join(told), {"network": network.name, "variants": rows})


def rules_step(check: Check) -> Finding:
    """Every gradient case on the card."""
    seconds = check.seconds_left() - 5.0
    request = {"provider": check.options.provider, "seconds": seconds, "smoke": check.options.smoke}
    answer = in_process("rules", request, check.folder / "rules", check.seconds_left())
    kinds = ("float32", "float16", "bfloat16")
    line = ", ".join(
        f"{kind} {answer[kind]['reached'] - answer[kind]['failed']} of {answer[kind]['reached']} right "
        f"({answer[kind]['cases']} cases)"
        for kind in kinds
    )
    elsewhere = ", ".join(answer["placement"]["elsewhere"]) or "none"
    return Finding(not answer["float32"]["failed"], f"{line}; elsewhere {elsewhere}", answer)


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    name: str
    run: Callable[[Check], Finding]


STEPS = (
    Step(1, "runtime", runtime_step),
    Step(2, "fallback", fallback_step),
    Step(3, "order", order_step),
    Step(4, "peak", peak_step),
    Step(5, "exports", export_step),
    Step(6, "exchange", exchange_step),
    Step(8, "forms", forms_step),
    Step(7, "rules", rules_step),
)


def run_step(check: Check, step: Step) -> bool:
    """Run one step, print its line, record it; whether nothing is wrong with it."""
    started = time.perf_counter()
    entry: Json = {"name": step.name}
    if check.seconds_left() < SMALLEST_STEP_SECONDS:
        entry.update(status="not reached", line="no time left")
    else:
        try:
            finding = step.run(check)
            status = "held" if finding.holds else "not held"
            entry.update(status=status, line=finding.line, **finding.details)
        except Exception as error:
            entry.update(status="error", line=_told(error), error=_told(error))
    entry["seconds"] = time.perf_counter() - started
    check.record["steps"][str(step.number)] = entry
    took = f"{entry['seconds']:.1f} s"
    print(f"{step.number} {step.name}: {entry['status']}: {entry['line']} [{took}]", flush=True)
    check.write()
    return entry["status"] in ("held", "not reached")


def _told(error: Exception) -> str:
    return f"{error}" if isinstance(error, CheckError) else f"{type(error).__name__}: {error}"


# --- The machine ----------------------------------------------------------------------------------


def machine(smoke: bool) -> Json:
    """Card, driver and versions; no card in a smoke run, which uses none."""
    card = None if smoke else _card()
    return {
        "card": card[0] if card else None,
        "driver": card[1] if card else None,
        "card_memory": card[2] if card else None,
        "processor": platform.machine(),
        "cpu_count": os.cpu_count(),
        "versions": {"python": platform.python_version(), "onnxgc": __version__, **_versions()},
    }


def _card() -> list[str] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True)
    lines = result.stdout.splitlines()
    return [part.strip() for part in lines[0].split(",")] if result.returncode == 0 and lines else None


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in ("numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "torch", "nvidia-cudnn-cu13"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


# --- Workers: the only code that touches the card -------------------------------------------------

MATMUL = """<ir_version: 9, opset_import: ["": 18]>
matmul (float[64, 64] a, float[64, 64] b) => (float[64, 64] c) { c = MatMul(a, b) }"""
UPDATE = """<ir_version: 9, opset_import: ["": 18]>
update (float[1024] w, float[1024] g, float lr) => (float[1024] w_new) {
    scaled = Mul(g, lr)
    w_new = Sub(w, scaled)
}"""
CUDA_LIBRARIES = ("libcudart", "libcublasLt", "libcublas", "libcudnn", "libcufft", "libcurand")


def load_libraries(provider: str) -> Json:
    """Make CUDA and cuDNN known to this process, and say which way did it.

    `preload_dlls` looks beside onnxruntime. Where onnxruntime lies elsewhere than the nvidia
    packages it is given their folders, and torch, which loads its own, is the last resort.
    """
    ort = runtime_ort.load_onnxruntime()
    if provider != CUDA:
        return {"found_by": "none needed"}
    told = io.StringIO()
    tried: Json = {}
    for name, load in (
        ("preload_dlls", getattr(ort, "preload_dlls", lambda: None)),
        ("preload_dlls with folders", lambda: _preload_from_packages(ort)),
        ("torch", lambda: importlib.import_module("torch")),
    ):
        with contextlib.redirect_stdout(told):
            load()
        tried[name] = _loaded_libraries()
        if len(tried[name]) == len(CUDA_LIBRARIES):
            return {"found_by": name, "loaded": tried, "messages": told.getvalue().splitlines()}
    return {"found_by": "nothing found all", "loaded": tried, "messages": told.getvalue().splitlines()}


def _preload_from_packages(ort: Any) -> None:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for folder in sorted(Path(root).glob("*/lib")):
            holds_cudnn = folder.parent.name == "cudnn"
            ort.preload_dlls(cuda=not holds_cudnn, cudnn=holds_cudnn, directory=str(folder))


def _loaded_libraries() -> list[str]:
    mapped = Path("/proc/self/maps").read_text() if sys.platform == "linux" else ""
    return [name for name in CUDA_LIBRARIES if f"/{name}.so" in mapped]


def session_on(model: Any, request: Json, folder: Path) -> Any:
    """A profiled session of `make_session` that really has the provider that was asked for."""
    provider = request["provider"]
    settings = SessionSettings(
        bool(request.get("file_order", True)),
        request["threads"],
        (CUDA, CPU) if provider == CUDA else (CPU,),
    )
    added = dict(request.get("cuda_options", {}))
    standard = runtime_ort._with_options

    def with_options(name: str, chosen: SessionSettings) -> str | tuple[str, dict[str, str]]:
        plain = standard(name, chosen)
        if name != CUDA or not added:
            return plain
        return (plain, added) if isinstance(plain, str) else (plain[0], {**plain[1], **added})

    with mock.patch.object(runtime_ort, "_with_options", with_options):
        session = make_session(model, settings=settings, profile_prefix=str(folder / "profile"))
    if session.get_providers()[0] != provider:
        raise CheckError(f"asked for {provider}, the session has {', '.join(session.get_providers())}")
    return session


def device_of(provider: str) -> str:
    return "cuda" if provider == CUDA else "cpu"


def free_device_bytes(provider: str) -> int | None:
    """Free memory of the card, or None without one."""
    if provider != CUDA:
        return None
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        with contextlib.suppress(OSError, AttributeError):
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            if ctypes.CDLL(name).cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0:
                return free.value
    import torch

    return int(torch.cuda.mem_get_info()[0])


def work_load(request: Json, folder: Path) -> Json:
    """Step 1: libraries, provider, one MatMul."""
    provider = request["provider"]
    libraries = load_libraries(provider)
    ort = runtime_ort.load_onnxruntime()
    session = session_on(onnx.parser.parse_model(MATMUL), request, folder)
    a, b = np.random.default_rng(SEED).standard_normal((2, 64, 64)).astype(np.float32)
    (c,) = session.run(None, {"a": a, "b": b})
    events = node_events(Path(session.end_profiling()))[0]
    (matmul,) = (event for event in events if event.operator in ("MatMul", "Gemm", "FusedMatMul"))
    expected = a.astype(np.float64) @ b.astype(np.float64)
    return {
        "onnxruntime": ort.__version__,
        "available_providers": ort.get_available_providers(),
        "session_providers": session.get_providers(),
        "libraries": libraries,
        "matmul": {
            "provider": matmul.provider,
            "largest_error": float(np.abs(c - expected).max() / np.abs(expected).max()),
            "arena_keys": sorted(matmul.memory),
        },
    }


def work_run(request: Json, folder: Path) -> Json:
    """One graph, three profiled runs and some timed ones, everything bound on the device."""
    provider = request["provider"]
    load_libraries(provider)
    ort = runtime_ort.load_onnxruntime()
    started = time.perf_counter()
    session = session_on(request["model"], request, folder)
    load_seconds = time.perf_counter() - started
    feeds = _load(Path(request["feeds"]), request["names"])
    values = {
        name: ort.OrtValue.ortvalue_from_numpy(value, device_of(provider), 0) for name, value in feeds.items()
    }
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    before = free_device_bytes(provider)
    profiled, free = [], []
    for _ in range(RUNS):
        profiled.append(_run_bound(session, binding, device_of(provider)))
        free.append(free_device_bytes(provider))
    profile = session.end_profiling()
    timed = [_run_bound(session, binding, device_of(provider)) for _ in range(TIMED_RUNS)]
    outputs = binding.copy_outputs_to_cpu()
    _save(folder / "outputs.npz", outputs)
    return {
        "profile": profile,
        "outputs": [output.name for output in session.get_outputs()],
        "session_providers": session.get_providers(),
        "load_seconds": load_seconds,
        "profiled_seconds": profiled,
        "step_seconds": timed,
        # After each run. An arena never shrinks by itself, so this is the most that was reserved
        # so far; the first run's includes code and handles that are loaded with the first kernels.
        "device_growth_bytes": [before - after for after in free if before is not None and after is not None],
        "output_bytes": sum(value.nbytes for value in outputs),
        "arena": _arena_on_device(ort, session, binding, provider),
    }


def _arena_on_device(ort: Any, session: Any, binding: Any, provider: str) -> Json:
    """What the arena gives back when it is made to shrink: its reserve, without code and handles.

    The last run's outputs stay, and so do the chunks that they are in.
    """
    before = free_device_bytes(provider)
    if before is None:
        return {}
    try:
        options = ort.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "gpu:0")
        _run_bound(session, binding, device_of(provider), options)
        after = free_device_bytes(provider)
        return {"shrunk_bytes": (after or 0) - before}
    except Exception as error:
        return {"error": _told(error)}


def _run_bound(session: Any, binding: Any, device: str, options: Any = None) -> float:
    """Seconds of one run. The last run's outputs go first: two sets of gradients would add up."""
    binding.clear_binding_outputs()
    for output in session.get_outputs():
        binding.bind_output(output.name, device, 0)
    started = time.perf_counter()
    session.run_with_iobinding(binding, options)
    binding.synchronize_outputs()
    return time.perf_counter() - started


def work_exchange(request: Json, folder: Path) -> Json:
    """Step 6: one tensor as input and output, and tensors shared with torch."""
    provider, device = request["provider"], device_of(request["provider"])
    load_libraries(provider)
    import torch

    ort = runtime_ort.load_onnxruntime()
    session = session_on(onnx.parser.parse_model(UPDATE), request, folder)
    w, g = np.random.default_rng(SEED).standard_normal((2, 1024)).astype(np.float32)
    lr = np.asarray(0.5, np.float32)

    def update(weight: Any, gradient: Any) -> None:
        binding = session.io_binding()
        for name, value in (("w", weight), ("g", gradient), ("lr", on_device(lr))):
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("w_new", weight)
        binding.synchronize_inputs()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    def on_device(value: Array) -> Any:
        return ort.OrtValue.ortvalue_from_numpy(value.copy(), device, 0)

    expected = w - g * lr
    weight, gradient = on_device(w), on_device(g)
    pointer = weight.data_ptr()
    update(weight, gradient)
    answer: Json = {
        "in_place_same_pointer": weight.data_ptr() == pointer,
        "in_place_values_right": bool(np.allclose(weight.numpy(), expected, rtol=1e-6, atol=1e-6)),
    }
    seen = torch.from_dlpack(weight)  # type: ignore[attr-defined]
    answer["onnxruntime_to_torch_same_pointer"] = seen.data_ptr() == pointer
    answer["onnxruntime_to_torch_same_device"] = seen.device.type == device
    owned = torch.from_numpy(w.copy()).to(device)
    lent = ort.OrtValue.from_dlpack(owned)
    answer["torch_to_onnxruntime_same_pointer"] = lent.data_ptr() == owned.data_ptr()
    answer["torch_to_onnxruntime_same_device"] = lent.device_name() == device
    update(lent, gradient)
    answer["torch_sees_update"] = bool(np.allclose(owned.cpu().numpy(), expected, rtol=1e-6, atol=1e-6))
    return {**answer, "torch": torch.__version__, "session_providers": session.get_providers()}


def work_export(request: Json, folder: Path) -> Json:
    """Step 5: a model of PyTorch as both graphs."""
    from scripts.gpu_checks import eager

    return eager.work_export(request["name"], request["small"], folder)


def work_eager(request: Json, folder: Path) -> Json:
    """Step 5: the same model in PyTorch."""
    from scripts.gpu_checks import eager

    return eager.work_eager(request["name"], request["small"], request["device"])


def work_rules(request: Json, folder: Path) -> Json:
    """Step 7: every gradient case, in full float32."""
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    provider = request["provider"]
    load_libraries(provider)
    from scripts.gpu_checks import rules

    providers = [provider] if provider == CPU else [provider, CPU]
    placement = rules.work_placement(provider, folder, request["seconds"] / 4)
    if request["smoke"]:
        return {**rules.work_rules(providers, 5.0), "placement": placement}
    return {**rules.work_rules(providers, request["seconds"] * 3 / 4), "placement": placement}


WORK: Mapping[str, Callable[[Json, Path], Json]] = {
    "export": work_export,
    "eager": work_eager,
    "rules": work_rules,
    "load": work_load,
    "run": work_run,
    "exchange": work_exchange,
}


def work(name: str, folder: Path) -> None:
    answer = WORK[name](json.loads((folder / "request.json").read_text()), folder)
    (folder / "answer.part").write_text(json.dumps(answer))
    os.replace(folder / "answer.part", folder / "answer.json")


# --- Command line ---------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> Options:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--smoke", action="store_true", help="tiny networks on the CPU provider")
    numbers = [step.number for step in STEPS]
    parser.add_argument("--only", type=int, nargs="+", metavar="STEP", choices=numbers)
    told = "instead of all; steps 2 and 3 take the first"
    parser.add_argument("--networks", nargs="+", metavar="NAME", help=told)
    parser.add_argument("--limit-s", type=float, default=460.0, help="for everything (default: 460)")
    parser.add_argument("--network-limit-s", type=float, default=120.0, help="for one network (default: 120)")
    given = parser.parse_args(arguments)
    networks = SMOKE_NETWORKS if given.smoke else PAPER_NETWORKS
    return Options(
        given.out,
        given.smoke,
        given.limit_s,
        given.network_limit_s,
        tuple(given.networks or (network.name for network in networks)),
        tuple(given.only or numbers),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        check = Check(options, Path(folder))
        card = check.record["card"] or "no card found"
        print("smoke run on the CPU: no CUDA result" if options.smoke else card, flush=True)
        check.write()
        fine = [run_step(check, step) for step in STEPS if step.number in options.only]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main())
