"""Calls as a `torch.fx.GraphModule`: a stateless function of inputs and weights."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import fx

from onnxgc.model.read_forward import PerSampleConstant
from onnxgc.torch.function_calls import BatchDependent, ModuleDtype, TorchCall, Value
from onnxgc.torch.onnx_plan import set_origin


class Origin(NamedTuple):
    """The ONNX node of a graph's node: its name, and the names of its outputs."""

    node: str
    outputs: tuple[str, ...]


@dataclass(eq=False)
class Program:
    """A graph with the parameters: training mode, a tensor like the module's, inputs, and weights.

    `inputs` and `weights` are names in order; `parts` are weights that contain the part of the first sample
    only, and `batched` is the input from which the batch size is read. `graph_module` has one node per call,
    which passes its `Origin` on to traced operators. Programs are immutable; copies of a module share them.
    """

    calls: tuple[TorchCall, ...]
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    parts: Mapping[str, PerSampleConstant]
    batched: str

    def __post_init__(self) -> None:
        self.graph_module = fx.GraphModule(torch.nn.Module(), _ProgramWriter(self).write(), "OnnxGraph")

    def __call__(self, *values: Any) -> Any:
        """The outputs; a trace that preserves metadata runs the graph node by node."""
        if fx.traceback.has_preserved_node_meta():
            return fx.Interpreter(self.graph_module).run(*values)
        return self.graph_module(*values)

    def __reduce__(self) -> tuple[Any, ...]:
        return Program, tuple(getattr(self, part.name) for part in fields(self))

    def __deepcopy__(self, memo: object) -> Program:
        return self


def sizes_for_batch(x: torch.Tensor, per_sample: list[int] | int, offset: list[int] | int) -> list[int] | int:
    """The integers `per_sample * batch + offset`, with x: [batch, ...]."""
    batch = x.shape[0]
    if isinstance(per_sample, int) and isinstance(offset, int):
        return per_sample * batch + offset
    assert isinstance(per_sample, list)
    assert isinstance(offset, list)
    return [each * batch + rest for each, rest in zip(per_sample, offset, strict=True)]


def tensor_for_batch(
    x: torch.Tensor, per_sample: list[Any] | int, offset: list[Any] | int, dtype: torch.dtype
) -> torch.Tensor:
    each, rest = (torch.tensor(value, dtype=dtype, device=x.device) for value in (per_sample, offset))
    return each * x.shape[0] + rest


def for_each_sample(first: torch.Tensor, x: torch.Tensor, axis: int, step: torch.Tensor | None = None) -> torch.Tensor:
    """The part of the first sample, extended along an axis by those of the other samples of x.

    `step` is the difference between consecutive samples, if they differ.
    """
    if step is None:
        return first.expand([x.shape[0] if index == axis else size for index, size in enumerate(first.shape)])
    counts = [1] * first.ndim
    counts[axis] = x.shape[0]
    return first + step * torch.arange(x.shape[0], device=first.device).reshape(counts)


class _ProgramWriter:
    """Writes the graph of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._graph = fx.Graph()
        self._values: dict[str, fx.Node] = {}

    def write(self) -> fx.Graph:
        program = self._program
        self._training = self._graph.placeholder("training")
        self._like = self._graph.placeholder("like")
        for index, name in enumerate(program.inputs):
            self._values[name] = self._placeholder(f"input_{index}", name)
        for index, name in enumerate(program.weights):
            self._values[name] = self._placeholder(f"weight_{index}", name)
        for name, part in program.parts.items():
            step = self._values.get(part.step)
            arguments = (self._values[name], self._values[program.batched], part.axis, step)
            self._values[name] = self._graph.call_function(for_each_sample, arguments)
        for call in program.calls:
            self._write(call)
        results = tuple(self._values[name] for name in program.outputs)
        self._graph.output(results[0] if len(results) == 1 else results)
        return self._graph

    def _placeholder(self, target: str, name: str) -> fx.Node:
        return self._graph.create_node("placeholder", target, name=name)

    def _write(self, call: TorchCall) -> None:
        settings = {name: self._value(value) for name, value in call.settings.items()}
        available = {"training": self._training, "outputs": len(call.outputs), "like": self._like}
        settings |= {name: available[name] for name in call.context}
        arguments = tuple(self._value(argument) for argument in call.arguments)
        node = self._graph.create_node("call_function", call.function, arguments, settings, call.node)
        set_origin(node, Origin(call.node, call.outputs))
        if len(call.outputs) == 1:
            self._values[call.outputs[0]] = node
            return
        for index, name in enumerate(call.outputs):
            if name:
                self._values[name] = self._graph.call_function(operator.getitem, (node, index))

    def _value(self, argument: Any) -> Any:
        match argument:
            case Value(name):
                return self._values[name]
            case BatchDependent(per_sample, offset, dtype):
                arguments = (self._values[self._program.batched], per_sample, offset)
                if dtype is None:
                    return self._graph.call_function(sizes_for_batch, arguments)
                return self._graph.call_function(tensor_for_batch, (*arguments, dtype))
            case ModuleDtype():
                return self._graph.call_function(getattr, (self._like, "dtype"))
        return argument
