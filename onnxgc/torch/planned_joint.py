"""A sequence as a joint graph that PyTorch itself splits: a node for each run, and the values saved for backward."""

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._functorch.partitioners import _extract_fwd_bwd_modules, must_recompute
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.utils._ordered_set import OrderedSet

from onnxgc.torch.joint_problem import BACKWARD, JointStep, ancestors, is_random, is_tangent


def repeat_as_given(graph: fx.Graph, results: Sequence[Any]) -> None:
    """Copies the operators that `torch.utils.checkpoint` recomputes for their readers outside of forward."""
    forward = ancestors(results)
    copies: dict[fx.Node, fx.Node] = {}

    def copied(node: fx.Node) -> fx.Node:
        if not must_recompute(node) or is_random(node) or "inductor_seed" in str(node.target):
            return node
        if node not in copies:
            arguments, settings = fx.map_arg((node.args, node.kwargs), copied)
            copies[node] = graph.create_node(node.op, node.target, arguments, settings, name=f"{node.name}_again")
            # Its own storages: the problem tells tensors from views by their addresses.
            values, options = fx.map_arg((arguments, settings), lambda source: source.meta["val"])
            with detect_fake_mode(node.meta["val"]) or contextlib.nullcontext():
                result = node.target(*values, **options)  # type: ignore[operator]
            copies[node].meta = {**node.meta, "val": result, "partitioner_tag": BACKWARD}
        return copies[node]

    for node in list(graph.nodes):
        if node not in forward and node.op == "call_function":
            with graph.inserting_before(node):
                node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), copied)
            if any(one.meta.get("partitioner_tag") == BACKWARD for one in node.all_input_nodes):
                node.meta["partitioner_tag"] = BACKWARD


def split_joint(
    joint: fx.GraphModule, step: JointStep, sequence: Sequence[int], num_fwd_outputs: int, static_inputs: list[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a sequence, with PyTorch's conventions for symbolic sizes and saved values."""
    writer = _JointWriter(joint.graph, step)
    for index in sequence:
        writer.run(index)
    joint.graph, saved = writer.finish()
    sizes = [node for node in saved if isinstance(node.meta.get("val"), py_sym_types)]
    values = [node for node in saved if node not in set(sizes)]
    inputs = joint.graph.find_nodes(op="placeholder")
    return _extract_fwd_bwd_modules(
        joint,
        values,
        sizes,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_nodes=OrderedSet(inputs[index] for index in static_inputs),
    )


class _JointWriter:
    def __init__(self, old: fx.Graph, step: JointStep) -> None:
        self._old, self._step = old, step
        self.graph = fx.Graph()
        self._latest: dict[fx.Node, fx.Node] = {}
        self._derived: dict[fx.Node, tuple[tuple[bool, tuple[fx.Node, ...]], fx.Node]] = {}
        self._forward: set[fx.Node] = set()
        """Nodes of the new graph that run in forward, inputs included."""
        self._in_backward = False
        for node in old.find_nodes(op="placeholder"):
            self._latest[node] = self.graph.node_copy(node)
            if not is_tangent(node):
                self._forward.add(self._latest[node])

    def run(self, index: int) -> None:
        node = self._step.nodes[index]
        if node is None:
            self._results = [
                self._value(one) if isinstance(one, fx.Node) else one for one in self._step.forward_outputs
            ]
            self._in_backward = True
            return
        self._latest[node] = self._copy(node)
        for part in node.users:
            if part.target is operator.getitem:
                self._value(part)

    def finish(self) -> tuple[fx.Graph, list[fx.Node]]:
        """The new graph, and the nodes of forward that backward reads."""
        old = self._old.output_node()
        gradients = [self._value(one) if isinstance(one, fx.Node) else one for one in self._step.backward_outputs]
        output = self.graph.output([*self._results, *gradients])
        output.meta = dict(old.meta)
        read: dict[fx.Node, None] = {}
        for node in self.graph.nodes:
            if node not in self._forward and node is not output:
                read.update(dict.fromkeys(one for one in node.all_input_nodes if one in self._forward))
        read.update(dict.fromkeys(one for one in gradients if isinstance(one, fx.Node) and one in self._forward))
        return self.graph, list(read)

    def _value(self, node: fx.Node) -> fx.Node:
        """The latest node with the value of a node of the old graph; backward computes views of its own."""
        if node in self._latest:
            return self._latest[node]
        known = self._derived.get(node)
        if known is not None and self._in_backward and not self._can_derive(node):
            return known[1]
        sources = self._in_backward, tuple(map(self._value, node.all_input_nodes))
        if known is None or known[0] != sources:
            known = self._derived[node] = sources, self._copy(node)
        return known[1]

    def _can_derive(self, node: fx.Node) -> bool:
        """Whether backward can compute a node that has no memory; sizes and entries of tuples come from forward."""
        if isinstance(node.meta.get("val"), py_sym_types):
            return False
        if node.target is not operator.getitem:
            return True
        (source,) = node.all_input_nodes
        return self._latest[source] not in self._forward if source in self._latest else self._can_derive(source)

    def _copy(self, node: fx.Node) -> fx.Node:
        new = self.graph.node_copy(node, self._value)
        if not self._in_backward:
            self._forward.add(new)
        return new
