"""One network in files of several frameworks: matches, wrong matches, and transferred plans."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx

from onnxgc.api.network_pairs import counterparts_of
from onnxgc.api.plan_transfer import CLOSE_FACTOR, Network, planned_network, transfer_between
from onnxgc.api.read_options import ReadOptions
from onnxgc.api.step_planning import traced_step_with_plan
from onnxgc.errors import ShapeError
from onnxgc.matching.match import match
from onnxgc.solvers.base import SolverOptions
from scripts.benchmarking.records import Progress, Record
from scripts.benchmarking.tables import machine_of, markdown_table
from scripts.exports import compare_twins, twin_variants
from scripts.exports.twins import BATCH, PIXELS

NETWORKS = ("resnet50", "mobilenet_v2", "encoder")
# Large enough that activations, not parameters' gradients, determine the peak.
PLANNED_BATCH = 32
MIN_MATCHED_SHARE = 0.95
HEADINGS = (
    "network, exports", "pairs", "checkpoints matched", "wrong", "renamed: matched", "doubled block: matched",
    "wrong", "transferred plans", "within 2% unadapted", "adapted", "median", "largest",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """`batch` is the batch of the plans; `time_limit` is in seconds for each search."""

    folder: Path
    only: tuple[str, ...] = ()
    batch: int = PLANNED_BATCH
    time_limit: float = 10.0
    threads: int = 1


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """The figures of all networks whose exports are in the folder."""
    files = sorted(path.stem for path in options.folder.glob("*-*.onnx"))
    networks = {
        name: _network(name, options, progress)
        for name in options.only or NETWORKS
        if any(file.startswith(f"{name}-") for file in files)
    }
    return {"batch": BATCH, "planned_batch": options.batch, "pixels": PIXELS, "networks": networks}


def failures(figures: Mapping[str, Any]) -> list[str]:
    """Wrong matches, networks with unmatched checkpoints, and adapted plans that are not close."""
    failed = []
    for name, found in figures["networks"].items():
        counts = found["counts"]
        if counts["wrong"] + sum(variant["wrong"] for variant in found["variants"].values()):
            failed.append(f"{name}: a match is wrong")
        if counts["checkpoints_matched"] < MIN_MATCHED_SHARE * counts["checkpoints"]:
            failed.append(f"{name}: less than {MIN_MATCHED_SHARE:.0%} of checkpoints are matched")
        if max(_ratios(found, "fitted"), default=0.0) > CLOSE_FACTOR:
            failed.append(f"{name}: an adapted plan is above {CLOSE_FACTOR} of the file's own")
    return failed


def table_rows(figures: Mapping[str, Any]) -> list[list[str]]:
    """A row for each network."""
    rows = []
    for name, found in figures["networks"].items():
        counts, variants = found["counts"], found["variants"]
        ratios = _ratios(found, "fitted")
        rows.append(
            [
                f"{name}, {found['exports']}",
                str(counts["pairs"]),
                f"{counts['checkpoints_matched']:,} of {counts['checkpoints']:,}",
                f"{counts['wrong']} of {counts['matches']:,}",
                *(f"{variants[kind]['matched']:,} of {variants[kind]['tensors']:,}" for kind in ("renamed", "doubled")),
                str(variants["renamed"]["wrong"] + variants["doubled"]["wrong"]),
                str(len(ratios)),
                str(_count_close(_ratios(found, "as_it_is"))),
                str(_count_close(ratios)),
                f"{sorted(ratios)[len(ratios) // 2]:.3f}" if ratios else "",
                f"{max(ratios):.3f}" if ratios else "",
            ]
        )
    return rows


def transfer_summary(figures: Mapping[str, Any]) -> str:
    """The quality of transferred plans without adaptation, and the extent of the adaptation."""
    groups = [group for found in figures["networks"].values() for group in found["plans"]]
    equal = [group["as_it_is"] for group in groups if group["stores_the_same"] for _ in range(group["plans"])]
    shares = [(group["overruled"], group["decided"]) for group in groups for _ in range(group["plans"])]
    changed = sorted((share for share in shares if share[0]), key=lambda share: share[0] / share[1])
    text = (
        f"Of {len(equal)} plans between files with the same activations in the baseline, "
        f"{_count_close(equal)} are within 2% without adaptation. Adaptation overrules no decision of the "
        f"source in {len(shares) - len(changed)} of {len(shares)} plans"
    )
    if not changed:
        return text
    (middle, of_middle), (most, of_most) = changed[len(changed) // 2], changed[-1]
    return f"{text}; in the others it overrules {middle} of {of_middle} in the median and at most {most} of {of_most}"


def results_section(record: Record) -> str:
    figures = record["figures"]
    same = sum(found["counts"]["same"] for found in figures["networks"].values())
    pairs = sum(found["counts"]["pairs"] for found in figures["networks"].values())
    text = (
        "**One network from several frameworks**: files with the same weights by PyTorch's two exporters, "
        "Keras, tf2onnx, Paddle and JAX. All pairs are compared, with fixed running statistics and in "
        "training. A match is *wrong* if the values of the two tensors differ, or, in a comparison with a "
        "renamed and reordered copy of the file (in part with a doubled block), if it is another tensor. A "
        "*transferred plan* is one file's plan with the least peak, applied to another file at batch "
        f"{figures['planned_batch']}. Its simulated peak is relative to the peak of the other file's own "
        "plan; *adapted* plans are changed to suit that file."
    )
    summary = (
        f"{same} of {pairs} pairs are reported as the same network. {transfer_summary(figures)} ({machine_of(record)})."
    )
    return "\n\n".join((text, markdown_table(HEADINGS, table_rows(figures)), summary))


def _network(name: str, options: Options, progress: Progress) -> dict[str, Any]:
    chosen = [
        (freeze_bn, paths)
        for freeze_bn, paths in compare_twins.comparable_pairs(options.folder)
        if paths[0].stem.startswith(f"{name}-")
    ]
    counts: Counter[str] = Counter()
    rows: list[tuple[tuple[str, Any], ...]] = []
    for freeze_bn, group in itertools.groupby(chosen, key=lambda item: item[0]):
        pairs = [paths for _, paths in group]
        for paths in pairs:
            progress(f"{paths[0].stem} and {paths[1].stem}")
            _count(counts, compare_twins.compare_pair(paths, freeze_bn))
        compare_twins.clear_caches()
        files = dict.fromkeys(path for paths in pairs for path in paths)
        networks = list(_planned(files, freeze_bn, options, progress))
        for one, other in itertools.permutations(networks, 2):
            progress(f"the plan of {one.name} in {other.name}")
            rows.append(tuple(_transferred(one, other).items()))
    return {
        "exports": len({path for _, paths in chosen for path in paths}),
        "counts": dict(counts),
        "variants": _variants(chosen, progress),
        # Equal figures in one row.
        "plans": [{"plans": count, **dict(figures)} for figures, count in Counter(rows).items()],
    }


def _variants(chosen: Sequence[tuple[bool, tuple[Path, Path]]], progress: Progress) -> dict[str, Any]:
    """Matches of each file with its variants."""
    variants: dict[str, Counter[str]] = {"renamed": Counter(), "doubled": Counter()}
    for path in dict.fromkeys(path for _, paths in chosen for path in paths):
        progress(f"{path.stem} renamed, reordered, with a doubled block")
        is_frozen = any(freeze_bn and path in paths for freeze_bn, paths in chosen)
        for kind, found in asdict(twin_variants.match_variants(path, is_frozen)).items():
            variants[kind].update(found)
    return {kind: dict(found) for kind, found in variants.items()}


def _count(counts: Counter[str], found: compare_twins.TwinComparison) -> None:
    matching = found.matching
    counts.update(
        pairs=1,
        same=int(matching.is_same_network),
        checkpoints_matched=found.checkpoints[0],
        checkpoints=found.checkpoints[1],
        matches=len(matching.pairs),
        wrong=found.wrong,
    )


def _planned(paths: Iterable[Path], freeze_bn: bool, options: Options, progress: Progress) -> Iterator[Network]:
    """Each file with its plan, without exports that cannot be read at the batch of the plans."""
    for path in paths:
        progress(f"planning {path.stem}")
        shapes = compare_twins.input_shapes(onnx.load(path, load_external_data=False), options.batch)
        limit = SolverOptions(time_limit_seconds=options.time_limit)
        with suppress(ShapeError):
            yield planned_network(path.stem, str(path), ReadOptions(freeze_bn=freeze_bn), shapes, limit)


def _transferred(one: Network, other: Network) -> dict[str, Any]:
    """The plan of one file in another: its peaks, relative to the peak of the other file's own plan."""
    matching = match(one.model, other.model)
    found = transfer_between(one, other, counterparts_of(one, other, matching.of_a))
    unadapted, adapted = (
        traced_step_with_plan(other.model, other.planned.traced, plan, other.planned)
        for plan in (found.unadapted, found.plan)
    )
    own = other.planned.profile.peak_bytes
    return {
        "decided": found.decided,
        "overruled": found.overruled,
        "as_it_is": round(unadapted.profile.peak_bytes / own, 3),
        "fitted": round(adapted.profile.peak_bytes / own, 3),
        "stores_the_same": not (found.lost or found.undecided) and _baseline_bytes(one) == _baseline_bytes(other),
    }


def _baseline_bytes(network: Network) -> int:
    return network.planned.regular_profile.peak_bytes


def _ratios(found: Mapping[str, Any], key: str) -> list[float]:
    return [group[key] for group in found["plans"] for _ in range(group["plans"])]


def _count_close(ratios: Iterable[float]) -> int:
    return sum(ratio <= CLOSE_FACTOR for ratio in ratios)
