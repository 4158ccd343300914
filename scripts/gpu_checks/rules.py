"""Every gradient case on a provider, in float32 and in both half precisions, against torch float64."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onnxgc.gradients.registry import RULES
from onnxgc.runtime.ort import make_session
from tests.gradients.gradient_case import Case, emitted, errors, feeds_of
from tests.gradients.gradient_cases import CASES, cases_of
from tests.gradients.half_precision import computed_in_bfloat16, computed_in_float16, is_in_one_type

Json = dict[str, Any]
# Kernels of a card add in other orders than the CPU's, and some approximate.
FLOAT32_TOLERANCE = 1e-4
_HALF_CASES_OF_A_RULE = 2
_SHOWN = 40


def work_rules(providers: Sequence[str], seconds: float) -> Json:
    """Counts and failures by type; what is not reached within `seconds` is counted too."""
    end = time.perf_counter() + seconds
    kinds: dict[str, list[tuple[Case, float]]] = {
        "float32": [(case, max(case.tolerance, FLOAT32_TOLERANCE)) for case in CASES],
        "float16": [(case, case.tolerance) for case in _halves(computed_in_float16)],
        "bfloat16": [(case, case.tolerance) for case in _halves(computed_in_bfloat16)],
    }
    return {kind: _tried(cases, providers, end) for kind, cases in kinds.items()}


def _halves(change: Callable[[Case], Case]) -> Iterator[Case]:
    for rule in RULES:
        yield from map(change, [c for c in cases_of(rule) if is_in_one_type(c)][:_HALF_CASES_OF_A_RULE])


def _tried(cases: Sequence[tuple[Case, float]], providers: Sequence[str], end: float) -> Json:
    failed: dict[str, str] = {}
    reached = 0
    for case, tolerance in cases:
        if time.perf_counter() > end:
            break
        reached += 1
        try:
            found = errors(case, providers=providers)
        except Exception as error:
            # A kernel that is missing or refuses; the other cases are still wanted.
            failed[str(case)] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        wrong = {name: error for name, error in found.items() if not error <= tolerance}
        if wrong:
            failed[str(case)] = ", ".join(f"{name} {error:.1e}" for name, error in wrong.items())
    return {
        "cases": len(cases),
        "reached": reached,
        "failed": len(failed),
        "failures": dict(list(failed.items())[:_SHOWN]),
    }


def work_placement(provider: str, folder: Path, seconds: float) -> Json:
    """Operators of each rule's first case that ran elsewhere than on `provider`."""
    end = time.perf_counter() + seconds
    elsewhere: dict[str, list[str]] = {}
    for rule in RULES:
        if time.perf_counter() > end:
            break
        try:
            names = _elsewhere(cases_of(rule)[0], provider, folder)
        except Exception:
            # The cases themselves tell of it.
            continue
        for name in names:
            elsewhere.setdefault(name, []).append(rule)
    return {"elsewhere": {name: rules[:5] for name, rules in sorted(elsewhere.items())}}


def _elsewhere(case: Case, provider: str, folder: Path) -> list[str]:
    step, graph = emitted(case)
    session = make_session(
        graph.model,
        providers=list(dict.fromkeys([provider, "CPUExecutionProvider"])),
        profile_prefix=str(folder / "placement"),
    )
    feeds, _ = feeds_of(case, step)
    session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [event["args"] for event in events if event.get("name", "").endswith("_kernel_time")]
    return sorted(
        {args["op_name"] for args in ran if args["provider"] != provider and "Memcpy" not in args["op_name"]}
    )
