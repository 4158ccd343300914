"""A sequence of a joint graph as two graphs: forward, which returns what is kept, and backward."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from onnxgc.torch.joint import JointStep, is_random, is_tangent, normalizes_a_batch, tensors_of
from onnxgc.torch.undecomposed_kernels import LAYER, layer_with_workspace

STATE_BYTES = 5056
"""Of the state of the CPU's generator; that of a CUDA device is smaller."""

_RUNNING_STATISTICS = (3, 4)
"""Parts of a BatchNormalization that its first run alone gives."""


def split(
    joint: fx.GraphModule, step: JointStep, sequence: Sequence[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward, each in the sequence's order, with what runs again as nodes of its own."""
    turn = sequence.index(step.turn)
    again = _repeated(sequence)
    forward = _Writer(step, again)
    for node in joint.graph.nodes:
        if node.op == "placeholder" and not is_tangent(node):
            forward.place(node, node)
    for index in sequence[:turn]:
        forward.run(index)
    backward = _Writer(step, again, forward)
    tangents = [node for node in joint.graph.nodes if node.op == "placeholder" and is_tangent(node)]
    for node in tangents:
        backward.place(node, node)
    for index in sequence[turn + 1 :]:
        backward.run(index)
    gradients = backward.arguments(step.backward_outputs)
    results = forward.arguments(step.forward_outputs)
    forward.graph.output((*results, *backward.saved))
    backward.finish(gradients, tangents)
    for writer in (forward, backward):
        writer.drop_unread()
    return fx.GraphModule(joint, forward.graph), fx.GraphModule(joint, backward.graph)


def runnable(gm: fx.GraphModule, example_inputs: Any) -> Any:
    """The graph as a function of a list, which it empties, so that each value goes when it was last read."""
    graph = gm.graph
    places = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_before(next(iter(graph.nodes))):
        values = graph.placeholder("values")
    with graph.inserting_after(values):
        for place in places:
            place.replace_all_uses_with(graph.call_method("pop", (values,)))
            graph.erase_node(place)
    gm.recompile()

    def run(given: list[Any]) -> Any:
        return gm.forward(given)

    vars(run)["_boxed_call"] = True
    return run


def _repeated(sequence: Sequence[int]) -> set[int]:
    seen: set[int] = set()
    return {index for index in sequence if index in seen or seen.add(index)}  # type: ignore[func-returns-value]


class _Writer:
    """Writes one of both graphs; what a backward graph does not compute it takes from `before`."""

    def __init__(self, step: JointStep, again: set[int], before: _Writer | None = None) -> None:
        self.graph = fx.Graph()
        self.saved: list[fx.Node] = []
        """For a backward graph: the nodes of the forward graph whose values it takes, in order."""
        self._step = step
        self._again = again
        self._before = before
        self._latest: dict[fx.Node, fx.Node] = {}
        self._derived: dict[fx.Node, tuple[tuple[fx.Node, ...], fx.Node]] = {}
        self._derived_names: set[str] = set()
        self._taken: dict[fx.Node, fx.Node] = {}
        self._states: dict[fx.Node, fx.Node] = {}
        """By random operator, the node that holds its generator's state."""

    def place(self, node: fx.Node, like: fx.Node) -> None:
        self._latest[node] = self._placeholder(str(like.target), like)

    def run(self, index: int) -> None:
        node = self._step.nodes[index]
        assert node is not None, "the turn runs in neither"
        is_first = node not in self._latest and (self._before is None or node not in self._before._latest)
        if normalizes_a_batch(node) and not is_first:
            kept = self.arguments((*node.args[:3], *node.args[6:]))
            made = self.graph.call_function(normalized_again, kept)
            made.meta = dict(node.meta)
        elif index in self._again and is_random(node):
            made = self._drawn(node, self.arguments(node.args), self.arguments(node.kwargs))
        else:
            made = self._call(node, self.arguments(node.args), self.arguments(node.kwargs))
        self._latest[node] = made
        for part in node.users:
            # A tuple would hold all its parts for as long as one of them is still to be taken.
            if part.target is operator.getitem:
                made = self.value(part)
                if normalizes_a_batch(node) and is_first and part.args[1] in _RUNNING_STATISTICS:
                    self._latest[part] = made

    def arguments(self, value: Any) -> Any:
        return fx.map_arg(value, self.value)

    def value(self, node: fx.Node) -> fx.Node:
        """The node of this graph that stands for a node of the joint graph now."""
        if node in self._latest:
            return self._latest[node]
        if node in self._step.derived and self._has_sources(node):
            sources = tuple(self.value(source) for source in node.all_input_nodes)
            known = self._derived.get(node)
            if known is None or known[0] != sources:
                known = sources, self._call(node, self.arguments(node.args), self.arguments(node.kwargs))
                self._derived[node] = known
                self._derived_names.add(known[1].name)
            return known[1]
        return self._take(node)

    def finish(self, gradients: Any, tangents: Sequence[fx.Node]) -> None:
        """Placeholders in the order in which they are given: what was kept, then gradients of results."""
        first = next(iter(self.graph.nodes))
        places = [self._taken[node] for node in self._taken] + [self._latest[node] for node in tangents]
        for node in reversed(places):
            if node is not first:
                first.prepend(node)
                first = node
        self.graph.output(gradients)

    def drop_unread(self) -> None:
        """Take out parts and views that nobody reads: they would be held to the end."""
        for node in reversed(self.graph.nodes):
            if node.name in self._derived_names and not node.users:
                self.graph.erase_node(node)

    def _has_sources(self, node: fx.Node) -> bool:
        """Whether it can be derived here: a part of what ran in forward comes from there as it is."""
        if self._before is None:
            return True
        return all(
            source in self._latest
            or (source in self._step.derived and self._has_sources(source))
            or not isinstance(source.meta.get("val"), list | tuple)
            for source in node.all_input_nodes
        )

    def _take(self, node: fx.Node) -> fx.Node:
        assert self._before is not None, f"{node} runs before what it reads"
        if node not in self._taken:
            self.saved.append(self._before.value(node))
            self._taken[node] = self._placeholder(node.name, node)
        return self._taken[node]

    def _placeholder(self, name: str, like: fx.Node) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta = dict(like.meta)
        return node

    def _call(self, node: fx.Node, arguments: Any, settings: Any) -> fx.Node:
        target = layer_with_workspace if node.target is LAYER else node.target
        made = self.graph.create_node(node.op, target, arguments, settings, name=node.name)
        made.meta = dict(node.meta)
        return made

    def _drawn(self, node: fx.Node, arguments: Any, settings: Any) -> fx.Node:
        """A random operator that draws the same each time: the generator's state goes with it."""
        value = next(tensors_of(node))
        if node in self._states:
            state = self._states[node]
        elif self._before is not None and node in self._before._states:
            before = self._before._states[node]
            self.saved.append(before)
            state = self._taken[before] = self._states[node] = self._placeholder(f"{node.name}_state", before)
        else:
            state = self._states[node] = self.graph.call_function(generator_state, (value.device,))
            # The trace's own kind of tensor, which has no contents.
            state.meta["val"] = value.new_empty(STATE_BYTES, dtype=torch.uint8, device="cpu")
            return self._call(node, arguments, settings)
        drawn: Any = (state, value.device, node.target, arguments, settings)
        made = self.graph.call_function(drawn_again, drawn)
        made.meta = dict(node.meta)
        return made


def normalized_again(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, momentum: float, eps: float
) -> tuple[torch.Tensor | None, ...]:
    """BatchNormalization by the batch once more: its running statistics were updated the first time."""
    made = torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    return (*made, None, None)


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of the device's generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def drawn_again(state: torch.Tensor, device: torch.device, target: Any, arguments: Any, settings: Any) -> Any:
    """What an operator gave when the generator had that state; the generator stays as it is now."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        return target(*arguments, **settings)
