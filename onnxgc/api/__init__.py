"""Functions for the command line and other programs."""

from onnxgc.api.bare_graphs import GraphSolution, solve
from onnxgc.api.benchmarking import Benchmark, bench
from onnxgc.api.comparison import compare
from onnxgc.api.inspection import Inspection, inspect
from onnxgc.api.largest_size import LargestSize, largest_size
from onnxgc.api.pipeline import OptimizeResult, optimize
from onnxgc.api.plan_table import Comparison
from onnxgc.api.planned_step import PlannedStep, emit, store_all_schedule
from onnxgc.api.step_planning import plan_step
from onnxgc.api.verification import Verification, verify
from onnxgc.api.verification_checks import Check

__all__ = [
    "Benchmark",
    "Check",
    "Comparison",
    "GraphSolution",
    "Inspection",
    "LargestSize",
    "OptimizeResult",
    "PlannedStep",
    "Verification",
    "bench",
    "compare",
    "emit",
    "inspect",
    "largest_size",
    "optimize",
    "plan_step",
    "solve",
    "store_all_schedule",
    "verify",
]
