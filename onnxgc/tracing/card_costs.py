"""The kernels, bytes, operations and time of a training graph on a GPU, by operator."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields

from onnxgc.model.core.draft import reads_of
from onnxgc.model.core.ir import Node, TensorType
from onnxgc.model.core.node_rewrites import ValueOf
from onnxgc.tracing.devices import Device
from onnxgc.tracing.durations import Work, work_of

# Elements of integers up to which a tensor is a shape, which the runtime computes on the CPU.
_MAX_SHAPE_ELEMENTS = 16
# Elements along an axis from which cuDNN has no fast convolution.
_MAX_FILTER = 11


@dataclass(slots=True)
class OperatorCost:
    """All nodes of one operator in one step.

    `slow_bytes` are read by reductions without a fast kernel; `large_filters` counts convolutions whose
    filter has more than 11 elements along an axis.
    """

    operator: str
    nodes: int = 0
    kernels: int = 0
    moved_bytes: int = 0
    flops: int = 0
    slow_bytes: int = 0
    large_filters: int = 0
    seconds: float = 0.0

    def add(self, work: Work, device: Device) -> None:
        """Adds a node that runs one kernel."""
        self.kernels += 1
        self.moved_bytes += work.moved_bytes
        self.flops += work.flops
        self.slow_bytes += work.slow_bytes
        self.seconds += device.duration_ns(work) / 1e9


def operator_costs(
    nodes: Iterable[Node], types: Mapping[str, TensorType], outputs: Collection[str], constant: ValueOf, device: Device
) -> tuple[OperatorCost, ...]:
    """Costs by operator, the slowest first. `types` has every tensor, `outputs` are those of the graph."""
    costs: dict[str, OperatorCost] = {}
    for node in nodes:
        work = work_of(node, types, outputs, constant)
        cost = costs.setdefault(work.kind, OperatorCost(work.kind))
        cost.nodes += 1
        if not work.is_free and not _computes_a_shape(node, types):
            cost.add(work, device)
        if node.op == "Conv" and max(types[node.inputs[1]].shape[2:], default=0) > _MAX_FILTER:
            cost.large_filters += 1
    return tuple(sorted(costs.values(), key=lambda cost: (-cost.seconds, -cost.nodes, cost.operator)))


def _computes_a_shape(node: Node, types: Mapping[str, TensorType]) -> bool:
    touched = [types[name] for name in (*reads_of(node), *filter(None, node.outputs))]
    return all(not kind.is_floating and kind.element_count <= _MAX_SHAPE_ELEMENTS for kind in touched)


def total_cost(costs: Iterable[OperatorCost]) -> OperatorCost:
    """The sum of all operators."""
    total = OperatorCost("total")
    for cost in costs:
        for field in fields(OperatorCost)[1:]:
            setattr(total, field.name, getattr(total, field.name) + getattr(cost, field.name))
    return total
