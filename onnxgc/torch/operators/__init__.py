"""ONNX operators as functions on torch tensors; `registry` is the table of all."""
