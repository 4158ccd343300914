"""The only place that makes ONNX Runtime sessions."""

from __future__ import annotations

import contextlib
import ctypes.util
import functools
import importlib
import importlib.metadata
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import onnx

from onnxgc.errors import RuntimeUnavailableError
from onnxgc.planning.arena import ArenaSettings

if TYPE_CHECKING:
    import onnxruntime

_BUILDS = ("onnxruntime", "onnxruntime-gpu")
PROVIDERS = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
}
"""What a session is made with, first the one that runs whatever it can."""
_ERRORS_ONLY = 3
_FATAL_ONLY = 4
# The CPU arena of `make_session`. Source: onnxruntime/core/framework/bfc_arena.h, whose defaults these are
# (kMinAllocationSize, DEFAULT_INITIAL_CHUNK_SIZE_BYTES, DEFAULT_MAX_POWER_OF_TWO_EXTEND_BYTES, growth by
# kNextPowerOfTwo), but for the dead bytes, of which the stock arena allows 128 MiB.
ARENA = ArenaSettings(
    granule_bytes=256, first_region_bytes=1 << 20, largest_region_bytes=1 << 30, most_dead_bytes=1 << 16
)


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What a session is made with.

    `file_order` stands for all settings under which a training file runs in its own order and frees
    each tensor at its last use; without it everything is as a stock session has it.
    """

    file_order: bool = True
    threads: int | None = None
    providers: tuple[str, ...] = ("CPUExecutionProvider",)


def load_onnxruntime() -> ModuleType:
    """The onnxruntime module.

    Raises:
        RuntimeUnavailableError: if it is not installed, or if two builds of it are.
    """
    folders = [folder for name in _BUILDS if (folder := _installed_in(name)) is not None]
    if len(folders) > len(set(folders)):
        raise RuntimeUnavailableError(
            f"{' and '.join(_BUILDS)} are both installed in {folders[0]} and overwrite each other; "
            "uninstall both, then install one"
        )
    try:
        onnxruntime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise RuntimeUnavailableError(
            "ONNX Runtime cannot be imported; install onnxgc[cuda] or onnxgc[cpu]"
        ) from error
    return onnxruntime


def _installed_in(distribution: str) -> str | None:
    """The folder of an installed build, or None."""
    try:
        return str(importlib.metadata.distribution(distribution).locate_file(""))
    except importlib.metadata.PackageNotFoundError:
        return None


def default_providers() -> tuple[str, ...]:
    """CUDA where this machine has a driver and the installed build has it, then the CPU."""
    available = load_onnxruntime().get_available_providers()
    if "CUDAExecutionProvider" in available and ctypes.util.find_library("cuda"):
        return PROVIDERS["cuda"]
    return PROVIDERS["cpu"]


def providers_named(name: str | None) -> tuple[str, ...]:
    """The providers of a session by a short name, cpu or cuda; without one as in `default_providers`.

    Raises:
        RuntimeUnavailableError: there is no such provider, or not here.
    """
    if name is None:
        return default_providers()
    if name not in PROVIDERS:
        raise RuntimeUnavailableError(f"unknown provider '{name}' (known: {', '.join(PROVIDERS)})")
    wanted = PROVIDERS[name]
    if wanted[0] not in load_onnxruntime().get_available_providers():
        raise RuntimeUnavailableError(
            f"the installed ONNX Runtime has no {wanted[0]}; install onnxgc[{name}], or take the provider cpu"
        )
    if name != "cpu" and default_providers() != wanted:
        raise RuntimeUnavailableError("this machine has no CUDA driver; take the provider cpu")
    return wanted


def make_session(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    providers: Sequence[str] | None = None,
    threads: int | None = None,
    profile_prefix: str | None = None,
    settings: SessionSettings | None = None,
    is_silent: bool = False,
) -> onnxruntime.InferenceSession:
    """A session that runs a training file in its own order, within the memory it promises.

    Priority order is file order as long as no optimiser replaces a node, and common-subexpression
    elimination would merge recomputed nodes with their originals: so none runs. Memory patterns and
    buffer reuse hold dead buffers back. `settings` takes the place of `providers` and `threads`, and
    may choose stock behaviour for comparison. A silent session tells its errors by exceptions alone.

    Raises:
        RuntimeUnavailableError: see `load_onnxruntime`.
        ValueError: both `settings` and what it takes the place of are given.
    """
    if settings is not None and (providers is not None or threads is not None):
        raise ValueError("settings already hold providers and threads; give one or the other")
    ort = load_onnxruntime()
    chosen = settings or SessionSettings(
        threads=threads, providers=tuple(providers) if providers else default_providers()
    )
    if "CUDAExecutionProvider" in chosen.providers:
        _load_cuda_libraries(ort)
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL_ONLY if is_silent else _ERRORS_ONLY
    if chosen.threads is not None:
        options.intra_op_num_threads = chosen.threads
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile_prefix
    if chosen.file_order:
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_mem_pattern = False
        options.enable_mem_reuse = False
        _register_tight_arena(ort)
        options.add_session_config_entry("session.use_env_allocators", "1")
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    providers_with_options = [_with_options(name, chosen) for name in chosen.providers]
    return ort.InferenceSession(source, options, providers=providers_with_options)


@functools.cache
def _register_tight_arena(ort: ModuleType) -> None:
    """Give the process a CPU arena that splits a chunk rather than lend all of it.

    The stock arena hands out a chunk whole unless it is twice the request, so that a tensor may
    occupy almost two times its size.
    """
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(
        memory, ort.OrtArenaCfg({"max_dead_bytes_per_chunk": ARENA.most_dead_bytes})
    )


@functools.cache
def _load_cuda_libraries(ort: ModuleType) -> None:
    """Load CUDA's libraries where they are Python packages, among which the runtime does not look."""
    with contextlib.redirect_stdout(io.StringIO()):  # It prints what it does not find.
        getattr(ort, "preload_dlls", lambda: None)()


# Convolutions choose an algorithm that takes little workspace, which the promised peak does not hold.
_CUDA_OPTIONS = {
    "arena_extend_strategy": "kSameAsRequested",
    "cudnn_conv_algo_search": "HEURISTIC",
    "cudnn_conv_use_max_workspace": "0",
}


def _with_options(provider: str, settings: SessionSettings) -> str | tuple[str, dict[str, str]]:
    if provider == "CUDAExecutionProvider" and settings.file_order:
        return provider, dict(_CUDA_OPTIONS)
    return provider
