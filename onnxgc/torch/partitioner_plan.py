"""The tensors that PyTorch's own partitioner saves under `activation_memory_budget`, by their ONNX names."""

import copy
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition

from onnxgc.torch.checkpointing import planned_module
from onnxgc.torch.joint_problem import JointStep
from onnxgc.torch.onnx_module import from_onnx
from onnxgc.torch.onnx_plan import by_products, origin_of, results_by_origin, sequence_keeping
from onnxgc.torch.operator_timing import Cost


@dataclass(frozen=True, slots=True)
class PartitionerBudget:
    """Keeps the tensors that PyTorch's partitioner saves, at a share of its default memory."""

    share: float

    def __call__(self, step: JointStep, *_: object) -> tuple[tuple[int, ...], int]:
        problem = step.problem
        kept = saved_storages(step, self.share)
        for operation in problem.operators[: step.boundary]:
            if not operation.may_repeat:
                kept.update(operation.writes)
        return sequence_keeping(step, kept), 0


def saved_storages(step: JointStep, share: float) -> set[int]:
    """The storages that PyTorch's partitioner saves for backward."""
    graph = next(iter(step.storages)).graph
    results = len(step.forward_outputs)
    with config.patch(activation_memory_budget=share), warnings.catch_warnings():
        # PyTorch calls its own deprecated functions.
        warnings.simplefilter("ignore")
        joint = fx.GraphModule(graph.owning_module or {}, copy.deepcopy(graph))
        forward, _ = min_cut_rematerialization_partition(joint, (), num_fwd_outputs=results)
    outputs: Any = forward.graph.output_node().args[0]
    saved = {node.name for node in outputs[results:] if isinstance(node, fx.Node)}
    return {storage for node in step.storages if node.name in saved for storage in step.storages[node]}


def tensors_saved(
    model: Any,
    share: float,
    *,
    input_shapes: Mapping[str, tuple[int, ...]],
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
    freeze_bn: bool = False,
) -> frozenset[str]:
    """The names of an ONNX model's tensors that PyTorch's partitioner saves.

    A tensor inside of an operator, such as an intermediate result of a Gelu, counts as the operator's output.
    The arguments are those of `from_onnx`.

    Raises:
        OnnxgcError: PyTorch cannot run the model.
    """
    module = from_onnx(model, trainable=trainable, freeze=freeze, freeze_bn=freeze_bn, input_shapes=input_shapes)
    names: set[str] = set()

    def plan_baseline(step: JointStep, *_: object) -> tuple[tuple[int, ...], int]:
        names.update(_names(step, saved_storages(step, share)))
        return tuple(range(len(step.problem))), 0

    planned_module(module, plan_baseline, lambda node: Cost(0, 0), module.example_inputs({}))
    return frozenset(names)


def _names(step: JointStep, saved: set[int]) -> set[str]:
    names: defaultdict[int, set[str]] = defaultdict(set)
    for origin, result in results_by_origin(step).items():
        for storage in step.storages[result]:
            names[storage].update(filter(None, origin.outputs))
    for index in range(step.boundary):
        node = step.nodes[index]
        origin = None if node is None else origin_of(node)
        for storage in step.problem.operators[index].writes:
            if storage not in names and origin is not None:
                names[storage].update(filter(None, origin.outputs))
        for storage in by_products(step.problem, index):
            names.pop(storage, None)
    return {name for storage in saved for name in names.get(storage, ())}
