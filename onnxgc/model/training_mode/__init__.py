"""From an inference graph to one that behaves as in training and has a loss."""
