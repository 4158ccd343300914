"""Takes the project's figures and writes them where people read them.

    python scripts/benchmark.py resnet50    equality, accuracy, memory and time on ResNet-50
    python scripts/benchmark.py light       the onnx package's light models and models/: planned, verified
    python scripts/benchmark.py peaks       the judge and the arena's model beside what the runtime allocates
    python scripts/benchmark.py budgets     extra time and bounds under memory budgets, some measured
    python scripts/benchmark.py table1      sums, simulated peaks, times beside the paper's Table 1
    python scripts/benchmark.py growth      how solve times grow with the graph
    python scripts/benchmark.py step        seconds of a step of exported models beside torch eager
    python scripts/benchmark.py torch       whole PyTorch modules beside checkpoints by hand and its budget
    python scripts/benchmark.py gradients   exports of whole models beside torch float64 of their modules
    python scripts/benchmark.py twins F     one network in files of several frameworks, which folder F has
    python scripts/benchmark.py training    memory, time and accuracy of training on ONNX Runtime
    python scripts/benchmark.py exactness   solvers beside exhaustive searches on small random graphs
    python scripts/benchmark.py picture     simulated memory over one step, drawn to docs/memory.svg
    python scripts/benchmark.py render      README.md, docs/ and the pictures from the recorded figures

Each but the last records a JSON file in benchmarks/ (or in the folder given by --record) and
prints a table; progress goes to stderr. Every figure is measured or simulated by the very run
that records it, but for what the paper prints and what is known of its code
(`scripts/benchmarking/paper_graphs.py` and `growth.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# The checkout itself, for `tests.torch_reference`, and for `scripts` when this file is the program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.benchmarking import (
    budgets,
    exactness,
    file_gradients,
    gradients,
    growth,
    growth_picture,
    networks,
    peaks,
    picture,
    readme,
    resnet50,
    step,
    table1,
    torch_plans,
    training,
    twins,
)
from scripts.benchmarking.records import BENCHMARKS, Progress, write_record

MEGABYTE = 10**6
MEBIBYTE = 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit code is 1 where a promised equality or check does not hold."""
    options = _parser().parse_args(arguments)
    run: Any = options.run
    return int(run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = _command(commands, "resnet50", _resnet50)
    _add_threads(command)
    command.add_argument("--rounds", type=int, default=7, help="steps of each contender that are timed")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--network", default="resnet50", help="another of models/, for a trial")
    command.add_argument("--batch", type=int, default=16)
    command.add_argument("--pixels", type=int, default=224)

    command = _command(commands, "light", _light)
    _add_threads(command)
    command.add_argument("--only", action="append", default=[], help="a network by name; repeatable")
    command.add_argument("--batch", type=int, default=2, help="images, for the networks of models/")
    command.add_argument("--pixels", type=int, help="image size, for the networks of models/")

    command = _command(commands, "gradients", _gradients)
    _add_threads(command)
    command.add_argument("--only", action="append", default=[], help="a model by name; repeatable")
    command.add_argument("--full", action="store_true", help="in the size that is trained")
    command.add_argument("--no-verify", action="store_true", help="leave out `onnxgc verify`")
    command.add_argument(
        "--all-exports", action="store_true", help="static and symbolic batch by each exporter"
    )
    command.add_argument("--files", type=Path, help="ONNX files below this folder instead of PyTorch models")

    command = _command(commands, "step", _step)
    command.add_argument("--threads", type=int, default=1)
    command.add_argument("--only", action="append", default=[], help="a model by name; repeatable")
    command.add_argument("--rounds", type=int, default=5, help="steps of each contender that are timed")
    command.add_argument("--small", action="store_true", help="small models, for a trial")

    command = _command(commands, "torch", _torch)
    command.add_argument("--threads", type=int, default=2)
    command.add_argument("--only", action="append", default=[], help="a model by name; repeatable")
    command.add_argument("--rounds", type=int, default=5, help="steps of each contender that are timed")
    command.add_argument("--time-limit", type=float, default=30.0, help="seconds of each search")
    command.add_argument("--small", action="store_true", help="small models, for a trial")

    command = _command(commands, "twins", _twins)
    command.add_argument(
        "folder", type=Path, help="what build_models.py --exports ORIGIN FOLDER --twins wrote"
    )
    command.add_argument("--only", action="append", default=[], help="a network by name; repeatable")
    command.add_argument("--time-limit", type=float, default=10.0, help="seconds of each search")

    command = _command(commands, "training", _training)
    command.add_argument("--threads", type=int, default=1)
    command.add_argument("--rounds", type=int, default=7, help="steps of each file that are timed")
    command.add_argument("--small", action="store_true", help="small networks, for a trial")

    command = _command(commands, "peaks", _peaks)
    command.add_argument("--threads", type=int, default=1)
    command.add_argument("--only", action="append", default=[], help="a network by name; repeatable")
    command.add_argument("--batch", type=int, default=2)
    command.add_argument("--pixels", type=int, help="image size (default: each network's own)")
    command.add_argument("--time-limit", type=float, default=10.0, help="seconds of each search")

    command = _command(commands, "budgets", _budgets)
    _add_threads(command)
    command.add_argument("--only", action="append", default=[], help="a graph or network; repeatable")
    command.add_argument("--graphs", type=Path, help="a folder of operator graphs (JSON)")
    command.add_argument("--time-limit", type=float, default=30.0, help="seconds of each search")

    command = _command(commands, "table1", _table1)
    command.add_argument("--only", action="append", default=[], help="a network by name; repeatable")
    command.add_argument("--time-limit", type=float, help="seconds of each search (default: its own limits)")

    command = _command(commands, "growth", _growth)
    command.add_argument("--most-vertices", type=int, default=10_000, help="leave larger graphs out")

    command = _command(commands, "exactness", _exactness)
    command.add_argument("--seed", type=int, default=0)
    for comparison in dataclasses.fields(exactness.Sizes):
        command.add_argument(f"--{comparison.name}", type=int, default=comparison.default)

    command = _command(commands, "picture", _picture)
    command.add_argument("--network", default="resnet50")
    command.add_argument("--batch", type=int, default=16)
    command.add_argument("--pixels", type=int, default=224)

    command = commands.add_parser(
        "render", help="README.md, docs/ and its pictures from the recorded figures"
    )
    command.set_defaults(run=_render)
    command.add_argument("--check", action="store_true", help="write nothing; exit with 1 if one is stale")
    return parser


def _command(commands: Any, name: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name)
    command.set_defaults(run=run)
    command.add_argument("--record", type=Path, default=BENCHMARKS, help="folder for the JSON file")
    return command


def _add_threads(command: argparse.ArgumentParser) -> None:
    cores = os.cpu_count() or 1
    command.add_argument(
        "--threads", type=int, default=cores, help="threads of each operator (default: cores)"
    )


def _resnet50(options: argparse.Namespace) -> int:
    chosen = resnet50.Options(
        options.network, options.batch, options.pixels, options.threads, options.rounds, options.seed
    )
    figures = resnet50.measure_network(chosen, Progress())
    _say(write_record("resnet50", figures, threads=options.threads, folder=options.record))
    same, accuracy, times = figures["identical"], figures["accuracy"], figures["step_seconds"]
    table = _table(
        f"{figures['network']}, batch {figures['batch']}, {figures['input']}", "regular", "planned"
    )
    simulated = figures["simulated_peak_bytes"]
    _add_pair(table, "simulated peak, MB", simulated, MEGABYTE)
    for settings, measured in figures["measured"].items():
        for key, what in (("requested_bytes", "requested"), ("in_use_bytes", "in use")):
            pair = {kind: measured[kind][key] for kind in ("regular", "planned")}
            _add_pair(table, f"measured, {settings}, {what}, MB", pair, MEGABYTE)
            third = {kind: measured[kind][f"{key}_by_run"][-1] for kind in ("regular", "planned")}
            _add_pair(table, "  last run alone", third, MEGABYTE)
    for key in ("minimum", "median"):
        pair = {kind: times[kind][key] for kind in ("regular", "planned")}
        _add_pair(table, f"step {key}, s (torch {times['torch'][key]:.3f})", pair, 1)
    Console().print(table)
    equal = (
        same["loss"]
        and same["gradients"] == same["gradients_of"]
        and same["statistics"] == same["statistics_of"]
    )
    print(
        f"bit-identical: loss {same['loss']}, gradients {same['gradients']}/{same['gradients_of']}, "
        f"statistics {same['statistics']}/{same['statistics_of']}"
    )
    print(
        f"distance to torch float64 over torch float32's own: median {accuracy['ratio_median']:.2f}, "
        f"max {accuracy['ratio_max']:.2f} ({accuracy['ratio_max_parameter']})"
    )
    return 0 if equal else 1


def _light(options: argparse.Namespace) -> int:
    rows = networks.run_light(options.only, options.batch, options.pixels, options.threads, Progress())
    _say(write_record("light", rows, threads=options.threads, folder=options.record))
    table = _table("light networks", "tensors", "regular, MB", "planned, MB", "ratio", "s", "verify")
    for row in rows:
        if "error" in row:
            table.add_row(row["network"], "", "", "", "", "", row["error"])
            continue
        regular, planned = row["regular_peak_bytes"], row["planned_peak_bytes"]
        failed = [check["name"] for check in row["verification"]["checks"] if not check["holds"]]
        table.add_row(
            row["network"], str(row["vertices"]), f"{regular / MEGABYTE:,.1f}", f"{planned / MEGABYTE:,.1f}",
            f"{planned / regular:.2f}", f"{row['seconds']['total']:.1f}", ", ".join(failed) or "holds",
        )  # fmt: skip
    Console().print(table)
    return 0 if all(row.get("verification", {}).get("holds") for row in rows) else 1


def _gradients(options: argparse.Namespace) -> int:
    chosen = gradients.Options(
        tuple(options.only), not options.full, options.threads, not options.no_verify, options.all_exports
    )
    if options.files:
        figures = file_gradients.run_files(options.files, chosen, Progress())
        rows, name = figures["rows"], "gradients_of_files"
    else:
        figures = gradients.run_gradients(chosen, Progress())
        rows, name = figures["rows"], "gradients"
    _say(write_record(name, figures, threads=options.threads, folder=options.record))
    table = _table(
        "distance to torch float64 over torch float32's own", "parameters", "median", "max", "of", "planned",
        "fails",
    )  # fmt: skip
    for row in rows:
        label = row.get("file") or f"{row['model']} {row.get('export', '')}"
        table.add_row(label, *gradients.cells(row))
    Console(width=180).print(table)
    return 0 if all(row["holds"] for row in rows) else 1


def _step(options: argparse.Namespace) -> int:
    chosen = step.Options(tuple(options.only), options.small, options.rounds, options.threads)
    figures = step.run_step(chosen, Progress())
    _say(write_record("step", figures, threads=options.threads, folder=options.record))
    table = _table("seconds of a step over torch eager's", "torch eager, s", "storing all", "planned", "goal")
    for row in figures["rows"]:
        if "error" in row:
            table.add_row(row["model"], row["error"], "", "", "")
            continue
        table.add_row(
            row["model"], f"{min(row['seconds'][step.EAGER]):.2f}", f"{row['store_all_of_torch']:.2f}",
            f"{row['planned_of_torch']:.2f}", "" if row["goal"] is None else f"{row['goal']:.1f}",
        )  # fmt: skip
    Console().print(table)
    return 1 if any("error" in row for row in figures["rows"]) else 0


def _torch(options: argparse.Namespace) -> int:
    chosen = torch_plans.Options(
        tuple(options.only), options.small, options.rounds, options.threads, options.time_limit
    )
    figures = torch_plans.run_torch_plans(chosen, Progress())
    _say(write_record("torch", figures, threads=options.threads, folder=options.record))
    table = _table("peak, MB, and time over eager's", *torch_plans.CONTENDERS)
    for row in figures["rows"]:
        if "error" in row:
            table.add_row(row["model"], row["error"])
            continue
        table.add_row(row["model"], *torch_plans.cells(row))
    Console().print(table)
    return 1 if any("error" in row for row in figures["rows"]) else 0


def _training(options: argparse.Namespace) -> int:
    chosen = training.Options(options.rounds, options.threads, options.small)
    figures = training.run_training(chosen, Progress())
    _say(write_record("training", figures, threads=options.threads, folder=options.record))
    table = _table("a step of the planned file", *training.HEADINGS[1:])
    for row in training.table_rows(figures):
        table.add_row(*row)
    Console().print(table)
    return 0 if training.holds(figures) else 1


def _twins(options: argparse.Namespace) -> int:
    chosen = twins.Options(options.folder, tuple(options.only), time_limit=options.time_limit)
    figures = twins.run_twins(chosen, Progress())
    _say(write_record("twins", figures, threads=1, folder=options.record))
    table = _table("one network from several frameworks", *twins.HEADINGS[1:])
    for row in twins.table_rows(figures):
        table.add_row(*row)
    Console(width=200).print(table)
    print(twins.plans_told(figures))
    return 0 if twins.holds(figures) else 1


def _peaks(options: argparse.Namespace) -> int:
    chosen = peaks.Options(
        tuple(options.only), options.batch, options.pixels, options.time_limit, options.threads
    )
    figures = peaks.run_peaks(chosen)
    rows = figures["rows"]
    _say(write_record("peaks", figures, threads=options.threads, folder=options.record))
    table = _table("peaks, MB", "simulated", "requested", "off", "arena's model", "in use", "off")
    for row in rows:
        judge, arena = peaks.deviations(row)
        simulated, requested, lent, in_use = (
            f"{row[f'{kind}_bytes'] / MEGABYTE:,.3f}"
            for kind in ("simulated", "requested", "arena", "in_use")
        )
        table.add_row(
            f"{row['network']}, {'x'.join(map(str, row['input']))}, {row['plan']}",
            simulated, requested, f"{judge:+.2%}", lent, in_use, f"{arena:+.2%}",
        )  # fmt: skip
    Console(width=140).print(table)
    print("nodes that are most off:", *peaks.worst_residuals(rows, 5), sep="\n")
    return 0 if all(peaks.is_close(row) for row in rows) else 1


def _budgets(options: argparse.Namespace) -> int:
    chosen = budgets.Options(options.graphs, tuple(options.only), options.time_limit, options.threads)
    figures = budgets.run_budgets(chosen, Progress())
    _say(write_record("budgets", figures, threads=options.threads, folder=options.record))
    if figures["graphs"]:
        shares = [f"{share:.0%}" for share in budgets.SHARES]
        table = _table("extra time, %, by budget (≥ its bound where not proved the least)", *shares)
        for row in budgets.graph_rows(figures):
            table.add_row(*row)
        Console().print(table)
    table = _table("least extra time; run with fewer images", *budgets.HEADINGS[1:])
    for row in budgets.table_rows(figures):
        table.add_row(*row)
    Console().print(table)
    return 0 if all(budgets.keeps_to_budget(row) for row in figures["networks"]) else 1


def _table1(options: argparse.Namespace) -> int:
    rows = table1.run_table1(options.only, options.time_limit, Progress())
    _say(write_record("table1", rows, folder=options.record))
    names = [solver.name for solver in table1.sum_solvers()]
    for graph in ("traced", "paper's"):
        table = _table(f"the paper's sum on the {graph} graph, MiB", "vertices", "total", "published", *names)
        for row in rows:
            found = row if graph == "traced" else row["paper_graph"]
            if found is None:
                continue
            known = "" if found is row else f"{found['code_mebibytes']:,}/{found['cuts_mebibytes']:,}"
            sums = (found["sums"].get(name) for name in names)
            table.add_row(
                f"{row['network']}, {row['batch']}",
                str(found["vertices"]), _mib(found["total_bytes"]), known,
                *("" if figures is None else _sum_cell(figures) for figures in sums),
            )  # fmt: skip
        Console(width=220).print(table)
    table = _table(
        "simulated peak without parameters' gradients, MB; `peak` with them last",
        "regular", "acg", "general", "peak", "paper regular", "random", "chen", "optimal", "extra/step",
        "extra/forward", "paper, time", "bound", "set by", "solve, s", "total, s", "regular+", "peak+",
    )  # fmt: skip
    for row in rows:
        plans, paper = row["plans"], row["paper"] or {}
        peaks = (plans[name]["activation_peak_bytes"] if name in plans else None for name in _PEAK_PLANS)
        chosen, solution = plans["peak, activations"], row["peaks"]["peak, activations"]
        table.add_row(
            f"{row['network']}, {row['batch']}",
            *("" if size is None else f"{size / MEGABYTE:,.0f}" for size in
              (row["regular"]["activation_peak_bytes"], *peaks)),
            *(str(paper.get(f"{name}_mb") or "") for name in ("regular", "random", "chen", "optimal")),
            f"{chosen['extra_of_step']:.0%}", f"{chosen['extra_of_forward']:.0%}",
            f"{paper['overhead_pct']}%" if paper else "",
            f"{solution['lower_bound_bytes'] / MEGABYTE:,.0f}", solution["bound_operator"][-24:],
            f"{solution['seconds']:.1f}", f"{row['total_seconds']:.1f}",
            *(f"{size / MEGABYTE:,.0f}" for size in
              (row["regular"]["peak_bytes"], plans["peak"]["peak_bytes"])),
        )  # fmt: skip
    Console(width=260).print(table)
    violations = [violation for row in rows for violation in row["violations"]]
    print("\n".join(violations) or "all that must hold holds")
    return 1 if violations else 0


_PEAK_PLANS = ("acg", "general", "peak, activations")


def _sum_cell(figures: dict[str, Any]) -> str:
    """Sum, its bound where that is lower, seconds."""
    bound = "" if figures["status"] == "optimal" else f" >{_mib(figures['lower_bound_bytes'])}"
    return f"{_mib(figures['objective_bytes'])}{bound} {figures['seconds']:.2f}s"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MEBIBYTE:,.0f}"


def _growth(options: argparse.Namespace) -> int:
    rows = growth.run_growth(options.most_vertices, Progress())
    found = growth.exponents(rows)
    _say(write_record("growth", {"graphs": rows, "exponents": found}, folder=options.record))
    if options.record == BENCHMARKS:
        readme.GROWTH_PICTURE.write_text(growth_picture.draw(rows), encoding="utf-8")
    names = [name for name in growth.TIMED if any(name in row["seconds"] for row in rows)]
    table = _table("seconds of a search", "vertices", "edges", *names, "paper's code", "over acg")
    for row in rows:
        published = row["paper_code_seconds"]
        seconds = (row["seconds"][name] for name in names)
        table.add_row(
            row["name"], f"{row['vertices']:,}", f"{row['edges']:,}",
            *("left out" if taken is None else f"{taken:.4f}" for taken in seconds),
            *(["", ""] if published is None else
              [f"{published:,.0f}", f"{published / row['seconds']['acg']:,.0f}"]),
        )  # fmt: skip
    Console(width=140).print(table)
    for family, powers in found.items():
        shown = ", ".join(f"{name} {power:.2f}" for name, power in powers.items())
        print(f"{family}: time grows with the vertices to the power of {shown}")
    return 0


def _exactness(options: argparse.Namespace) -> int:
    sizes = exactness.Sizes(options.graphs, options.chains, options.families, options.schedules)
    rows = exactness.run_exactness(sizes, options.seed, Progress())
    _say(write_record("exactness", rows, folder=options.record))
    table = _table(
        "beside exhaustive searches", "beside", "on", "instances", "equal", "called optimal",
        "below", "false bounds", "false proofs", "mean ratio", "worst",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["solver"], row["truth"], row["on"], f"{row['instances']:,}", f"{row['equal']:,}",
            f"{row['called_optimal']:,}", str(row["below"]), str(row["false_bounds"]),
            str(row["false_proofs"]), f"{row['mean_ratio']:.4f}", f"{row['worst_ratio']:.3f}",
        )  # fmt: skip
    Console(width=180).print(table)
    return 1 if any(row["below"] or row["false_bounds"] or row["false_proofs"] for row in rows) else 0


def _picture(options: argparse.Namespace) -> int:
    figures = picture.simulate_timelines(options.network, options.batch, options.pixels)
    _say(write_record("memory", figures, folder=options.record))
    if options.record == BENCHMARKS:
        readme.PICTURE.write_text(picture.draw(figures), encoding="utf-8")
    table = _table(f"{figures['network']}, batch {figures['batch']}", "regular", "planned")
    _add_pair(table, "simulated peak, MB", figures["peak_bytes"], MEGABYTE)
    Console().print(table)
    return 0


def _render(options: argparse.Namespace) -> int:
    wanted = {path: readme.render(path, path.read_text(encoding="utf-8")) for path in readme.BLOCKS}
    wanted |= readme.render_pictures()
    stale = [
        path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if not options.check:
            path.write_text(wanted[path], encoding="utf-8")
        print(f"{'stale' if options.check else 'wrote'}: {path.name}")
    return 1 if stale and options.check else 0


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _add_pair(table: Table, label: str, pair: dict[str, float], unit: int) -> None:
    ratio = pair["planned"] / pair["regular"]
    table.add_row(label, f"{pair['regular'] / unit:,.3f}", f"{pair['planned'] / unit:,.3f} ({ratio:.2f})")


def _say(path: Path) -> None:
    print(f"recorded {path.parent.name}/{path.name}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
