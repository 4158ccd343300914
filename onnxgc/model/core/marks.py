"""Marks on nodes that an export writes for modules in evaluation mode and for stopped gradients."""

from __future__ import annotations

# Marks a BatchNormalization in evaluation mode, through all conversions.
EVALUATED = "__evaluated"
# Marks an Identity that no gradient passes, a detach() of PyTorch.
STOPPED = "__stopped"
# The key of either mark among the metadata of a node in a file.
MARK = "onnxgc.mark"
MARKS = frozenset([EVALUATED, STOPPED])
