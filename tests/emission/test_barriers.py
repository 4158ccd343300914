from collections.abc import Mapping

import onnx

from onnxgc.emission.barriers import BarrierWriter
from onnxgc.emission.graph_tensors import GraphTensors
from onnxgc.model.core.ir import Node, TensorType

LARGE, SMALL = TensorType(onnx.TensorProto.FLOAT, (64, 64)), TensorType(onnx.TensorProto.FLOAT, (4,))
TYPES = dict.fromkeys(("loss", "x", "y", "z", "dx", "dy", "dz"), LARGE) | {"stored": SMALL, "vector": SMALL}


def writer(*, small_bytes: int = 100, types: Mapping[str, TensorType] = TYPES) -> BarrierWriter:
    tensors = GraphTensors(types.__getitem__, fixed=(), taken=types)
    return BarrierWriter(tensors, small_bytes, "loss")


def neg(source: str, target: str) -> Node:
    return Node("Neg", (source,), (target,))


def tokens(nodes: list[Node]) -> list[str]:
    return [node.inputs[0] for node in nodes if node.op == "Slice"]


def test_a_node_that_could_run_early_waits_for_the_previous_group():
    barriers = writer()
    first = barriers.delay_group([neg("x", "dx")])
    assert [node.op for node in first] == ["Slice", "Shape", "Add", "Reshape", "Neg"]
    assert tokens(first) == ["loss"]
    assert tokens(barriers.delay_group([neg("y", "dy")])) == ["dx"]
    assert [node.op for node in barriers.delay_group([neg("dy", "dz")])] == ["Neg"]


def test_a_small_tensor_that_may_run_early_is_not_a_token():
    """Its readers could run early as well."""
    barriers = writer()
    barriers.delay_group([neg("x", "dx"), neg("stored", "vector")])
    assert tokens(barriers.delay_group([neg("y", "dy")])) == ["dx"]


def test_the_barrier_comes_first_in_its_group():
    """Later, its slice would keep the token live after the token's last other reader."""
    barriers = writer()
    barriers.delay_group([neg("x", "dx")])
    group = barriers.delay_group([Node("Exp", ("dx",), ("vector",)), neg("y", "dy")])
    assert [node.op for node in group] == ["Slice", "Shape", "Exp", "Add", "Reshape", "Neg"]


def test_the_token_is_the_last_tensor_of_its_group():
    """A group that waited for the first tensor would overlap with the rest of the previous group."""
    barriers = writer()
    barriers.delay_group([neg("x", "dx"), neg("y", "dy")])
    assert tokens(barriers.delay_group([neg("z", "dz")])) == ["dy"]


def test_a_group_without_delayed_nodes_passes_the_token_on():
    barriers = writer()
    barriers.delay_group([neg("x", "dx")])
    barriers.delay_group([neg("stored", "vector")])
    assert tokens(barriers.delay_group([neg("y", "dy")])) == ["dx"]


def test_readers_of_always_delayed_tensors_wait_regardless_of_size():
    barriers = writer()
    delayed = barriers.delay_group([neg("stored", "vector")], frozenset({"stored"}))
    assert [node.op for node in delayed] == ["Slice", "Shape", "Add", "Reshape", "Neg"]
    assert delayed[-1].inputs == ("stored/held1",)


def test_a_barrier_keeps_zeros_of_empty_shapes():
    """Without `allowzero`, a 0 in the shape means the input's own size."""
    empty = TensorType(onnx.TensorProto.FLOAT, (0, 4))
    barriers = writer(small_bytes=-1, types={"loss": LARGE, "x": empty, "dx": empty})
    group = barriers.delay_group([neg("x", "dx")])
    (reshape,) = (node for node in group if node.op == "Reshape")
    assert reshape.attribute("allowzero") == 1


def test_the_barrier_delays_the_largest_input():
    """Delaying a vector would not delay the allocation of the largest tensor."""
    barriers = writer()
    group = barriers.delay_group([Node("Add", ("stored", "x"), ("dx",))])
    assert group[-1].inputs == ("stored", "x/held1")
    # A tensor of exactly `small_bytes` is small.
    barriers = writer(small_bytes=LARGE.size_bytes)
    assert [node.op for node in barriers.delay_group([neg("x", "dx")])] == ["Neg"]
