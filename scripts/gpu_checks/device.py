"""Libraries, sessions and free memory of the device, in a worker process."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from onnxgc.runtime import ort as runtime_ort
from onnxgc.runtime.ort import SessionSettings, make_session
from scripts.gpu_checks.settings import CPU, CUDA, CheckError, Json

CUDA_LIBRARIES = ("libcudart", "libcublasLt", "libcublas", "libcudnn", "libcufft", "libcurand")


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


def settings_of(request: Json) -> SessionSettings:
    """Settings of sessions on the requested provider."""
    providers = (CUDA, CPU) if request["provider"] == CUDA else (CPU,)
    return SessionSettings(bool(request.get("file_order", True)), request["threads"], providers)


def session_on(model: Any, request: Json, profile: Path | None = None) -> Any:
    """A session of `make_session` on the requested provider, with a profile if a prefix is given.

    Raises:
        CheckError: the session fell back to another provider.
    """
    with mock.patch.dict(runtime_ort._CUDA_OPTIONS, request.get("cuda_options", {})):
        session = make_session(
            model, settings=settings_of(request), profile_prefix=None if profile is None else str(profile)
        )
    return on_provider(session, request["provider"])


def on_provider(session: Any, provider: str) -> Any:
    """The session, unless it fell back to another provider."""
    if session.get_providers()[0] != provider:
        raise CheckError(f"the session has {', '.join(session.get_providers())} instead of {provider}")
    return session


def free_device_bytes(provider: str) -> int | None:
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


def _preload_from_packages(ort: Any) -> None:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for folder in sorted(Path(root).glob("*/lib")):
            holds_cudnn = folder.parent.name == "cudnn"
            ort.preload_dlls(cuda=not holds_cudnn, cudnn=holds_cudnn, directory=str(folder))


def _loaded_libraries() -> list[str]:
    mapped = Path("/proc/self/maps").read_text() if sys.platform == "linux" else ""
    return [name for name in CUDA_LIBRARIES if f"/{name}.so" in mapped]
