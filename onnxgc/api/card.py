"""What a training graph makes a GPU do, by operator."""

from onnxgc.emission.training_graph import training_nodes
from onnxgc.model.core.draft import reads_of
from onnxgc.model.core.ir import Array
from onnxgc.planning.schedule import Schedule
from onnxgc.tracing.card_costs import OperatorCost, operator_costs, total_cost
from onnxgc.tracing.devices import Device
from onnxgc.tracing.step_graph import TrainingStep


def step_costs(
    step: TrainingStep, schedule: Schedule, device: Device, *, has_barriers: bool = True
) -> tuple[OperatorCost, ...]:
    """Costs of the nodes of a schedule's training file by operator, the slowest first, and their total."""
    nodes, tensors = training_nodes(step, schedule, has_barriers=has_barriers)
    types = {name: tensors.type_of(name) for node in nodes for name in (*reads_of(node), *node.outputs) if name}

    def constant(name: str) -> Array | None:
        added = tensors.constants.values.get(name)
        return step.constants.get(name, added) if name not in step.model.weights else step.model.constant(name)

    costs = operator_costs(nodes, types, step.graph.outputs, constant, device)
    return (*costs, total_cost(costs))
