"""Did a session run a training file as it is written?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import onnx

from onnxgc.model.core.ir import Array
from onnxgc.runtime.measure import executed_order
from onnxgc.runtime.ort import SessionSettings
from onnxgc.runtime.profile import RunProfile


@dataclass(frozen=True, slots=True)
class ExecutionCheck:
    """What a session ran of a training file.

    `lost` are recomputed nodes that did not run: their saving is gone, or their values came from
    elsewhere. A Cast that other Casts alone read is not lost: ONNX Runtime reads through it at every
    level of optimisation, in the recomputation as in the forward pass. `moved` is the first node that
    ran before its place in the file, or None.
    """

    executed: int
    recomputed: int
    lost: tuple[str, ...]
    moved: str | None

    @property
    def holds(self) -> bool:
        return not self.lost and self.moved is None


def check_execution(model: onnx.ModelProto, order: Sequence[str]) -> ExecutionCheck:
    """Compare executed node names (`RunProfile.order`) with the file's nodes."""
    file_order = [node.name for node in model.graph.node]
    recomputed = [node for node in model.graph.node if _role(node) == "recompute"]
    known, ran = set(file_order), set(order)
    expected = [name for name in file_order if name in ran]
    executed = [name for name in order if name in known]
    moved = next((one for one, two in zip(executed, expected, strict=True) if one != two), None)
    skipped = _read_through(model, ran)
    lost = tuple(node.name for node in recomputed if node.name not in ran and node.name not in skipped)
    return ExecutionCheck(len(order), len(recomputed), lost, moved)


def run_and_check(
    model: onnx.ModelProto, feeds: Mapping[str, Array], settings: SessionSettings | None = None
) -> tuple[ExecutionCheck, RunProfile]:
    """Load a training file, run it once in this process, and check what was executed."""
    profile = executed_order(model, feeds, settings or SessionSettings())
    return check_execution(model, profile.order), profile


def _read_through(model: onnx.ModelProto, ran: Set[str]) -> set[str]:
    """Casts whose readers are all Casts, which ran or are such themselves."""
    found: set[str] = set()
    only_casts = dict.fromkeys((value.name for value in model.graph.output), False)
    for node in reversed(model.graph.node):
        if node.op_type == "Cast" and node.name not in ran and only_casts.get(node.output[0]):
            found.add(node.name)
        is_cast = node.op_type == "Cast" and (node.name in ran or node.name in found)
        for name in node.input:
            only_casts[name] = only_casts.get(name, True) and is_cast
    return found


def _role(node: onnx.NodeProto) -> str:
    return next((entry.value for entry in node.metadata_props if entry.key == "onnxgc.role"), "")
