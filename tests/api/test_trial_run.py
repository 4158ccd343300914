import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgc.api import optimize, trial_run
from onnxgc.errors import ModelFileError, ShapeError
from onnxgc.model.core.ir import TensorType
from onnxgc.model.read import read_model
from onnxgc.runtime import isolated_run
from onnxgc.runtime.ort import SessionSettings, make_session
from tests.model.model_helpers import model_of, normal, text_model, with_weights

GOOD = "(float[2,3] x) => (float[2,4] y) { y = MatMul(x, w) }"
# ONNX's checker accepts it: the index is out of range only at run time.
BROKEN = """(float[2,3] x) => (float[2,1] y) <int64[2,1] far = {7, 7}> {
    h = MatMul(x, w) y = GatherElements<axis=1>(h, far) }"""


def model(body: str) -> onnx.ModelProto:
    return model_of(body, w=(3, 4))


def test_a_model_that_runs_leaves_no_note():
    ran, unchecked = (optimize(model(GOOD), loss="mse", check=check).report["notes"] for check in (True, False))
    assert ran == unchecked


def test_a_model_that_does_not_run_is_rejected_with_the_runtimes_reason():
    with pytest.raises(ModelFileError, match=r"does not run on ONNX Runtime.*Out of range.*--no-check"):
        optimize(model(BROKEN), loss="mse")


def test_a_model_that_does_not_load_is_rejected():
    source = text_model(
        "(float[2,3] x) => (float[2,4] y) { h = MatMul(x, w) y = acme.Layer(h) }", domains=', "acme": 1'
    )
    source.graph.value_info.append(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (2, 4)))
    with pytest.raises(ModelFileError, match=r"does not run on ONNX Runtime.*acme"):
        trial_run.trial_run(with_weights(source, w=normal(3, 4)), optimize(model(GOOD), loss="mse").planned.model)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:

    def take(program: str) -> None:
        path = tmp_path / "child.py"
        path.write_text(program)
        monkeypatch.setattr(isolated_run, "_CHILD", path)

    return take


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT"])
def test_a_crash_of_the_runtime_is_one_line(child: Callable[[str], None], name: str):
    child(f"import os, signal; os.kill(os.getpid(), signal.{name})")
    with pytest.raises(ModelFileError, match=rf"crashed \({name}\).*--no-check") as caught:
        optimize(model(GOOD), loss="mse")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "program",
    [
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "raise MemoryError",
        "import os, sys; print('terminate called: std::bad_alloc', file=sys.stderr, flush=True); os.abort()",
    ],
)
def test_lack_of_memory_gives_a_note(child: Callable[[str], None], program: str):
    child(program)
    notes = optimize(model(GOOD), loss="mse").report["notes"]
    assert any("ran out of memory" in note for note in notes)


@pytest.mark.parametrize(
    "place, name, value, words",
    [
        (trial_run, "available_bytes", lambda: 10, "skipped: it needs at least"),
        (trial_run, "MAX_FLOPS", 1, "not run before planning"),
        (sys.modules, "onnxruntime", None, "ONNX Runtime is not installed"),
    ],
)
def test_a_model_that_is_not_run_has_a_note(
    place: Any, name: str, value: Any, words: str, monkeypatch: pytest.MonkeyPatch
):
    (monkeypatch.setitem if place is sys.modules else monkeypatch.setattr)(place, name, value)
    assert any(words in note for note in optimize(model(BROKEN), loss="mse").report["notes"])


def test_a_runtime_that_hangs_is_stopped(child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch):
    child("import time; time.sleep(60)")
    monkeypatch.setattr(trial_run, "MAX_SECONDS", 0.2)
    notes = optimize(model(GOOD), loss="mse").report["notes"]
    assert any("still starting on the model after" in note for note in notes)


def test_an_interruption_ends_the_process(child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch):
    started = []

    class Interrupted(subprocess.Popen[bytes]):
        def communicate(self, *_: object, **__: object) -> tuple[bytes, bytes]:
            started.append(self)
            raise KeyboardInterrupt

    child("import time; time.sleep(60)")
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimize(model(GOOD), loss="mse")
    assert started[0].returncode == -signal.SIGKILL


def test_the_process_ends_with_its_caller():
    lifeline, held = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        waiting = [
            sys.executable,
            "-c",
            f"import runpy; runpy.run_path({str(isolated_run._CHILD)!r})['_end_with_the_caller']()",
        ]
        process = subprocess.Popen(waiting, stdin=lifeline, cwd=folder)
        os.close(lifeline)
        os.close(held)
        assert process.wait(20) == 1


def test_shapes_that_differ_from_inferred_ones_are_rejected():
    source = model(GOOD)
    read = read_model(source, loss="mse")
    wrong = replace(read, types={**read.types, "y": TensorType(onnx.TensorProto.FLOAT, (2, 5))})
    with pytest.raises(ShapeError, match=r"MatMul 'y' gives 'y' as float32 \[2, 4\].*float32 \[2, 5\].*--no-check"):
        trial_run.trial_run(source, wrong)
    other = replace(read, types={**read.types, "y": TensorType(onnx.TensorProto.DOUBLE, (2, 4))})
    with pytest.raises(ShapeError, match="float64"):
        trial_run.trial_run(source, other)


def test_half_precision_may_be_widened_by_the_runtime():
    source = text_model("(float16[2,3] x) => (float16[2,3] y) { h = Mul(x, w) y = Softmax(h) }")
    source.graph.initializer.append(numpy_helper.from_array(np.ones((2, 3), np.float16), "w"))
    assert trial_run.trial_run(source, read_model(source, loss="mse")) == ""


@pytest.mark.parametrize(
    "auto_pad, stride, kernel, dilation",
    [("SAME_UPPER", 2, 1, 1), ("SAME_LOWER", 2, 4, 1), ("SAME_LOWER", 3, 1, 1), ("SAME_UPPER", 3, 4, 2)],
)
def test_transposed_convolution_by_auto_pad_and_output_padding(auto_pad: str, stride: int, kernel: int, dilation: int):
    """ONNX's inference adds the padding to a size that it does not change."""
    attributes = f'auto_pad="{auto_pad}", strides=[{stride}], dilations=[{dilation}], output_padding=[1]'
    source = text_model(
        f"(float[1,2,4] x) => (float[] loss) {{ y = ConvTranspose<{attributes}>(x, w) l = Mul(y, y) "
        "loss = ReduceSum<keepdims=0>(l) }"
    )
    source = with_weights(source, w=normal(2, 3, kernel))
    (right,) = make_session(source).run(None, {"x": normal(1, 2, 4)})
    emitted = optimize(source, loss="loss").training_graph.model
    for settings in (SessionSettings(), SessionSettings(file_order=False)):
        found = make_session(emitted, settings=settings).run(["loss"], {"x": normal(1, 2, 4)})[0]
        np.testing.assert_allclose(found, right, rtol=1e-5)


def test_weights_in_other_files_are_found_next_to_the_model(tmp_path: Path):
    path = tmp_path / "model.onnx"
    onnx.save(model(GOOD), path, save_as_external_data=True, size_threshold=0)
    notes = optimize(path, loss="mse").report["notes"]
    assert not any("trial run" in note for note in notes)
    inner = onnx.load(path, load_external_data=False)
    note = trial_run.trial_run(inner, read_model(inner, loss="mse"))
    assert "its weights are in other files" in note


def test_text_files_are_run_too(tmp_path: Path):
    path = tmp_path / "model.textproto"
    onnx.save(model(GOOD), path)
    assert optimize(path, loss="mse").report["status"]


def test_a_type_without_a_kernel_on_the_cpu_gives_a_note():
    source = text_model("(bfloat16[2,3] x) => (bfloat16[2,3] y) { y = Mul(x, w) }")
    value = onnx.helper.make_tensor("w", onnx.TensorProto.BFLOAT16, (2, 3), np.ones(6))
    source.graph.initializer.append(value)
    notes = optimize(source, loss="mse").report["notes"]
    (note,) = [note for note in notes if "the trial run on the CPU is not possible" in note]
    assert all(part in note for part in ("CPUExecutionProvider", "Mul for bfloat16", "'y'", "float32"))


def test_an_operator_with_an_unsupported_type_is_not_an_error_of_shapes():
    source = text_model("(bfloat16[1,3,4] x) => (bfloat16[1,3,4] y) { y = Conv(x, w) }")
    source.graph.initializer.append(onnx.helper.make_tensor("w", onnx.TensorProto.BFLOAT16, (3, 3, 1), np.ones(9)))
    with pytest.raises(ShapeError, match=r"Conv.*opset 18.*'x' bfloat16.*opset 22") as caught:
        optimize(source, loss="mse")
    assert "check the input shapes" not in str(caught.value)


def test_an_empty_input_is_fed_empty():
    source = model("(float[0,3] x) => (float[0,4] y) { y = MatMul(x, w) }")
    assert trial_run.trial_run(source, read_model(source, loss="mse")) == ""


def test_the_runtime_prints_nothing(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(ModelFileError):
        optimize(model(BROKEN), loss="mse")
    assert capfd.readouterr() == ("", "")
