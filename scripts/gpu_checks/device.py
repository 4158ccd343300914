"""Sessions on the device, and its free memory, in a worker process."""

import contextlib
import ctypes
from pathlib import Path
from typing import Any

from onnxgc.runtime.ort import SessionSettings, make_session
from scripts.gpu_checks.settings import CPU, CUDA, CheckError, Json


def settings_of(request: Json) -> SessionSettings:
    """Settings of sessions on the requested provider."""
    providers = (CUDA, CPU) if request["provider"] == CUDA else (CPU,)
    return SessionSettings(threads=request["threads"], providers=providers)


def session_on(model: Any, request: Json, profile: Path | None = None, cuda_graph: bool = False) -> Any:
    """A session on the requested provider, with a profile if a prefix is given.

    Raises:
        CheckError: the session fell back to another provider.
    """
    settings, prefix = settings_of(request), None if profile is None else str(profile)
    if cuda_graph:
        options: Json = {"providers": settings.providers, "threads": settings.threads, "cuda_graph": True}
        session = make_session(model, **options)
    else:
        session = make_session(model, settings=settings, profile_prefix=prefix)
    if session.get_providers()[0] != request["provider"]:
        found = ", ".join(session.get_providers())
        raise CheckError(f"the session has {found} instead of {request['provider']}")
    return session


def free_device_bytes(provider: str) -> int:
    """Free memory of the card; 0 without one."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    for name in ("libcudart.so.13", "libcudart.so.12") if provider == CUDA else ():
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(name).cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
            return free.value
    return 0
