"""Weights of external data are copied by pieces or stay where they are; others are written by pieces."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxgc.api import optimize, pipeline
from onnxgc.emission import atomic_files
from onnxgc.errors import OutputFileError
from onnxgc.model.core import stored_weights

NETWORK = """<ir_version: 8, opset_import: ["": 17]> g (float[2,64] x) => (float[2,64] y)
    <int64[2] s = {64, 64}> {
        f = ConstantOfShape<value=float[1] {0.5}>(s) a = MatMul(x, w) b = MatMul(a, f) y = MatMul(b, v) }"""
SIZE = 64 * 64 * 4
HOLE = 1 << 16
VALUES = np.random.default_rng(0).standard_normal((64, 64), np.float32)


def network_in(folder: Path) -> Path:
    """A network with the weight w after a hole of its file, and v, which is a hole."""
    model = parser.parse_model(NETWORK)
    with open(folder / "weights.bin", "wb") as stream:
        stream.seek(HOLE)
        stream.write(VALUES.tobytes())
        stream.truncate(3 * HOLE)
    for name, offset in {"w": HOLE, "v": 2 * HOLE}.items():
        tensor = model.graph.initializer.add(name=name, data_type=1, dims=[64, 64], data_location=1)
        for key, value in {"location": "weights.bin", "offset": offset, "length": SIZE}.items():
            tensor.external_data.add(key=key, value=str(value))
    path = folder / "net.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def weights_in(file: str, model: Path) -> set[str]:
    tensors = onnx.load(model, load_external_data=False).graph.initializer
    return {tensor.name for tensor in tensors for entry in tensor.external_data if entry.value == file}


@pytest.mark.parametrize("weights", ["copy", "reference"])
def test_large_weights_leave_the_file_by_themselves(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_weights, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(atomic_files, "MAX_SINGLE_FILE_BYTES", 2 * SIZE)
    monkeypatch.setattr(pipeline, "MAX_SINGLE_FILE_BYTES", 2 * SIZE)
    target = tmp_path / "out.onnx"
    optimize(network_in(tmp_path), target, weights=weights, solver="acg", check=False)
    referenced = {"w", "v"} if weights == "reference" else set()
    assert weights_in("weights.bin", target) == referenced
    assert weights_in("out.onnx.data", target) == {"f", "w", "v"} - referenced
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(target).graph.initializer}
    expected: dict[str, np.ndarray] = {"w": VALUES, "v": np.zeros((64, 64)), "f": np.full((64, 64), 0.5)}
    assert all(np.array_equal(stored[name], value) for name, value in expected.items())


def test_weights_are_referenced_in_their_own_folder_only(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(OutputFileError, match=r"weight 'w' is in .* which a file in .* cannot refer to"):
        optimize(network_in(tmp_path), tmp_path / "other" / "out.onnx", weights="reference", solver="acg", check=False)
    assert not list((tmp_path / "other").iterdir())


def test_missing_space_is_an_error_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=SIZE))
    with pytest.raises(OutputFileError, match="bytes, and 16,384 are free"):
        optimize(network_in(tmp_path), tmp_path / "out.onnx", external_data=True, solver="acg", check=False)
