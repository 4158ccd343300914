"""onnxgc: optimal gradient checkpoints for ONNX models."""

__version__ = "0.1.0"

from onnxgc.api import bench, compare, inspect, largest_size, optimize, solve, verify
from onnxgc.errors import OnnxgcError

__all__ = ["OnnxgcError", "__version__", "bench", "compare", "inspect", "largest_size", "optimize", "solve", "verify"]
