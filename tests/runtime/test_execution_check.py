import numpy as np
import onnx
import pytest
from onnx import helper

from onnxgc.runtime import check_execution, run_and_check


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


def file_of_casts(*types: int, stored: tuple[str, ...] = ()) -> onnx.ModelProto:
    nodes, tensor = [], "x"
    for number, dtype in enumerate(types):
        nodes.append(helper.make_node("Cast", [tensor], [f"cast{number}"], name=f"cast{number}", to=dtype))
        nodes[-1].metadata_props.add(key="onnxgc.role", value="recompute")
        tensor = f"cast{number}"
    nodes.append(helper.make_node("Abs", [tensor], ["y"], name="y"))
    x = helper.make_tensor_value_info("x", onnx.TensorProto.BOOL, [3])
    outputs = [helper.make_tensor_value_info(name, types[-1], [3]) for name in ("y", *stored)]
    graph = helper.make_graph(nodes, "g", [x], outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_casts_that_the_runtime_skips_are_not_lost() -> None:
    model = file_of_casts(onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.FLOAT)
    found, profile = run_and_check(model, {"x": np.asarray([True, False, True])})
    assert "cast0" not in profile.order
    assert found.holds


@pytest.mark.parametrize(
    "stored, order, lost",
    [((), ["cast1", "y"], ()), ((), ["y"], ("cast0", "cast1")), (("cast0",), ["cast1", "y"], ("cast0",))],
)
def test_a_cast_with_other_readers_is_lost(stored: tuple[str, ...], order: list[str], lost: tuple[str, ...]) -> None:
    model = file_of_casts(onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT, stored=stored)
    assert check_execution(model, order).lost == lost
