"""Every gradient case on a provider, in float32 and in both half precisions, against torch float64."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from onnxgc.gradients.registry import RULES
from onnxgc.runtime.ort import make_session
from scripts.gpu_checks.device import load_libraries
from scripts.gpu_checks.profile_reports import node_events
from scripts.gpu_checks.settings import CPU, Json
from tests.gradients.gradient_case import Case, emitted, errors, feeds_of
from tests.gradients.gradient_cases import CASES, cases_of
from tests.gradients.half_precision import computed_in_bfloat16, computed_in_float16, is_in_one_type

# Kernels of a card add in another order than the CPU's, and some approximate.
FLOAT32_TOLERANCE, TF32_TOLERANCE = 1e-4, 2e-2
_HALF_CASES_OF_A_RULE = 2
_FAILURES_SHOWN = 40
_RULES_SHOWN = 5


def work_rules(request: Json, folder: Path) -> Json:
    """All cases in the forms for CUDA, for the requested time."""
    if not request["tf32"]:
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    provider, seconds = request["provider"], request["seconds"]
    load_libraries(provider)
    placement = check_placement(provider, folder, seconds / 4)
    providers = [provider] if provider == CPU else [provider, CPU]
    tolerance = TF32_TOLERANCE if request["tf32"] else FLOAT32_TOLERANCE
    return {**check_rules(providers, seconds * 3 / 4, tolerance), "placement": placement}


def check_rules(providers: Sequence[str], seconds: float, tolerance: float) -> Json:
    """Numbers of cases and failures by type, for cases reached within `seconds`."""
    end = time.perf_counter() + seconds
    kinds: dict[str, list[tuple[Case, float]]] = {
        "float32": [(case, max(case.tolerance, tolerance)) for case in CASES],
        "float16": [(case, case.tolerance) for case in _half_cases(computed_in_float16)],
        "bfloat16": [(case, case.tolerance) for case in _half_cases(computed_in_bfloat16)],
    }
    return {kind: _checked(cases, providers, end) for kind, cases in kinds.items()}


def check_placement(provider: str, folder: Path, seconds: float) -> Json:
    """Operators that run elsewhere than on `provider` in the first case of each rule."""
    end = time.perf_counter() + seconds
    elsewhere: dict[str, list[str]] = {}
    for rule in RULES:
        if time.perf_counter() > end:
            break
        try:
            names = _operators_elsewhere(cases_of(rule)[0], provider, folder)
        except Exception:
            # `check_rules` reports the failure.
            continue
        for name in names:
            elsewhere.setdefault(name, []).append(rule)
    return {"elsewhere": {name: rules[:_RULES_SHOWN] for name, rules in sorted(elsewhere.items())}}


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


def _operators_elsewhere(case: Case, provider: str, folder: Path) -> set[str]:
    step, graph = emitted(case, "cuda")
    session = make_session(
        graph.model,
        providers=list(dict.fromkeys([provider, CPU])),
        profile_prefix=str(folder / "placement"),
    )
    feeds, _ = feeds_of(case, step)
    session.run(None, feeds)
    (events,) = node_events(Path(session.end_profiling()))
    return {event.operator for event in events if event.provider != provider and not event.is_copy}
