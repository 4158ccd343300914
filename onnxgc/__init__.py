"""onnxgc: optimal gradient checkpoints for ONNX models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnxgc.errors import OnnxgcError

if TYPE_CHECKING:
    from onnxgc.api import bench, compare, inspect, optimize, solve, verify
    from onnxgc.api.largest_size import largest_size as largest_size

__version__ = "0.1.0"
__all__ = ["OnnxgcError", "__version__", "bench", "compare", "inspect", "largest_size", "optimize", "solve", "verify"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that the command starts at once and can be interrupted.
    if name in __all__:
        return getattr(import_module("onnxgc.api"), name)
    raise AttributeError(f"module 'onnxgc' has no attribute '{name}'")
