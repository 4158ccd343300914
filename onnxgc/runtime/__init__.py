"""Running and measuring training files on ONNX Runtime."""

from onnxgc.runtime.execution import ExecutionCheck, check_execution, run_and_check
from onnxgc.runtime.ort import SessionSettings, make_session

__all__ = ["ExecutionCheck", "SessionSettings", "check_execution", "make_session", "run_and_check"]
