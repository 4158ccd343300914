"""Emits the standard operators that replace one contrib operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from onnx import helper

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.core.draft import NameSource
from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.model.files.contrib_domain import RUNTIME_DOMAIN
from onnxgc.model.static_shapes.opset_changes import SETTINGS_AS_INPUTS


class LoweringWalk(Protocol):
    """The part of a shape walk that lowering uses."""

    def type_of(self, name: str) -> TensorType | None: ...

    def add_fresh_constant(self, wanted: str, value: Array) -> str: ...

    def visit(self, node: Node) -> None: ...


class ContribBuilder:
    """One contrib operator, and methods that emit the nodes that replace it."""

    def __init__(self, walk: LoweringWalk, opset: int, names: NameSource, node: Node) -> None:
        self._walk = walk
        self._names = names
        self.opset = opset
        self.node = node

    def has_input(self, index: int) -> bool:
        return index < len(self.node.inputs) and bool(self.node.inputs[index])

    def input(self, index: int) -> str:
        return self.node.inputs[index]

    def input_or_empty(self, index: int) -> str:
        return self.node.inputs[index] if index < len(self.node.inputs) else ""

    def has_output(self, index: int) -> bool:
        return index < len(self.node.outputs) and bool(self.node.outputs[index])

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.node.attribute(name, default)

    def attributes(self, *names: str) -> dict[str, Any]:
        """Those of the attributes that the node has."""
        return {name: value for name in names if (value := self.node.attribute(name)) is not None}

    def type_of(self, tensor: str) -> TensorType:
        kind = self._walk.type_of(tensor)
        if kind is None:
            raise self.unsupported(f"its input '{tensor}' has no static shape")
        return kind

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self.type_of(tensor).shape

    def emit(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Emits a node with one output, and returns the output's name."""
        output = self._names.fresh(f"{self.node.name}/{op}")
        self._visit(op, inputs, (output,), attributes, domain)
        return output

    def split(self, tensor: str, sizes: Sequence[int], axis: int) -> tuple[str, ...]:
        outputs = tuple(self._names.fresh(f"{self.node.name}/part{index}") for index in range(len(sizes)))
        if self.opset >= SETTINGS_AS_INPUTS:
            self._visit("Split", (tensor, self.ints(*sizes)), outputs, {"axis": axis})
        else:
            self._visit("Split", (tensor,), outputs, {"axis": axis, "split": list(sizes)})
        return outputs

    def set_output(self, tensor: str, index: int = 0) -> None:
        """Makes `tensor` the node's output `index`."""
        self._visit("Identity", (tensor,), (self.node.outputs[index],), {})

    def constant(self, value: Array) -> str:
        return self._walk.add_fresh_constant(self._names.fresh(f"{self.node.name}/constant"), value)

    def number(self, value: float) -> str:
        """A scalar constant of the first input's element type."""
        dtype = helper.tensor_dtype_to_np_dtype(self.type_of(self.node.inputs[0]).dtype)
        return self.constant(np.asarray(value, dtype))

    def ints(self, *values: int) -> str:
        return self.constant(np.asarray(values, np.int64))

    def unsupported(self, reason: str) -> UnsupportedOperatorError:
        return UnsupportedOperatorError(
            f"{RUNTIME_DOMAIN}::{self.node.op} {self.node.label} cannot be written in standard operators: "
            f"{reason}; export the model without ONNX Runtime's optimisation"
        )

    def reject_inputs(self, *indices: int) -> None:
        for index in indices:
            if self.has_input(index):
                raise self.unsupported(f"it has the optional input {index} ('{self.input(index)}')")

    def reject_outputs(self, *indices: int) -> None:
        for index in indices:
            if self.has_output(index):
                raise self.unsupported(
                    f"its output '{self.node.outputs[index]}' has no meaning outside of that operator"
                )

    def _visit(
        self,
        op: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attributes: Mapping[str, Any],
        domain: str = "",
    ) -> None:
        name = self._names.fresh(f"{self.node.name}/{op}_node")
        self._walk.visit(
            Node(
                op,
                tuple(inputs),
                tuple(outputs),
                attributes,
                name=name,
                origin=self.node.origin,
                module=self.node.module,
                rule=f"{domain}::{op}" if domain else op,
                domain=domain,
            )
        )
