"""Where a file and the module that it was made of part, operator by operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from onnxgc.torch.apply_plan import origin_of
from onnxgc.torch.export_forms import WithoutChoices

if TYPE_CHECKING:
    from onnxgc.torch.export_check import Fault, Sides

# The name under which a parameter stands beside the results of operators.
_PARAMETER = ("the parameter",)
# Values that are those of another computation, not of another rounding.
_APART = 1e-5
_ADVICE = "write it in other operators, or leave it out of the module"
_UNFOUND = (
    "the captured operators have the file's values: what forward does beside them (a tensor hook, "
    "torch.set_grad_enabled, .data) is lost; write it with detach()"
)


def place_of(converted: ExportedProgram, sides: Sides, fault: Fault) -> str:
    """The first operator whose values, or whose gradients, the file has not; and what to do."""
    if not fault.training:
        return (
            "forward asks for its mode in a way that a file cannot say; write it so that both are one graph"
        )
    try:
        found = _custom(sides, fault) or _parting(converted, sides, fault) or _UNFOUND
    except Exception:  # It only explains, and a module that can be captured need not run so.
        found = "its place is not known; export submodules one by one to find it"
    return found


def said(node: fx.Node) -> str:
    """An operator and the submodule that calls it."""
    name = str(getattr(node.target, "name", lambda: node.target)()).removeprefix("aten::").partition(".")[0]
    path = path_of(node)
    return f"{name} in '{path}'" if path else f"{name} in forward"


def path_of(node: fx.Node) -> str:
    """The path of the submodule that calls an operator."""
    scopes = list((node.meta.get("nn_module_stack") or {}).values())
    return str(scopes[-1][0]).removeprefix("L['self'].") if scopes else ""


def _custom(sides: Sides, fault: Fault) -> str:
    """The first function with a backward of its own, which a file does not keep."""
    if fault.key[0] != "gradient":
        return ""
    args, kwargs = fault.call
    with torch.enable_grad(), WithoutChoices():
        outputs = [
            leaf for leaf in pytree.tree_leaves(sides.module(*args, **kwargs)) if isinstance(leaf, Tensor)
        ]
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if (function := getattr(node, "_forward_cls", None)) is not None:
            return (
                f"the backward of {function.__name__} (torch.autograd.Function) is lost: a file has that of "
                "the operators in its forward; write it in operators whose own backward is meant"
            )
        waiting += [other for other, _ in node.next_functions if other is not None]
    return ""


class _Values(fx.Interpreter):
    """Runs a graph and keeps the tensor of each name; nothing is dropped at random."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.target is torch.ops.aten.native_dropout.default:
            (x, *_), _ = self.fetch_args_kwargs_from_env(n)
            return x, torch.ones_like(x, dtype=torch.bool)
        result = super().run_node(n)
        if isinstance(result, Tensor) and n.op == "call_function":
            for name in _names_of(n):
                self.found[name] = result
        return result


def _names_of(node: fx.Node) -> Iterator[str]:
    origin = origin_of(node)
    yield node.name if origin is None else origin.outputs[0]


def _parting(program: ExportedProgram, sides: Sides, fault: Fault) -> str:
    """The first operator that has other values in the file; of gradients, the last that passes on others."""
    from onnxgc.torch.export_check import gradients_of, left_as_it_was

    ours, theirs = _Values(sides.network.program.graph_module), _Values(program.graph_module)
    inputs = [leaf for leaf in pytree.tree_leaves(fault.call) if isinstance(leaf, Tensor)]
    with left_as_it_was(sides.module), left_as_it_was(sides.network), torch.enable_grad(), WithoutChoices():
        network = sides.network
        made = ours.run(fault.training, network._value("onnxgc_like"), *inputs, *network.weights())
        results = theirs.run(*_arguments(program, sides, inputs))
    nodes = {node.name: node for node in program.graph_module.graph.nodes}
    outputs = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
    returned = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)][-len(outputs) :]
    for name, value in theirs.found.items():
        for one, other in zip(outputs, returned, strict=True):
            if value is other:
                ours.found.setdefault(name, one)
    common = [
        name for name in theirs.found if name in ours.found and _is_like(ours.found[name], theirs.found[name])
    ]
    for name in common:
        if _are_apart(ours.found[name], theirs.found[name]):
            return f"{said(nodes[name])} has other values in the file; {_ADVICE}"
    if fault.key[0] != "gradient":
        return ""
    _with_parameter(program, sides, fault.key[1], ours, theirs)
    flowing = [name for name in (*_PARAMETER, *common) if name in ours.found]
    flowing = [
        name for name in flowing if ours.found[name].requires_grad and theirs.found[name].requires_grad
    ]
    found = gradients_of(outputs, [ours.found[name] for name in flowing], fault.seed)
    expected = gradients_of(returned, [theirs.found[name] for name in flowing], fault.seed)
    for name, *pair in reversed(list(zip(flowing, found, expected, strict=True))):
        ours_here, theirs_here = (torch.zeros_like(ours.found[name]) if g is None else g for g in pair)
        if _are_apart(ours_here, theirs_here):
            user = next(iter(nodes[name].users)) if name in nodes else _reader_of(program, fault.key[1])
            return (
                f"the gradient that {said(user)} passes on is another in the file; {_ADVICE}" if user else ""
            )
    return ""


def _with_parameter(
    program: ExportedProgram, sides: Sides, name: str, ours: _Values, theirs: _Values
) -> None:
    """Notes the parameter itself on both sides."""
    keys = {other: key for key, other in sides.network.onnx_names().items()}
    if name in keys and _reader_of(program, name) is not None:
        ours.found[_PARAMETER[0]] = sides.network.get_parameter(keys[name])
        theirs.found[_PARAMETER[0]] = dict(sides.module.named_parameters())[name]


def _reader_of(program: ExportedProgram, name: str) -> fx.Node | None:
    """The first operator that reads a parameter."""
    targets = program.graph_signature.inputs_to_parameters
    places = (node for node in program.graph_module.graph.nodes if targets.get(node.name) == name)
    return next((user for place in places for user in place.users), None)


def _arguments(program: ExportedProgram, sides: Sides, inputs: list[Tensor]) -> list[Any]:
    """What the graph of a captured module takes: weights by their names, and the inputs."""
    held: dict[str, Tensor] = dict(sides.module.named_parameters(remove_duplicate=False))
    held |= dict(sides.module.named_buffers(remove_duplicate=False))
    given = iter(inputs)
    values: list[Any] = []
    for spec in program.graph_signature.input_specs:
        if spec.target is None:
            values.append(
                next(given)
                if type(spec.arg).__name__ == "TensorArgument"
                else getattr(spec.arg, "value", None)
            )
            continue
        value = held.get(spec.target, program.constants.get(spec.target))
        is_float = isinstance(value, Tensor) and value.is_floating_point() and sides.dtype is not None
        values.append(value.to(sides.dtype) if is_float and spec.target not in held else value)
    return values


def _is_like(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.is_floating_point() and other.is_floating_point()


def _are_apart(one: Tensor, other: Tensor) -> bool:
    one, other = one.detach().double(), other.detach().double()
    is_same = (one == other) | (one.isnan() & other.isnan())
    return not float(torch.where(is_same, 0.0, one - other).norm()) <= _APART * float(other.norm())
