"""Steps that run training files: peaks and times of the baseline and of plans, in several settings."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from scripts.gpu_checks.check import Check, Finding
from scripts.gpu_checks.graph_runs import Measured, distance, distance_of
from scripts.gpu_checks.profile_reports import counts_line, fallback_report
from scripts.gpu_checks.settings import CPU, MAKE_SESSION, OTHER_SETTINGS, Json, Network, Setting
from scripts.gpu_checks.training_files import BASELINE, GRAPHS, PLANNED, Recipe, recipes
from scripts.gpu_checks.worker_process import load_arrays

MAX_DISTANCE = 1e-3
"""Of gradients of a CUDA graph from those without one, relative by norm."""


def peak_step(check: Check) -> Finding:
    """Measured and simulated peaks of the paper's networks, in the forms for CUDA."""
    return _networks(check, "peak", map(Recipe, check.options.paper_networks))


def forms_step(check: Check) -> Finding:
    """The same in the forms for CPUs."""
    return _networks(check, "forms", (Recipe(network, "cpu") for network in check.options.paper_networks))


def table1_step(check: Check) -> Finding:
    """The other networks of the paper's Table 1."""
    done = check.options.paper_networks
    others = [network for network in check.options.table1_networks if network not in done]
    return _networks(check, "table1", map(Recipe, others))


def settings_step(check: Check) -> Finding:
    """The first network with other settings of sessions."""
    recipe = Recipe(check.options.paper_networks[0])
    settings = [one for one in OTHER_SETTINGS if not (check.options.smoke and one.cuda_options)]
    rows: dict[str, Json] = {}
    check.begin("settings", {"settings": rows})
    for setting in settings:
        check.add_row(rows, setting.name, functools.partial(_row, check, recipe, setting), _line)
    return _finding(rows, "settings", may_be_above=True)


def graph_step(check: Check) -> Finding:
    """The first network as a CUDA graph, beside the same session without one."""
    recipe = Recipe(check.options.paper_networks[0])
    rows: dict[str, Json] = {}
    check.begin("graph", {"rows": rows})
    for graph in GRAPHS:
        check.add_row(rows, graph, functools.partial(_graph_row, check, recipe, graph), _graph_line)
    failed = [f"{name}: {row['error']}" for name, row in rows.items() if row["status"] == "error"]
    holds = not failed and all(row["status"] in ("held", "not on this provider") for row in rows.values())
    return Finding(holds, "; ".join([f"{len(rows)} files", *failed]), {"rows": rows})


def budgets_step(check: Check) -> Finding:
    """Measured peaks of plans within budgets."""
    rows: dict[str, Json] = {}
    check.begin("budgets", {"networks": rows})
    for recipe in recipes("training", check.options.smoke):
        if recipe.budgets:
            for graph in recipe.graphs:
                row = functools.partial(_budget_row, check, recipe, graph)
                check.add_row(rows, f"{recipe.source.name}, {graph}", row, _run_line)
    return _finding(rows, "networks")


def half_step(check: Check) -> Finding:
    """A convolutional network in float16 and a transformer in bfloat16, with weights in float32."""
    rows: dict[str, Json] = {}
    check.begin("half", {"networks": rows})
    for recipe in recipes("training", check.options.smoke):
        if recipe.compute_type != "float32":
            for graph in GRAPHS:
                row = functools.partial(_half_row, check, recipe, graph)
                check.add_row(rows, f"{recipe.name}, {graph}", row, _run_line)
    return _finding(rows, "networks")


def _networks(check: Check, step: str, networks: Iterable[Recipe]) -> Finding:
    rows: dict[str, Json] = {}
    check.begin(step, {"networks": rows})
    for recipe in networks:
        check.add_row(rows, recipe.source.name, functools.partial(_row, check, recipe), _line)
        if recipe.source != check.options.paper_networks[0]:
            check.forget(recipe)
    return _finding(rows, "networks")


def _finding(rows: Json, key: str, may_be_above: bool = False) -> Finding:
    reached = [row for row in rows.values() if row["status"] != "not reached"]
    good = ("held", "not on this provider", *(("not held",) if may_be_above else ()))
    holds = bool(reached or not rows) and all(row["status"] in good for row in reached)
    failed = [f"{name}: {row['error']}" for name, row in rows.items() if row["status"] == "error"]
    held = sum(row["status"] == "held" for row in reached)
    return Finding(holds, "; ".join([f"{held} of {len(rows)} held", *failed]), {key: rows})


def _row(check: Check, recipe: Recipe, setting: Setting = MAKE_SESSION) -> Json:
    """Both graphs of a network; holds if the plan's peak is below the baseline's."""
    measured = {graph: check.measured(recipe, graph, setting) for graph in GRAPHS}
    regular, planned = (measured[graph].figures for graph in GRAPHS)
    assert isinstance(recipe.source, Network)
    shape = list(recipe.source.shape)
    row: Json = {"shape": shape, "setting": setting.name, "forms": recipe.forms}
    row |= {BASELINE: regular, PLANNED: planned}
    row["simulated_ratio"] = planned["simulated_peak_bytes"] / regular["simulated_peak_bytes"]
    row["measured_ratio"] = planned["measured_peak_bytes"] / max(regular["measured_peak_bytes"], 1)
    row["time_ratio"] = planned["median_seconds"] / regular["median_seconds"]
    row["distance"] = distance(measured[BASELINE], measured[PLANNED])
    is_smaller = row["measured_ratio"] < 1 and row["simulated_ratio"] < 1
    return {**row, "status": "held" if is_smaller and row["distance"]["loss_is_finite"] else "not held"}


def _graph_row(check: Check, recipe: Recipe, graph: str) -> Json:
    """Times and outputs of a session with fixed addresses, with and without a CUDA graph."""
    request = check.run_request(recipe, graph)
    runs: Json = {}
    for name, has_graph in (("bound", False), ("cuda_graph", True)):
        if has_graph and check.options.provider == CPU:
            return {**runs, "status": "not on this provider"}
        runs[name] = check.worker("fixed", {**request, "cuda_graph": has_graph}, f"fixed-{graph}-{name}")
    names = runs["bound"].pop("outputs"), runs["cuda_graph"].pop("outputs")
    outputs = [
        load_arrays(check.folder / f"fixed-{graph}-{run}" / "outputs.npz", listed)
        for run, listed in zip(runs, names, strict=True)
    ]
    far = distance_of(outputs[0], outputs[1], check.files(recipe).loss)
    is_equal = far["loss_is_finite"] and far["not_finite"] == 0 and (far["largest"] or 0.0) < MAX_DISTANCE
    return {**runs, "distance": far, "status": "held" if is_equal else "not held"}


def _budget_row(check: Check, recipe: Recipe, graph: str) -> Json:
    """Holds if the simulated peak is within the budget, and the measured one below the baseline's."""
    figures = check.measured(recipe, graph).figures
    regular = check.measured(recipe, BASELINE).figures
    share = figures["simulated_peak_bytes"] / regular["simulated_peak_bytes"]
    limit = float(graph.rstrip("%")) / 100 if graph.endswith("%") else 1.0
    is_below = graph == BASELINE or figures["measured_peak_bytes"] < regular["measured_peak_bytes"]
    time_ratio = figures["median_seconds"] / regular["median_seconds"]
    status = "held" if share <= limit and is_below else "not held"
    return {**figures, "simulated_share": share, "time_ratio": time_ratio, "status": status}


def _half_row(check: Check, recipe: Recipe, graph: str) -> Json:
    """Holds if the loss is finite; on a CPU, ONNX Runtime lacks kernels for bfloat16."""
    if check.options.provider == CPU and recipe.compute_type == "bfloat16":
        return {"status": "not on this provider"}
    measured = check.measured(recipe, graph)
    loss = _loss(measured)
    placement = fallback_report(measured.steady, check.options.provider)
    row = {**measured.figures, "loss_value": loss, "fallback": placement}
    return {**row, "status": "not held" if loss is None else "held"}


def _loss(measured: Measured) -> float | None:
    loss = float(load_arrays(measured.outputs, measured.names)[measured.files.loss])
    return loss if abs(loss) < float("inf") else None


def _line(row: Json) -> str:
    parts = [f"{graph} {_figures_line(row[graph])}" for graph in GRAPHS]
    far = row["distance"]
    loss, largest = ("none" if far[key] is None else f"{far[key]:.1e}" for key in ("loss", "largest"))
    parts.append(f"distance of the loss {loss}, of gradients at most {largest}")
    return "; ".join([*parts, f"{far['bit_equal']} of {far['outputs']} outputs bit-identical"])


def _run_line(row: Json) -> str:
    if "median_seconds" not in row:
        return str(row["status"])
    line = _figures_line(row)
    if "fallback" in row:
        line += f", compute elsewhere {counts_line(row['fallback']['compute_elsewhere'])}"
    return line


def _graph_line(row: Json) -> str:
    times = [
        f"{name} {1e3 * row[name]['median_seconds']:.1f} ms"
        for name in ("bound", "cuda_graph")
        if name in row
    ]
    return ", ".join([*times, row["status"]])


def _figures_line(figures: Json) -> str:
    measured, simulated = (figures[f"{kind}_peak_bytes"] / 1e6 for kind in ("measured", "simulated"))
    order = "" if figures["equals_schedule"] else ", not in order"
    return f"{1e3 * figures['median_seconds']:.1f} ms, {measured:.0f} MB (simulated {simulated:.0f}){order}"
