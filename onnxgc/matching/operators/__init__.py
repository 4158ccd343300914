"""How each ONNX operator maps to the normal form."""
