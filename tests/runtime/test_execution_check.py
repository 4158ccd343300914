"""The check that a session ran a training file as it is written."""

from __future__ import annotations

import onnx
import pytest
from onnx import helper

from onnxgc.runtime import check_execution


def file_of(*names: str) -> onnx.ModelProto:
    nodes = []
    for name in names:
        node = helper.make_node("Relu", ["x"], [name], name=name)
        role = "recompute" if name.endswith("__recompute") else "forward"
        node.metadata_props.add(key="onnxgc.role", value=role)
        nodes.append(node)
    return helper.make_model(helper.make_graph(nodes, "g", [], []))


@pytest.mark.parametrize(
    "order, lost, moved",
    [
        (["a", "b", "a__recompute", "c"], (), None),
        (["a", "b", "fused", "a__recompute"], (), None),
        (["a", "b", "c"], ("a__recompute",), None),
        (["b", "a", "a__recompute", "c"], (), "b"),
        (["a__recompute", "a", "b", "c"], (), "a__recompute"),
    ],
)
def test_lost_and_moved_nodes_are_named(order: list[str], lost: tuple[str, ...], moved: str | None) -> None:
    found = check_execution(file_of("a", "b", "a__recompute", "c"), order)
    assert (found.lost, found.moved) == (lost, moved)
    assert found.holds == (not lost and moved is None)
    assert found.recomputed == 1
