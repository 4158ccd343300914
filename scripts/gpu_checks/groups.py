"""The groups of the GPU check, each one command, and the rows of their steps."""

from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np

from scripts.gpu_checks.check import Check, Jobs, Step
from scripts.gpu_checks.graph_runs import distance
from scripts.gpu_checks.settings import (
    CPU,
    LAYERS,
    REDUCED_SHAPES,
    SMOKE_LAYERS,
    SMOKE_REDUCED_SHAPES,
    Json,
    Network,
    Sequences,
)
from scripts.gpu_checks.training_files import BASELINE, GRAPHS, PLANNED, Recipe, recipes
from scripts.gpu_checks.worker_process import load_arrays

MAX_DISTANCE = 1e-3
"""Of gradients of a CUDA graph from those without one, relative by norm."""
WAYS = ("eager", "channels_last", "channels_last amp", "checkpointed")
FIRST_WAYS = ("compiled", "compiled cuda_graph", "from_onnx")
"""Of the first network only."""
MODULE_WAYS = (
    "eager", "checkpointed", "planned=80%", "planned=60%", "planned=40%", "planned=min", "compiled",
    "compiled activation_memory_budget=0.5", "compiled planned=60%",
)  # fmt: skip
# Compilation needs a compiler and minutes on a CPU.
_NOT_IN_SMOKE = ("compiled", "80%", "40%", "min")


def _single(name: str, check: Check) -> Jobs:
    return {name: partial(check.worker, name, {})}


# -- runs of training files --------------------------------------------------------------------------


def _kernels(check: Check) -> Jobs:
    """Baselines in the forms for CUDA; the first network also planned, and in the forms for CPUs."""
    first, *others = check.options.paper_networks
    files = [(Recipe(first), BASELINE), (Recipe(first, "cpu"), BASELINE)]
    files += [(Recipe(network), BASELINE) for network in others] + [(Recipe(first), PLANNED)]
    return {f"{recipe.name} {graph}": partial(_profiled, check, recipe, graph) for recipe, graph in files}


def _profiled(check: Check, recipe: Recipe, graph: str) -> Json:
    return check.worker("kernels", check.run_request(recipe, graph), f"kernels-{recipe.name}-{graph}")


def _reports(name: str, check: Check) -> Jobs:
    """A report on each run of the first network; that on fallbacks never fails."""
    return {graph: partial(_report, name, check, graph) for graph in GRAPHS}


def _report(name: str, check: Check, graph: str) -> Json:
    found: Json = getattr(check.measured(Recipe(check.options.paper_networks[0]), graph), name)
    return {**_status(found.get("equals_schedule", True)), **found}


def _peak(check: Check) -> Jobs:
    return _compared(check, map(Recipe, check.options.paper_networks))


def _forms(check: Check) -> Jobs:
    return _compared(check, (Recipe(network, "cpu") for network in check.options.paper_networks))


def _table1(check: Check) -> Jobs:
    """The networks of the paper's Table 1 that `peak` omits."""
    done = check.options.paper_networks
    return _compared(check, (Recipe(one) for one in check.options.table1_networks if one not in done))


def _compared(check: Check, chosen: Iterable[Recipe]) -> Jobs:
    return {recipe.source.name: partial(_both_graphs, check, recipe) for recipe in chosen}


def _both_graphs(check: Check, recipe: Recipe) -> Json:
    """Peaks and times of a network; holds if the plan's peak is below the baseline's."""
    runs = [check.measured(recipe, graph) for graph in GRAPHS]
    regular, planned = (run.figures for run in runs)
    far = distance(*(run.outputs() for run in runs), loss=runs[0].loss)
    ratios = {
        f"{kind}_ratio": planned[f"{kind}_peak_bytes"] / max(regular[f"{kind}_peak_bytes"], 1)
        for kind in ("simulated", "measured")
    }
    assert isinstance(recipe.source, Network)
    return {
        **_status(max(ratios.values()) < 1 and far["loss_is_finite"]),
        "shape": list(recipe.source.shape),
        "forms": recipe.forms,
        BASELINE: regular,
        PLANNED: planned,
        **ratios,
        "time_ratio": planned["median_seconds"] / regular["median_seconds"],
        "distance": far,
    }


def _graph(check: Check) -> Jobs:
    """The first network as a CUDA graph, beside the same session without one; graphs allow no barriers."""
    return {graph: partial(_as_graph, check, graph) for graph in GRAPHS}


def _as_graph(check: Check, graph: str) -> Json:
    recipe = Recipe(check.options.paper_networks[0], has_barriers=False)
    request, runs = check.run_request(recipe, graph), dict[str, Json]()
    for name in ("bound", "cuda_graph"):
        if name == "cuda_graph" and check.options.provider == CPU:
            return {**runs, "status": "not available"}
        chosen = {**request, "cuda_graph": name == "cuda_graph"}
        runs[name] = check.worker("fixed", chosen, f"fixed-{graph}-{name}")
    outputs = [
        load_arrays(check.worker_folder(f"fixed-{graph}-{name}") / "outputs.npz", answer.pop("names"))
        for name, answer in runs.items()
    ]
    far = distance(*outputs, loss=check.files(recipe).loss)
    is_equal = far["loss_is_finite"] and not far["not_finite"] and (far["largest"] or 0.0) < MAX_DISTANCE
    return {**_status(is_equal), **runs, "distance": far}


def _budgets(check: Check) -> Jobs:
    return {
        f"{recipe.source.name}, {graph}": partial(_within_budget, check, recipe, graph)
        for recipe in recipes("training", check.options.smoke)
        if recipe.budgets
        for graph in recipe.graphs
    }


def _within_budget(check: Check, recipe: Recipe, graph: str) -> Json:
    """Holds if the simulated peak is within the budget, and the measured one below the baseline's."""
    figures, regular = (check.measured(recipe, name).figures for name in (graph, BASELINE))
    share = figures["simulated_peak_bytes"] / regular["simulated_peak_bytes"]
    limit = float(graph.rstrip("%")) / 100 if graph.endswith("%") else 1.0
    is_below = graph == BASELINE or figures["measured_peak_bytes"] < regular["measured_peak_bytes"]
    time_ratio = figures["median_seconds"] / regular["median_seconds"]
    return {**_status(share <= limit and is_below), **figures, "share": share, "time_ratio": time_ratio}


def _half(check: Check) -> Jobs:
    """A convolutional network in float16 and a transformer in bfloat16, with weights in float32."""
    return {
        f"{recipe.name}, {graph}": partial(_placed_run, check, recipe, graph)
        for recipe in recipes("training", check.options.smoke)
        if recipe.compute_type != "float32"
        for graph in GRAPHS
    }


def _placed_run(check: Check, recipe: Recipe, graph: str) -> Json:
    """Holds if the loss is finite; on a CPU, ONNX Runtime lacks kernels for bfloat16."""
    if check.options.provider == CPU and recipe.compute_type == "bfloat16":
        return {"status": "not available"}
    run = check.measured(recipe, graph)
    loss = float(run.outputs()[run.loss])
    is_finite = bool(np.isfinite(loss))
    found = {"loss_value": loss if is_finite else None, "fallback": run.fallback}
    return {**_status(is_finite), **run.figures, **found}


def _status(holds: bool) -> Json:
    return {"status": "held" if holds else "not held"}


# -- races and PyTorch -------------------------------------------------------------------------------


def _reductions(check: Check) -> Jobs:
    shapes = SMOKE_REDUCED_SHAPES if check.options.smoke else REDUCED_SHAPES
    return {"x".join(map(str, shape)): partial(check.worker, "reductions", {"shape": shape}) for shape in shapes}


def _weights(check: Check) -> Jobs:
    layers = SMOKE_LAYERS if check.options.smoke else LAYERS
    return {layer.name: partial(check.worker, "weights", {"layer": index}) for index, layer in enumerate(layers)}


def _torch(check: Check) -> Jobs:
    """PyTorch on the same card, all networks eager first."""
    networks = check.options.paper_networks
    pairs: list[tuple[Network | Sequences, str]] = [(network, way) for way in WAYS for network in networks]
    return _in_ways(check, [*pairs, *((networks[0], way) for way in FIRST_WAYS)])


def _modules(check: Check) -> Jobs:
    """Planned modules beside eager, per-block checkpointing and PyTorch's own budget."""
    network, sequences = check.options.paper_networks[0], check.options.sequences[0]
    pairs: list[tuple[Network | Sequences, str]] = []
    for way in MODULE_WAYS:
        pairs += [(network, way), (sequences, way)]
    return _in_ways(check, [*pairs, *((network, way) for way in ("from_onnx", "from_onnx planned=60%"))])


def _in_ways(check: Check, pairs: Iterable[tuple[Network | Sequences, str]]) -> Jobs:
    return {
        f"{network.name}, {way}": partial(check.worker, "torch", {"network": network.name, "way": way})
        for network, way in pairs
        if not (check.options.smoke and any(word in way for word in _NOT_IN_SMOKE))
    }


def _transformers(check: Check) -> Jobs:
    """ONNX Runtime against PyTorch with its fused attention, and the longest kernels."""
    jobs = dict(_in_ways(check, []))
    for sequences in check.options.sequences:
        recipe = Recipe(sequences)
        jobs |= _in_ways(check, [(sequences, way) for way in ("eager", "amp", "checkpointed")])
        for graph in GRAPHS:
            jobs[f"{sequences.name}, {graph}"] = partial(_placed_run, check, recipe, graph)
        jobs[f"{sequences.name}, kernels"] = partial(_profiled, check, recipe, BASELINE)
    return jobs


def _rules(check: Check) -> Jobs:
    """Every gradient case; half of the time without TF32."""
    kinds = {"without TF32": (False, 0.5), "with TF32": (True, 1.0)}
    return {
        name: partial(check.worker, "rules", {"tf32": tf32}, name, share)
        for name, (tf32, share) in kinds.items()
        if not (tf32 and check.options.smoke)
    }


_RUNTIME = Step("runtime", partial(_single, "load"), 1)
GROUPS: Mapping[str, tuple[Step, ...]] = {
    "kernels": (
        _RUNTIME,
        Step("kernels", _kernels, 6),
        Step("reductions", _reductions, 3),
        Step("weights", _weights, 8),
    ),
    "torch": (_RUNTIME, Step("torch", _torch, 12)),
    "steps": (
        _RUNTIME,
        Step("fallback", partial(_reports, "fallback"), 2),
        Step("order", partial(_reports, "order"), 1),
        Step("peak", _peak, 5),
        Step("forms", _forms, 5),
        Step("graph", _graph, 3),
        Step("exchange", partial(_single, "exchange"), 1),
        Step("table1", _table1, 8),
    ),
    "transformers": (_RUNTIME, Step("modules", _modules, 8), Step("transformers", _transformers, 8)),
    "training": (
        _RUNTIME,
        Step("optimizer", partial(_single, "optimizer"), 2),
        Step("budgets", _budgets, 3),
        Step("half", _half, 3),
        Step("rules", _rules, 5),
    ),
}
