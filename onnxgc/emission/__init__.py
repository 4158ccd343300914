"""Emission: a schedule as a portable ONNX training graph, and the writing of files."""
