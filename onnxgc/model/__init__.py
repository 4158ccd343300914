"""From an ONNX file to a `TrainableModel`: weights lifted, shapes known, loss attached."""
