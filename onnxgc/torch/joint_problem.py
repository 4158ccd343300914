"""Forward and backward of a torch function, traced as ATen operators, as a rematerialisation problem.

PyTorch's ahead-of-time autograd traces both into one joint graph. Each ATen operator becomes an operator,
each tensor's memory a storage. Views become neither. The forward/backward boundary is an
operator that reads the outputs of forward and writes their gradients, with which backward begins.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator
from onnxgc.torch.operator_timing import Cost
from onnxgc.tracing.durations import Timing, Work

_CUDA_ROUNDING = 512
"""PyTorch's CUDA allocator rounds sizes up to multiples of these bytes."""
_TANGENT = "tangents"
"""Prefix of the names of backward's inputs."""


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


def joint_step(graph: fx.Graph, num_fwd_outputs: int, costs: Costs) -> JointStep:
    """The problem of a joint graph whose output lists forward's outputs first, then gradients."""
    results: Any = graph.output_node().args[0]
    return _Builder(graph, results[:num_fwd_outputs], results[num_fwd_outputs:], costs).step()


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws from its device's generator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """The output tensors of a node in the trace, which have no contents."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from (entry for entry in value if isinstance(entry, torch.Tensor))


class _Builder:
    def __init__(self, graph: fx.Graph, forward: Iterable[Any], backward: Iterable[Any], costs: Costs) -> None:
        self._graph = graph
        self._forward, self._backward = tuple(forward), tuple(backward)
        self._costs = costs
        self._storage_of: dict[int, int] = {}
        """Indices of storages by their addresses in the trace."""
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
        self._overwritten = _overwritten(self._graph)
        nodes = [node for node in self._graph.nodes if node.op not in ("placeholder", "output")]
        backward = _dependents(tangents)
        first = next((index for index, node in enumerate(nodes) if node in backward), len(nodes))
        storages: dict[fx.Node, tuple[int, ...]] = {}
        for node in nodes[:first]:
            self._add(node)
            storages[node] = self._storages([node])
        boundary = len(self._nodes)
        self._add_boundary(tangents)
        for node in nodes[first:]:
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
        writes = self._new_storages([node])
        outputs = list(tensors_of(node))
        if outputs and not writes:
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
        return tuple(dict.fromkeys(self._storage_of[each] for each in addresses if each in self._storage_of))

    def _new_storages(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        created: list[int] = []
        for value in (value for node in nodes for value in tensors_of(node)):
            address = _address(value)
            if address not in self._storage_of and address not in self._inputs:
                self._storage_of[address] = len(self._sizes)
                created.append(len(self._sizes))
                self._sizes.append(_rounded(value))
                self._dtypes.append(value.dtype)
        return tuple(created)

    def _may_repeat(self, node: fx.Node) -> bool:
        """Whether an operator may be recomputed.

        Collective operators may not, nor operators that read an input which forward overwrites. The module's
        own generator is such an input.
        """
        if "c10d" in getattr(node.target, "namespace", "") or node.kwargs.get("generator") is not None:
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


def _overwritten(graph: fx.Graph) -> set[fx.Node]:
    """Inputs that forward overwrites, such as running statistics."""
    outputs = graph.output_node().meta.get("desc", ())
    changed = [each.mutated_input for each in outputs if hasattr(each, "mutated_input")]
    return {node for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in changed}


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


def _rounded(value: torch.Tensor) -> int:
    size = value.untyped_storage().nbytes()
    return -(-size // _CUDA_ROUNDING) * _CUDA_ROUNDING if value.device.type == "cuda" else size


def _work(node: fx.Node) -> Work:
    outputs = list(tensors_of(node))
    read = [value for source in node.all_input_nodes for value in tensors_of(source)]
    moved = sum(value.numel() * value.element_size() for value in (*outputs, *read))
    kind = str(node.target)
    dtype = str((outputs or read or [torch.empty(0)])[0].dtype).removeprefix("torch.")
    return Work(node.name, node.name, kind, dtype, _flops(node), moved)


def _flops(node: fx.Node) -> int:
    """Floating-point operations by PyTorch's count where it has one, else one per element."""
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return sum(value.numel() for value in tensors_of(node))
    arguments = fx.map_arg(node.args, lambda source: source.meta.get("val"))
    settings: Mapping[str, Any] = fx.map_arg(node.kwargs, lambda source: source.meta.get("val"))
    return int(count(*arguments, **settings, out_val=node.meta.get("val")))
