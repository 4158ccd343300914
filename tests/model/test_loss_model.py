"""Losses from a second model: equal to the built-in ones, by name or by position, as a function too."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

import onnxgc
from onnxgc.errors import LossError, NoParametersError
from onnxgc.training import Trainer
from tests.cli.command import run_command
from tests.training.networks import digits, digits_network

BATCH = 16
CROSS_ENTROPY = """
    <ir_version: 8, opset_import: ["" : {opset}]>
    head (float[rows, 10] {scores}, int64[rows] digit) => (float loss) {{
        c1 = LogSoftmax ({scores})
        column = Unsqueeze (digit, last)
        picked = GatherElements <axis = 1> (c1, column)
        mean = ReduceMean <keepdims = 0> (picked)
        loss = Neg (mean)
    }}"""
FUNCTION = """
    <ir_version: 9, opset_import: ["" : 17, "own" : 1]>
    head (float[rows, 10] scores, int64[rows] digit) => (float loss) { loss = own.cross_entropy (scores, digit) }
    <opset_import: ["" : 17], domain: "own">
    cross_entropy (scores, digit) => (loss) {
        loss = SoftmaxCrossEntropyLoss <reduction = "mean"> (scores, digit)
    }"""


def loss_model(scores: str = "scores", opset: int = 17) -> onnx.ModelProto:
    model = parser.parse_model(CROSS_ENTROPY.format(scores=scores, opset=opset))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray([1]), "last"))
    return model


@pytest.mark.parametrize(
    "loss",
    [loss_model(), loss_model("logits"), loss_model(opset=18), parser.parse_model(FUNCTION)],
    ids=["by name", "by position", "of another opset", "as a function"],
)
def test_a_run_is_that_of_the_built_in_loss(loss: onnx.ModelProto):
    """Names within the loss clash with the model's (c1)."""
    train, test = digits()
    data = {name: array[: 5 * BATCH // 2] for name, array in train.items()}
    renamed = {"image": data["image"], "digit": data["labels"]}
    how: dict[str, Any] = {"batch": BATCH, "threads": 1, "check": False, "solver": "peak", "learning_rate": 0.01}
    built_in, own = Trainer(digits_network(), **how), Trainer(digits_network(), loss_model=loss, **how)
    assert own.inputs == {"image": (BATCH, 1, 8, 8), "digit": (BATCH,)}
    expected, found = (t.fit(d, epochs=2, shuffle=False) for t, d in ((built_in, data), (own, renamed)))
    assert [e["loss"] for e in found] == pytest.approx([e["loss"] for e in expected], rel=1e-4)
    held = {"image": test["image"][:BATCH], "digit": test["labels"][:BATCH]}
    inferred = {"image": held["image"], "labels": held["digit"]}
    assert own.evaluate(held)["loss"] == pytest.approx(built_in.evaluate(inferred)["loss"], rel=1e-3)


def test_the_training_file_contains_the_loss(tmp_path: Path):
    """So that verify and train need no second file."""
    model, loss, file = (tmp_path / f"{name}.onnx" for name in ("digits", "loss", "training"))
    onnx.save(digits_network(), model)
    onnx.save(loss_model(), loss)
    names = tmp_path / "names.txt"
    names.write_text("# the head\nhead.*\n\n", encoding="utf-8")
    options = ("--loss-model", str(loss), "--trainable", f"@{names}", "--optimizer", "sgd", "--solver", "peak")
    shapes = ("--input-shapes", f"image:{BATCH},1,8,8", "-q")
    run_command("optimize", model, file, *options, *shapes)
    loss.unlink()
    assert onnxgc.verify(model, file, threads=1).holds
    trainer = Trainer(file, model=model, threads=1)
    assert sorted(trainer.parameters()) == ["head.bias", "head.weight"]


def test_what_cannot_be_a_loss_is_one_line(tmp_path: Path):
    two = loss_model()
    two.graph.output.append(onnx.helper.make_tensor_value_info("mean", 1, []))
    vector = loss_model()
    vector.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("c1", 1, ["rows", 10]))
    several = digits_network()
    several.graph.output.append(onnx.helper.make_tensor_value_info("flat", 1, None))
    for model, loss, words in (
        (digits_network(), two, "has 2 outputs"),
        (digits_network(), vector, "must be a single floating-point number"),
        (several, loss_model("logits"), "no input of the loss model"),
    ):
        with pytest.raises(LossError, match=words) as caught:
            onnxgc.optimize(model, loss_model=loss, input_shapes={"image": (BATCH, 1, 8, 8)})
        assert "\n" not in str(caught.value)
    with pytest.raises(LossError, match="both choose the loss"):
        onnxgc.optimize(digits_network(), loss="mse", loss_model=loss_model())
    with pytest.raises(NoParametersError, match="matches no"):
        onnxgc.optimize(digits_network(), trainable=["@absent.txt"])
    onnx.save(digits_network(), tmp_path / "digits.onnx")
    refused = run_command("optimize", tmp_path / "digits.onnx", "--trainable", f"@{tmp_path / 'absent.txt'}", code=2)
    assert "cannot be read: No such file" in refused.err
