"""Running and measuring training files on ONNX Runtime."""
