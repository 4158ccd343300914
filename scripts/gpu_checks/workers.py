"""Work of the GPU check's worker processes, which use the card."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx

from onnxgc.model.core.ir import Array
from onnxgc.runtime import ort as runtime_ort
from onnxgc.runtime.ort import SessionSettings, make_session
from scripts.gpu_checks.profile_reports import node_events
from scripts.gpu_checks.settings import (
    CPU,
    CUDA,
    RUNS,
    SEED,
    TIMED_RUNS,
    CheckError,
    Json,
    device_of,
    error_line,
)
from scripts.gpu_checks.worker_process import load_arrays, save_arrays

MATMUL = """<ir_version: 9, opset_import: ["": 18]>
matmul (float[64, 64] a, float[64, 64] b) => (float[64, 64] c) { c = MatMul(a, b) }"""
UPDATE = """<ir_version: 9, opset_import: ["": 18]>
update (float[1024] w, float[1024] g, float lr) => (float[1024] w_new) {
    scaled = Mul(g, lr)
    w_new = Sub(w, scaled)
}"""
SMOKE_RULES_SECONDS = 2.0
CUDA_LIBRARIES = ("libcudart", "libcublasLt", "libcublas", "libcudnn", "libcufft", "libcurand")


def work(name: str, folder: Path) -> None:
    """Answers the request in `folder`."""
    answer = WORK[name](json.loads((folder / "request.json").read_text()), folder)
    (folder / "answer.part").write_text(json.dumps(answer))
    os.replace(folder / "answer.part", folder / "answer.json")


def work_load(request: Json, folder: Path) -> Json:
    """Step 1: libraries, provider and a MatMul."""
    provider = request["provider"]
    libraries = load_libraries(provider)
    ort = runtime_ort.load_onnxruntime()
    session = session_on(onnx.parser.parse_model(MATMUL), request, folder)
    a, b = np.random.default_rng(SEED).standard_normal((2, 64, 64)).astype(np.float32)
    (c,) = session.run(None, {"a": a, "b": b})
    events = node_events(Path(session.end_profiling()))[0]
    (matmul,) = (event for event in events if event.operator in ("MatMul", "Gemm", "FusedMatMul"))
    expected = a.astype(np.float64) @ b.astype(np.float64)
    return {
        "onnxruntime": ort.__version__,
        "available_providers": ort.get_available_providers(),
        "session_providers": session.get_providers(),
        "libraries": libraries,
        "matmul": {
            "provider": matmul.provider,
            "largest_error": float(np.abs(c - expected).max() / np.abs(expected).max()),
            "arena_keys": sorted(matmul.memory),
        },
    }


def work_run(request: Json, folder: Path) -> Json:
    """Profiled and timed runs of a graph, with all inputs and outputs on the device."""
    provider = request["provider"]
    load_libraries(provider)
    ort = runtime_ort.load_onnxruntime()
    started = time.perf_counter()
    session = session_on(request["model"], request, folder)
    load_seconds = time.perf_counter() - started
    feeds = load_arrays(Path(request["feeds"]), request["names"])
    values = {
        name: ort.OrtValue.ortvalue_from_numpy(value, device_of(provider), 0) for name, value in feeds.items()
    }
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    before = _free_device_bytes(provider)
    profiled, free = [], []
    for _ in range(RUNS):
        profiled.append(_run_bound(session, binding, device_of(provider)))
        free.append(_free_device_bytes(provider))
    profile = session.end_profiling()
    timed = [_run_bound(session, binding, device_of(provider)) for _ in range(TIMED_RUNS)]
    outputs = binding.copy_outputs_to_cpu()
    save_arrays(folder / "outputs.npz", outputs)
    return {
        "profile": profile,
        "outputs": [output.name for output in session.get_outputs()],
        "session_providers": session.get_providers(),
        "load_seconds": load_seconds,
        "profiled_seconds": profiled,
        "step_seconds": timed,
        # After each run. An arena does not shrink by itself, so that this is the largest reserve until then.
        # The first kernels also load code and handles.
        "device_growth_bytes": [before - after for after in free if before is not None and after is not None],
        "output_bytes": sum(value.nbytes for value in outputs),
        "arena": _arena_on_device(ort, session, binding, provider),
    }


def work_exchange(request: Json, folder: Path) -> Json:
    """Step 6: a tensor as input and output, and tensors shared with torch."""
    provider, device = request["provider"], device_of(request["provider"])
    load_libraries(provider)
    import torch

    ort = runtime_ort.load_onnxruntime()
    session = session_on(onnx.parser.parse_model(UPDATE), request, folder)
    w, g = np.random.default_rng(SEED).standard_normal((2, 1024)).astype(np.float32)
    lr = np.asarray(0.5, np.float32)

    def update(weight: Any, gradient: Any) -> None:
        binding = session.io_binding()
        for name, value in (("w", weight), ("g", gradient), ("lr", on_device(lr))):
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("w_new", weight)
        binding.synchronize_inputs()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    def on_device(value: Array) -> Any:
        return ort.OrtValue.ortvalue_from_numpy(value.copy(), device, 0)

    expected = w - g * lr
    weight, gradient = on_device(w), on_device(g)
    pointer = weight.data_ptr()
    update(weight, gradient)
    answer: Json = {
        "in_place_same_pointer": weight.data_ptr() == pointer,
        "in_place_values_right": bool(np.allclose(weight.numpy(), expected, rtol=1e-6, atol=1e-6)),
    }
    seen = torch.from_dlpack(weight)  # type: ignore[attr-defined]
    answer["onnxruntime_to_torch_same_pointer"] = seen.data_ptr() == pointer
    answer["onnxruntime_to_torch_same_device"] = seen.device.type == device
    owned = torch.from_numpy(w.copy()).to(device)
    shared = ort.OrtValue.from_dlpack(owned)
    answer["torch_to_onnxruntime_same_pointer"] = shared.data_ptr() == owned.data_ptr()
    answer["torch_to_onnxruntime_same_device"] = shared.device_name() == device
    update(shared, gradient)
    answer["torch_sees_update"] = bool(np.allclose(owned.cpu().numpy(), expected, rtol=1e-6, atol=1e-6))
    return {**answer, "torch": torch.__version__, "session_providers": session.get_providers()}


def work_export(request: Json, folder: Path) -> Json:
    """Step 5: both graphs of a PyTorch model."""
    from scripts.gpu_checks import eager

    return eager.export_and_plan(request["name"], request["small"], folder)


def work_eager(request: Json, folder: Path) -> Json:
    """Step 5: the same model in PyTorch."""
    from scripts.gpu_checks import eager

    return eager.measure_eager(request["name"], request["small"], request["device"])


def work_rules(request: Json, folder: Path) -> Json:
    """Step 7: every gradient case, without TF32."""
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    provider = request["provider"]
    load_libraries(provider)
    from scripts.gpu_checks import rules

    providers = [provider] if provider == CPU else [provider, CPU]
    placement = rules.check_placement(provider, folder, request["seconds"] / 4)
    seconds = SMOKE_RULES_SECONDS if request["smoke"] else request["seconds"] * 3 / 4
    return {**rules.check_rules(providers, seconds), "placement": placement}


def load_libraries(provider: str) -> Json:
    """Loads CUDA and cuDNN into this process, and reports the successful way.

    `preload_dlls` searches next to onnxruntime. If onnxruntime and the nvidia packages are in different
    places, it receives the folders of the packages. The last resort is torch, which loads its own libraries.
    """
    ort = runtime_ort.load_onnxruntime()
    if provider != CUDA:
        return {"found_by": "none needed"}
    messages = io.StringIO()
    tried: Json = {}
    for name, load in (
        ("preload_dlls", getattr(ort, "preload_dlls", lambda: None)),
        ("preload_dlls with folders", lambda: _preload_from_packages(ort)),
        ("torch", lambda: importlib.import_module("torch")),
    ):
        with contextlib.redirect_stdout(messages):
            load()
        tried[name] = _loaded_libraries()
        if len(tried[name]) == len(CUDA_LIBRARIES):
            return {"found_by": name, "loaded": tried, "messages": messages.getvalue().splitlines()}
    return {"found_by": "nothing found all", "loaded": tried, "messages": messages.getvalue().splitlines()}


def session_on(model: Any, request: Json, folder: Path) -> Any:
    """A profiled session of `make_session` on the requested provider.

    Raises:
        CheckError: the session fell back to another provider.
    """
    provider = request["provider"]
    settings = SessionSettings(
        bool(request.get("file_order", True)),
        request["threads"],
        (CUDA, CPU) if provider == CUDA else (CPU,),
    )
    with mock.patch.dict(runtime_ort._CUDA_OPTIONS, request.get("cuda_options", {})):
        session = make_session(model, settings=settings, profile_prefix=str(folder / "profile"))
    if session.get_providers()[0] != provider:
        raise CheckError(f"the session has {', '.join(session.get_providers())} instead of {provider}")
    return session


def _preload_from_packages(ort: Any) -> None:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for folder in sorted(Path(root).glob("*/lib")):
            holds_cudnn = folder.parent.name == "cudnn"
            ort.preload_dlls(cuda=not holds_cudnn, cudnn=holds_cudnn, directory=str(folder))


def _loaded_libraries() -> list[str]:
    mapped = Path("/proc/self/maps").read_text() if sys.platform == "linux" else ""
    return [name for name in CUDA_LIBRARIES if f"/{name}.so" in mapped]


def _free_device_bytes(provider: str) -> int | None:
    """Free memory of the card, or None without one."""
    if provider != CUDA:
        return None
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        with contextlib.suppress(OSError, AttributeError):
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            if ctypes.CDLL(name).cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0:
                return free.value
    import torch

    return int(torch.cuda.mem_get_info()[0])


def _arena_on_device(ort: Any, session: Any, binding: Any, provider: str) -> Json:
    """Bytes that the arena releases when it shrinks: its reserve, without code and handles.

    Chunks with outputs of the last run are not released.
    """
    before = _free_device_bytes(provider)
    if before is None:
        return {}
    try:
        options = ort.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "gpu:0")
        _run_bound(session, binding, device_of(provider), options)
        after = _free_device_bytes(provider)
        return {"shrunk_bytes": (after or 0) - before}
    except Exception as error:
        return {"error": error_line(error)}


def _run_bound(session: Any, binding: Any, device: str, options: Any = None) -> float:
    """Seconds of one run. Outputs of the last run are released first, else gradients would be live twice."""
    binding.clear_binding_outputs()
    for output in session.get_outputs():
        binding.bind_output(output.name, device, 0)
    started = time.perf_counter()
    session.run_with_iobinding(binding, options)
    binding.synchronize_outputs()
    return time.perf_counter() - started


WORK: Mapping[str, Callable[[Json, Path], Json]] = {
    "export": work_export,
    "eager": work_eager,
    "rules": work_rules,
    "load": work_load,
    "run": work_run,
    "exchange": work_exchange,
}
