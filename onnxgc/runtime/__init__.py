"""Running and measuring training files on ONNX Runtime."""

from typing import Any

from onnxgc.runtime.execution_check import ExecutionCheck, check_execution, run_and_check
from onnxgc.runtime.ort import SessionSettings, make_session

__all__ = ["ExecutionCheck", "SessionSettings", "check_execution", "make_session", "run_and_check"]


def __getattr__(name: str) -> Any:
    """The trainer, which is built on all of this and more, where people look for it."""
    if name == "Trainer":
        from onnxgc.training import Trainer

        return Trainer
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
