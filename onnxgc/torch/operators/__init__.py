"""ONNX operators as functions on torch tensors; `registry` maps names to functions."""
