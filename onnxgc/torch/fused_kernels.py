"""What compiled code materialises: Inductor computes pointwise operators inside the kernels that read them."""

import functools
import operator
from collections.abc import Iterator

import torch
from torch import fx
from torch._functorch.partitioners import get_default_op_list

from onnxgc.torch.joint_problem import Costs, is_mutable, is_tangent, overwritten_inputs, tensors_of
from onnxgc.torch.operator_timing import Cost, MeasuredCosts, hint, nanoseconds_of_copy


def inlined_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes of a joint graph that need no memory in compiled code.

    Such a node is pointwise, and read by kernels of generated code alone: one in the same pass, or several, if
    all that it is computed from is no larger than itself.
    """
    nodes = list(graph.nodes)
    overwritten = overwritten_inputs(graph)
    dependents = {node for node in nodes if node.op == "placeholder" and is_tangent(node)}
    for node in nodes:
        if not dependents.isdisjoint(node.all_input_nodes):
            dependents.add(node)
    sources: dict[fx.Node, frozenset[fx.Node]] = {}
    inlined = set[fx.Node]()
    for node in nodes:
        read = {one for each in node.all_input_nodes for one in sources.get(each, frozenset())}
        if node.op == "call_function" and _is_view(node):
            sources[node] = frozenset(read)
            continue
        sources[node] = frozenset([node]) if node.op == "call_function" else frozenset()
        if not is_pointwise(node) or not overwritten.isdisjoint(node.all_input_nodes):
            continue
        readers = list(_readers(node))
        if not all(map(_is_generated, readers)):
            continue
        is_single = len(readers) == 1 and (readers[0] in dependents) == (node in dependents)
        if is_single or sum(map(_bytes, read)) <= _bytes(node):
            inlined.add(node)
            sources[node] = frozenset(read)
    return frozenset(inlined)


class FusedCosts:
    """Costs of compiled operators: of generated kernels the time to copy what they move, else as given or measured."""

    def __init__(self, costs: Costs | None) -> None:
        self._costs = costs or MeasuredCosts()

    def __call__(self, node: fx.Node) -> Cost:
        if not _is_generated(node) or is_mutable(node):
            return self._costs(node)
        moved = sum(map(_bytes, (node, *node.all_input_nodes)))
        device = next((value.device for value in tensors_of(node)), torch.device("cpu"))
        return Cost(round(moved * nanoseconds_of_copy(device)), 0)


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the result is computed from one element of each input."""
    if not _is_generated(node) or isinstance(node.meta.get("val"), list | tuple):
        return False
    if node.target in _GATHERS:
        return False
    largest = max((hint(value.numel()) for one in node.all_input_nodes for value in tensors_of(one)), default=0)
    return largest <= max((hint(value.numel()) for value in tensors_of(node)), default=0)


_GATHERS = {getattr(torch.ops.aten, name).default for name in ("embedding", "gather", "cat")} | {
    torch.ops.aten.index.Tensor
}


@functools.cache
def _generated_kinds() -> frozenset[object]:
    return frozenset(get_default_op_list().fusible_ops)


def _is_generated(node: fx.Node) -> bool:
    """Whether Inductor generates code for an operator, instead of a call of a library."""
    kind = getattr(node.target, "overloadpacket", node.target)
    tags = getattr(node.target, "tags", ())
    name = str(node.target)
    is_known = kind in _generated_kinds() or torch.Tag.pointwise in tags or "inductor_random" in name
    return node.op == "call_function" and (is_known or "inductor_lookup_seed" in name or "prims." in name)


def _is_view(node: fx.Node) -> bool:
    """Whether a node allocates nothing: an entry of a tuple, or a view."""
    if node.target is operator.getitem:
        return True
    addresses = {value.untyped_storage()._cdata for one in node.all_input_nodes for value in tensors_of(one)}
    outputs = list(tensors_of(node))
    return bool(outputs) and all(value.untyped_storage()._cdata in addresses for value in outputs)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Readers of a node and of its views; an output of the graph is its own reader."""
    for user in node.users:
        if user.op == "output":
            yield user
        elif _is_view(user):
            yield from _readers(user)
        else:
            yield user


def _bytes(node: fx.Node) -> int:
    return sum(hint(value.numel()) * value.element_size() for value in tensors_of(node))
