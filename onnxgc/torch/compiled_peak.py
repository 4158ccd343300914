"""The memory of compiled passes, by the allocations and frees in the code that Inductor generates for them."""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.graph_compile import collect_fw_donated_buffer_idxs
from torch._guards import TracingContext, detect_fake_mode
from torch._inductor import config, ir
from torch._inductor.codegen import wrapper
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves

from onnxgc.torch.joint_problem import is_tangent, rounded_size, tensors_of
from onnxgc.torch.operator_timing import hint

_Storage = tuple[object, int]
"""An identity, and bytes."""


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Bytes of both passes: the peak, and what is live between them."""

    peak: int
    saved: int


def compiled_memory(
    forward: fx.GraphModule, backward: fx.GraphModule, results: int, workspace: Callable[[fx.Node], int]
) -> PassMemory:
    """The memory of two passes as Inductor will run them; it generates their code, and compiles none of it.

    `results` is the number of forward's outputs before the values that it saves. `workspace` is the bytes that a
    node's operator takes beyond its inputs and outputs.
    """
    inputs, entering = (gm.graph.find_nodes(op="placeholder") for gm in (forward, backward))
    outputs: Any = forward.graph.output_node().args[0]
    gradients: Any = backward.graph.output_node().args[0]
    before = _Timeline(dict.fromkeys(map(str, inputs)), workspace)
    produced = _generate(forward, before, range(results), ())
    kept = {str(node): storage for node, (storage, _) in zip(outputs, produced, strict=True)}
    strides = {str(node): stride for node, (_, stride) in zip(outputs, produced, strict=True)}
    kept.update((node.name, (object(), _size(node))) for node in entering if is_tangent(node))
    after = _Timeline({node.name: kept.get(node.name) for node in entering}, workspace)
    saved = after.live
    given: Any = [[_fake(one) for one in nodes] for nodes in (inputs, outputs[:results], gradients, outputs[results:])]
    donated = collect_fw_donated_buffer_idxs(*given) if functorch_config.donated_buffer else []
    names = {str(outputs[results + index]) for index in donated}
    donated = [index for index, node in enumerate(entering) if node.name in names]
    _generate(backward, after, (), donated, [strides.get(node.name, ()) for node in entering])
    return PassMemory(max(before.peak, after.peak), saved)


class _Done(BaseException):
    """Ends the compilation of a graph whose code is generated."""


class _Timeline:
    """Live bytes along the generated code of a pass, and their peak."""

    def __init__(self, inputs: Mapping[str, _Storage | None], workspace: Callable[[fx.Node], int]) -> None:
        """Inputs that the caller holds anyway have no storage."""
        self.storages = dict(inputs)
        self._names = Counter(one for one in inputs.values() if one is not None)
        self.live = self.peak = sum(size for _, size in self._names)
        self._workspace = workspace

    def run(self, line: Any) -> None:
        if isinstance(line, wrapper.AllocateLine):
            self._name(line.node.get_name(), _new_storage(line.node))
        elif isinstance(line, wrapper.ReuseLine | wrapper.ReinterpretLine):
            self._name(line.reused_as.get_name(), self.storages.get(line.node.get_name()))
            if isinstance(line, wrapper.ReuseLine) and line.delete_old:
                self._free(line.node.get_name())
        elif isinstance(line, wrapper.FreeLine | wrapper.FreeIfNotReusedLine):
            if not getattr(line, "is_reused", False):
                self._free(line.node.get_name())
        elif isinstance(line, wrapper.ExternKernelAllocLine | wrapper.ExternKernelOutLine):
            self._call(line.node)

    def _call(self, node: Any) -> None:
        # A call of several outputs allocates them all; the lines that follow only name them.
        entries = [one for one in tree_leaves(getattr(node, "outputs", ())) if isinstance(one, ir.Buffer)]
        is_one = not isinstance(node.layout, ir.MultiOutputLayout | ir.NoneLayout | ir.NonOwningLayout)
        if is_one and not isinstance(node, ir.ExternKernelOut):
            entries = [node]
        for one in entries:
            self._name(one.get_name(), _new_storage(one))
        origin = node.origin_node or next(iter(node.origins), None)
        self.peak = max(self.peak, self.live + (0 if origin is None else self._workspace(_as_called(origin, node))))

    def _name(self, name: str, storage: _Storage | None) -> None:
        self.storages[name] = storage
        if storage is not None:
            self.live += 0 if self._names[storage] else storage[1]
            self.peak = max(self.peak, self.live)
            self._names[storage] += 1

    def _free(self, name: str) -> None:
        storage = self.storages.pop(name, None)
        if storage is not None:
            self._names[storage] -= 1
            self.live -= 0 if self._names[storage] else storage[1]


def _generate(
    gm: fx.GraphModule,
    timeline: _Timeline,
    visible: Sequence[int],
    donated: Sequence[int],
    strides: Iterable[Sequence[int]] = (),
) -> list[tuple[_Storage | None, Sequence[int]]]:
    """Runs a pass's generated code on a timeline; the storages and strides of the pass's outputs.

    `strides` are those of the pass's inputs, where known.
    """
    found: list[tuple[_Storage | None, Sequence[int]]] = []
    graph = copy.deepcopy(gm.graph)
    inputs, output = graph.find_nodes(op="placeholder"), graph.output_node()
    entries: Any = output.args[0]
    output.meta["user_visible_output_idxs"] = [one for one in visible if isinstance(entries[one], fx.Node)]

    def read(_: str) -> None:
        lowered: Any = V.graph
        for name, node in zip(lowered.graph_input_names, inputs, strict=True):
            timeline.storages[name] = timeline.storages[node.name]
        for line in lowered.wrapper_code.lines:
            timeline.run(line)
        for one in lowered.graph_outputs:
            has_name = not isinstance(one, ir.NoneAsConstantBuffer | ir.ShapeAsConstantBuffer)
            found.append((timeline.storages.get(one.get_name()), _hints(one.get_stride())) if has_name else (None, ()))
        raise _Done

    context: Any = TracingContext.try_get() or SimpleNamespace(fw_metadata=None)
    with (
        mock.patch.object(GraphLowering, "save_output_code", read),
        mock.patch.object(context, "fw_metadata", SimpleNamespace(bw_donated_idxs=list(donated))),
        config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        contextlib.suppress(_Done),
    ):
        values = [_laid_out(*one) for one in zip_longest((node.meta["val"] for node in inputs), strides, fillvalue=())]
        compile_fx_inner(fx.GraphModule(gm, graph), values, is_backward=not visible)
    return found


def _hints(sizes: Iterable[Any]) -> list[int]:
    return [int(V.graph.sizevars.optimization_hint(one, fallback=1)) for one in sizes]


def _laid_out(value: Any, stride: Sequence[int]) -> Any:
    """A tensor of the trace with its dimensions in the order of the strides, if there are any."""
    if not stride or list(map(hint, value.stride())) == list(stride):
        return value
    order = sorted(range(len(stride)), key=lambda axis: -stride[axis])
    with detect_fake_mode(value) or contextlib.nullcontext():
        return torch.empty_permuted(value.shape, order, dtype=value.dtype, device=value.device)


def _as_called(origin: fx.Node, call: Any) -> fx.Node:
    """A node whose inputs have the layouts in which generated code calls the operator."""
    graph = fx.Graph()
    inputs = (one for one in call.inputs if isinstance(one, ir.IRNode))
    layouts = [(_hints(one.get_size()), _hints(one.get_stride())) for one in inputs]

    def given(source: fx.Node) -> fx.Node:
        value: Any = source.meta.get("val")
        node = graph.placeholder(source.name)
        is_tensor = isinstance(value, torch.Tensor)
        found = next((one for one in layouts if is_tensor and one[0] == list(map(hint, value.shape))), None)
        if found is not None:
            layouts.remove(found)
            value = _laid_out(value, found[1])
        node.meta["val"] = value
        return node

    return graph.node_copy(origin, given)


def _new_storage(buffer: Any) -> _Storage:
    length = V.graph.sizevars.optimization_hint(V.graph.get_allocation_storage_size(buffer), fallback=0)
    return object(), rounded_size(int(length) * buffer.get_dtype().itemsize, buffer.get_device())


def _size(node: fx.Node) -> int:
    return sum(hint(value.numel()) * value.element_size() for value in tensors_of(node))


def _fake(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
