"""Barriers: each group waits for something that itself comes late."""

from __future__ import annotations

import onnx

from onnxgc.emission.barriers import BarrierWriter
from onnxgc.model.ir import Array, Node, TensorType

LARGE, SMALL = TensorType(onnx.TensorProto.FLOAT, (64, 64)), TensorType(onnx.TensorProto.FLOAT, (4,))
TYPES = dict.fromkeys(("loss", "x", "y", "dx", "dy"), LARGE) | {"stored": SMALL, "vector": SMALL}


def writer() -> BarrierWriter:
    constants: dict[bytes, str] = {}

    def constant(value: Array) -> str:
        return constants.setdefault(value.tobytes(), f"c{len(constants)}")

    def type_of(name: str) -> TensorType:
        return TYPES.get(name) or TensorType(onnx.TensorProto.INT64, (2,))

    return BarrierWriter(
        type_of, constant, lambda name: name.startswith("c"), "zero", 100, lambda name: name, "loss"
    )


def tokens(nodes: list[Node]) -> list[str]:
    return [node.inputs[0] for node in nodes if node.op == "Slice"]


def test_a_node_that_could_come_early_is_held_by_the_group_before() -> None:
    barriers = writer()
    first = barriers.group([Node("Neg", ("x",), ("dx",))])
    assert [node.op for node in first] == ["Slice", "Shape", "Add", "Reshape", "Neg"]
    assert tokens(first) == ["loss"]
    second = barriers.group([Node("Neg", ("y",), ("dy",))])
    assert tokens(second) == ["dx"]


def test_what_waits_anyway_gets_no_barrier() -> None:
    barriers = writer()
    barriers.group([Node("Neg", ("x",), ("dx",))])
    assert [node.op for node in barriers.group([Node("Exp", ("dx",), ("dy",))])] == ["Exp"]


def test_a_small_tensor_that_may_come_early_is_no_token() -> None:
    """Whatever waited for it would wait for nothing."""
    barriers = writer()
    barriers.group([Node("Neg", ("x",), ("dx",)), Node("Neg", ("stored",), ("vector",))])
    assert tokens(barriers.group([Node("Neg", ("y",), ("dy",))])) == ["dx"]


def test_the_barrier_opens_its_group() -> None:
    """Later, its slice would keep the token alive beyond the token's last reader."""
    barriers = writer()
    barriers.group([Node("Neg", ("x",), ("dx",))])
    group = barriers.group([Node("Exp", ("dx",), ("vector",)), Node("Neg", ("y",), ("dy",))])
    assert [node.op for node in group] == ["Slice", "Shape", "Exp", "Add", "Reshape", "Neg"]
