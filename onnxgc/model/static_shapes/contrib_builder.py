"""Emits the standard operators that replace one contrib operator."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import helper

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.core.draft import NameSource
from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.model.files.contrib_domain import RUNTIME_DOMAIN
from onnxgc.model.rebatch.shape_pair import ShapeWalk
from onnxgc.model.static_shapes.opset_changes import REDUCED_AXES_AS_INPUTS, SETTINGS_AS_INPUTS

_MAX_TENSORS = 10


class ContribBuilder:
    """One contrib operator, and methods that emit the nodes that replace it.

    `inputs` and `outputs` contain "" for absent ones, also for those after the node's last.
    """

    def __init__(self, walk: ShapeWalk, opset: int, names: NameSource, node: Node) -> None:
        self._walk = walk
        self._names = names
        self.opset = opset
        self.node = node
        self.inputs = (*node.inputs, *[""] * _MAX_TENSORS)
        self.outputs = (*node.outputs, *[""] * _MAX_TENSORS)
        self.attribute = node.attribute

    def attributes(self, *names: str) -> dict[str, Any]:
        """Those of the attributes that the node has."""
        return {name: value for name in names if (value := self.attribute(name)) is not None}

    def type_of(self, tensor: str) -> TensorType:
        kind = self._walk.type_of(tensor)
        if kind is None:
            raise self.unsupported(f"its input '{tensor}' has no static shape")
        return kind

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self.type_of(tensor).shape

    def emit(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        output = self._names.fresh(f"{self.node.name}/{op}")
        self._visit(op, inputs, (output,), attributes, domain)
        return output

    def total(self, *tensors: str) -> str:
        """The sum of the tensors that are present; the first is."""
        result, *others = filter(None, tensors)
        for other in others:
            result = self.emit("Add", result, other)
        return result

    def split(self, tensor: str, sizes: Sequence[int], axis: int) -> tuple[str, ...]:
        outputs = tuple(self._names.fresh(f"{self.node.name}/part{index}") for index in range(len(sizes)))
        if self.opset >= SETTINGS_AS_INPUTS:
            self._visit("Split", (tensor, self.ints(*sizes)), outputs, {"axis": axis})
        else:
            self._visit("Split", (tensor,), outputs, {"axis": axis, "split": list(sizes)})
        return outputs

    def reduce(self, op: str, tensor: str, axes: Sequence[int], keepdims: int) -> str:
        first_opset = SETTINGS_AS_INPUTS if op == "ReduceSum" else REDUCED_AXES_AS_INPUTS
        if self.opset >= first_opset:
            return self.emit(op, tensor, self.ints(*axes), keepdims=keepdims)
        return self.emit(op, tensor, axes=list(axes), keepdims=keepdims)

    def set_output(self, tensor: str, index: int = 0) -> None:
        self._visit("Identity", (tensor,), (self.outputs[index],), {})

    def constant(self, value: Array) -> str:
        return self._walk.add_fresh_constant(self._names.fresh(f"{self.node.name}/constant"), value)

    def number(self, value: npt.ArrayLike) -> str:
        dtype = helper.tensor_dtype_to_np_dtype(self.type_of(self.inputs[0]).dtype)
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
            if self.inputs[index]:
                raise self.unsupported(f"it has the optional input {index} ('{self.inputs[index]}')")

    def reject_outputs(self, *indices: int) -> None:
        for output in filter(None, (self.outputs[index] for index in indices)):
            raise self.unsupported(f"its output '{output}' has no meaning outside of that operator")

    def _visit(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Mapping[str, Any], domain: str = ""
    ) -> None:
        node = self.node.as_operator(
            op, inputs, outputs, self._names.fresh(f"{self.node.name}/{op}_node"), **attributes
        )
        self._walk.visit(node.with_changes(rule=f"{domain}::{op}", domain=domain) if domain else node)
