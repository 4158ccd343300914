"""Whether a session executed a training file in the order of its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx

from onnxgc.model.core.ir import Array
from onnxgc.runtime.measure import executed_order
from onnxgc.runtime.ort import SessionSettings
from onnxgc.runtime.profile import RunProfile

if TYPE_CHECKING:
    import onnxruntime


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


def keeps_file_order(session: onnxruntime.InferenceSession, model: onnx.ModelProto) -> bool:
    """Whether a session of `make_session` runs a model's nodes in their order, whatever their dependencies.

    The runtime adds nodes after those of the file: the definition of a function without a kernel, copies
    between devices, and casts around kernels for half precision that the CPU lacks. Their readers run late.
    """
    provider = session.get_providers()[0]
    assigned = {
        node.name
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name == provider
        for node in part.get_nodes()
    }
    if provider == "CPUExecutionProvider" and _has_half_precision(model):
        return False
    # The runtime turns Constant nodes into initializers.
    return assigned == {node.name for node in model.graph.node if node.op_type != "Constant"}


def _has_half_precision(model: onnx.ModelProto) -> bool:
    half = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    graph = model.graph
    return (
        any(tensor.data_type in half for tensor in graph.initializer)
        or any(value.type.tensor_type.elem_type in half for value in (*graph.input, *graph.value_info))
        or any(
            (attribute.i in half and attribute.name in ("to", "dtype")) or attribute.t.data_type in half
            for node in graph.node
            for attribute in node.attribute
        )
    )


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
