"""The groups of the GPU check, each one command, and their steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from scripts.gpu_checks.check import Check, Finding
from scripts.gpu_checks.kernels import kernels_step
from scripts.gpu_checks.optimizer_step import optimizer_step
from scripts.gpu_checks.peak_steps import (
    budgets_step,
    forms_step,
    graph_step,
    half_step,
    peak_step,
    settings_step,
    table1_step,
)
from scripts.gpu_checks.races import reductions_step, weights_step
from scripts.gpu_checks.rules_step import rules_step
from scripts.gpu_checks.runtime_steps import exchange_step, fallback_step, order_step, runtime_step
from scripts.gpu_checks.settings import MIN_ROW_SECONDS, Json, error_line
from scripts.gpu_checks.torch_steps import modules_step, torch_step, transformers_step


@dataclass(frozen=True, slots=True)
class Step:
    """A step with its share of the group's time, relative to the other steps'.

    Time that a step leaves goes to the later ones.
    """

    name: str
    run: Callable[[Check], Finding]
    share: float


_RUNTIME = Step("runtime", runtime_step, 1)
GROUPS: Mapping[str, tuple[Step, ...]] = {
    "kernels": (
        _RUNTIME,
        Step("kernels", kernels_step, 6),
        Step("reductions", reductions_step, 3),
        Step("weights", weights_step, 8),
    ),
    "torch": (_RUNTIME, Step("torch", torch_step, 12)),
    "steps": (
        _RUNTIME,
        Step("fallback", fallback_step, 2),
        Step("order", order_step, 1),
        Step("peak", peak_step, 5),
        Step("forms", forms_step, 5),
        Step("graph", graph_step, 3),
        Step("settings", settings_step, 2),
        Step("exchange", exchange_step, 1),
        Step("table1", table1_step, 8),
    ),
    "transformers": (
        _RUNTIME,
        Step("modules", modules_step, 8),
        Step("transformers", transformers_step, 8),
    ),
    "training": (
        _RUNTIME,
        Step("optimizer", optimizer_step, 2),
        Step("budgets", budgets_step, 3),
        Step("half", half_step, 3),
        Step("rules", rules_step, 5),
    ),
}


def run_group(check: Check, name: str) -> bool:
    """Runs the steps of a group, or those that the user chose; `False` if one failed."""
    only = check.options.only
    steps = [step for step in GROUPS[name] if not only or step.name in only]
    passed = True
    for index, step in enumerate(steps):
        check.open_step(step.share / sum(later.share for later in steps[index:]))
        passed = run_step(check, step) and passed
    return passed


def run_step(check: Check, step: Step) -> bool:
    """Runs a step, prints its line and records it; `False` if it failed."""
    started = time.perf_counter()
    entry: Json = {}
    if check.seconds_left() < MIN_ROW_SECONDS:
        entry.update(status="not reached", line="no time left")
    else:
        try:
            finding = step.run(check)
            status = "held" if finding.holds else "not held"
            entry.update(status=status, line=finding.line, **finding.details)
        except Exception as error:
            entry.update(status="error", line=error_line(error), error=error_line(error))
    entry["seconds"] = time.perf_counter() - started
    check.steps[step.name] = entry
    print(f"{step.name}: {entry['status']}: {entry['line']} [{entry['seconds']:.1f} s]", flush=True)
    check.write()
    return entry["status"] in ("held", "not reached")
