"""Errors that users can correct.

Each message is one line that states what is wrong, where, and what to do. The command line prints it and
exits with `exit_code`; any other exception is a bug and keeps its traceback.
"""


class OnnxgcError(Exception):
    """Base of all errors that users can correct."""

    exit_code = 2


class ModelFileError(OnnxgcError):
    """The model file is missing, is not ONNX, is truncated or is not valid ONNX."""


class ShapeError(OnnxgcError):
    """A tensor's shape cannot be inferred, or a given shape does not fit the model."""


class UnsupportedOperatorError(OnnxgcError):
    """Operators between a parameter and the loss have no gradient rule."""


class LossError(OnnxgcError):
    """The requested loss does not fit the model's outputs."""


class OptimizerError(OnnxgcError):
    """The optimizer is unknown, or one of its settings is invalid."""


class TrainingError(OnnxgcError):
    """Training cannot continue: data, loss or state do not fit the training file."""


class NoParametersError(OnnxgcError):
    """No trainable parameter reaches the loss."""


class OutputFileError(OnnxgcError):
    """A result cannot be written to the requested file."""


class PlanError(OnnxgcError):
    """A checkpoint is unknown or the plan does not fit the graph."""


class GraphFileError(OnnxgcError):
    """A bare graph file is malformed."""


class ExportError(OnnxgcError):
    """A PyTorch module has no ONNX model that trains like it."""


class RuntimeUnavailableError(OnnxgcError):
    """ONNX Runtime or PyTorch is missing, or two builds of ONNX Runtime conflict."""


class RuntimeFailedError(OnnxgcError):
    """ONNX Runtime rejects a file, or fails while running it."""


class DurationError(OnnxgcError):
    """A device is unknown, or a calibration cannot be read."""


class VerificationError(OnnxgcError):
    """A training file fails a check."""

    exit_code = 1


class BudgetFormError(OnnxgcError):
    """A memory budget is not valid."""


class BudgetError(OnnxgcError):
    """No plan fits the memory budget."""

    exit_code = 3
