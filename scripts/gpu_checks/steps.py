"""The steps of the GPU check."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from scripts.gpu_checks.check import Check, Finding
from scripts.gpu_checks.export_step import export_step
from scripts.gpu_checks.graph_runs import graph_figures, measure_graph, prepare
from scripts.gpu_checks.peak_step import peak_step
from scripts.gpu_checks.profile_reports import barrier_report, counts_line, fallback_report, order_report
from scripts.gpu_checks.settings import (
    GRAPHS,
    LAST_STEPS_SECONDS,
    MAKE_SESSION,
    MIN_STEP_SECONDS,
    Json,
    error_line,
)

MAX_MATMUL_ERROR = 1e-2


@dataclass(frozen=True, slots=True)
class Step:
    """A step by its number in the documentation of the script."""

    number: int
    name: str
    run: Callable[[Check], Finding]


def run_step(check: Check, step: Step) -> bool:
    """Runs a step, prints its line and records it; `False` if it failed."""
    started = time.perf_counter()
    entry: Json = {"name": step.name}
    if check.seconds_left() < MIN_STEP_SECONDS:
        entry.update(status="not reached", line="no time left")
    else:
        try:
            finding = step.run(check)
            status = "held" if finding.holds else "not held"
            entry.update(status=status, line=finding.line, **finding.details)
        except Exception as error:
            entry.update(status="error", line=error_line(error), error=error_line(error))
    entry["seconds"] = time.perf_counter() - started
    check.record["steps"][str(step.number)] = entry
    took = f"{entry['seconds']:.1f} s"
    print(f"{step.number} {step.name}: {entry['status']}: {entry['line']} [{took}]", flush=True)
    check.write()
    return entry["status"] in ("held", "not reached")


def runtime_step(check: Check) -> Finding:
    answer = check.worker_with_session("load")
    matmul = answer["matmul"]
    holds = matmul["provider"] == check.options.provider and matmul["largest_error"] < MAX_MATMUL_ERROR
    line = (
        f"onnxruntime {answer['onnxruntime']}, libraries by {answer['libraries']['found_by']}, "
        f"MatMul on {matmul['provider']}, error {matmul['largest_error']:.1e}"
    )
    return Finding(holds, line, answer)


def fallback_step(check: Check) -> Finding:
    """Operators off the card; the step reports them and never fails."""
    network, provider = check.first_network(), check.options.provider
    reports = {graph: fallback_report(check.measured(network, graph).steady, provider) for graph in GRAPHS}
    planned = reports["planned"]
    line = (
        f"{network.name} planned: {planned['nodes']} nodes, "
        f"compute elsewhere {counts_line(planned['compute_elsewhere'])}, "
        f"shape arithmetic elsewhere {counts_line(planned['shape_arithmetic_elsewhere'])}, "
        f"copies {counts_line(planned['copies'])}, of data {counts_line(planned['copies_of_data'])}"
    )
    return Finding(True, line, {"network": network.name, **reports})


def order_step(check: Check) -> Finding:
    network = check.first_network()
    reports: dict[str, Json] = {}
    for graph in GRAPHS:
        model, events = check.prepared(network).models[graph], check.measured(network, graph).steady
        reports[graph] = {**order_report(model, events), "barriers": barrier_report(model, events)}
    planned = reports["planned"]
    barriers = planned["barriers"]
    copies = sum(barriers["copies_beside"].values())
    line = (
        f"{network.name} planned: {planned['executed']} nodes, late {planned['late']['count']}, "
        f"lost {planned['lost_recomputed']['count']} of {planned['recomputed']} recomputed, "
        f"unknown {planned['unknown']['count']}; {barriers['executed']} barrier nodes take "
        f"{barriers['host_time_share']:.1%} of host time, with {copies} adjacent copies"
    )
    holds = all(report["equals_schedule"] for report in reports.values())
    return Finding(holds, line, {"network": network.name, **reports})


def exchange_step(check: Check) -> Finding:
    answer = check.worker_with_session("exchange")
    facts = {name: value for name, value in answer.items() if isinstance(value, bool)}
    line = ", ".join(f"{name.replace('_', ' ')} {'yes' if holds else 'NO'}" for name, holds in facts.items())
    return Finding(all(facts.values()), line, answer)


def forms_step(check: Check) -> Finding:
    """The first network with other forms of the weight gradients of convolutions."""
    from scripts.gpu_checks.forms import VARIANTS, forms_of

    network, provider = check.first_network(), check.options.provider
    rows: dict[str, Mapping[str, Json]] = {}
    lines = []
    # The last variant has the forms for CUDA.
    for variant in list(VARIANTS)[-1:] if check.options.smoke else VARIANTS:
        if check.seconds_left() < LAST_STEPS_SECONDS:
            break
        folder = check.folder / f"forms-{variant.replace(' ', '-')}"
        with forms_of(variant):
            prepared = prepare(network, folder, "cuda" if variant == "cuda" else "cpu")
        row: dict[str, Json] = {"nodes": {graph: len(prepared.models[graph].graph.node) for graph in GRAPHS}}
        for graph in GRAPHS:
            measured = measure_graph(prepared, graph, MAKE_SESSION, check.options, check.seconds_left())
            figures = graph_figures(prepared, measured, graph, provider)
            kept = ("simulated_peak_bytes", "measured_peak_bytes", "step_seconds")
            row[graph] = {key: figures[key] for key in kept}
        rows[variant] = row
        lines.append(f"{variant} {', '.join(_form_line(graph, row[graph]) for graph in GRAPHS)}")
        print(f"    {lines[-1]}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    return Finding(bool(rows), "; ".join(lines), {"network": network.name, "variants": rows})


def _form_line(graph: str, figures: Json) -> str:
    measured, simulated = (figures[f"{kind}_peak_bytes"] / 1e6 for kind in ("measured", "simulated"))
    return f"{graph} {min(figures['step_seconds']) * 1e3:.1f} ms {measured:.0f} of {simulated:.0f} MB"


def rules_step(check: Check) -> Finding:
    """Every gradient case on the card."""
    seconds = check.seconds_left() - MIN_STEP_SECONDS
    request = {"provider": check.options.provider, "seconds": seconds, "smoke": check.options.smoke}
    answer = check.worker("rules", request, check.folder / "rules")
    line = ", ".join(
        f"{kind} {answer[kind]['reached'] - answer[kind]['failed']} of {answer[kind]['reached']} correct "
        f"({answer[kind]['cases']} cases)"
        for kind in ("float32", "float16", "bfloat16")
    )
    elsewhere = ", ".join(answer["placement"]["elsewhere"]) or "none"
    return Finding(not answer["float32"]["failed"], f"{line}; elsewhere {elsewhere}", answer)


STEPS = (
    Step(1, "runtime", runtime_step),
    Step(2, "fallback", fallback_step),
    Step(3, "order", order_step),
    Step(4, "peak", peak_step),
    Step(5, "exports", export_step),
    Step(6, "exchange", exchange_step),
    Step(8, "forms", forms_step),
    Step(7, "rules", rules_step),
)
"""The longest step is last."""
