from pathlib import Path

import onnx
import pytest
from onnx import helper, numpy_helper

import onnxgc
from onnxgc.errors import LossError
from tests.model.model_helpers import normal, text_model, with_weights

ir = pytest.importorskip("onnx_ir")
from onnx_ir.passes import PassError, PreconditionError, Sequential  # noqa: E402
from onnx_ir.passes.common import IdentityEliminationPass, NameFixPass  # noqa: E402

from onnxgc.passes import Checkpointing  # noqa: E402

LAYERS = 6


def chain() -> onnx.ModelProto:
    """Matrix products and sigmoids, with metadata and an Identity in front."""
    layers = " ".join(f"[mm{n}] z{n} = MatMul(y{n}, w{n}) [act{n}] y{n + 1} = Sigmoid(z{n})" for n in range(LAYERS))
    model = text_model(f"(float[256,8] x) => (float[256,8] y{LAYERS}) {{ [start] y0 = Identity(x) {layers} }}")
    helper.set_model_props(model, {"author": "somebody"})
    return with_weights(model, **{f"w{n}": normal(8, 8, seed=n) for n in range(LAYERS)})


def test_a_pipeline_ends_in_the_training_graph():
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


def test_training_graphs_are_rejected():
    once = Checkpointing(loss="mse", solver="store-all")(ir.from_proto(chain()))
    with pytest.raises(PreconditionError, match="the model is a training graph"):
        Checkpointing(loss="mse")(once)


def test_mistakes_raise_errors_of_the_package():
    with pytest.raises(TypeError, match="'output' is not an option of this pass; known: barriers, budget, "):
        Checkpointing(output="training.onnx")
    checkpointing = Checkpointing(loss="nothing")
    assert checkpointing.report == {}
    with pytest.raises(PassError) as caught:
        Sequential(IdentityEliminationPass(), checkpointing)(ir.from_proto(chain()))
    assert isinstance(caught.value.__cause__, LossError)


def test_external_weights_are_read(tmp_path: Path):
    path = tmp_path / "model.onnx"
    onnx.save(chain(), path, save_as_external_data=True, location="weights", size_threshold=0)
    result = Checkpointing(loss="mse", solver="store-all")(ir.load(path))
    stored = {tensor.name: tensor for tensor in ir.to_proto(result.model).graph.initializer}
    assert numpy_helper.to_array(stored["w3"]).tobytes() == chain().graph.initializer[3].raw_data
