"""What training files make a GPU do, in the forms for CPUs and for CUDA: no GPU is needed.

Times are expectations of the cost model in `onnxgc.tracing.card_costs`. The model is checked against the
steps that `scripts/gpu_check.py` recorded on an H200.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxgc.api import PlannedStep, plan_step
from onnxgc.api.card import step_costs
from onnxgc.model.read import read_model
from onnxgc.tracing.devices import device
from scripts.benchmarking.cuda_results import networks_in_forms, step_seconds
from scripts.benchmarking.records import MODELS, Progress, Record, read_records
from scripts.benchmarking.table1 import paper_networks
from scripts.benchmarking.tables import markdown_table, megabytes
from scripts.gpu_checks.settings import TABLE1_NETWORKS

DEVICE = "h200"
NETWORKS = {network.name: network.shape for network in TABLE1_NETWORKS[:5]}
EXPORTS = ("vit_b_16", "bert", "gpt2")
PLANS = {"baseline": "store-all", "planned": "peak"}
PROVIDERS = ("cpu", "cuda")
_FIGURES = ("nodes", "kernels", "moved_bytes", "slow_bytes", "seconds")
_HEADINGS = (
    "network, plan", "nodes: CPU forms", "CUDA forms", "kernels", "", "traffic, GB", "",
    "slow reductions, GB", "", "expected ms", "", "peak, MB", "",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    only: tuple[str, ...] = ()


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """Figures by network, plan and provider; without packages for an export, its network is omitted."""
    networks: dict[str, Any] = {}
    for name in options.only or (*NETWORKS, *EXPORTS):
        progress(name)
        with tempfile.TemporaryDirectory() as folder:
            try:
                networks[name] = _planned(*_source(name, Path(folder)), _step_figures)
            except ImportError as error:
                progress(f"{name}: not measured, {error}")
    return {
        "device": DEVICE,
        "networks": networks,
        "deviations": _deviations(networks),
        "table1_peaks": {} if options.only else _table1_peaks(progress),
    }


def failures(figures: Any) -> list[str]:
    return []


def _source(name: str, folder: Path) -> tuple[Path, Mapping[str, tuple[int, ...]] | None]:
    """A model's file, and the shapes of its inputs if they are not the file's."""
    if name in NETWORKS:
        return MODELS / f"{name}.onnx", {"x": NETWORKS[name]}
    from scripts.exports.torch_export import export_model

    path = folder / "model.onnx"
    export_model(name, path, small=False)
    return path, None


def _planned(
    path: Path, shapes: Mapping[str, tuple[int, ...]] | None, figures: Callable[[PlannedStep], Any]
) -> dict[str, Any]:
    """Figures of steps by plan and provider."""
    models = {provider: read_model(path, input_shapes=shapes, provider=provider) for provider in PROVIDERS}
    return {
        plan: {provider: figures(plan_step(model, solver)) for provider, model in models.items()}
        for plan, solver in PLANS.items()
    }


def _step_figures(planned: PlannedStep) -> dict[str, Any]:
    total = step_costs(planned.step, planned.schedule, device(DEVICE), has_barriers=False)[-1]
    return {name: getattr(total, name) for name in _FIGURES} | {"peak_bytes": planned.profile.peak_bytes}


def _table1_peaks(progress: Progress) -> dict[str, Any]:
    """Simulated peaks of the networks of the paper's Table 1, by plan and provider."""
    found = {}
    for name, (batch, pixels) in paper_networks().items():
        progress(f"{name}, peaks")
        shapes = {"x": (batch, *pixels)}
        found[name] = _planned(MODELS / f"{name}.onnx", shapes, lambda planned: planned.profile.peak_bytes)
    return found


def _deviations(networks: Mapping[str, Any]) -> dict[str, float]:
    """Expected over recorded time of the H200's steps, by network and plan, minus one."""
    found = {}
    for record in read_records("gpu"):
        if "H200" in str(record["card"]):
            for name, row in networks_in_forms(record, "cpu").items():
                for plan, graph in (("baseline", "regular"), ("planned", "planned")):
                    if name in networks:
                        measured = step_seconds(row[graph])
                        expected = networks[name][plan]["cpu"]["seconds"]
                        found[f"{name}, {plan}"] = expected / measured - 1
    return found


def _table(figures: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, plans in figures["networks"].items():
        for plan, rows in plans.items():
            pairs = [
                (f"{rows[p]['nodes']:,}", f"{rows[p]['kernels']:,}", f"{rows[p]['moved_bytes'] / 1e9:.1f}",
                 f"{rows[p]['slow_bytes'] / 1e9:.1f}", f"{1e3 * rows[p]['seconds']:.1f}",
                 megabytes(rows[p]["peak_bytes"]))
                for p in PROVIDERS
            ]  # fmt: skip
            yield f"{name}, {plan}", *(cell for both in zip(*pairs, strict=True) for cell in both)


def results_section(record: Record) -> str:
    figures = record["figures"]
    largest = max(map(abs, figures["deviations"].values()), default=0.0)
    table = markdown_table(_HEADINGS, list(_table(figures)))
    return (
        "**Forms for CUDA, expected.** No card was used: nodes, kernels and bytes are counted, and times are "
        f"those of a cost model of the {device(figures['device']).name} with two fitted parameters. It is "
        f"within {math.ceil(100 * largest)}% of the {len(figures['deviations'])} steps recorded above, which have the "
        f"forms for CPUs. {_peaks_line(figures['table1_peaks'])}Files without barriers:\n\n{table}"
    )


def expected_line(record: Record) -> str:
    """A line of README.md: the first network's baseline in both forms."""
    (name, shape), *_ = NETWORKS.items()
    figures = record["figures"]
    if name not in figures["networks"]:
        return ""
    rows = figures["networks"][name]["baseline"]
    cpu, cuda = (f"{1e3 * rows[provider]['seconds']:.0f}" for provider in PROVIDERS)
    return (
        f"- {name} at batch {shape[0]}, expected of an {figures['device'].upper()} by a cost model, not measured: "
        f"{cuda} ms a step with gradients in the forms for CUDA, {cpu} in those for CPUs."
    )


def _peaks_line(peaks: Mapping[str, Any]) -> str:
    ratios = [row[plan]["cuda"] / row[plan]["cpu"] for row in peaks.values() for plan in PLANS]
    if not ratios:
        return ""
    return (
        f"On the {len(peaks)} networks of the paper's Table 1, simulated peaks of baselines and plans are "
        f"{min(ratios):.2f} to {max(ratios):.3f} times those of the forms for CPUs. "
    )
