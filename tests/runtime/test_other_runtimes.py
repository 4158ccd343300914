"""What other runtimes cannot run, by the table of what was tried."""

from pathlib import Path
from typing import Any

import onnx
import pytest

import onnxgc
from onnxgc.model.core.ir import Node, TensorType
from onnxgc.runtime.other_runtimes import limits_of
from tests.cli.command import run_command
from tests.training.networks import digits_network

FLOAT, DOUBLE = (TensorType(kind, (2,)) for kind in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE))


@pytest.mark.parametrize(
    "runtime, node, effect",
    [
        ("webgpu", Node("MaxPool", ("x",), ("y", "i")), "fails"),
        ("webgpu", Node("MaxPool", ("x",), ("y",)), None),
        ("webgpu", Node("Tanh", ("x",), ("wide",)), "fails"),
        ("webgpu", Node("Sign", ("x",), ("y",)), "cpu"),
        ("web", Node("MaxPool", ("x",), ("wide", "i")), None),
        ("openvino", Node("HardSigmoid", ("x",), ("y",), {"alpha": 3e38, "beta": 0.0}), "wrong"),
        ("openvino", Node("HardSigmoid", ("x",), ("y",), {"alpha": 0.2, "beta": 0.5}), None),
        ("openvino", Node("Relu", ("x",), ("y",), name="r__recompute"), "merged"),
        ("iree", Node("MaxPool", ("x",), ("y", "i")), "wrong"),
    ],
)
def test_a_node_is_found_by_its_condition(runtime: str, node: Node, effect: str | None):
    types = {"x": FLOAT, "y": FLOAT, "i": FLOAT, "wide": DOUBLE}
    assert limits_of(runtime, [node, node], types) == ({} if effect is None else {effect: {node.op: 2}})


def test_inspect_lists_them_and_portable_avoids_them(tmp_path: Path):
    model = tmp_path / "digits.onnx"
    onnx.save(digits_network(), model)
    shapes = ("--input-shapes", "image:4,1,8,8")
    shown = run_command("inspect", model, *shapes, "--provider", "webgpu").out
    assert "webgpu cannot run: Dropout (1), MaxPool (1)" in shown
    assert "web runs all operators of the step" in run_command("inspect", model, *shapes, "--provider", "web").out
    how: dict[str, Any] = {
        "input_shapes": {"image": (4, 1, 8, 8)},
        "optimizer": "adamw",
        "solver": "peak",
        "check": False,
    }
    found = {}
    for portable in (False, True):
        onnxgc.optimize(
            model, tmp_path / "training.onnx", portable=portable, pools=None if portable else "indices", **how
        )
        found[portable] = onnxgc.inspect(tmp_path / "training.onnx", provider="webgpu").limits
    assert found[False]["fails"].keys() >= {"MaxPool", "Pow"}
    assert found[True].keys() == {"cpu"}
