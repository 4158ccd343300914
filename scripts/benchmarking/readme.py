"""The parts of README.md and docs/ that are written from recorded figures and from the code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarking import (
    budgets,
    chain_picture,
    growth_picture,
    peaks,
    picture,
    reference,
    summary,
    torch_plans,
    training,
    twins,
)
from scripts.benchmarking.records import BENCHMARKS, ROOT, read_record
from scripts.benchmarking.tables import MEGABYTE, markdown_table, megabytes, where

README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results.md"
REFERENCE = ROOT / "docs" / "reference.md"
PICTURE = ROOT / "docs" / "memory.svg"
GROWTH_PICTURE = ROOT / "docs" / "growth.svg"
CHAIN_PICTURE = ROOT / "docs" / "chain.svg"
MEBIBYTE = 2**20


def render(path: Path, text: str, folder: Path = BENCHMARKS) -> str:
    """The document's `text` with every generated block as it should be now."""
    for name, block in BLOCKS[path].items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{path.name} has no block '{begin}' ... '{end}'")
        text = f"{before}{begin}\n{block(folder)}\n{end}{after}"
    return text


def render_pictures(folder: Path = BENCHMARKS) -> dict[Path, str]:
    """The SVGs, by their places: of a small chain, and of what is recorded."""
    memory, growth = read_record("memory", folder), read_record("growth", folder)
    drawn = {CHAIN_PICTURE: chain_picture.draw()}
    if memory is not None:
        drawn[PICTURE] = picture.draw(memory["figures"])
    if growth is not None:
        drawn[GROWTH_PICTURE] = growth_picture.draw(growth["figures"]["graphs"])
    return drawn


def results(folder: Path) -> str:
    blocks = (
        _resnet50,
        _peaks,
        _budgets,
        _cuda,
        _gradients,
        _step,
        _torch,
        training.block,
        twins.block,
        _light,
        _table1,
        _growth,
        _exactness,
    )
    parts = [part for part in (block(folder) for block in blocks) if part]
    return (
        "\n\n".join(parts)
        or "No figures are recorded yet; `python scripts/benchmark.py resnet50` records them."
    )


def _resnet50(folder: Path) -> str:
    record = read_record("resnet50", folder)
    if record is None:
        return ""
    figures = record["figures"]
    rows = []
    simulated = figures["simulated_peak_bytes"]
    rows.append(_peak_row("simulated", simulated["regular"], simulated["planned"]))
    for settings, label in (("make_session", "`make_session()`"), ("default", "all-default session")):
        measured = figures["measured"][settings]
        for key, what in (("requested_bytes", "requested"), ("in_use_bytes", "in use")):
            row = _peak_row(f"measured, {label}, {what}", measured["regular"][key], measured["planned"][key])
            rows.append(row)
    times = figures["step_seconds"]
    for key in ("minimum", "median"):
        regular, planned, torch = (times[kind][key] for kind in ("regular", "planned", "torch"))
        rows.append(
            [
                f"time of a step, {key} of {times['rounds']} (torch eager: {torch:.2f} s)",
                f"{regular:.2f} s",
                f"{planned:.2f} s",
                f"{planned / regular:.2f}",
            ]
        )
    same, accuracy = figures["identical"], figures["accuracy"]
    torch_version = record["environment"]["versions"]["torch"].partition("+")[0]
    sentences = [
        f"**{figures['network']}, batch {figures['batch']}, {figures['input']}**, one training step "
        f"(peaks in MB of 10^6 bytes, the highest of {figures['memory_runs']} runs, parameters' gradients of "
        f"{megabytes(figures['parameter_gradient_bytes'])} MB included):",
        markdown_table(["", "storing everything", "planned", "planned / storing everything"], rows),
        f"Planned against storing everything: the loss is {'' if same['loss'] else 'NOT '}"
        f"bit-identical, and so are {same['gradients']} of {same['gradients_of']} gradients. Distance of the "
        f"gradients to torch {torch_version} in float64, as a multiple of torch float32's own distance: "
        f"median {accuracy['ratio_median']:.2f}, largest {accuracy['ratio_max']:.2f}. "
        "Time against torch eager (the "
        "same graph by torch's operators and autograd, storing everything): "
        f"{times['regular']['minimum'] / times['torch']['minimum']:.2f} (storing everything) and "
        f"{times['planned']['minimum'] / times['torch']['minimum']:.2f} (planned), by minima. "
        f"{where(record)}.",
    ]
    return "\n\n".join(sentences)


def _peak_row(label: str, regular: int, planned: int) -> list[str]:
    return [label, megabytes(regular), megabytes(planned), f"{planned / regular:.2f}"]


def _peaks(folder: Path) -> str:
    record = read_record("peaks", folder)
    if record is None:
        return ""
    rows = record["figures"]["rows"]
    judge, arena = (max(map(abs, off)) for off in zip(*(peaks.deviations(row) for row in rows), strict=True))
    text = (
        "**Simulated and measured** peaks in MB, parameters' gradients included, of the networks in models/. "
        "*Requested* is what ONNX Runtime's allocator was asked for at once in "
        f"{record['figures']['steps']} steps, and simulated bytes are at most {judge:.2%} off. Bytes in use "
        "are more, since chunks have slack; a model of the runtime's arena, no constant of it fitted, says "
        f"how many, and is at most {arena:.2%} off. A star stands where no plan was found within "
        f"{peaks.BUDGET} of the peak, beside the least one ({where(record)}).\n\n"
    )
    return text + markdown_table(peaks.HEADINGS, peaks.table_rows(rows))


def _budgets(folder: Path) -> str:
    record = read_record("budgets", folder)
    if record is None:
        return ""
    figures = record["figures"]
    timing = next((row["timing"] for row in figures["networks"]), "")
    text = (
        f"**Budgets.** Least extra time under a memory budget, as a share of the step without recomputation "
        f"({timing}); no plan within the budget takes less than the bound. The last two columns are fewer "
        f"images in a budget as much smaller, simulated and measured ({where(record)}).\n\n"
    )
    headings = (
        "network, batch, budget", "storing all, MB", "planned, MB", "extra time, %", "bound, %", "search, s",
        "fewer images, MB", "measured, MB",
    )  # fmt: skip
    text += markdown_table(headings, budgets.table_rows(figures))
    if figures["graphs"]:
        shares = [f"{share:.0%}" for share in budgets.SHARES]
        text += (
            "\n\nPublic problem graphs (operators, order of first runs): extra time in % by budget, "
            f"within {figures['time_limit_seconds']:.0f} s; where it is not proved the least, its bound.\n\n"
        )
        text += markdown_table(("graph", *shares), budgets.graph_rows(figures))
    return text


def _cuda(folder: Path) -> str:
    """One table a card, of what `scripts/gpu_check.py` recorded there."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("gpu/*.json"))]
    return "\n\n".join(_card(record) for record in records if not record["smoke"])


def _card(record: Mapping[str, Any]) -> str:
    rows = []
    for network, row in record["steps"]["4"]["networks"].items():
        if "regular" not in row:
            continue
        regular, planned = row["regular"], row["planned"]
        times = [min(figures["step_seconds"]) * 1e3 for figures in (regular, planned)]
        rows.append(
            [
                f"{network}, {row['shape'][0]}",
                *(
                    megabytes(figures[f"{kind}_peak_bytes"])
                    for figures in (regular, planned)
                    for kind in ("simulated", "measured")
                ),
                f"{row['measured_ratio']:.2f}",
                *(f"{time:.0f}" for time in times),
                f"{times[1] / times[0]:.2f}",
            ]
        )
    headings = (
        "network, batch", "storing everything: simulated", "measured", "planned: simulated", "measured",
        "ratio", "step, ms: storing everything", "planned", "ratio",
    )  # fmt: skip
    versions = record["versions"]
    return (
        f"**On CUDA** ({record['card']}, ONNX Runtime "
        f"{versions['onnxruntime-gpu'] or versions['onnxruntime']}, "
        f"{record['date'][:10]}), one training step in float32, peaks in MB of requested bytes with the "
        "parameters' gradients. Where more is measured than simulated, convolutions took a workspace:\n\n"
        f"{markdown_table(headings, rows)}"
    )


def _gradients(folder: Path) -> str:
    record = read_record("gradients", folder)
    if record is None:
        return ""
    figures = record["figures"]
    rows = []
    for row in figures["rows"]:
        label = f"{row['model']}, {row['export']}"
        if "error" in row:
            rows.append([label, "", "", "", "", row["error"]])
            continue
        rows.append(
            [
                label,
                f"{row['parameters']} of {row['parameters_of']}",
                f"{row['ratio_median']:.2f}",
                f"{row['ratio_max']:.2f}",
                f"{row['planned_of_regular']:.2f}",
                "yes" if row["holds"] else "NO",
            ]
        )
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    return (
        "**Gradients of whole models**, exported from PyTorch in a "
        f"{figures['size']} size and trained for one "
        "step, beside torch float64 of the module itself. *Distance* is that of each parameter's gradient to "
        "float64, as a multiple of torch float32's own; *right* where it is at most 2 and the planned file "
        f"equals the one that stores everything bit for bit ({versions}):\n\n"
        + markdown_table(
            (
                "model, export",
                "parameters",
                "distance: median",
                "largest",
                "planned / storing everything",
                "right",
            ),
            rows,
        )
        + f"\n\n{where(record)}."
    )


def _step(folder: Path) -> str:
    record = read_record("step", folder)
    if record is None:
        return ""
    rows = [
        [
            _inputs(row),
            f"{min(row['seconds']['torch eager']):.2f}",
            f"{row['store_all_of_torch']:.2f}",
            f"{row['planned_of_torch']:.2f}",
            *(megabytes(row["peak_bytes"][kind]) for kind in ("store-all", "planned")),
        ]
        for row in record["figures"]["rows"]
        if "error" not in row
    ]
    headings = (
        "model, inputs", "torch eager, s", "storing everything / torch", "planned / torch",
        "peak, MB: storing everything", "planned",
    )  # fmt: skip
    return (
        "**Time of a step**, forward and backward, of models exported from PyTorch, beside PyTorch itself in "
        f"the same process, best of {record['figures']['rounds']}:\n\n"
        f"{markdown_table(headings, rows)}\n\n{where(record)}."
    )


def _torch(folder: Path) -> str:
    record = read_record("torch", folder)
    if record is None:
        return ""
    rows = [row for row in record["figures"]["rows"] if "error" not in row]
    off = max(
        abs(plan["simulated_peak_bytes"] / row["peak_bytes"][contender] - 1)
        for row in rows
        for contender, plan in row["plans"].items()
    )
    headings = (
        "model, inputs", "eager", "checkpoint of each block", "ours in that peak", "activation_memory_budget",
        "ours in that peak",
    )  # fmt: skip
    equal = all(count == row["parameters"] for row in rows for count in row["bit_equal_gradients"].values())
    return (
        "**In PyTorch**: whole modules with their loss by `onnxgc.torch.checkpoint`, beside "
        "`torch.utils.checkpoint` of each block and what PyTorch's partitioner keeps at "
        f"`activation_memory_budget={record['figures']['own_share']}`. Each cell has the peak of a step in "
        "MB, gradients included, as PyTorch's allocator has it, and the best time of "
        f"{record['figures']['rounds']} as a multiple of eager's, all in one process; "
        f"simulated peaks are at most {off:.2%} off"
        + ("; all gradients are bit-identical to eager's" if equal else "")
        + f":\n\n{markdown_table(headings, [[_inputs(row), *torch_plans.cells(row)] for row in rows])}\n\n"
        f"{where(record)}."
    )


def _inputs(row: Mapping[str, Any]) -> str:
    return f"{row['model']}, {' and '.join('x'.join(map(str, shape)) for shape in row['inputs'].values())}"


def _light(folder: Path) -> str:
    record = read_record("light", folder)
    if record is None:
        return ""
    rows = []
    for figures in record["figures"]:
        if "error" in figures:
            rows.append([figures["network"], *[""] * 5, "cannot be planned"])
            continue
        regular, planned = figures["regular_peak_bytes"], figures["planned_peak_bytes"]
        shapes = ", ".join("x".join(map(str, shape)) for shape in figures["inputs"].values())
        rows.append(
            [
                figures["network"], shapes, str(figures["vertices"]), megabytes(regular), megabytes(planned),
                f"{planned / regular:.2f}",
                "all hold" if figures["verification"]["holds"] else _failed(figures["verification"]),
            ]
        )  # fmt: skip
    headings = ["network", "input", "tensors", "storing everything", "planned", "ratio", "checks of `verify`"]
    title = "**Light networks**: simulated peak in MB, parameters' gradients included, and whether the file "
    return f"{title}keeps its promises when it runs.\n\n{markdown_table(headings, rows)}\n\n{where(record)}."


def _failed(verification: Mapping[str, Any]) -> str:
    return "fails: " + ", ".join(check["name"] for check in verification["checks"] if not check["holds"])


def _table1(folder: Path) -> str:
    record = read_record("table1", folder)
    if record is None:
        return ""
    rows = record["figures"]
    headings = [
        "network, batch", "vertices", "sum: all", "`acg`", "`general`", "peak: regular", "`acg`", "`peak`",
        "floor", "paper: regular", "optimal", "`peak` / optimal", "extra forward", "solve, s",
    ]  # fmt: skip
    return "\n\n".join(
        [
            "**Beside the paper's Table 1**, at its batch sizes and inputs in float32; the last network "
            "is not in it. *Sum* is the paper's objective, checkpoints and heaviest segment with source and "
            "target counted, in MiB of 2^20 bytes; *all* is all tensors together, and in brackets stands a "
            "lower bound where the optimum is not proved. *Peak* is simulated here for the CPU in MB of 10^6 "
            "bytes, and counts activations, their gradients and workspaces, but neither parameters nor their "
            "gradients; *floor* is the working set of the one operator that no schedule goes below. The "
            "*paper*'s peaks are measured there on a GPU in PyTorch 1.5, in MB as printed and without "
            "weights, so megabytes compare only roughly. *Extra forward* is what the plan of `peak` computes "
            "again, in floating-point operations as a share of one forward pass, and *solve* the time of its "
            "search.",
            markdown_table(headings, [_table1_row(row) for row in rows]),
            _paper_graphs_sentence([row["paper_graph"] for row in rows if row["paper_graph"]]),
        ]
    )


def _table1_row(row: Mapping[str, Any]) -> list[str]:
    peak, paper = row["plans"]["peak, activations"], row["paper"]
    solution = row["peaks"]["peak, activations"]
    general = row["sums"].get("general")
    columns = [_mib(row["total_bytes"]), _mib(row["sums"]["acg"]["objective_bytes"])]
    columns.append("" if general is None else _mib_with_bound(general))
    columns += [
        megabytes(row["regular"]["activation_peak_bytes"]),
        megabytes(row["plans"]["acg"]["activation_peak_bytes"]),
        megabytes(peak["activation_peak_bytes"]),
        megabytes(solution["lower_bound_bytes"]),
    ]
    if paper:
        ratio = peak["activation_peak_bytes"] / MEGABYTE / paper["optimal_mb"]
        columns += [f"{paper['regular_mb']:,}", f"{paper['optimal_mb']:,}", f"{ratio:.2f}"]
    else:
        columns += [""] * 3
    columns += [f"{peak['extra_of_forward']:.0%}", f"{solution['seconds']:.1f}"]
    return [f"{row['network']}, {row['batch']}", f"{row['vertices']:,}", *columns]


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / MEBIBYTE:,.0f}"


def _mib_with_bound(figures: Mapping[str, Any]) -> str:
    bound = "" if figures["status"] == "optimal" else f" (≥ {_mib(figures['lower_bound_bytes'])})"
    return f"{_mib(figures['objective_bytes'])}{bound}"


def _paper_graphs_sentence(graphs: Sequence[Mapping[str, Any]]) -> str:
    """What is found on the graphs of the paper's own code."""
    same = sum(
        abs(graph["sums"]["acg"]["objective_bytes"] / MEBIBYTE - graph["code_mebibytes"]) <= 0.51
        for graph in graphs
    )
    text = (
        "The graphs that the paper's code draws for the same networks end at the logits, and where an "
        "operator overwrites its input the two share a vertex. On these `acg` finds that code's sum for "
        f"{same} of {len(graphs)} networks, within rounding"
    )
    general = [graph for graph in graphs if "general" in graph["sums"]]
    lower = [
        graph["sums"]["general"]["objective_bytes"] / graph["sums"]["acg"]["objective_bytes"]
        for graph in general
        if graph["sums"]["general"]["objective_bytes"] < graph["sums"]["acg"]["objective_bytes"]
    ]
    if lower:
        text += f", and `general` a lower one for {len(lower)}, down to {min(lower):.2f} of it"
    return f"{text}."


def _growth(folder: Path) -> str:
    record = read_record("growth", folder)
    if record is None:
        return ""
    graphs = record["figures"]["graphs"]
    published = [graph for graph in graphs if graph["paper_code_seconds"] is not None]
    shown = ", ".join(
        f"{graph['name']} {graph['paper_code_seconds'] / graph['seconds']['acg']:,.0f}" for graph in published
    )
    ratios = (
        " The paper's code, timed apart from this run, takes so many times as long: "
        f"{shown} (the chain extrapolated)."
        if shown
        else ""
    )
    return (
        f"**Solve times.** `acg`, its division tree included, takes {_acg_range(graphs)} on the paper's "
        f"graphs.{ratios}\n\n![Seconds of a search over the number of vertices](growth.svg)"
    )


def _acg_range(graphs: Sequence[Mapping[str, Any]]) -> str:
    times = [graph["seconds"]["acg"] for graph in graphs if graph["family"] == "network"]
    return f"{1000 * min(times):.1f} to {1000 * max(times):.0f} ms"


def _exactness(folder: Path) -> str:
    record = read_record("exactness", folder)
    if record is None:
        return ""
    rows = [
        [
            row["solver"] if " " in row["solver"] else f"`{row['solver']}`", row["truth"], row["on"],
            f"{row['instances']:,}", f"{row['equal'] / row['instances']:.1%}",
            f"{row['mean_ratio']:.4f}", f"{row['worst_ratio']:.2f}",
        ]
        for row in record["figures"]
    ]  # fmt: skip
    wrong = sum(row["below"] + row["false_bounds"] + row["false_proofs"] for row in record["figures"])
    headings = ["solver", "beside", "on", "instances", "equal", "mean ratio", "worst ratio"]
    return (
        "**Exactness** on small random graphs from a fixed seed, beside searches that try everything. *All "
        "schedules* may run operators in any order, drop any tensor at any time and compute each forward "
        "tensor twice. Of all lower bounds and proofs of optimality "
        f"{'none is' if wrong == 0 else f'{wrong} are'} wrong.\n\n{markdown_table(headings, rows)}"
    )


BLOCKS: Mapping[Path, Mapping[str, Callable[[Path], str]]] = {
    README: {"summary": summary.summary},
    RESULTS: {"results": results},
    REFERENCE: {
        "commands": reference.commands,
        "solvers": reference.solvers,
        "operators": reference.operators,
    },
}
