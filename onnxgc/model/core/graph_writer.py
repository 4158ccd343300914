"""The nodes and weights of a new graph, for passes that replace operators."""

from typing import Any

import numpy as np
import numpy.typing as npt

from onnxgc.model.core.draft import Draft, NameSource
from onnxgc.model.core.ir import Array, Node, Weight
from onnxgc.model.core.stored_weights import ArrayWeight


class GraphWriter:
    """Collects the nodes, weights and notes of a changed draft, under unused names."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.nodes: list[Node] = []
        self.weights: dict[str, Weight] = dict(draft.weights)
        self.notes: list[str] = []
        self.names = NameSource(draft.tensor_names())
        self.node_names = NameSource(node.name for node in draft.nodes)
        self._shared: dict[tuple[object, ...], str] = {}

    def constant(self, wanted: str, value: Array) -> str:
        name = self.names.fresh(wanted)
        self.weights[name] = ArrayWeight(value)
        return name

    def int_constant(self, wanted: str, values: npt.ArrayLike) -> str:
        return self.constant(wanted, np.asarray(values, np.int64))

    def shared_constant(self, wanted: str, value: Array, group: str = "") -> str:
        """The name of a constant; equal values of a group share one."""
        key = (group, value.dtype, value.shape, value.tobytes())
        if key not in self._shared:
            self._shared[key] = self.constant(wanted, value)
        return self._shared[key]

    def result(self, **changes: Any) -> Draft:
        changed = self.draft.with_changes(nodes=tuple(self.nodes), weights=self.weights, **changes)
        return changed.with_notes(*self.notes)
