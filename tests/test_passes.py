"""Checkpointing in a pipeline of onnx_ir's passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxgc
from onnxgc.errors import LossError

ir = pytest.importorskip("onnx_ir")
from onnx_ir.passes import PassError, PreconditionError, Sequential  # noqa: E402
from onnx_ir.passes.common import IdentityEliminationPass, NameFixPass  # noqa: E402

from onnxgc.passes import Checkpointing  # noqa: E402

LAYERS = 6


def chain() -> onnx.ModelProto:
    """Matrix products and sigmoids, with metadata and an Identity in front."""
    generator = np.random.default_rng(0)
    weights = [generator.normal(size=(8, 8)).astype(np.float32) for _ in range(LAYERS)]
    nodes = [helper.make_node("Identity", ["x"], ["y0"], name="start")]
    for index in range(LAYERS):
        nodes.append(helper.make_node("MatMul", [f"y{index}", f"w{index}"], [f"z{index}"], name=f"mm{index}"))
        nodes.append(helper.make_node("Sigmoid", [f"z{index}"], [f"y{index + 1}"], name=f"act{index}"))
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [256, 8])],
        [helper.make_tensor_value_info(f"y{LAYERS}", TensorProto.FLOAT, [256, 8])],
        [numpy_helper.from_array(weight, f"w{index}") for index, weight in enumerate(weights)],
    )
    model = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 18)])
    helper.set_model_props(model, {"author": "somebody"})
    return model


def test_a_pipeline_ends_in_the_training_graph() -> None:
    options = {"loss": "mse", "budget": 0.6, "step_limit": 1}
    checkpointing = Checkpointing(**options)
    source = ir.from_proto(chain())
    before = ir.to_proto(source)
    result = Sequential(NameFixPass(), checkpointing)(source)
    assert result.modified
    assert ir.to_proto(source) == before
    training = ir.to_proto(result.model)
    onnx.checker.check_model(training, full_check=True)

    expected = onnxgc.optimize(chain(), **options).training_graph.model  # type: ignore[arg-type]
    assert [node.name for node in training.graph.node] == [node.name for node in expected.graph.node]
    assert any("__recompute" in node.output[0] for node in training.graph.node)
    assert [value.name for value in training.graph.output] == ["loss", *(f"w{i}_grad" for i in range(LAYERS))]
    assert [(entry.domain, entry.version) for entry in training.opset_import] == [("", 18)]
    metadata = {entry.key: entry.value for entry in training.metadata_props}
    assert metadata["author"] == "somebody"
    simulated = checkpointing.report["planned"]["simulated_peak_bytes"]
    assert int(metadata["onnxgc.simulated_peak_bytes"]) == simulated
    roles = {entry.value for node in training.graph.node for entry in node.metadata_props}
    assert {"forward", "recompute", "backward"} <= roles


def test_training_graphs_are_rejected() -> None:
    once = Checkpointing(loss="mse", solver="store-all")(ir.from_proto(chain()))
    with pytest.raises(PreconditionError, match="the model is a training graph"):
        Checkpointing(loss="mse")(once)


def test_mistakes_raise_errors_of_the_package() -> None:
    with pytest.raises(TypeError, match="'output' is not an option of this pass; known: barriers, budget, "):
        Checkpointing(output="training.onnx")
    checkpointing = Checkpointing(loss="nothing")
    assert checkpointing.report == {}
    with pytest.raises(PassError) as caught:
        Sequential(IdentityEliminationPass(), checkpointing)(ir.from_proto(chain()))
    assert isinstance(caught.value.__cause__, LossError)


def test_external_weights_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(chain(), path, save_as_external_data=True, location="weights", size_threshold=0)
    result = Checkpointing(loss="mse", solver="store-all")(ir.load(path))
    stored = {tensor.name: tensor for tensor in ir.to_proto(result.model).graph.initializer}
    assert numpy_helper.to_array(stored["w3"]).tobytes() == chain().graph.initializer[3].raw_data


def test_message_without_onnx_ir_names_the_package() -> None:
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'onnx_ir' else find(name, *rest)\n"
        "import onnxgc\n"
        "try:\n    import onnxgc.passes\n"
        "except onnxgc.OnnxgcError as error:\n    print(error)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "onnxgc.passes needs onnx_ir, which is not installed: pip install 'onnxgc[ir]'\n"
