"""What the command line and other programs call."""

from onnxgc.api.benchmarking import Benchmark, bench
from onnxgc.api.comparison import Comparison, compare
from onnxgc.api.inspection import Inspection, inspect
from onnxgc.api.pipeline import (
    OptimizeResult,
    PlannedStep,
    emit,
    optimize,
    plan_step,
    store_all_schedule,
)
from onnxgc.api.solving import solve_graph
from onnxgc.api.verification import Check, Verification, verify

__all__ = [
    "Benchmark",
    "Check",
    "Comparison",
    "Inspection",
    "OptimizeResult",
    "PlannedStep",
    "Verification",
    "bench",
    "compare",
    "emit",
    "inspect",
    "optimize",
    "plan_step",
    "solve_graph",
    "store_all_schedule",
    "verify",
]
