"""The contents of a model, and the obstacles to training it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx

from onnxgc.api.budget_plans import DEFAULT_DEVICE
from onnxgc.api.card import step_costs
from onnxgc.api.step_planning import plan_step
from onnxgc.api.training_inspection import TrainingFileContents
from onnxgc.errors import ModelFileError, OnnxgcError
from onnxgc.gradients.registry import RULES, STOPS
from onnxgc.model.core.ir import TrainableModel
from onnxgc.model.files.load import load_proto, source_of
from onnxgc.model.files.proto_to_draft import draft_of
from onnxgc.model.operators.registry import node_flops
from onnxgc.model.read import draft_with_roles, explain_weights, is_written_by_optimize, read_model
from onnxgc.model.weight_roles.roles import ParameterDecision
from onnxgc.report.data.inspect_report import InspectReport
from onnxgc.runtime.cuda_kernels import left_to_the_cpu
from onnxgc.runtime.known_faults import FoundFault, faults_in
from onnxgc.runtime.ort import provider_of_forms
from onnxgc.runtime.other_runtimes import RUNTIMES, limits_of
from onnxgc.tracing.card_costs import OperatorCost
from onnxgc.tracing.devices import Device
from onnxgc.tracing.devices import device as named_device


@dataclass(frozen=True, slots=True)
class OperatorUse:
    """All uses of one operator in the forward graph and its loss.

    `gradient` is `rule`, `none needed` (no parameter precedes it, or its derivative is zero) or `missing`;
    `nodes` are nodes of the source model.
    """

    operator: str
    gradient: str
    nodes: tuple[str, ...]
    flops: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """The result of `inspect`.

    `obstacles` are the errors by which `optimize` would reject the model; later fields are empty as far as
    they depend on it. `left_to_the_cpu` counts the training graph's nodes without a CUDA kernel at its opset,
    by operator. `limits` has, for another runtime, the nodes that it cannot run, by effect and operator.
    `runtime_faults` are known faults of ONNX Runtime that make the model's inference wrong, but
    not its training.
    """

    weights: tuple[ParameterDecision, ...]
    obstacles: tuple[str, ...]
    notes: tuple[str, ...] = ()
    operators: tuple[OperatorUse, ...] = ()
    loss: str = ""
    regular_peak_bytes: int | None = None
    planned_peak_bytes: int | None = None
    opset: int | None = None
    left_to_the_cpu: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    runtime_faults: tuple[FoundFault, ...] = ()
    card: tuple[OperatorCost, ...] = ()
    limits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def as_json(self) -> InspectReport:
        return {
            "inputs": {name: list(shape) for name, shape in self.inputs.items()},
            "loss": self.loss,
            "weights": [
                {
                    "name": weight.name,
                    "shape": list(weight.type.shape),
                    "bytes": weight.type.size_bytes,
                    "role": weight.role.value,
                    "reason": weight.reason,
                    "doubt": weight.doubt,
                }
                for weight in self.weights
            ],
            "operators": [
                {
                    "operator": use.operator,
                    "gradient": use.gradient,
                    "count": len(use.nodes),
                    "nodes": list(use.nodes),
                    "flops": use.flops,
                }
                for use in self.operators
            ],
            "regular": {"simulated_peak_bytes": self.regular_peak_bytes},
            "planned": {"simulated_peak_bytes": self.planned_peak_bytes},
            "opset": self.opset,
            "left_to_the_cpu": dict(self.left_to_the_cpu),
            "limits": {effect: dict(counts) for effect, counts in self.limits.items()},
            "runtime_faults": [
                {
                    "name": fault.fault.name,
                    "nodes": list(fault.nodes),
                    "cause": fault.fault.cause,
                    "levels": fault.fault.levels,
                    "versions": fault.fault.versions,
                    "detail": str(fault),
                }
                for fault in self.runtime_faults
            ],
            "card": [
                {
                    "operator": cost.operator,
                    "nodes": cost.nodes,
                    "kernels": cost.kernels,
                    "moved_bytes": cost.moved_bytes,
                    "flops": cost.flops,
                    "slow_bytes": cost.slow_bytes,
                    "seconds": cost.seconds,
                }
                for cost in self.card
            ],
            "notes": list(self.notes),
            "obstacles": list(self.obstacles),
        }


def inspect(
    source: Any,
    *,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    loss: str = "auto",
    trainable: Sequence[str] = (),
    freeze: Sequence[str] = (),
    freeze_bn: bool = False,
    untie: bool = False,
    provider: str | None = None,
    device: str | None = None,
) -> Inspection:
    """Weights with roles, operators with gradient support, peaks, and obstacles to training.

    Arguments are those of `optimize`. With the provider `cuda`, `card` has the expected costs of a step
    on `device` (default: a100) by operator. With `web`, `webgpu`, `openvino` or `iree`, `limits` has the nodes
    that this runtime cannot run. Of a training file, the result has the nodes, weights and peak
    of the file itself.

    Raises:
        ModelFileError: the file is not an ONNX model, or a training file is given with options of reading.
            Other errors are returned as `obstacles`.
    """
    other = provider if provider in RUNTIMES else ""
    chosen = "cpu" if provider is None or other else provider_of_forms(provider)
    card = named_device(device or DEFAULT_DEVICE) if chosen == "cuda" else None
    loaded = load_proto(source_of(source))
    if is_written_by_optimize(loaded.proto):
        if input_shapes or trainable or freeze or freeze_bn or untie or loss != "auto":
            raise ModelFileError(
                "a training file is inspected as it is; leave out the options for reading a forward model"
            )
        return _of_training_file(loaded.proto, card, other)
    weights: tuple[ParameterDecision, ...] = ()
    try:
        given = draft_with_roles(*loaded, trainable=trainable, freeze=freeze, untie=untie)
        weights = () if untie else given[1]
        model = read_model(
            loaded,
            input_shapes=input_shapes,
            loss=loss,
            trainable=trainable,
            freeze=freeze,
            freeze_bn=freeze_bn,
            untie=untie,
            provider=chosen,
            given=given,
        )
    except ModelFileError:
        raise
    except OnnxgcError as error:
        return Inspection(weights or explain_weights(loaded, trainable=trainable, freeze=freeze), (str(error),))
    inspection = Inspection(
        weights or explain_weights(loaded, trainable=trainable, freeze=freeze),
        (),
        model.notes,
        _operator_uses(model),
        model.loss_kind,
        inputs={name: model.types[name].shape for name in (*model.inputs, *model.targets)},
        runtime_faults=faults_in(draft_of(*loaded).with_changes(types=model.types)),
    )
    try:
        planned = plan_step(model, "acg")
    except OnnxgcError as error:
        return replace(inspection, obstacles=(str(error),))
    return replace(
        inspection,
        regular_peak_bytes=planned.regular_profile.peak_bytes,
        planned_peak_bytes=planned.profile.peak_bytes,
        opset=model.opset,
        left_to_the_cpu=left_to_the_cpu(planned.step.nodes.values(), planned.step.types, model.opset),
        card=() if card is None else step_costs(planned.step, planned.schedule, card),
        limits=limits_of(other, planned.step.nodes.values(), planned.step.types),
    )


def _of_training_file(proto: onnx.ModelProto, card: Device | None, runtime: str) -> Inspection:
    contents = TrainingFileContents(proto)
    return Inspection(
        contents.weights,
        (),
        (contents.note,),
        loss=contents.loss,
        planned_peak_bytes=contents.peak_bytes,
        opset=contents.opset,
        left_to_the_cpu=left_to_the_cpu(contents.nodes, contents.types, contents.opset),
        inputs=contents.inputs,
        card=() if card is None else contents.card_costs(card),
        limits=limits_of(runtime, contents.nodes, contents.types),
    )


def _operator_uses(model: TrainableModel) -> tuple[OperatorUse, ...]:
    active = set(model.parameters)
    nodes: dict[tuple[str, str], list[str]] = {}
    flops: dict[tuple[str, str], int] = {}
    for node in model.nodes:
        gradient = "none needed"
        floating = [name for name in node.outputs if name and model.types[name].is_floating]
        needed = any(name in active for name in node.inputs) and floating and not node.once
        if needed and node.rule and node.rule not in STOPS:
            gradient = "rule" if node.rule in RULES else "missing"
            active.update(floating)
        key = (node.rule if gradient != "none needed" else node.op, gradient)
        nodes.setdefault(key, []).append(node.origin or node.name)
        flops[key] = flops.get(key, 0) + node_flops(node, model.types)
    return tuple(
        OperatorUse(operator, gradient, tuple(nodes[operator, gradient]), flops[operator, gradient])
        for operator, gradient in sorted(nodes)
    )
