"""Running and measuring training files on ONNX Runtime."""

from onnxgc.runtime.ort import SessionSettings, make_session

__all__ = ["SessionSettings", "make_session"]
