import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxgc.errors import TrainingError
from onnxgc.training.data import split_arrays
from onnxgc.training.labels import Labels
from onnxgc.training.training_file import TrainingFile
from tests.api.chains import chain
from tests.model.model_helpers import normal, text_model, with_weights
from tests.training.samples import losses_of, make_trainer, samples


def arrays(*names: str) -> dict[str, Any]:
    return {name: np.asarray(number) for number, name in enumerate(names)}


@pytest.mark.parametrize(
    "names, inputs, train, evaluated",
    [
        ("x y x_test y_val", "", "x y", "x y"),
        ("x_train x_validation", "", "x", "x"),
        ("img_test y img_test_test y_test", "img_test y", "img_test y", "img_test y"),
        ("x x_test x_test_test x_val", "x x_test", "x x_test", "x_test x"),
        ("x_train x_test", "x_train", "x_train", "x"),
        # Where the inputs are not known.
        ("img_test_train y img_test_test y_test", "", "img_test y", "img_test y"),
    ],
)
def test_names_of_inputs_keep_their_endings(names: str, inputs: str, train: str, evaluated: str):
    given = arrays(*names.split())
    found = split_arrays(given, inputs.split())
    assert [list(part) for part in found] == [train.split(), evaluated.split()]
    # Each array once, none lost.
    assert sorted(int(array) for part in found for array in part.values()) == list(range(len(given)))


@pytest.mark.parametrize(
    "names, words",
    [
        ("x_val y x_test", "'x_val' and 'x_test' are both 'x' for evaluation; omit one"),
        ("x x_train", "'x' and 'x_train' are both 'x' for training; omit one"),
    ],
)
def test_two_arrays_with_one_name_are_rejected(names: str, words: str):
    with pytest.raises(TrainingError, match=words):
        split_arrays(arrays(*names.split()))


def test_an_input_mistaken_for_evaluation_is_reported():
    source = chain(1)
    source.graph.input[0].name = source.graph.node[0].input[0] = "x_test"
    trainer = make_trainer(source, batch=8)
    given = {"x_test": samples(0)["x"], "labels": samples(0)["labels"]}
    with pytest.raises(TrainingError, match=r"rename it to 'x_test_train': names with _test"):
        trainer.fit(split_arrays(given)[0])
    trainer.fit(split_arrays(given, trainer.inputs)[0])
    assert trainer.updates == 8


def test_arrays_for_evaluation_alone_are_rejected():
    with pytest.raises(TrainingError, match=r"^no arrays are for training: 'x_test', 'y_val' are for eval"):
        split_arrays(arrays("x_test", "y_val"))


CROSS_ENTROPY = "loss = SoftmaxCrossEntropyLoss <ignore_index = 9> (y, labels)"
PICKED = """
    axes = Constant <value = int64[1] {1}> ()
    column = Unsqueeze (label, axes)
    picked = GatherElements <axis = 1> (p, column)
    mean = ReduceMean <keepdims = 0> (picked)
    loss = Neg (mean)
"""
GATHERED = f"p = LogSoftmax <axis = 1> (y)  label = Identity (labels) {PICKED}"
MASKED = f"""
    p = LogSoftmax <axis = 1> (y)
    nine = Constant <value = int64 {{9}}> ()
    zero = Constant <value = int64 {{0}}> ()
    left_out = Equal (labels, nine)
    counts = Not (left_out)
    label = Where (counts, labels, zero) {PICKED}
"""
OTHER_MASK = MASKED.replace("Where (counts, labels, zero)", "Where (counts, zero, labels)")
ALONG_SAMPLES = GATHERED.replace("LogSoftmax <axis = 1>", "LogSoftmax <axis = 0>")


def with_its_loss(loss: str) -> onnx.ModelProto:
    model = text_model(f"(float[N, 16] x, int64[N] labels) => (float loss) {{ y = MatMul (x, w) {loss} }}")
    return with_weights(model, w=normal(16, 4))


@pytest.mark.parametrize(
    "loss, labels",
    [
        (CROSS_ENTROPY, Labels(4, 9)),
        (GATHERED, Labels(4)),
        (MASKED, Labels(4, 9)),
        # Values read at ignored labels are not labels.
        (OTHER_MASK, None),
        (ALONG_SAMPLES, None),
    ],
)
def test_labels_of_a_loss_in_the_model_are_known(loss: str, labels: Labels | None):
    trainer = make_trainer(with_its_loss(loss), batch=8)
    assert trainer._file.labels == ({} if labels is None else {"labels": labels})
    if labels is None:
        return
    given = samples(0, 24)
    if labels.ignored is not None:
        given["labels"][3] = labels.ignored
    trainer.fit(given)
    for wrong in (4, -1):
        spoilt = {**given, "labels": np.where(np.arange(24) == 17, wrong, given["labels"])}
        before = trainer.updates
        told = "" if labels.ignored is None else "; 9 ignores a sample"
        words = f"'labels' has {wrong} at [17], and the model has the classes 0 to 3{told}"
        with pytest.raises(TrainingError, match=f"{re.escape(words)}$"):
            trainer.fit(spoilt)
        # Before anything is trained.
        assert trainer.updates == before


@pytest.mark.parametrize("order, ignored", [((4, 2), (9, 9)), ((2, 4), (9, -7))])
def test_labels_of_two_losses_have_the_common_range(order: tuple[int, int], ignored: tuple[int, int]):
    model = text_model(f"""(float[N, 16] x, int64[N] labels) => (float loss) {{
        y = MatMul (x, w)  z = MatMul (x, v)
        one = SoftmaxCrossEntropyLoss <ignore_index = {ignored[0]}> (y, labels)
        other = SoftmaxCrossEntropyLoss <ignore_index = {ignored[1]}> (z, labels)
        loss = Add (one, other)
    }}""")
    trainer = make_trainer(with_weights(model, w=normal(16, order[0]), v=normal(16, order[1])), batch=8)
    assert trainer._file.labels == {"labels": Labels(2, 9 if ignored == (9, 9) else None)}


def test_labels_of_an_added_loss_are_found():
    trainer = make_trainer(chain(1), batch=8)
    assert trainer._file.labels == {"labels": Labels(4, -100)}
    assert isinstance(trainer._file, TrainingFile)


def test_all_forms_of_data_give_the_same_run(tmp_path: Path):
    arrays = samples(0, 160)
    np.savez(tmp_path / "data.npz", x=arrays["x"].astype(np.float64), y=arrays["labels"].astype(np.int32))
    batches = [{name: array[start : start + 64] for name, array in arrays.items()} for start in (0, 64, 128)]
    forms: list[Any] = [
        tmp_path / "data.npz",
        arrays,
        {"inputs": arrays["x"], "target": arrays["labels"]},
        (arrays["x"], arrays["labels"]),
        batches,
        [(batch["x"], batch["labels"]) for batch in batches],
        lambda: iter(batches),
    ]
    curves = []
    for form in forms:
        trainer = make_trainer(chain(2), batch=64)
        curves.append(losses_of(trainer, form, 2, shuffle=False))
    assert len(curves[0]) == 6
    assert all(curve == curves[0] for curve in curves)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"labels": np.array([0, 4] * 32)}, r"'labels' has 4 at \[1\], and the model has the classes 0 to 3"),
        ({"labels": np.array([0, -1] * 32)}, "'labels' has -1 at"),
        ({"x": np.zeros((64, 15), np.float32)}, r"'x' has the shape \[64, 15\], and the model takes \[any, 16\]"),
        ({"x": np.zeros((64, 16), np.int64)}, "'x' is int64, and the model takes float32; convert it first"),
        ({"labels": np.zeros(63, np.int64)}, "'labels' has 63 samples, and other inputs have 64"),
        (
            {"x": np.full((64, 16), np.nan, np.float32)},
            "the loss is nan in update 1, and the parameters are no longer usable",
        ),
        ({"labels": None}, "a batch has no 'labels'; it has 'x', and a step takes x, labels"),
    ],
)
def test_data_that_do_not_fit_are_rejected_in_one_line(change: dict[str, Any], words: str):
    trainer = make_trainer(chain(2), batch=64)
    batch = {name: value for name, value in (samples(0) | change).items() if value is not None}
    with pytest.raises(TrainingError, match=words) as caught:
        trainer.step(batch)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "contents, words",
    [(b"text", "write one with numpy.savez"), (b"", "write one with numpy.savez"), (None, "the file does not exist")],
)
def test_files_that_are_not_data_are_rejected_in_one_line(tmp_path: Path, contents: bytes | None, words: str):
    path = tmp_path / "data.npz"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(TrainingError, match=words):
        make_trainer(chain(2), batch=64).fit(path)


def test_a_truncated_data_file_is_rejected_in_one_line(tmp_path: Path):
    path = tmp_path / "data.npz"
    np.savez(path, **samples(0, 640))
    whole = path.read_bytes()
    for contents in (whole[: len(whole) // 2], whole[:300] + bytes(200) + whole[500:], whole[:-30]):
        path.write_bytes(contents)
        with pytest.raises(TrainingError, match=r"cannot be read as an .npz file"):
            make_trainer(chain(2), batch=64).fit(path)


def test_an_iterator_runs_once():
    trainer = make_trainer(chain(2), batch=64)
    once = iter([samples(0)])
    with pytest.raises(TrainingError, match="a new iterator for each epoch"):
        trainer.fit(once, 2)
