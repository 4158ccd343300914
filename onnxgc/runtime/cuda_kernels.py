"""Nodes that ONNX Runtime runs on CUDA, according to its table of kernels."""

import csv
import functools
import importlib.resources
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onnx import defs

from onnxgc.model.core.ir import Node, TensorType, dtype_name


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel for the versions `since` to `until` of an operator; without `until`, for `since` alone.

    An open range does not match versions of the operator later than `since`.
    """

    since: int
    until: int | None
    types: frozenset[str]

    def runs(self, version: int, dtype: str) -> bool:
        last = self.since if self.until is None else self.until
        return self.since <= version <= last and dtype in self.types


def left_to_the_cpu(nodes: Iterable[Node], types: Mapping[str, TensorType], opset: int) -> dict[str, int]:
    """Number of nodes without a CUDA kernel for their version and type, by operator.

    Nodes of other domains are ignored, and nodes that compute shapes, which run on the CPU in any case.
    """
    found: dict[str, int] = {}
    for node in nodes:
        if node.domain:
            continue
        decisive = next((name for name in (*node.inputs[:1], *node.outputs[:1]) if name in types), None)
        floating = [name for name in (*node.inputs, *node.outputs) if name in types and types[name].is_floating]
        if decisive is None or not floating:
            continue
        if _lacks_kernel(node.op, types[floating[0] if node.op in _BY_LATER_INPUT else decisive].dtype, opset):
            found[node.op] = found.get(node.op, 0) + 1
    return found


@functools.lru_cache(maxsize=1024)
def _lacks_kernel(op: str, kind: int, opset: int) -> bool:
    if not defs.has(op, opset, ""):
        return False
    version, dtype = defs.get_schema(op, opset, "").since_version, dtype_name(kind)
    dtype = _NAMES_IN_TABLE.get(dtype, dtype)
    return not any(kernel.runs(version, dtype) for kernel in _kernels().get(op, ()))


# The first input is a condition.
_BY_LATER_INPUT = frozenset({"Where"})
_NAMES_IN_TABLE = {"float32": "float", "float64": "double"}


@functools.cache
def _kernels() -> Mapping[str, tuple[Kernel, ...]]:
    text = importlib.resources.files("onnxgc.runtime").joinpath("cuda_operators.csv").read_text()
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    kernels: dict[str, tuple[Kernel, ...]] = {}
    for row in rows:
        until = int(row["until"]) if row["until"] else None
        kernel = Kernel(int(row["since"]), until, frozenset(row["types"].split()))
        kernels[row["operator"]] = (*kernels.get(row["operator"], ()), kernel)
    return kernels
