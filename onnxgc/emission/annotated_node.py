"""Nodes of a training file with their annotations."""

from dataclasses import dataclass

import onnx

from onnxgc.model.core.ir import Node


@dataclass(frozen=True, slots=True)
class AnnotatedNode:
    """A node with its role in the step and, for a recomputed one, its segment."""

    node: Node
    role: str
    segment: int | None = None

    def to_proto(self) -> onnx.NodeProto:
        """The node with its annotations as metadata; docs/training-file.md lists the keys."""
        proto = self.node.to_proto()
        entries = {"onnxgc.role": self.role, "onnxgc.node": self.node.origin or self.node.name}
        if self.node.module:
            entries["onnxgc.module"] = self.node.module
        if self.segment is not None:
            entries["onnxgc.segment"] = str(self.segment)
        for key, value in entries.items():
            proto.metadata_props.add(key=key, value=value)
        return proto
