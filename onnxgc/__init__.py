"""onnxgc: optimal gradient checkpoints for ONNX models."""

__version__ = "0.1.0"
