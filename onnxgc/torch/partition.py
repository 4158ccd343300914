"""A sequence of a joint graph as two graphs: forward, which also returns kept tensors, and backward."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from onnxgc.torch.exact_kernels import LAYER, layer_with_workspace
from onnxgc.torch.joint_problem import JointStep, is_batch_normalization, is_random, is_tangent, tensors_of

STATE_BYTES = 5056
"""Size of the CPU generator's state; that of a CUDA device is smaller."""

_RUNNING_STATISTICS = (3, 4)
"""Indices of a BatchNormalization's outputs that only its first run computes."""


def split(joint: fx.GraphModule, step: JointStep, sequence: Sequence[int]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward, each in the sequence's order, with a node for each recomputation."""
    boundary = sequence.index(step.boundary)
    recomputed = {index for index, runs in Counter(sequence).items() if runs > 1}
    forward = _PassWriter(step, recomputed)
    inputs = joint.graph.find_nodes(op="placeholder")
    tangents = [node for node in inputs if is_tangent(node)]
    for node in inputs:
        if not is_tangent(node):
            forward.add_input(node)
    for index in sequence[:boundary]:
        forward.run(index)
    backward = _PassWriter(step, recomputed, forward)
    for node in tangents:
        backward.add_input(node)
    for index in sequence[boundary + 1 :]:
        backward.run(index)
    gradients = backward.arguments(step.backward_outputs)
    results = forward.arguments(step.forward_outputs)
    forward.graph.output((*results, *backward.saved))
    backward.finish(gradients, tangents)
    for writer in (forward, backward):
        writer.drop_unread_views()
    return fx.GraphModule(joint, forward.graph), fx.GraphModule(joint, backward.graph)


def boxed_function(gm: fx.GraphModule, example_inputs: Any) -> Any:
    """The graph as a function that empties its list of inputs: each is released after its last use."""
    graph = gm.graph
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_before(next(iter(graph.nodes))):
        values = graph.placeholder("values")
    with graph.inserting_after(values):
        for node in inputs:
            node.replace_all_uses_with(graph.call_method("pop", (values,)))
            graph.erase_node(node)
    gm.recompile()

    def run(given: list[Any]) -> Any:
        return gm.forward(given)

    vars(run)["_boxed_call"] = True
    return run


class _PassWriter:
    """Writes the graph of one pass; a backward graph takes values from the forward graph `before`."""

    def __init__(self, step: JointStep, recomputed: set[int], before: _PassWriter | None = None) -> None:
        self.graph = fx.Graph()
        self.saved: list[fx.Node] = []
        """Nodes of the forward graph whose values a backward graph takes, in order."""
        self._step = step
        self._recomputed = recomputed
        self._before = before
        self._latest: dict[fx.Node, fx.Node] = {}
        self._derived: dict[fx.Node, tuple[tuple[fx.Node, ...], fx.Node]] = {}
        self._derived_names: set[str] = set()
        self._taken: dict[fx.Node, fx.Node] = {}
        self._states: dict[fx.Node, fx.Node] = {}
        """By random operator, the node of its generator's state."""

    def add_input(self, node: fx.Node) -> None:
        self._latest[node] = self._placeholder(str(node.target), node)

    def run(self, index: int) -> None:
        node = self._step.nodes[index]
        assert node is not None, "the boundary is in neither pass"
        is_first = node not in self._latest and (self._before is None or node not in self._before._latest)
        if is_batch_normalization(node) and not is_first:
            kept = self.arguments((*node.args[:3], *node.args[6:]))
            result = self.graph.call_function(recompute_batch_normalization, kept)
            result.meta = dict(node.meta)
        elif index in self._recomputed and is_random(node):
            result = self._random_call(node)
        else:
            result = self._call(node)
        self._latest[node] = result
        for part in node.users:
            # A tuple would keep all of its entries live until the last one is read.
            if part.target is operator.getitem:
                result = self.value(part)
                if is_batch_normalization(node) and is_first and part.args[1] in _RUNNING_STATISTICS:
                    self._latest[part] = result

    def arguments(self, value: Any) -> Any:
        return fx.map_arg(value, self.value)

    def value(self, node: fx.Node) -> fx.Node:
        """The latest node of this graph with the value of a node of the joint graph."""
        if node in self._latest:
            return self._latest[node]
        if node in self._step.derived and self._can_derive(node):
            sources = tuple(self.value(source) for source in node.all_input_nodes)
            known = self._derived.get(node)
            if known is None or known[0] != sources:
                known = sources, self._call(node)
                self._derived[node] = known
                self._derived_names.add(known[1].name)
            return known[1]
        return self._take(node)

    def finish(self, gradients: Any, tangents: Sequence[fx.Node]) -> None:
        """Orders the inputs (kept values, then gradients of outputs) and writes the output."""
        first = next(iter(self.graph.nodes))
        inputs = [*self._taken.values(), *(self._latest[node] for node in tangents)]
        for node in reversed(inputs):
            if node is not first:
                first.prepend(node)
                first = node
        self.graph.output(gradients)

    def drop_unread_views(self) -> None:
        """Removes tuple entries and views without readers, which would stay live to the end."""
        for node in reversed(self.graph.nodes):
            if node.name in self._derived_names and not node.users:
                self.graph.erase_node(node)

    def _can_derive(self, node: fx.Node) -> bool:
        """Whether this graph can compute a view; entries of forward's tuples are taken from forward."""
        if self._before is None:
            return True
        return all(
            source in self._latest
            or (source in self._step.derived and self._can_derive(source))
            or not isinstance(source.meta.get("val"), list | tuple)
            for source in node.all_input_nodes
        )

    def _take(self, node: fx.Node) -> fx.Node:
        assert self._before is not None, f"{node} runs before its inputs"
        if node not in self._taken:
            self.saved.append(self._before.value(node))
            self._taken[node] = self._placeholder(node.name, node)
        return self._taken[node]

    def _placeholder(self, name: str, like: fx.Node) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta = dict(like.meta)
        return node

    def _call(self, node: fx.Node) -> fx.Node:
        target = layer_with_workspace if node.target is LAYER else node.target
        arguments, settings = self.arguments(node.args), self.arguments(node.kwargs)
        result = self.graph.create_node(node.op, target, arguments, settings, name=node.name)
        result.meta = dict(node.meta)
        return result

    def _random_call(self, node: fx.Node) -> fx.Node:
        """A random operator that repeats its numbers: the first run saves the generator's state."""
        arguments, settings = self.arguments(node.args), self.arguments(node.kwargs)
        value = next(tensors_of(node))
        if node in self._states:
            state = self._states[node]
        elif self._before is not None and node in self._before._states:
            before = self._before._states[node]
            self.saved.append(before)
            state = self._taken[before] = self._states[node] = self._placeholder(f"{node.name}_state", before)
        else:
            state = self._states[node] = self.graph.call_function(generator_state, (value.device,))
            # A tensor of the trace, without contents.
            state.meta["val"] = value.new_empty(STATE_BYTES, dtype=torch.uint8, device="cpu")
            return self._call(node)
        drawn: Any = (state, value.device, node.target, arguments, settings)
        result = self.graph.call_function(redraw, drawn)
        result.meta = dict(node.meta)
        return result


def recompute_batch_normalization(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, momentum: float, eps: float
) -> tuple[torch.Tensor | None, ...]:
    """BatchNormalization by the batch's statistics, without a second update of running statistics."""
    result = torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    return (*result, None, None)


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of the device's generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def redraw(state: torch.Tensor, device: torch.device, target: Any, arguments: Any, settings: Any) -> Any:
    """The result of a random operator from an earlier generator state; the present state is unchanged."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        return target(*arguments, **settings)
