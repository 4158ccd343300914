"""Every error that onnxgc raises on purpose.

Each message is one line that says what is wrong, where, and what to do about it. The command
line prints it and exits with `exit_code`; anything that is not an `OnnxgcError` is a bug and
keeps its traceback.
"""

from __future__ import annotations


class OnnxgcError(Exception):
    """Base of all errors that a user can cause and mend."""

    exit_code = 2


class ModelFileError(OnnxgcError):
    """The model file is missing, is not ONNX, is truncated or is not valid ONNX."""


class ShapeError(OnnxgcError):
    """A tensor's shape cannot be inferred, or a given shape does not fit the model."""


class UnsupportedOperatorError(OnnxgcError):
    """Operators on the way from a parameter to the loss have no gradient rule."""


class LossError(OnnxgcError):
    """The requested loss does not fit the model's outputs."""


class OptimizerError(OnnxgcError):
    """The optimizer is unknown, or one of its settings does not fit."""


class TrainingError(OnnxgcError):
    """Training cannot go on: data, loss or state are not what the training file takes."""


class NoParametersError(OnnxgcError):
    """No trainable parameter reaches the loss."""


class OutputFileError(OnnxgcError):
    """A result cannot be written where the user asked for it."""


class PlanError(OnnxgcError):
    """A checkpoint is unknown or the plan does not fit the graph."""


class GraphFileError(OnnxgcError):
    """A bare graph file is malformed."""


class ExportError(OnnxgcError):
    """A PyTorch module cannot be written as an ONNX model that trains like it."""


class RuntimeUnavailableError(OnnxgcError):
    """ONNX Runtime or PyTorch is missing, or two builds of the former break each other."""


class RuntimeFailedError(OnnxgcError):
    """ONNX Runtime refuses a file, or stops while it runs it."""


class DurationError(OnnxgcError):
    """A device is unknown, or a calibration cannot be read."""


class VerificationError(OnnxgcError):
    """A check that the training file promised does not hold."""

    exit_code = 1


class BudgetFormError(OnnxgcError):
    """A memory budget is not written as one."""


class BudgetError(OnnxgcError):
    """No plan fits the memory budget."""

    exit_code = 3
