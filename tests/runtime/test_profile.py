import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxgc.model.core.ir import Node, TensorType
from onnxgc.runtime import check_execution, run_and_check
from onnxgc.runtime.cuda_kernels import left_to_the_cpu
from onnxgc.runtime.profile import RunProfile, read_profile


def profile_of(runs: list[list[tuple[Any, ...]]], folder: Path, provider: str | None = None) -> list[RunProfile]:
    """The profile of nodes: name, bytes requested, their increase, bytes in use, highest, and another provider."""
    events: list[dict[str, object]] = [{"cat": "Session", "name": "session_initialization", "args": {}}]
    for run in runs:
        for name, held, more, in_use, highest, *other in run:
            figures = {
                "mem_bytes_requested_in_use": held,
                "mem_requested_in_use_delta": more,
                "mem_bytes_in_use": in_use,
                "mem_in_use_delta": more,
                "mem_in_use_peak": highest,
            }
            args = {"provider": other[0] if other else "CPU", **{key: str(value) for key, value in figures.items()}}
            events.append({"cat": "Node", "name": f"{name}_kernel_time", "dur": 2, "args": args})
        events.append({"cat": "Session", "name": "model_run", "args": {}})
    path = folder / "profile.json"
    path.write_text(json.dumps(events))
    return read_profile(path, provider)


def test_memory_of_the_session_is_excluded(tmp_path: Path):
    (run,) = profile_of([[("a", 1010, 10, 1016, 1016), ("b", 1030, 20, 1048, 1048)]], tmp_path)
    assert run.order == ("a", "b")
    assert run.held_bytes == (10, 30)
    assert run.in_use_bytes == (10, 42)
    assert (run.requested_peak_bytes, run.in_use_peak_bytes) == (30, 42)
    assert run.kernel_ns == (2000, 2000)
    assert run.nodes_by_provider == {"CPU": 2}


def test_a_workspace_appears_where_it_raises_the_maximum(tmp_path: Path):
    nodes = [("a", 10, 10, 10, 10), ("b", 20, 10, 20, 50), ("c", 30, 10, 30, 50), ("d", 40, 10, 40, 60)]
    first, second = profile_of([nodes, [(*node[:4], 60) for node in nodes]], tmp_path)
    assert first.workspace_bytes == (0, 30, 0, 20)
    assert (first.requested_peak_bytes, second.requested_peak_bytes) == (60, 40)
    assert second.workspace_bytes == (0, 0, 0, 0)


def test_a_profile_without_nodes_has_no_runs(tmp_path: Path):
    assert profile_of([], tmp_path) == []


def test_each_provider_has_a_separate_arena(tmp_path: Path):
    """Nodes of another provider report that provider's arena, which is not part of the peak."""
    nodes = [
        ("shape", 7000, 50, 7000, 9000),
        ("a", 110, 10, 110, 150, "GPU"),
        ("shape2", 8000, 1000, 8000, 9000),
        ("b", 130, 20, 130, 150, "GPU"),
    ]
    (run,) = profile_of([nodes], tmp_path, "GPU")
    assert run.order == ("shape", "a", "shape2", "b")
    assert run.held_bytes == (0, 10, 10, 30)
    assert run.workspace_bytes == (0, 0, 0, 0)
    (nothing,) = profile_of([nodes], tmp_path, "TPU")
    assert nothing.requested_peak_bytes == 0


def test_outputs_that_stay_allocated_can_be_excluded():
    run = RunProfile(("a", "b", "c"), (1, 1, 1), (10, 30, 25), (10, 30, 25), (0, 5, 0), 1.0, {})
    assert run.requested_peak_bytes == 35
    assert run.requested_peak_without({"b": 20}) == 15
    assert run.requested_peak_without({"a": 10, "c": 1}) == 25


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
def test_lost_and_moved_nodes_are_named(order: list[str], lost: tuple[str, ...], moved: str | None):
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


def test_casts_that_the_runtime_skips_are_not_lost():
    model = file_of_casts(onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.FLOAT)
    found, profile = run_and_check(model, {"x": np.asarray([True, False, True])})
    assert "cast0" not in profile.order
    assert found.holds


@pytest.mark.parametrize(
    "stored, order, lost",
    [((), ["cast1", "y"], ()), ((), ["y"], ("cast0", "cast1")), (("cast0",), ["cast1", "y"], ("cast0",))],
)
def test_a_cast_with_other_readers_is_lost(stored: tuple[str, ...], order: list[str], lost: tuple[str, ...]):
    model = file_of_casts(onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT, stored=stored)
    assert check_execution(model, order).lost == lost


FLOAT = TensorType(TensorProto.FLOAT, (2, 3))


@pytest.mark.parametrize(
    "op, opset, dtype, runs_on_cuda",
    [
        ("Relu", 18, TensorProto.FLOAT, True),
        ("Tan", 18, TensorProto.FLOAT, False),
        # Registered for Flatten 13 to 20, and Flatten changed at 21, 23 and 24.
        ("Flatten", 18, TensorProto.FLOAT, True),
        ("Elu", 21, TensorProto.FLOAT, True),
        ("Elu", 22, TensorProto.FLOAT, False),
        ("HardSigmoid", 18, TensorProto.FLOAT, True),
        ("HardSigmoid", 18, TensorProto.BFLOAT16, False),
    ],
)
def test_nodes_without_a_kernel_are_counted(op: str, opset: int, dtype: int, runs_on_cuda: bool):
    kind = TensorType(dtype, (2, 3))
    found = left_to_the_cpu([Node(op, ("x",), ("y",))], {"x": kind, "y": kind}, opset)
    assert found == ({} if runs_on_cuda else {op: 1})


def test_the_type_is_not_that_of_a_condition():
    types = {"c": TensorType(TensorProto.BOOL, (2, 3)), "x": FLOAT, "y": FLOAT}
    assert left_to_the_cpu([Node("Where", ("c", "x", "x"), ("y",))], types, 18) == {}
