"""Memory and time of compiled PyTorch modules: onnxgc, PyTorch's own memory budget, and manual checkpointing.

Each model runs in a separate process, one step of forward and backward of its loss. Peaks are those of PyTorch's
CPU allocator during a step, gradients included. onnxgc plans within the peak of each rival, and for the least
peak. The record is written after each model; `--only` replaces the rows of those models.

    python -m scripts.benchmarking.compiled NAME REQUEST RESULT    one model in this process
"""

import copy
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.benchmarking.manual_checkpoints import checkpoint_blocks
from scripts.benchmarking.processes import failed_processes, rows_of_processes, write_result
from scripts.benchmarking.records import Progress, Record
from scripts.benchmarking.tables import machine_of, markdown_table, megabytes
from scripts.benchmarking.timing import interleaved_seconds
from scripts.benchmarking.torch_plans import measured_peak

EAGER, BY_HAND, LEAST = "eager", "checkpoint of each block", "min"
SHARES = ("1.0", "0.5", "0.2", "0.05")
"""Values of `activation_memory_budget`."""
RIVALS = (*SHARES, BY_HAND)


@dataclass(frozen=True, slots=True)
class Options:
    """`rounds` is the number of timed steps; `time_limit` is in seconds for each search."""

    only: tuple[str, ...] = ()
    small: bool = False
    rounds: int = 9
    threads: int = 1
    time_limit: float = 10.0


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """One row a model: peak and median time of each contender."""
    from scripts.benchmarking.compiled_models import MODELS

    known = {row["model"]: row for row in (progress.recorded() or {"rows": []})["rows"]} if options.only else {}
    for name in options.only or MODELS:
        known.update({row["model"]: row for row in rows_of_processes("compiled", "model", [name], options, progress)})
        figures = {
            "rounds": options.rounds,
            "small": options.small,
            "rows": [known[one] for one in MODELS if one in known],
        }
        progress.record(figures)
    return figures


def failures(figures: Mapping[str, Any]) -> list[str]:
    """Models that failed, and budgets that a measured peak exceeds."""
    rows = [row for row in figures["rows"] if "error" not in row]
    broken = [
        f"{row['model']}: {one['peak_bytes']:,} bytes within a budget of {one['budget_bytes']:,}"
        for row in rows
        for one in row["ours"]
        if one["budget_bytes"] and one["peak_bytes"] > one["budget_bytes"]
    ]
    return failed_processes(figures["rows"]) + broken


def compare(name: str, options: Options) -> dict[str, Any]:
    """The row of one model, in this process."""
    import torch
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    from onnxgc.torch.compiling import plans_of_options
    from scripts.benchmarking.compiled_models import MODELS

    progress = Progress()
    torch.set_num_threads(options.threads)
    dynamo_config.recompile_limit = 64
    inductor_config.fx_graph_cache, functorch_config.enable_autograd_cache = False, False
    model = MODELS[name]
    torch.manual_seed(0)
    module, given = model.build(options.small), model.data()
    double = copy.deepcopy(module).double()
    exact = _gradients(double, double, given.double() if given.is_floating_point() else given)
    modules = {EAGER: module, BY_HAND: checkpoint_blocks(copy.deepcopy(module), (model.block,))}
    calls: dict[str, Callable[..., Any]] = {EAGER: module}
    found: dict[str, dict[str, Any]] = {}

    def add(contender: str, call: Callable[..., Any]) -> int:
        started = time.perf_counter()
        distance = _distance(_gradients(modules.get(contender, module), call, given), exact)
        seconds = time.perf_counter() - started
        modules.get(contender, module).zero_grad(set_to_none=True)
        calls[contender] = call
        peak = measured_peak(lambda: call(given).backward())
        found[contender] = {"peak_bytes": peak, "distance": distance, "first_seconds": seconds}
        progress(f"{name}: {contender}: {peak:,} bytes, {seconds:.1f} s")
        return peak

    add(EAGER, module)
    for rival in RIVALS:
        share = 1.0 if rival == BY_HAND else float(rival)
        add(rival, torch.compile(modules.get(rival, module), backend=functools.partial(_by_inductor, share)))
    peaks = sorted({found[rival]["peak_bytes"] for rival in RIVALS}, reverse=True)
    for budget in (*map(str, peaks), LEAST):
        settings: Any = {"budget": budget, "time_limit": options.time_limit}
        add(budget, torch.compile(module, backend="onnxgc", options=settings))
        found[budget]["promised_bytes"] = plans_of_options(settings)[-1].planned_peak_bytes
    steps = {one: functools.partial(_run, modules.get(one, module), call, given) for one, call in calls.items()}
    for contender, times in interleaved_seconds(steps, options.rounds, lambda stage: None).items():
        found[contender]["seconds"] = statistics.median(times)
    return {
        "input": list(given.shape),
        "rivals": {one: found[one] for one in (EAGER, *RIVALS)},
        "ours": [{"budget_bytes": 0 if one == LEAST else int(one), **found[one]} for one in (*map(str, peaks), LEAST)],
    }


def results_section(record: Record) -> str:
    figures = record["figures"]
    rows = [row for row in figures["rows"] if "error" not in row]
    headings = ("model", "eager", *RIVALS, "least peak of ours")
    table = markdown_table(headings, [_cells(row) for row in rows])
    off = max((abs(one["promised_bytes"] / one["peak_bytes"] - 1) for row in rows for one in row["ours"]), default=0)
    distance = max(
        (one["distance"] / row["rivals"]["1.0"]["distance"] for row in rows for one in row["ours"]), default=0
    )
    size = "small networks" if figures["small"] else "networks"
    return (
        f"**Under `torch.compile`**: {size}, and for each the peak of a step in MB as PyTorch's allocator reports it, "
        f"gradients included, and its time in ms (median of {figures['rounds']}): of Inductor at values of "
        "`activation_memory_budget`, and with `torch.utils.checkpoint` of each block. Below each is backend `onnxgc` "
        f"within that peak. Promised and measured peaks differ by at most {off:.2%}; gradients are at most "
        f"{distance:.2f} times as far from those in float64 as those of Inductor at 1.0:\n\n{table}\n\n"
        f"{machine_of(record)}."
    )


def _within(row: Mapping[str, Any], budget_bytes: int) -> Mapping[str, Any]:
    """The fastest plan of ours whose measured peak is within a budget."""
    fitting = [one for one in row["ours"] if one["peak_bytes"] <= budget_bytes]
    return min(fitting or row["ours"], key=lambda one: float(one["seconds"]))


def _cells(row: Mapping[str, Any]) -> list[str]:
    least: Mapping[str, Any] = row["ours"][-1]
    pairs = ((row["rivals"][one], _within(row, row["rivals"][one]["peak_bytes"])) for one in RIVALS)
    return [
        row["model"],
        _cell(row["rivals"][EAGER]),
        *(f"{_cell(rival)}<br>{_cell(ours)}" for rival, ours in pairs),
        _cell(least),
    ]


def _cell(one: Mapping[str, Any]) -> str:
    return f"{megabytes(one['peak_bytes'])}, {1000 * one['seconds']:.0f}"


def _by_inductor(share: float, gm: Any, inputs: Sequence[Any]) -> Any:
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(activation_memory_budget=share):
        return compile_fx(gm, inputs)


def _run(module: Any, call: Callable[..., Any], given: Any) -> None:
    module.zero_grad(set_to_none=True)
    call(given).backward()


def _gradients(module: Any, call: Callable[..., Any], given: Any) -> Any:
    import torch

    _run(module, call, given)
    return torch.cat([one.grad.flatten().double() for one in module.parameters()])


def _distance(found: Any, exact: Any) -> float:
    return float((found - exact).norm() / exact.norm())


if __name__ == "__main__":
    write_result(compare, Options)
