"""Training on ONNX Runtime: a loop, its state, and the way back to the deployed model."""

from onnxgc.tracing.optimizers import SGD, Adagrad, Adam, AdamW, Lion, ParameterGroup, RMSprop
from onnxgc.training.deployment import export_state
from onnxgc.training.learning_rates import constant, cosine, linear, one_cycle, step, with_warm_up
from onnxgc.training.trainer import Event, StopTraining, Trainer

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Event",
    "Lion",
    "ParameterGroup",
    "RMSprop",
    "StopTraining",
    "Trainer",
    "constant",
    "cosine",
    "export_state",
    "linear",
    "one_cycle",
    "step",
    "with_warm_up",
]
