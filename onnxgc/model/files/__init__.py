"""Reading ONNX files, and writing forward and evaluation files."""
