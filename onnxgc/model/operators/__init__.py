"""Facts about ONNX operators, one record an operator, one module a family; `registry` has all of them."""
