"""Every gradient case on a provider, in float32 and in both half precisions, against torch float64."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from onnxgc.gradients.registry import RULES
from scripts.gpu_checks.settings import CPU, Json
from tests.gradients.gradient_case import Case, errors
from tests.gradients.gradient_cases import CASES, cases_of
from tests.gradients.half_precision import computed_in_bfloat16, computed_in_float16, is_in_one_type

# Kernels of a card add in another order than the CPU's, and some approximate.
FLOAT32_TOLERANCE, TF32_TOLERANCE = 1e-4, 2e-2
SMOKE_SECONDS = 4.0
_HALF_CASES_OF_A_RULE = 2
_FAILURES_SHOWN = 40


def work_rules(request: Json, folder: Path) -> Json:
    """All cases in the forms for CUDA, for the requested time."""
    if not request["tf32"]:
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    provider, seconds = request["provider"], request["seconds"]
    providers = [provider] if provider == CPU else [provider, CPU]
    tolerance = TF32_TOLERANCE if request["tf32"] else FLOAT32_TOLERANCE
    found = check_rules(providers, min(seconds, SMOKE_SECONDS) if request["smoke"] else seconds, tolerance)
    return {"status": "not held" if found["float32"]["failed"] else "held", **found}


def check_rules(providers: Sequence[str], seconds: float, tolerance: float) -> Json:
    """Numbers of cases and failures by type, for cases reached within `seconds`."""
    end = time.perf_counter() + seconds
    kinds: dict[str, list[tuple[Case, float]]] = {
        "float32": [(case, max(case.tolerance, tolerance)) for case in CASES],
        "float16": [(case, case.tolerance) for case in _half_cases(computed_in_float16)],
        "bfloat16": [(case, case.tolerance) for case in _half_cases(computed_in_bfloat16)],
    }
    return {kind: _checked(cases, providers, end) for kind, cases in kinds.items()}


def _half_cases(change: Callable[[Case], Case]) -> Iterator[Case]:
    for rule in RULES:
        yield from map(change, [c for c in cases_of(rule) if is_in_one_type(c)][:_HALF_CASES_OF_A_RULE])


def _checked(cases: Sequence[tuple[Case, float]], providers: Sequence[str], end: float) -> Json:
    failed: dict[str, str] = {}
    reached = 0
    for case, tolerance in cases:
        if time.perf_counter() > end:
            break
        reached += 1
        try:
            found = errors(case, providers=providers, forms="cuda")
        except Exception as error:
            # A provider may lack a kernel, or a kernel may reject its inputs.
            failed[str(case)] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        wrong = {name: error for name, error in found.items() if not error <= tolerance}
        if wrong:
            failed[str(case)] = ", ".join(f"{name} {error:.1e}" for name, error in wrong.items())
    return {
        "cases": len(cases),
        "reached": reached,
        "failed": len(failed),
        "failures": dict(list(failed.items())[:_FAILURES_SHOWN]),
    }
