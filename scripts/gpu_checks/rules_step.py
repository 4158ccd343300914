"""The step of the GPU check that runs every gradient case."""

from __future__ import annotations

from functools import partial

from scripts.gpu_checks.check import Check, Finding
from scripts.gpu_checks.settings import MIN_ROW_SECONDS, Json

SMOKE_SECONDS = 4.0


def rules_step(check: Check) -> Finding:
    """Every gradient case, without TF32 and with it."""
    answers: dict[str, Json] = {}
    check.begin("rules", {"rows": answers})
    for name, tf32, share in (("without TF32", False, 0.6), ("with TF32", True, 1.0)):
        if check.options.smoke and tf32:
            continue
        seconds = SMOKE_SECONDS if check.options.smoke else share * check.seconds_left() - MIN_ROW_SECONDS
        request = {"seconds": seconds, "tf32": tf32}
        check.add_row(answers, name, partial(check.worker, "rules", request, name), _line)
    holds = all(row.get("float32", {"failed": 1})["failed"] == 0 for row in answers.values())
    line = "; ".join(f"{name}: {row.get('error') or _line(row)}" for name, row in answers.items())
    return Finding(holds, line, {"rows": answers})


def _line(row: Json) -> str:
    if "float32" not in row:
        return str(row["status"])
    counts = ", ".join(
        f"{kind} {row[kind]['reached'] - row[kind]['failed']} of {row[kind]['reached']} correct "
        f"({row[kind]['cases']} cases)"
        for kind in ("float32", "float16", "bfloat16")
    )
    return f"{counts}; elsewhere {', '.join(row['placement']['elsewhere']) or 'none'}"
