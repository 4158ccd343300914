"""Barriers: each group waits for something that itself comes late."""

from __future__ import annotations

import onnx

from onnxgc.emission.barriers import BarrierWriter
from onnxgc.model.core.ir import Array, Node, TensorType

LARGE, SMALL = TensorType(onnx.TensorProto.FLOAT, (64, 64)), TensorType(onnx.TensorProto.FLOAT, (4,))
TYPES = dict.fromkeys(("loss", "x", "y", "z", "dx", "dy", "dz"), LARGE) | {"stored": SMALL, "vector": SMALL}


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


def test_the_token_is_the_last_tensor_of_its_group() -> None:
    """A group that waited for the first would overlap with the rest of the group before."""
    barriers = writer()
    barriers.group([Node("Neg", ("x",), ("dx",)), Node("Neg", ("y",), ("dy",))])
    assert tokens(barriers.group([Node("Neg", ("z",), ("dz",))])) == ["dy"]


def test_a_group_of_nothing_late_passes_the_token_on() -> None:
    barriers = writer()
    barriers.group([Node("Neg", ("x",), ("dx",))])
    barriers.group([Node("Neg", ("stored",), ("vector",))])
    assert tokens(barriers.group([Node("Neg", ("y",), ("dy",))])) == ["dx"]


def test_what_is_always_held_waits_whatever_its_size() -> None:
    barriers = writer()
    held = barriers.group([Node("Neg", ("stored",), ("vector",))], frozenset({"stored"}))
    assert [node.op for node in held] == ["Slice", "Shape", "Add", "Reshape", "Neg"]
    assert held[-1].inputs == ("stored/held1",)


def test_tensors_of_no_elements_keep_their_zeros() -> None:
    """Without `allowzero` a 0 in the shape would be read as the input's own size there."""
    barriers = writer()
    barriers.small_bytes = -1
    empty = TensorType(onnx.TensorProto.FLOAT, (0, 4))
    barriers.type_of = lambda name: empty if name in ("x", "dx") else LARGE
    group = barriers.group([Node("Neg", ("x",), ("dx",))])
    (reshape,) = (node for node in group if node.op == "Reshape")
    assert reshape.attribute("allowzero") == 1


def test_the_largest_input_is_held() -> None:
    """A view of a vector would not be worth its nodes; one of the largest tensor waits as the node does."""
    barriers = writer()
    group = barriers.group([Node("Add", ("stored", "x"), ("dx",))])
    assert group[-1].inputs == ("stored", "x/held1")
    barriers = writer()
    # As large as what counts as small is small.
    barriers.small_bytes = LARGE.size_bytes
    assert [node.op for node in barriers.group([Node("Neg", ("x",), ("dx",))])] == ["Neg"]
