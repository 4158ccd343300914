"""The first operator at which an exported file and its module diverge."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from onnxgc.torch.exportable_functions import WithoutRandomness
from onnxgc.torch.module_pair import (
    Discrepancy,
    ModulePair,
    distance,
    gradients_of,
    norm,
    preserve_state,
    tensor_leaves,
)
from onnxgc.torch.onnx_plan import origin_of

# The name of the parameter itself among those of operators' results.
_PARAMETER = "the parameter"
# Relative distance above which values differ by more than rounding.
_MAX_ROUNDING = 1e-5
_ADVICE = "write it in other operators, or leave it out of the module"


def locate(converted: ExportedProgram, pair: ModulePair, discrepancy: Discrepancy) -> str:
    """The first operator with other values or gradients in the file, and a remedy."""
    if not discrepancy.training:
        return "forward branches on its mode, which a file cannot express; write it as one graph for both modes"
    try:
        return (
            _custom_backward(pair, discrepancy)
            or _first_divergence(converted, pair, discrepancy)
            or "the captured operators have the file's values, but an effect of forward outside of them is "
            "lost (a tensor hook, torch.set_grad_enabled, .data); write it with detach()"
        )
    except Exception:  # A module that can be captured need not run operator by operator.
        return "its operator is unknown; export submodules one by one to find it"


def describe_node(node: fx.Node) -> str:
    """An operator and the submodule that calls it."""
    name = str(getattr(node.target, "name", lambda: node.target)()).removeprefix("aten::").partition(".")[0]
    path = submodule_path(node)
    return f"{name} in '{path}'" if path else f"{name} in forward"


def submodule_path(node: fx.Node) -> str:
    """The path of the submodule that calls an operator."""
    scopes = list((node.meta.get("nn_module_stack") or {}).values())
    return str(scopes[-1][0]).removeprefix("L['self'].") if scopes else ""


def _custom_backward(pair: ModulePair, discrepancy: Discrepancy) -> str:
    """The first custom autograd function, whose backward is lost in a file."""
    if discrepancy.key[0] != "gradient":
        return ""
    args, kwargs = discrepancy.call
    with torch.enable_grad(), WithoutRandomness():
        outputs = tensor_leaves(pair.module(*args, **kwargs))
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if (function := getattr(node, "_forward_cls", None)) is not None:
            return (
                f"the backward of {function.__name__} (torch.autograd.Function) is lost: a file has the "
                "backward of the operators in its forward; write it in operators with the intended backward"
            )
        waiting += [other for other, _ in node.next_functions if other is not None]
    return ""


class _Values(fx.Interpreter):
    """Runs a graph without Dropout and keeps the tensor of each name."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.tensors: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.target is torch.ops.aten.native_dropout.default:
            (x, *_), _ = self.fetch_args_kwargs_from_env(n)
            return x, torch.ones_like(x, dtype=torch.bool)
        result = super().run_node(n)
        if isinstance(result, Tensor) and n.op == "call_function":
            origin = origin_of(n)
            self.tensors[n.name if origin is None else origin.outputs[0]] = result
        return result


def _first_divergence(program: ExportedProgram, pair: ModulePair, discrepancy: Discrepancy) -> str:
    """The first operator with other values in the file; for gradients, the last one with other gradients."""
    ours, theirs = _Values(pair.network.program.graph_module), _Values(program.graph_module)
    inputs = tensor_leaves(discrepancy.call)
    network = pair.network
    with preserve_state(pair.module), preserve_state(network), torch.enable_grad(), WithoutRandomness():
        outputs = tensor_leaves(
            ours.run(discrepancy.training, network._value("onnxgc_like"), *inputs, *network.weights())
        )
        returned = tensor_leaves(theirs.run(*_arguments(program, pair, inputs)))[-len(outputs) :]
    nodes = {node.name: node for node in program.graph_module.graph.nodes}
    for name, value in theirs.tensors.items():
        for one, other in zip(outputs, returned, strict=True):
            if value is other:
                ours.tensors.setdefault(name, one)
    pairs = {
        name: (ours.tensors[name], other)
        for name, other in theirs.tensors.items()
        if name in ours.tensors and _is_like(ours.tensors[name], other)
    }
    for name, (one, other) in pairs.items():
        if _differ(one, other):
            return f"{describe_node(nodes[name])} has other values in the file; {_ADVICE}"
    if discrepancy.key[0] != "gradient":
        return ""
    parameter = discrepancy.key[1]
    reader = _reader_of(program, parameter)
    keys = {name: key for key, name in network.onnx_names().items()}
    if parameter in keys and reader is not None:
        own = dict(pair.module.named_parameters())[parameter]
        pairs = {_PARAMETER: (network.get_parameter(keys[parameter]), own), **pairs}
    pairs = {name: both for name, both in pairs.items() if all(one.requires_grad for one in both)}
    found = gradients_of(outputs, [one for one, _ in pairs.values()], discrepancy.seed)
    expected = gradients_of(returned, [other for _, other in pairs.values()], discrepancy.seed)
    for name, *gradients in reversed(list(zip(pairs, found, expected, strict=True))):
        one, other = (torch.zeros_like(pairs[name][0]) if each is None else each for each in gradients)
        if _differ(one, other):
            user = next(iter(nodes[name].users)) if name in nodes else reader
            return f"the gradient of {describe_node(user)} differs in the file; {_ADVICE}" if user else ""
    return ""


def _reader_of(program: ExportedProgram, name: str) -> fx.Node | None:
    """The first operator that reads a parameter."""
    targets = program.graph_signature.inputs_to_parameters
    inputs = (node for node in program.graph_module.graph.nodes if targets.get(node.name) == name)
    return next((user for node in inputs for user in node.users), None)


def _arguments(program: ExportedProgram, pair: ModulePair, inputs: list[Tensor]) -> list[Any]:
    """The arguments of a captured module's graph: weights by name, and the inputs."""
    weights: dict[str, Tensor] = dict(pair.module.named_parameters(remove_duplicate=False))
    weights |= dict(pair.module.named_buffers(remove_duplicate=False))
    given = iter(inputs)
    values: list[Any] = []
    for spec in program.graph_signature.input_specs:
        if spec.target is None:
            is_tensor = type(spec.arg).__name__ == "TensorArgument"
            values.append(next(given) if is_tensor else getattr(spec.arg, "value", None))
            continue
        value = weights.get(spec.target, program.constants.get(spec.target))
        is_float = isinstance(value, Tensor) and value.is_floating_point() and pair.dtype is not None
        values.append(value.to(pair.dtype) if is_float and spec.target not in weights else value)
    return values


def _is_like(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.is_floating_point() and other.is_floating_point()


def _differ(one: Tensor, other: Tensor) -> bool:
    return not distance(one, other) <= _MAX_ROUNDING * norm(other)
