"""The role that PyTorch's exporters state for a weight overrides the role inferred from its use."""

import numpy as np
import onnx

from onnxgc.model.core.ir import Array
from onnxgc.model.read import explain_weights
from onnxgc.model.weight_roles.roles import Role
from tests.model.model_helpers import model_of, normal, read, text_model, with_weights

KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
FOLDED = "pkg.onnxscript.optimizer.folded_from"
SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
BODY = """(float[2,4] x) => (float[2,4] y) {
    a = MatMul(x, w) b = Mul(a, s) c = Add(b, k) d = Mul(c, t) y = Add(d, e)
}"""
WEIGHTS: dict[str, Array] = {
    "w": normal(4, 4),
    "s": np.asarray(1.5, np.float32),
    "k": normal(4),
    "t": normal(2, 4),
    "e": np.zeros((1,), np.float32),
}


def exported(marks: dict[str, dict[str, str]], producer: str = "pytorch", **weights: Array) -> onnx.ModelProto:
    model = model_of(BODY, **weights or WEIGHTS)
    model.producer_name = producer
    for name, entries in marks.items():
        value = model.graph.value_info.add(name=name)
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        for key, text in entries.items():
            value.metadata_props.add(key=key, value=text)
    return model


def parameters(model: onnx.ModelProto) -> list[str]:
    return [weight.name for weight in explain_weights(model) if weight.role is Role.PARAMETER]


def test_marks_of_the_newer_exporter_decide():
    marks = {"w": "PARAMETER", "s": "PARAMETER", "k": "BUFFER"}
    model = exported({name: {KIND: kind} for name, kind in marks.items()})
    assert parameters(model) == ["w", "s"]
    reasons = {weight.name: weight.reason for weight in explain_weights(model)}
    assert reasons["k"] == "a buffer, as marked by the exporter"
    assert reasons["t"] == "a constant, as marked by the exporter"


def test_a_weight_folded_from_a_parameter_trains_and_one_folded_from_constants_does_not():
    model = exported({"w": {KIND: "PARAMETER"}, "t": {FOLDED: "['layer.g', 'layer.v']"}})
    assert parameters(model) == ["w", "t"]
    notes = read(model).notes
    assert any("computed from 'layer.g', 'layer.v'" in note and "optimize=False" in note for note in notes)
    assert parameters(exported({"w": {KIND: "PARAMETER"}, "t": {FOLDED: "val_1,val_2"}})) == ["w"]


def test_the_signature_separates_folded_buffers_from_folded_parameters():
    """Names cannot: a submodule's buffer has a dot in its name, the module's own parameter has none."""
    signature = """
# inputs
p_table: PARAMETER target='table'
b_norm_mean: BUFFER target='norm.mean' persistent=True
x: USER_INPUT
"""
    marks = {"w": {KIND: "PARAMETER"}, "k": {FOLDED: "['norm.mean', 'val_1']"}, "t": {FOLDED: "['table', 'val_2']"}}
    model = exported(marks)
    model.graph.metadata_props.add(key=SIGNATURE, value=signature)
    assert parameters(model) == ["w", "t"]
    (note,) = (note for note in read(model).notes if "computed from" in note)
    assert note.startswith("the exporter stored values computed from 'table', which")


def test_a_note_names_parameters_that_the_exporter_removed():
    signature = "p_w: PARAMETER target='w'\np_gone: PARAMETER target='gone'\nb_k: BUFFER target='mean'\n"
    model = exported({"w": {KIND: "PARAMETER"}})
    model.graph.metadata_props.add(key=SIGNATURE, value=signature)
    notes = [note for note in read(model).notes if "not in the file" in note]
    assert len(notes) == 1
    assert notes[0].startswith("parameters of the module are not in the file: 'gone'; forward does not use")


def test_a_note_asks_about_a_learned_exponent():
    body = "(float[2,4] x) => (float[2,4] y) { a = MatMul(x, w) y = Pow(a, e) }"
    model = by_older(model_of(body, w=(4, 4), e=np.full((1,), 3, np.float32)))
    model.producer_name = "pytorch"
    notes = read(model).notes
    assert any(note.startswith("'e': classified as a constant, like all single numbers") for note in notes)


def test_a_weight_with_a_folded_normalisation_trains_and_a_note_reports_it():
    """The optimizer keeps the weight's name, derives the bias's name from it, and marks neither."""
    body = "(float[2,4] x) => (float[2,4] y) { a = MatMul(x, w)  b = Add(a, w_bias)  y = MatMul(b, v) }"
    model = model_of(body, w=(4, 4), w_bias=(4,), v=(4, 4))
    model.producer_name = "pytorch"
    model.graph.value_info.add(name="v").metadata_props.add(key=KIND, value="PARAMETER")
    signature = "p_w: PARAMETER target='w'\np_v: PARAMETER target='v'\nx: USER_INPUT"
    model.graph.metadata_props.add(key=SIGNATURE, value=signature)
    assert parameters(model) == ["w", "w_bias", "v"]
    (note,) = (note for note in read(model).notes if "computed from" in note)
    assert note.startswith("the exporter stored values computed from 'w', which")


def test_a_marked_parameter_trains_regardless_of_its_use():
    body = "(float[2,4] x) => (float[3,4] y) { z = MatMul(x, w)  y = Concat<axis=0>(z, c) }"
    model = model_of(body, w=(4, 4), c=(1, 4))
    model.producer_name = "pytorch"
    for name in ("w", "c"):
        model.graph.value_info.add(name=name).metadata_props.add(key=KIND, value="PARAMETER")
    assert parameters(model) == ["w", "c"]
    assert not any("freeze" in note for note in read(model).notes)


def by_older(model: onnx.ModelProto) -> onnx.ModelProto:
    """The older exporter names nodes by the paths of modules."""
    for node in model.graph.node:
        node.name = f"/block/{node.op_type}"
    return model


def test_all_numbers_train_in_files_of_the_older_exporter_and_of_version_1():
    model = exported({})
    model.producer_version = "1.9"
    assert parameters(model) == parameters(by_older(exported({}))) == ["w", "s", "k", "t", "e"]


def test_without_the_marks_of_the_newer_exporter_use_decides():
    """Some tools drop the marks and keep the producer; constants of formulas are then plain initializers."""
    model = exported({})
    model.producer_version = "2.14.1"
    for node in model.graph.node:
        node.name = f"node_{node.op_type}"
    assert parameters(model) == ["w", "k", "t", "e"]
    # A number with the name of a module trains.
    model.graph.initializer[1].name = model.graph.node[1].input[1] = "block.scale"
    assert "block.scale" in parameters(model)


def test_constant_nodes_of_the_older_exporter_do_not_train():
    body = BODY.replace("a = MatMul(x, w)", "w = Constant<value = float[4,4] {%s}>() a = MatMul(x, w)")
    numbers = ", ".join(map(str, range(16)))
    model = by_older(text_model(body % numbers))
    model.producer_name = "pytorch"
    others = {name: value for name, value in WEIGHTS.items() if name != "w"}
    assert "w" not in parameters(with_weights(model, **others))
    model.producer_name = "PaddlePaddle"
    assert "w" in parameters(with_weights(model, **others))


def test_constant_nodes_that_a_simplifier_made_initializers_do_not_train():
    model = by_older(exported({}))
    for tensor, name in zip(model.graph.initializer, ("w", "s", "k", "t", "e"), strict=True):
        if name in ("k", "t"):
            tensor.name = f"/head/{'Constant' if name == 'k' else 'Constant_12'}_output_0"
            reader = next(node for node in model.graph.node if name in node.input)
            reader.input[1] = tensor.name
    assert parameters(model) == ["w", "s", "e"]


def test_files_of_other_exporters_are_classified_by_use():
    assert parameters(exported({"k": {KIND: "BUFFER"}}, producer="other")) == ["w", "k", "t", "e"]
