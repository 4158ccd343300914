"""Forward and backward of a torch function, traced as ATen operators, as a rematerialisation problem.

PyTorch's ahead-of-time autograd gives one graph of both. Here each of its operators becomes an operation,
each tensor's memory a storage; views are neither. Between forward and backward stands the *turn*: an
operation that reads what forward returns and writes the gradients that backward begins with.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator
from onnxgc.torch.operator_timing import Cost
from onnxgc.tracing.durations import Timing, Work

_CUDA_ROUNDING = 512
"""PyTorch's CUDA allocator hands out multiples of so many bytes."""
_TANGENT = "tangents"
"""How names of the inputs of backward begin."""


class Costs(Protocol):
    """Something that says what an operator takes."""

    def cost_of(self, node: fx.Node) -> Cost: ...


class Estimated:
    """Costs by a data sheet; no operator has a workspace."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing

    def cost_of(self, node: fx.Node) -> Cost:
        return Cost(self._timing.duration_ns(_work(node)), 0)


@dataclass(frozen=True, slots=True)
class JointStep:
    """A joint graph and its problem; operation `i` is the node `nodes[i]`, the turn that of `None`.

    `derived` are nodes that make no memory: parts of a tuple and views. `storages` are those behind each
    node of forward, `dtypes` what each storage holds.
    """

    nodes: tuple[fx.Node | None, ...]
    turn: int
    problem: OperatorProblem
    derived: frozenset[fx.Node]
    forward_outputs: tuple[Any, ...]
    backward_outputs: tuple[Any, ...]
    storages: Mapping[fx.Node, tuple[int, ...]]
    dtypes: tuple[torch.dtype, ...]


def joint_step(graph: fx.Graph, num_fwd_outputs: int, costs: Costs) -> JointStep:
    """The problem of a joint graph whose output lists forward's results first, then gradients."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    results = output.args[0]
    return _Builder(graph, results[:num_fwd_outputs], results[num_fwd_outputs:], costs).step()


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws from the generator of its device."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """The tensors that a node makes, as the trace has them: without contents."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from (entry for entry in value if isinstance(entry, torch.Tensor))


class _Builder:
    def __init__(
        self, graph: fx.Graph, forward: Iterable[Any], backward: Iterable[Any], costs: Costs
    ) -> None:
        self._graph = graph
        self._forward, self._backward = tuple(forward), tuple(backward)
        self._costs = costs
        self._storage_of: dict[int, int] = {}
        """Numbers of storages by the address of what stands for their memory in the trace."""
        self._sizes: list[int] = []
        self._dtypes: list[torch.dtype] = []
        self._operations: list[ProblemOperator] = []
        self._nodes: list[fx.Node | None] = []
        self._derived: set[fx.Node] = set()
        self._drawn: tuple[int, ...] = ()
        """The mark that the last random operator has written."""

    def step(self) -> JointStep:
        inputs = [node for node in self._graph.nodes if node.op == "placeholder"]
        tangents = [node for node in inputs if is_tangent(node)]
        self._inputs = {_address(v) for node in inputs if not is_tangent(node) for v in tensors_of(node)}
        self._overwritten = set(_overwritten(self._graph))
        behind = _reached(tangents)
        turn = -1
        storages: dict[fx.Node, tuple[int, ...]] = {}
        for node in self._graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if turn < 0 and node in behind:
                turn = self._add_turn(tangents)
            self._add(node)
            if turn < 0:
                storages[node] = self._storages([node])
        if turn < 0:
            turn = self._add_turn(tangents)
        kept = frozenset(self._storages(entry for entry in self._backward if isinstance(entry, fx.Node)))
        problem = OperatorProblem(tuple(self._operations), tuple(self._sizes), kept)
        return JointStep(
            tuple(self._nodes),
            turn,
            problem,
            frozenset(self._derived),
            self._forward,
            self._backward,
            storages,
            tuple(self._dtypes),
        )

    def _add_turn(self, tangents: Iterable[fx.Node]) -> int:
        reads = self._storages(entry for entry in self._forward if isinstance(entry, fx.Node))
        writes = self._new_storages(tangents)
        self._operations.append(
            ProblemOperator("turn", reads, writes, 0, may_repeat=False, fewest=len(writes))
        )
        self._nodes.append(None)
        return len(self._nodes) - 1

    def _add(self, node: fx.Node) -> None:
        if node.op != "call_function" or node.target is operator.getitem:
            self._derived.add(node)
            return
        writes = self._new_storages([node])
        made = list(tensors_of(node))
        if made and not writes:
            self._derived.add(node)
            return
        reads = self._storages(node.all_input_nodes)
        if is_random(node):
            # They draw one behind the other, in whatever order the rest runs: each reads a mark of no size.
            reads = (*reads, *self._drawn)
            self._drawn = (len(self._sizes),)
            writes = (*writes, *self._drawn)
            self._sizes.append(0)
            self._dtypes.append(torch.uint8)
        cost = self._costs.cost_of(node)
        # What makes no tensor is there for its effect.
        self._operations.append(
            ProblemOperator(
                node.name,
                reads,
                writes,
                cost.duration_ns,
                cost.workspace_bytes,
                may_repeat=bool(made) and self._may_repeat(node),
                fewest=len(writes),
            )
        )
        self._nodes.append(node)

    def _storages(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        """Storages behind nodes that operators write; inputs of forward have none."""
        found = (self._storage_of.get(_address(value)) for node in nodes for value in tensors_of(node))
        return tuple(dict.fromkeys(storage for storage in found if storage is not None))

    def _new_storages(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        found: list[int] = []
        for value in (value for node in nodes for value in tensors_of(node)):
            address = _address(value)
            if address not in self._storage_of and address not in self._inputs:
                self._storage_of[address] = len(self._sizes)
                found.append(len(self._sizes))
                self._sizes.append(_rounded(value))
                self._dtypes.append(value.dtype)
        return tuple(found)

    def _may_repeat(self, node: fx.Node) -> bool:
        """Not where a rank would wait for others, nor where an input is another one after forward.

        A generator that the module has itself is such an input too.
        """
        if "c10d" in getattr(node.target, "namespace", "") or node.kwargs.get("generator") is not None:
            return False
        read = node.args[:3] if normalizes_a_batch(node) else node.all_input_nodes
        return not any(self._reads_overwritten(source) for source in read if isinstance(source, fx.Node))

    def _reads_overwritten(self, node: fx.Node) -> bool:
        if node in self._overwritten:
            return True
        return node in self._derived and any(map(self._reads_overwritten, node.all_input_nodes))


def is_tangent(node: fx.Node) -> bool:
    """Whether an input is a gradient that backward begins with."""
    return _TANGENT in str(node.target)


def normalizes_a_batch(node: fx.Node) -> bool:
    """Whether it is a BatchNormalization by the batch, which does not depend on running statistics."""
    return node.target is torch.ops.aten._native_batch_norm_legit_functional.default and bool(node.args[5])


def _overwritten(graph: fx.Graph) -> Iterator[fx.Node]:
    """Inputs that hold something else after forward, such as running statistics."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    changed = [
        described.mutated_input
        for described in output.meta.get("desc", ())
        if hasattr(described, "mutated_input")
    ]
    yield from (node for node in graph.nodes if node.op == "placeholder" and node.meta.get("desc") in changed)


def _reached(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that depend on the given ones."""
    found: set[fx.Node] = set(nodes)
    waiting = list(found)
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found.add(user)
                waiting.append(user)
    return found


def _address(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _rounded(value: torch.Tensor) -> int:
    size = value.untyped_storage().nbytes()
    return -(-size // _CUDA_ROUNDING) * _CUDA_ROUNDING if value.device.type == "cuda" else size


def _work(node: fx.Node) -> Work:
    made = list(tensors_of(node))
    read = [value for source in node.all_input_nodes for value in tensors_of(source)]
    moved = sum(value.numel() * value.element_size() for value in (*made, *read))
    kind = str(node.target)
    dtype = str((made or read or [torch.empty(0)])[0].dtype).removeprefix("torch.")
    return Work(node.name, node.name, kind, dtype, _flops(node), moved)


def _flops(node: fx.Node) -> int:
    """Floating-point operations: PyTorch's own count where it has one, else one an element."""
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return sum(value.numel() for value in tensors_of(node))
    arguments = fx.map_arg(node.args, lambda source: source.meta.get("val"))
    settings: Mapping[str, Any] = fx.map_arg(node.kwargs, lambda source: source.meta.get("val"))
    return int(count(*arguments, **settings, out_val=node.meta.get("val")))
