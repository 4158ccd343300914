"""Reports on ONNX Runtime profiles: order, barriers, fallbacks to the CPU and arenas."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxgc.emission.graph_tensors import ZERO
from scripts.gpu_checks.settings import Json

_KERNEL = "_kernel_time"
_MEMCPY = ("MemcpyToHost", "MemcpyFromHost")
# Longer integer vectors are data, not shapes.
_MAX_DIMENSIONS = 8
_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """One executed node. `seconds` is host time: on CUDA, mostly the time of the launch.

    `outputs` has element type and shape of each output.
    """

    name: str
    operator: str
    provider: str
    seconds: float
    outputs: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def is_copy(self) -> bool:
        return self.operator in _MEMCPY

    @property
    def is_shape_arithmetic(self) -> bool:
        """Whether all outputs are shapes, flags or empty tensors, which are cheap on any provider."""
        sizes = [(kind, int(np.prod(shape, dtype=np.int64))) for kind, shape in self.outputs]
        return bool(sizes) and all(
            size == 0 or (size <= _MAX_DIMENSIONS and not kind.startswith(("float", "double", "bfloat")))
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
    return NodeEvent(
        event["name"].removesuffix(_KERNEL),
        arguments.get("op_name", ""),
        arguments.get("provider", ""),
        float(event["dur"]) / 1e6,
        outputs,
    )


def fallback_report(events: Sequence[NodeEvent], provider: str) -> Json:
    """Nodes that ran elsewhere than on `provider`: shape arithmetic, and other computation."""
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
    """Names of the nodes of barriers, which depend on the opaque zero, up to their views."""
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
    """The executed order compared with the file's order, and executed nodes that the file lacks.

    A node is late if it ran after a node that follows it in the file. Shape arithmetic makes no other node
    late: it allocates no memory, and ONNX Runtime runs it first.
    """
    position = {node.name: index for index, node in enumerate(model.graph.node)}
    executed = [event.name for event in events if event.name in position]
    ran = set(executed)
    movable = barrier_nodes(model) | {event.name for event in events if event.is_shape_arithmetic}
    latest, late, largest_delay = -1, [], 0
    for name in executed:
        if name in movable:
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
    """Cost of barriers: their share of host time."""
    barriers = barrier_nodes(model)
    own = [event.seconds for event in events if event.name in barriers]
    total = sum(event.seconds for event in events)
    return {"executed": len(own), "host_time_share": sum(own) / total if total else 0.0}


def _role(node: onnx.NodeProto) -> str:
    return next((entry.value for entry in node.metadata_props if entry.key == "onnxgc.role"), "")


def _some(names: Sequence[str]) -> Json:
    return {"count": len(names), "names": list(names[:_NAMES_SHOWN])}
