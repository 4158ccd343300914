"""Nodes that runtimes other than ONNX Runtime's CPU and CUDA providers cannot run, by a table of what was tried."""

import csv
import functools
import importlib.resources
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import onnx

from onnxgc.model.core.ir import Node, TensorType

RUNTIMES = ("web", "webgpu", "openvino", "iree")
"""Runtimes that `inspect` knows; `web` is wasm, in which every operator of a training file runs."""
EFFECTS = {
    "fails": "cannot run",
    "wrong": "computes wrong gradients by",
    "merged": "merges recomputed nodes",
    "cpu": "leaves to the CPU",
}
Types = Mapping[str, TensorType]


def _has_float64(node: Node, types: Types) -> bool:
    names = (*node.inputs, *node.outputs)
    return any(name in types and types[name].dtype == onnx.TensorProto.DOUBLE for name in names)


_CONDITIONS: Mapping[str, Callable[[Node, Types], bool]] = {
    "": lambda node, types: True,
    "indices": lambda node, types: len(node.outputs) > 1 and bool(node.outputs[1]),
    "float64": _has_float64,
    "steep": lambda node, types: not node.attribute("beta", 0.5),
    "recomputed": lambda node, types: "__recompute" in node.name,
    "marked": lambda node, types: "__recompute" in node.attributes,
}


def limits_of(runtime: str, nodes: Iterable[Node], types: Types) -> dict[str, dict[str, int]]:
    """By effect (`fails`, `wrong`, `merged`, `cpu`), the number of nodes by operator."""
    rows = [row for row in _table() if row["runtime"] == runtime and row["condition"] in _CONDITIONS]
    found: dict[str, Counter[str]] = {}
    for node in nodes:
        for row in rows:
            listed = row["operator"].split()
            if (
                (node.op in listed or listed == ["*"])
                and not node.domain
                and _CONDITIONS[row["condition"]](node, types)
            ):
                found.setdefault(row["effect"], Counter())[node.op] += 1
                break
    return {effect: dict(sorted(found[effect].items())) for effect in EFFECTS if effect in found}


@functools.cache
def _table() -> tuple[Mapping[str, str], ...]:
    text = importlib.resources.files("onnxgc.runtime").joinpath("other_runtimes.csv").read_text()
    return tuple(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
