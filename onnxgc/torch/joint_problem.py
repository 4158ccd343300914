"""Forward and backward of a torch function, traced as ATen operators, as a rematerialisation problem.

PyTorch's ahead-of-time autograd traces both into one joint graph. Each ATen operator becomes an operator,
each tensor's memory a storage. Views become neither. The forward/backward boundary is an
operator that reads the outputs of forward and writes their gradients, with which backward begins.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator
from onnxgc.torch.operator_timing import Cost, hint
from onnxgc.tracing.durations import Timing, Work

_CUDA_ROUNDING = 512
"""PyTorch's CUDA allocator rounds sizes up to multiples of these bytes."""
_TANGENT = "tangents"
"""Prefix of the names of backward's inputs."""
BACKWARD = "must_be_in_backward"
"""PyTorch's tag of nodes that only backward may compute."""


Costs = Callable[[fx.Node], Cost]
"""Durations and workspaces of operators."""


@dataclass(frozen=True, slots=True)
class EstimatedCosts:
    """Durations from the data sheet of a device; no operator has a workspace."""

    timing: Timing

    def __call__(self, node: fx.Node) -> Cost:
        return Cost(self.timing.duration_ns(_work(node)), 0)


@dataclass(frozen=True, slots=True)
class JointStep:
    """A joint graph and its problem: operator `i` is `nodes[i]`, or None for the boundary.

    `derived` are nodes that allocate no memory: entries of tuples and views. `storages` are those of each
    node of forward, `dtypes` the element types of each storage.
    """

    nodes: tuple[fx.Node | None, ...]
    boundary: int
    problem: OperatorProblem
    derived: frozenset[fx.Node]
    forward_outputs: tuple[Any, ...]
    backward_outputs: tuple[Any, ...]
    storages: Mapping[fx.Node, tuple[int, ...]]
    dtypes: tuple[torch.dtype, ...]


def joint_step(
    graph: fx.Graph, num_fwd_outputs: int, costs: Costs, inlined: Callable[[fx.Node], bool] = lambda node: False
) -> JointStep:
    """The problem of a joint graph whose output lists forward's outputs first, then gradients.

    A compiler computes `inlined` nodes again inside each reader: they take no memory, as views.
    """
    results: Any = graph.output_node().args[0]
    return _Builder(graph, results[:num_fwd_outputs], results[num_fwd_outputs:], costs, inlined).step()


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws from its device's generator; attention does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def is_mutable(node: fx.Node) -> bool:
    """Whether an operator overwrites an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """The output tensors of a node in the trace, which have no contents."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from (entry for entry in value if isinstance(entry, torch.Tensor))


class _Builder:
    def __init__(
        self,
        graph: fx.Graph,
        forward: Iterable[Any],
        backward: Iterable[Any],
        costs: Costs,
        inlined: Callable[[fx.Node], bool],
    ) -> None:
        self._graph, self._inlined = graph, inlined
        self._forward, self._backward = tuple(forward), tuple(backward)
        self._costs = costs
        self._storages_at: dict[int, tuple[int, ...]] = {}
        """Indices of storages by addresses in the trace: one, or those from which an inlined node is computed."""
        self._sizes: list[int] = []
        self._dtypes: list[torch.dtype] = []
        self._operators: list[ProblemOperator] = []
        self._nodes: list[fx.Node | None] = []
        self._derived: set[fx.Node] = set()
        self._draw_order: tuple[int, ...] = ()
        """The empty storage that the last random operator writes."""

    def step(self) -> JointStep:
        inputs = self._graph.find_nodes(op="placeholder")
        tangents = [node for node in inputs if is_tangent(node)]
        self._inputs = {_address(v) for node in inputs if not is_tangent(node) for v in tensors_of(node)}
        self._overwritten = overwritten_inputs(self._graph)
        nodes = [node for node in self._graph.nodes if node.op not in ("placeholder", "output")]
        forward, backward = _passes(nodes, tangents, self._forward)
        storages: dict[fx.Node, tuple[int, ...]] = {}
        for node in forward:
            self._add(node)
            storages[node] = self._storages([node])
        boundary = len(self._nodes)
        self._add_boundary(tangents)
        for node in backward:
            self._add(node)
        kept = frozenset(self._storages(entry for entry in self._backward if isinstance(entry, fx.Node)))
        problem = OperatorProblem(tuple(self._operators), tuple(self._sizes), kept)
        return JointStep(
            tuple(self._nodes),
            boundary,
            problem,
            frozenset(self._derived),
            self._forward,
            self._backward,
            storages,
            tuple(self._dtypes),
        )

    def _add_boundary(self, tangents: Iterable[fx.Node]) -> None:
        reads = self._storages(entry for entry in self._forward if isinstance(entry, fx.Node))
        writes = self._new_storages(tangents)
        self._operators.append(ProblemOperator("boundary", reads, writes, 0, may_repeat=False, min_writes=len(writes)))
        self._nodes.append(None)

    def _add(self, node: fx.Node) -> None:
        if node.op != "call_function" or node.target is operator.getitem:
            self._derived.add(node)
            return
        outputs = list(tensors_of(node))
        if self._inlined(node):
            self._derived.add(node)
            sources = self._storages(node.all_input_nodes)
            self._storages_at.update((_address(value), sources) for value in outputs)
            return
        writes = self._new_storages([node])
        if outputs and not writes and not is_mutable(node):
            self._derived.add(node)
            return
        reads = self._storages(node.all_input_nodes)
        if is_random(node):
            # Random operators keep their order: each reads an empty storage that the one before writes.
            reads = (*reads, *self._draw_order)
            self._draw_order = (len(self._sizes),)
            writes = (*writes, *self._draw_order)
            self._sizes.append(0)
            self._dtypes.append(torch.uint8)
        cost = self._costs(node)
        # An operator without output tensors runs for its side effect.
        self._operators.append(
            ProblemOperator(
                node.name,
                reads,
                writes,
                cost.duration_ns,
                cost.workspace_bytes,
                may_repeat=bool(outputs) and self._may_repeat(node),
                min_writes=len(writes),
            )
        )
        self._nodes.append(node)

    def _storages(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        """Storages of nodes; inputs of forward have none."""
        addresses = (_address(value) for node in nodes for value in tensors_of(node))
        return tuple(dict.fromkeys(one for each in addresses for one in self._storages_at.get(each, ())))

    def _new_storages(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        created: list[int] = []
        for value in (value for node in nodes for value in tensors_of(node)):
            address = _address(value)
            if address not in self._storages_at and address not in self._inputs:
                self._storages_at[address] = (len(self._sizes),)
                created.append(len(self._sizes))
                self._sizes.append(rounded_size(hint(value.untyped_storage().nbytes()), value.device))
                self._dtypes.append(value.dtype)
        return tuple(created)

    def _may_repeat(self, node: fx.Node) -> bool:
        """Whether an operator may be recomputed.

        Collective operators may not, nor operators that read an input which forward overwrites. The module's
        own generator is such an input.
        """
        if "c10d" in getattr(node.target, "namespace", "") or node.kwargs.get("generator") is not None:
            return False
        if is_mutable(node) or "inductor_seed" in str(node.target):
            return False
        read = node.args[:3] if is_batch_normalization(node) else node.all_input_nodes
        return not any(self._reads_overwritten(source) for source in read if isinstance(source, fx.Node))

    def _reads_overwritten(self, node: fx.Node) -> bool:
        if node in self._overwritten:
            return True
        return node in self._derived and any(map(self._reads_overwritten, node.all_input_nodes))


def is_tangent(node: fx.Node) -> bool:
    """Whether an input is the gradient of an output of forward."""
    return _TANGENT in str(node.target)


def is_batch_normalization(node: fx.Node) -> bool:
    """Whether a node normalises by the batch's statistics, independent of running statistics."""
    return node.target is torch.ops.aten._native_batch_norm_legit_functional.default and bool(node.args[5])


def overwritten_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Inputs that forward overwrites, such as running statistics."""
    outputs = graph.output_node().meta.get("desc", ())
    changed = [each.mutated_input for each in outputs if hasattr(each, "mutated_input")]
    targets = {node.args[0] for node in graph.nodes if is_mutable(node)}
    inputs = graph.find_nodes(op="placeholder")
    return {node for node in inputs if node.meta.get("desc") in changed or node in targets}


def _passes(
    nodes: list[fx.Node], tangents: Iterable[fx.Node], results: Iterable[Any]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Nodes of forward and of backward, which begins with the first that depends on a tangent."""
    dependents = _dependents(tangents)
    first = next((index for index, node in enumerate(nodes) if node in dependents), len(nodes))
    late = {node for node in nodes[first:] if node not in dependents}
    late.update(node for node in nodes if node.meta.get("partitioner_tag") == BACKWARD)
    needed = ancestors([node for node in nodes if is_mutable(node) and node in late] + list(results))
    forward = [node for index, node in enumerate(nodes) if (node in needed if node in late else index < first)]
    taken = set(forward)
    return forward, [node for node in nodes if node not in taken]


def ancestors(nodes: Iterable[Any]) -> set[fx.Node]:
    """Nodes, with all from which they are computed."""
    found, waiting = set[fx.Node](), [node for node in nodes if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _dependents(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that depend on the given ones."""
    dependents, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in dependents:
            dependents.add(node)
            waiting.extend(node.users)
    return dependents


def _address(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def rounded_size(size: int, device: torch.device) -> int:
    """Bytes that PyTorch's allocator takes for a size in bytes."""
    return -(-size // _CUDA_ROUNDING) * _CUDA_ROUNDING if device.type == "cuda" else size


def _work(node: fx.Node) -> Work:
    outputs = list(tensors_of(node))
    read = [value for source in node.all_input_nodes for value in tensors_of(source)]
    moved = sum(hint(value.numel()) * value.element_size() for value in (*outputs, *read))
    kind = str(node.target)
    dtype = str((outputs or read or [torch.empty(0)])[0].dtype).removeprefix("torch.")
    return Work(node.name, node.name, kind, dtype, _flops(node), moved)


def _flops(node: fx.Node) -> int:
    """Floating-point operations by PyTorch's count where it has one, else one per element."""
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return sum(hint(value.numel()) for value in tensors_of(node))
    arguments = fx.map_arg(node.args, lambda source: source.meta.get("val"))
    settings: Mapping[str, Any] = fx.map_arg(node.kwargs, lambda source: source.meta.get("val"))
    return hint(count(*arguments, **settings, out_val=node.meta.get("val")))
