"""Names, types and constants of the tensors of a training graph under construction."""

from collections.abc import Callable, Collection, Iterable

import numpy as np
import onnx

from onnxgc.gradients.differentiate import ConstantPool
from onnxgc.model.core.draft import fresh_name
from onnxgc.model.core.ir import TensorType
from onnxgc.tracing.gradient_types import type_of_array

ZERO = "barrier_zero"


class GraphTensors:
    """Tensors of the step plus those that emission adds.

    `step_type` returns the type of a tensor of the step; `fixed` are the step's weights and constants. `zero`
    is the name of an int64 input [0] that no runtime can fold. `types` are the types of added tensors,
    `vectors` the added tensors that are shapes or settings.
    """

    def __init__(self, step_type: Callable[[str], TensorType], *, fixed: Collection[str], taken: Iterable[str]) -> None:
        self._step_type = step_type
        self._fixed = fixed
        self._taken = set(taken)
        self.constants = ConstantPool(self._taken)
        self.zero = self.fresh_name(ZERO)
        self.types: dict[str, TensorType] = {}
        self.vectors: set[str] = set()
        self.declare_vector(self.zero, TensorType(onnx.TensorProto.INT64, (1,)))

    def fresh_name(self, wanted: str) -> str:
        return fresh_name(wanted, self._taken)

    def type_of(self, name: str) -> TensorType:
        if name in self.types:
            return self.types[name]
        if name in self.constants.values:
            return type_of_array(self.constants.values[name])
        return self._step_type(name)

    def is_fixed(self, name: str) -> bool:
        """Whether a tensor exists before the step: a weight or a constant."""
        return name in self._fixed or name in self.constants.values

    def declare_vector(self, name: str, kind: TensorType) -> None:
        self.types[name] = kind
        self.vectors.add(name)

    def integers(self, values: Iterable[int]) -> str:
        """A constant int64 vector."""
        return self.constants.add(np.asarray(tuple(values), np.int64))
