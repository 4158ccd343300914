from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgc.errors import RuntimeFailedError, RuntimeUnavailableError
from onnxgc.runtime import interleaved_timing, ort
from onnxgc.runtime.interleaved_timing import seconds_in_turns
from onnxgc.runtime.measure import measure
from onnxgc.runtime.ort import PROVIDERS, SessionSettings, load_onnxruntime, make_session, providers_named
from tests.model.model_helpers import text_model

SETTINGS = SessionSettings(threads=1)
HAS_CUDA = "CUDAExecutionProvider" in load_onnxruntime().get_available_providers()
DRIVER_IS_HERE = ort.default_providers() == PROVIDERS["cuda"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "sum.onnx"
    onnx.save(text_model("(float[2] x) => (float[2] y) { y = Add(x, x) }"), path)
    return path


def test_each_file_takes_its_steps(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interleaved_timing, "_PAUSE_SECONDS", 0.0)
    feeds = {"x": np.ones(2, np.float32)}
    found = seconds_in_turns({"one": model, "two": model}, feeds, settings=SETTINGS, runs=2, warm_up=1)
    assert list(found) == ["one", "two"]
    for seconds in found.values():
        assert len(seconds) == 2
        assert min(seconds) > 0


def test_a_file_that_does_not_run_ends_the_timing(model: Path, tmp_path: Path):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"nothing of the kind")
    with pytest.raises(RuntimeFailedError, match=r"broken.onnx' does not run on ONNX Runtime: .+"):
        seconds_in_turns({"broken": broken}, {}, settings=SETTINGS, runs=1, warm_up=0)


def test_providers_have_short_names(monkeypatch: pytest.MonkeyPatch):
    assert providers_named("cpu") == ("CPUExecutionProvider",)
    assert providers_named(None) == ort.default_providers()
    with pytest.raises(RuntimeUnavailableError, match="unknown provider 'tpu'"):
        providers_named("tpu")

    class Build:
        def __init__(self, *names: str) -> None:
            self.names = names

        def get_available_providers(self) -> list[str]:
            return list(self.names)

    monkeypatch.setattr(ort, "_has_cuda_driver", lambda: False)
    for build, told in (
        (Build("CPUExecutionProvider"), "the installed ONNX Runtime has no CUDA"),
        (Build("CUDAExecutionProvider", "CPUExecutionProvider"), "this machine has no CUDA driver"),
    ):
        monkeypatch.setattr(ort, "load_onnxruntime", lambda build=build: build)
        with pytest.raises(RuntimeUnavailableError, match=told):
            providers_named("cuda")
    monkeypatch.setattr(ort, "_has_cuda_driver", lambda: True)
    assert providers_named("cuda") == PROVIDERS["cuda"]


@pytest.mark.skipif(not HAS_CUDA or DRIVER_IS_HERE, reason="needs a build with CUDA on a machine without")
def test_a_provider_that_does_not_start_is_reported(model: Path):
    """The runtime itself would go on with the CPU."""
    settings = SessionSettings(threads=1, providers=PROVIDERS["cuda"])
    with pytest.raises(RuntimeFailedError, match="CUDAExecutionProvider does not start"):
        measure(model, {"x": np.ones(2, np.float32)}, settings=settings)


@pytest.mark.skipif(not HAS_CUDA, reason="needs a build with CUDA")
def test_libraries_in_packages_are_loaded_only_for_cuda(model: Path, monkeypatch: pytest.MonkeyPatch):
    loaded = []
    monkeypatch.setattr(load_onnxruntime(), "preload_dlls", lambda: loaded.append(1))
    ort._load_cuda_libraries.cache_clear()
    make_session(model, providers=PROVIDERS["cpu"])
    assert not loaded
    make_session(model, settings=SessionSettings(providers=PROVIDERS["cuda"]), is_silent=True)
    assert loaded
    ort._load_cuda_libraries.cache_clear()
