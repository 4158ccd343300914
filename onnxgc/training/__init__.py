"""Training on ONNX Runtime: a loop, its state, and the way back to the deployed model."""

from onnxgc.tracing.optimizers import SGD, AdamW, ParameterGroup
from onnxgc.training.deployment import export_state
from onnxgc.training.learning_rates import constant, cosine, step, with_warm_up
from onnxgc.training.trainer import Event, StopTraining, Trainer

__all__ = [
    "SGD",
    "AdamW",
    "Event",
    "ParameterGroup",
    "StopTraining",
    "Trainer",
    "constant",
    "cosine",
    "export_state",
    "step",
    "with_warm_up",
]
