"""One network in files of several frameworks: what is matched, how often wrongly, and plans carried over."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx

from onnxgc.api.network_pairs import CLOSE, Network, carried_over, counterparts_of, planned_network
from onnxgc.api.pipeline import ReadOptions, plan_traced_again
from onnxgc.errors import ShapeError
from onnxgc.matching.match import Reason, match
from onnxgc.solvers.base import SolverOptions
from scripts.benchmarking.records import Progress, read_record
from scripts.benchmarking.tables import markdown_table, where
from scripts.exports import compare_twins, twin_variants
from scripts.exports.twins import BATCH, PIXELS

NETWORKS = ("resnet50", "mobilenet_v2", "encoder")
# So many that activations, not the parameters' gradients, make the peak.
PLANNED_BATCH = 32


@dataclass(frozen=True, slots=True)
class Options:
    """`batch` is that of the plans, `time_limit` the seconds of each search."""

    folder: Path
    only: tuple[str, ...] = ()
    batch: int = PLANNED_BATCH
    time_limit: float = 10.0


def run_twins(options: Options, progress: Progress) -> dict[str, Any]:
    """The figures of all networks of which the folder has exports."""
    files = sorted(path.stem for path in options.folder.glob("*-*.onnx"))
    networks = {
        name: _network(name, options, progress)
        for name in options.only or NETWORKS
        if any(file.startswith(f"{name}-") for file in files)
    }
    return {"batch": BATCH, "planned_batch": options.batch, "pixels": PIXELS, "networks": networks}


def _network(name: str, options: Options, progress: Progress) -> dict[str, Any]:
    chosen = [
        (freeze_bn, paths)
        for freeze_bn, paths in compare_twins.comparisons(options.folder)
        if paths[0].stem.startswith(f"{name}-")
    ]
    exports = sorted({path.stem.split("-", 1)[1] for _, paths in chosen for path in paths})
    counts: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for freeze_bn, group in itertools.groupby(chosen, key=lambda item: item[0]):
        pairs = [paths for _, paths in group]
        for paths in pairs:
            progress(f"{paths[0].stem} beside {paths[1].stem}")
            _count(counts, compare_twins.compared(paths, freeze_bn))
        compare_twins.forget()
        found = dict.fromkeys(path for paths in pairs for path in paths)
        networks, refused = _planned(found, freeze_bn, options, progress)
        left_out += refused
        for one, other in itertools.permutations(networks, 2):
            progress(f"the plan of {one.name} in {other.name}")
            rows.append({"training": not freeze_bn, **_carried(one, other)})
    variants: dict[str, Counter[str]] = {"renamed": Counter(), "doubled": Counter()}
    for path in dict.fromkeys(path for _, paths in chosen for path in paths):
        progress(f"{path.stem} renamed, reordered, with a block twice")
        is_kept = any(freeze_bn and path in paths for freeze_bn, paths in chosen)
        for kind, judged in asdict(twin_variants.variants_matched(path, is_kept)).items():
            variants[kind].update(judged)
    return {
        "exports": exports,
        "counts": dict(counts),
        "variants": {kind: dict(found) for kind, found in variants.items()},
        "plans": list(_grouped(rows, exports)),
        "left_out": left_out,
    }


def _count(counts: Counter[str], found: compare_twins.Compared) -> None:
    matching = found.matching
    counts.update(
        pairs=1,
        same=int(matching.is_same_network),
        checkpoints_matched=found.checkpoints[0],
        checkpoints=found.checkpoints[1],
        read_matched=found.read_by_backward[0],
        read=found.read_by_backward[1],
        matches=len(matching.pairs),
        wrong=found.wrong,
        ambiguous=sum(u.reason is Reason.AMBIGUOUS for u in (*matching.unmatched_a, *matching.unmatched_b)),
    )


# -- plans ------------------------------------------------------------------------------------


def _planned(
    paths: Mapping[Path, None], freeze_bn: bool, options: Options, progress: Progress
) -> tuple[list[Network], list[str]]:
    """Each file with its plan at the batch of the plans, and those that cannot be read for it."""
    networks: list[Network] = []
    refused: list[str] = []
    for path in paths:
        progress(f"planning {path.stem}")
        shapes = compare_twins.input_shapes(onnx.load(path, load_external_data=False), options.batch)
        limit = SolverOptions(time_limit_seconds=options.time_limit)
        try:
            networks.append(
                planned_network(path.stem, str(path), ReadOptions(freeze_bn=freeze_bn), shapes, limit)
            )
        except ShapeError:
            refused.append(path.stem.split("-", 1)[1])
    return networks, refused


def _carried(one: Network, other: Network) -> dict[str, Any]:
    """The plan of one file in another: peaks over that of the plan made for it."""
    matching = match(one.model, other.model)
    counterpart = counterparts_of(one, other, matching.of_a)
    carried = carried_over(one, other, counterpart)
    as_it_is, fitted = (
        plan_traced_again(other.model, other.planned.traced, plan, other.planned)
        for plan in (carried.as_it_is, carried.plan)
    )
    own, source = other.planned.profile.peak_bytes, one.planned.profile.peak_bytes
    return {
        "from": one.name.split("-", 1)[1],
        "to": other.name.split("-", 1)[1],
        "lost": len(carried.lost),
        "decided": carried.decided,
        "overruled": carried.overruled,
        "as_it_is": round(as_it_is.profile.peak_bytes / own, 3),
        "fitted": round(fitted.profile.peak_bytes / own, 3),
        "of_source": round(fitted.profile.peak_bytes / source, 3),
        "stores_the_same": not (carried.lost or carried.undecided) and _stored(one) == _stored(other),
    }


def _stored(network: Network) -> int:
    return network.planned.regular_profile.peak_bytes


def _grouped(rows: Sequence[Mapping[str, Any]], exports: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of the same figures as one, with the places of their exports: many files differ in names alone."""
    groups: dict[tuple[Any, ...], list[list[int]]] = defaultdict(list)
    for row in rows:
        figures = tuple((key, value) for key, value in row.items() if key not in ("from", "to"))
        groups[figures].append([exports.index(row["from"]), exports.index(row["to"])])
    for found, pairs in groups.items():
        yield {"pairs": pairs, **dict(found)}


# -- what is printed --------------------------------------------------------------------------

HEADINGS = (
    "network, exports",
    "pairs",
    "checkpoints matched",
    "wrong",
    "renamed: matched",
    "block twice: matched",
    "wrong",
    "plans carried",
    "within 2% as they are",
    "made to fit",
    "median",
    "largest",
)


def table_rows(figures: Mapping[str, Any]) -> list[list[str]]:
    """A row for each network."""
    rows = []
    for name, found in figures["networks"].items():
        counts, variants = found["counts"], found["variants"]
        ratios = _ratios(found, "fitted")
        rows.append(
            [
                f"{name}, {len(found['exports'])}",
                str(counts["pairs"]),
                f"{counts['checkpoints_matched']:,} of {counts['checkpoints']:,}",
                f"{counts['wrong']} of {counts['matches']:,}",
                *(
                    f"{variants[kind]['matched']:,} of {variants[kind]['tensors']:,}"
                    for kind in ("renamed", "doubled")
                ),
                str(variants["renamed"]["wrong"] + variants["doubled"]["wrong"]),
                str(len(ratios)),
                str(sum(ratio <= CLOSE for ratio in _ratios(found, "as_it_is"))),
                str(sum(ratio <= CLOSE for ratio in ratios)),
                f"{sorted(ratios)[len(ratios) // 2]:.3f}" if ratios else "",
                f"{max(ratios):.3f}" if ratios else "",
            ]
        )
    return rows


def holds(figures: Mapping[str, Any]) -> bool:
    """Nothing is matched wrongly, nearly all checkpoints are matched, and carried plans come close."""
    for found in figures["networks"].values():
        counts = found["counts"]
        wrong = counts["wrong"] + sum(variant["wrong"] for variant in found["variants"].values())
        if wrong or counts["checkpoints_matched"] < 0.95 * counts["checkpoints"]:
            return False
        if any(ratio > CLOSE for ratio in _ratios(found, "fitted")):
            return False
    return True


def plans_told(figures: Mapping[str, Any]) -> str:
    """How far carried plans hold as they are, and how much of them had to give way."""
    groups = [group for found in figures["networks"].values() for group in found["plans"]]
    alike = [group["as_it_is"] for group in groups if group["stores_the_same"] for _ in group["pairs"]]
    shares = [(group["overruled"], group["decided"]) for group in groups for _ in group["pairs"]]
    changed = sorted((share for share in shares if share[0]), key=lambda share: share[0] / share[1])
    told = (
        f"Of {len(alike)} plans between files that store the same tensors, "
        f"{sum(ratio <= CLOSE for ratio in alike)} are within 2% as they are. Made to fit, "
        f"{len(shares) - len(changed)} of {len(shares)} plans overrule no decision of the source"
    )
    if not changed:
        return told
    (middle, of_middle), (most, of_most) = changed[len(changed) // 2], changed[-1]
    return f"{told}, the others {middle} of {of_middle} in the median and {most} of {of_most} at most"


def block(folder: Path) -> str:
    """What documents say of the record."""
    record = read_record("twins", folder)
    if record is None:
        return ""
    figures = record["figures"]
    same = sum(found["counts"]["same"] for found in figures["networks"].values())
    pairs = sum(found["counts"]["pairs"] for found in figures["networks"].values())
    text = (
        "**One network from several frameworks**: files of the same weights by PyTorch's two exporters, "
        "Keras, tf2onnx, Paddle and JAX, every two of them compared, with running statistics and in "
        "training. A match is *wrong* where the two tensors' values differ, or, beside a copy of the file "
        "with other names, another order of nodes and maybe a block twice, where it is another tensor. A "
        "*plan carried over* is one file's plan of least peak in another file, at batch "
        f"{figures['planned_batch']}; its simulated peak is divided by that of the plan which was made for "
        "the other file."
    )
    told = f"{same} of {pairs} pairs are called the same network. {plans_told(figures)} ({where(record)})."
    return "\n\n".join((text, markdown_table(HEADINGS, table_rows(figures)), told))


def _ratios(found: Mapping[str, Any], key: str) -> list[float]:
    return [group[key] for group in found["plans"] for _ in group["pairs"]]
