"""Creates ONNX Runtime sessions; the only module that does."""

from __future__ import annotations

import contextlib
import ctypes
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
from onnxgc.runtime.graph_capture import check_capturable

if TYPE_CHECKING:
    import onnxruntime

_BUILDS = ("onnxruntime", "onnxruntime-gpu")
PROVIDERS = {"cpu": ("CPUExecutionProvider",), "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider")}
"""Execution providers of a session, preferred first."""
_ERRORS_ONLY = 3
_FATAL_ONLY = 4
MAX_DEAD_BYTES = 1 << 16
"""Unused bytes of a chunk of the CPU arena, at most; the stock arena allows 128 MiB."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Settings of a session.

    `file_order` sets all options under which a training file runs in the order of its nodes and each tensor
    is released after its last use; without it a session has ONNX Runtime's default options. With
    `cuda_graph`, the first run with an IO binding captures its kernels, and later ones replay them.
    """

    file_order: bool = True
    threads: int | None = None
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    cuda_graph: bool = False


def load_onnxruntime() -> ModuleType:
    """The onnxruntime module.

    Raises:
        RuntimeUnavailableError: it is not installed, or two builds are.
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
        raise RuntimeUnavailableError("ONNX Runtime cannot be imported; install onnxgc[cuda] or onnxgc[cpu]") from error
    return onnxruntime


def _installed_in(distribution: str) -> str | None:
    """The folder of an installed build, or None."""
    try:
        return str(importlib.metadata.distribution(distribution).locate_file(""))
    except importlib.metadata.PackageNotFoundError:
        return None


def default_providers() -> tuple[str, ...]:
    """CUDA if this machine has a driver and the installed build supports it, then the CPU."""
    if _has_cuda_driver() and "CUDAExecutionProvider" in load_onnxruntime().get_available_providers():
        return PROVIDERS["cuda"]
    return PROVIDERS["cpu"]


@functools.cache
def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    return True


def providers_named(name: str | None) -> tuple[str, ...]:
    """The providers of a session by short name, cpu or cuda; `default_providers` without one.

    Raises:
        RuntimeUnavailableError: the provider is unknown or not available here.
    """
    if name is None:
        return default_providers()
    if name not in PROVIDERS:
        raise RuntimeUnavailableError(f"unknown provider '{name}' (known: {', '.join(PROVIDERS)})")
    wanted = PROVIDERS[name]
    if wanted[0] not in load_onnxruntime().get_available_providers():
        raise RuntimeUnavailableError(
            f"the installed ONNX Runtime has no {wanted[0]}; install onnxgc[{name}] or choose provider cpu"
        )
    if name != "cpu" and default_providers() != wanted:
        raise RuntimeUnavailableError("this machine has no CUDA driver; choose the provider cpu")
    return wanted


def provider_of_forms(name: str | None) -> str:
    """The provider for which a training file is written: `name`, by default cuda where available.

    Raises:
        RuntimeUnavailableError: the provider is unknown; it need not be available here.
    """
    if name is None:
        return "cuda" if default_providers() == PROVIDERS["cuda"] else "cpu"
    if name not in PROVIDERS:
        raise RuntimeUnavailableError(f"unknown provider '{name}' (known: {', '.join(PROVIDERS)})")
    return name


def make_session(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    providers: Sequence[str] | None = None,
    threads: int | None = None,
    cuda_graph: bool = False,
    profile_prefix: str | None = None,
    settings: SessionSettings | None = None,
    is_silent: bool = False,
) -> onnxruntime.InferenceSession:
    """Creates a session that runs a training file in the order of its nodes, within its simulated peak.

    Graph optimisations are off: common-subexpression elimination would merge recomputed nodes with their
    originals, and priority order equals file order only while no node is replaced. Memory patterns and
    buffer reuse are off, since they keep dead buffers. `settings` replaces `providers`, `threads` and
    `cuda_graph`, and may choose default behaviour for comparison. A silent session reports errors by
    exceptions only.

    With `cuda_graph`, the first run captures the kernels as a CUDA graph, which later runs replay: use one IO
    binding, whose inputs and outputs keep their addresses. The first run executes the step more than once,
    so that values which it replaces in place must be restored after it.

    Raises:
        RuntimeUnavailableError: see `load_onnxruntime`; or the model cannot run as a CUDA graph.
        ValueError: `settings` is combined with `providers`, `threads` or `cuda_graph`.
    """
    if settings is not None and (providers is not None or threads is not None or cuda_graph):
        raise ValueError("settings already hold providers, threads and cuda_graph; give one or the other")
    ort = load_onnxruntime()
    chosen = settings or SessionSettings(
        threads=threads, providers=tuple(providers) if providers else default_providers(), cuda_graph=cuda_graph
    )
    if chosen.cuda_graph:
        check_capturable(model, chosen.providers)
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
        # For `keeps_file_order`.
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    providers_with_options = [_with_options(name, chosen) for name in chosen.providers]
    return ort.InferenceSession(source, options, providers=providers_with_options)


@functools.cache
def _register_tight_arena(ort: ModuleType) -> None:
    """Registers a CPU arena for the process that splits chunks.

    The default arena splits a chunk only if it is at least twice the request, so that a tensor may occupy
    almost twice its size.
    """
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"max_dead_bytes_per_chunk": MAX_DEAD_BYTES}))


@functools.cache
def _load_cuda_libraries(ort: ModuleType) -> None:
    """Loads CUDA's libraries from Python packages, which the runtime does not search."""
    with contextlib.redirect_stdout(io.StringIO()):  # It prints missing libraries.
        getattr(ort, "preload_dlls", lambda: None)()


# Convolutions use algorithms with little workspace, which the simulated peak does not include.
_CUDA_OPTIONS = {
    "arena_extend_strategy": "kSameAsRequested",
    "cudnn_conv_algo_search": "HEURISTIC",
    "cudnn_conv_use_max_workspace": "0",
}


def _with_options(provider: str, settings: SessionSettings) -> str | tuple[str, dict[str, str]]:
    if provider != "CUDAExecutionProvider":
        return provider
    capture = {"enable_cuda_graph": "1"} if settings.cuda_graph else {}
    return provider, {**(_CUDA_OPTIONS if settings.file_order else {}), **capture}
