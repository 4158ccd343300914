"""Conversion of a model to the target opset."""
