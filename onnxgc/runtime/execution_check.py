"""Whether a session executed a training file in the order of its nodes."""

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
    """Executed nodes of a training file, compared with the file.

    Attributes:
        executed: number of executed nodes.
        recomputed: number of recomputed nodes in the file.
        lost: recomputed nodes that were not executed, so that their saving is lost. A Cast read only by
            other Casts is not lost: ONNX Runtime skips it at every level of optimisation.
        moved: the first node executed before its position in the file, or None.
    """

    executed: int
    recomputed: int
    lost: tuple[str, ...]
    moved: str | None

    @property
    def holds(self) -> bool:
        return not self.lost and self.moved is None


def check_execution(model: onnx.ModelProto, order: Sequence[str]) -> ExecutionCheck:
    """Compares executed node names (`RunProfile.order`) with the nodes of the file."""
    file_order = [node.name for node in model.graph.node]
    recomputed = [node for node in model.graph.node if _role(node) == "recompute"]
    known, ran = set(file_order), set(order)
    expected = [name for name in file_order if name in ran]
    executed = [name for name in order if name in known]
    moved = next((one for one, two in zip(executed, expected, strict=True) if one != two), None)
    skipped = _skipped_casts(model, ran)
    lost = tuple(node.name for node in recomputed if node.name not in ran and node.name not in skipped)
    return ExecutionCheck(len(order), len(recomputed), lost, moved)


def run_and_check(
    model: onnx.ModelProto, feeds: Mapping[str, Array], settings: SessionSettings | None = None
) -> tuple[ExecutionCheck, RunProfile]:
    """Loads a training file, runs it once in this process and checks the executed nodes."""
    profile = executed_order(model, feeds, settings or SessionSettings())
    return check_execution(model, profile.order), profile


def _skipped_casts(model: onnx.ModelProto, ran: Set[str]) -> set[str]:
    """Casts that were not executed and whose readers are all Casts."""
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
