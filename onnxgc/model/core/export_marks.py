"""Marks that an export sets on nodes: modules in evaluation mode, and stopped gradients."""

# A BatchNormalization in evaluation mode. All conversions keep the mark.
EVALUATED = "__evaluated"
# An Identity that stops the gradient: detach() in PyTorch.
STOPPED = "__stopped"
# The key of either mark in a node's metadata.
MARK = "onnxgc.mark"
MARKS = frozenset([EVALUATED, STOPPED])
