"""Memory and time of whole PyTorch modules: onnxgc, manual checkpointing and PyTorch's own memory budget.

Each model runs in a separate process, one step of forward and backward. Peaks are those of PyTorch's CPU
allocator during a step, gradients included. Steps are interleaved; times are the best of all rounds. onnxgc
plans twice: within the peak of manual checkpointing, and within the peak of PyTorch's memory budget.

    python -m scripts.benchmarking.torch_plans NAME REQUEST RESULT    one model in this process
"""

from __future__ import annotations

import argparse
import copy
import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scripts.benchmarking.command_options import (
    add_only,
    add_rounds,
    add_small,
    add_threads,
    add_time_limit,
    options_of,
)
from scripts.benchmarking.manual_checkpoints import checkpoint_blocks
from scripts.benchmarking.processes import result_of_process, write_result
from scripts.benchmarking.records import Progress, Record, write_record
from scripts.benchmarking.step import inputs_label
from scripts.benchmarking.tables import machine_of, markdown_table, megabytes, print_table
from scripts.benchmarking.timing import interleaved_seconds

EAGER, BY_HAND, OWN_BUDGET = "eager", "per-block checkpoint", "activation_memory_budget"
OURS_BY_HAND, OURS_BUDGET = "ours within per-block", "ours within activation_memory_budget"
CONTENDERS = (EAGER, BY_HAND, OURS_BY_HAND, OWN_BUDGET, OURS_BUDGET)
OWN_SHARE = 0.5
"""PyTorch's memory budget, as a share of the memory that its default saves."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The batch of a model, and the classes of the blocks that users checkpoint."""

    blocks: tuple[str, ...]
    batch: int


SUBJECTS: Mapping[str, Subject] = {
    "resnet50": Subject(("Bottleneck",), 8),
    "densenet121": Subject(("_DenseLayer", "_Transition"), 8),
    "vit_b_16": Subject(("EncoderBlock",), 4),
    "unet": Subject(("Sequential",), 2),
    "gpt2": Subject(("GPT2Block",), 8),
}


@dataclass(frozen=True, slots=True)
class Options:
    """`rounds` is the number of timed steps; `time_limit` is in seconds for each search."""

    only: tuple[str, ...] = ()
    small: bool = False
    rounds: int = 5
    threads: int = 2
    time_limit: float = 30.0


def add_options(parser: argparse.ArgumentParser) -> None:
    add_threads(parser, 2)
    add_only(parser, "a model")
    add_rounds(parser, 5)
    add_time_limit(parser, 30.0)
    add_small(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Exit code 1: a process failed."""
    options = options_of(Options, arguments)
    figures = run_torch_plans(options, Progress())
    write_record("torch", figures, threads=options.threads, folder=arguments.record)
    rows = [[row["model"], *([row["error"]] if "error" in row else cells(row))] for row in figures["rows"]]
    print_table("peak, MB, and time as a multiple of eager's", CONTENDERS, rows)
    return 1 if any("error" in row for row in figures["rows"]) else 0


def run_torch_plans(options: Options, progress: Progress) -> dict[str, Any]:
    """One row a model: peak and times of each contender."""
    rows = []
    for name in options.only or tuple(SUBJECTS):
        progress(name)
        rows.append({"model": name, **result_of_process("scripts.benchmarking.torch_plans", name, options)})
    return {"rounds": options.rounds, "time_limit": options.time_limit, "own_share": OWN_SHARE, "rows": rows}


def cells(row: Mapping[str, Any]) -> list[str]:
    """The peak of each contender, with its best time as a multiple of eager's."""
    best = {contender: min(seconds) for contender, seconds in row["seconds"].items()}
    times = {contender: f"{seconds / best[EAGER]:.2f}" for contender, seconds in best.items()}
    times[EAGER] = f"{best[EAGER]:.2f} s"
    return [f"{megabytes(row['peak_bytes'][contender])}, {times[contender]}" for contender in CONTENDERS]


def compare(name: str, options: Options) -> dict[str, Any]:
    """The row of one model, in this process."""
    import torch
    from torch import nn

    from onnxgc.torch.checkpointing import planned_module
    from onnxgc.torch.operator_timing import MeasuredCosts
    from onnxgc.torch.partitioner_plan import PartitionerBudget
    from scripts.exports.torch_models import TORCH_MODELS

    progress = Progress()
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    subject, model = SUBJECTS[name], TORCH_MODELS[name]
    module = model.module(options.small)
    batch = {key: value[: subject.batch] for key, value in model.batch(options.small).items()}
    inputs = tuple(batch.values())
    with torch.no_grad():
        target = model.target(copy.deepcopy(module)(*inputs))
    plain = with_loss(module, model.loss_of, target)
    own = PartitionerBudget(OWN_SHARE)
    contenders: dict[str, nn.Module] = {
        EAGER: plain,
        BY_HAND: checkpoint_blocks(copy.deepcopy(plain), subject.blocks),
        OWN_BUDGET: planned_module(copy.deepcopy(plain), own, MeasuredCosts(), inputs),
    }
    peaks: dict[str, int] = {}
    for contender, made in contenders.items():
        progress(f"{name}: {contender}")
        peaks[contender] = _measured_peak(made, inputs)
    plans: dict[str, Any] = {}
    for contender, rival in ((OURS_BY_HAND, BY_HAND), (OURS_BUDGET, OWN_BUDGET)):
        progress(f"{name}: {contender}")
        made, plans[contender] = _planned(plain, inputs, peaks[rival], options.time_limit)
        contenders[contender] = made
        peaks[contender] = _measured_peak(made, inputs)
        plans[contender]["saved_bytes"] = _saved_bytes(made, inputs)
    steps = {contender: functools.partial(_step, made, inputs) for contender, made in contenders.items()}
    seconds = interleaved_seconds(steps, options.rounds, lambda stage: progress(f"{name}: {stage}"))
    gradients = {contender: [one.grad for one in made.parameters()] for contender, made in contenders.items()}
    return {
        "model": name,
        "inputs": {key: list(value.shape) for key, value in batch.items()},
        "peak_bytes": peaks,
        "seconds": seconds,
        "plans": plans,
        "parameters": len(gradients[EAGER]),
        "bit_equal_gradients": {
            contender: sum(map(_is_equal, gradients[EAGER], found)) for contender, found in gradients.items()
        },
    }


def results_section(record: Record) -> str:
    figures = record["figures"]
    rows = [row for row in figures["rows"] if "error" not in row]
    difference = max(
        abs(plan["simulated_peak_bytes"] / row["peak_bytes"][contender] - 1)
        for row in rows
        for contender, plan in row["plans"].items()
    )
    headings = (
        "model, inputs", "eager", "checkpoint of each block", "ours within that peak",
        "activation_memory_budget", "ours within that peak",
    )  # fmt: skip
    is_equal = all(count == row["parameters"] for row in rows for count in row["bit_equal_gradients"].values())
    table = markdown_table(headings, [[inputs_label(row), *cells(row)] for row in rows])
    return (
        "**In PyTorch**: whole modules with their loss by `onnxgc.torch.checkpoint` (*ours*), compared with "
        "`torch.utils.checkpoint` of each block and with PyTorch's partitioner at "
        f"`activation_memory_budget={figures['own_share']}`. Each cell has the peak of a step in MB as "
        f"PyTorch's allocator reports it, gradients included, and the best time of {figures['rounds']} as a "
        "multiple of eager's. All contenders run in one process. Simulated and measured peaks differ by at "
        f"most {difference:.2%}{'; all gradients are bit-identical to those of eager' if is_equal else ''}:"
        f"\n\n{table}\n\n{machine_of(record)}."
    )


def _planned(plain: Any, inputs: Any, budget_bytes: int, time_limit: float) -> tuple[Any, dict[str, Any]]:
    """A module with a plan within a budget, and the plan's figures."""
    from onnxgc.torch import checkpoint, plans_of

    started = time.perf_counter()
    made = checkpoint(copy.deepcopy(plain), inputs, budget=str(budget_bytes), time_limit=time_limit)
    seconds = time.perf_counter() - started
    (plan,) = plans_of(made)
    return made, {
        "planning_seconds": seconds,
        "simulated_peak_bytes": plan.planned_peak_bytes,
        "simulated_regular_peak_bytes": plan.regular_peak_bytes,
        "repeated": plan.repeated,
        "operators": plan.operators,
        "extra_time_ratio": plan.extra_time_ratio,
        "lower_bound_ratio": plan.lower_bound_ratio,
        "simulated_saved_bytes": sum(one.size_bytes for one in plan.saved),
    }


def with_loss(module: Any, loss: Callable[[Any, Any], Any], target: Any) -> Any:
    """A module that returns the loss of `module`."""
    from torch import nn

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            self.register_buffer("target", target)

        def forward(self, *inputs: Any) -> Any:
            return loss(self.module(*inputs), self.target)

    return WithLoss()


def _step(module: Any, inputs: Any) -> None:
    module.zero_grad()
    module(*inputs).backward()


def _measured_peak(module: Any, inputs: Any) -> int:
    """The most bytes allocated at once during a step, without those allocated before it."""
    from torch.profiler import ProfilerActivity, profile

    _step(module, inputs)
    module.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        module(*inputs).backward()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def _saved_bytes(module: Any, inputs: Any) -> int:
    """Bytes that autograd saves, without parameters, buffers and inputs."""
    import torch

    known = {one.untyped_storage().data_ptr() for one in (*module.parameters(), *module.buffers(), *inputs)}
    found: dict[int, int] = {}

    def pack(one: Any) -> Any:
        storage = one.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        loss = module(*inputs)
    del loss
    return sum(found.values())


def _is_equal(one: Any, other: Any) -> bool:
    import torch

    return (one is None and other is None) or torch.equal(one, other)


if __name__ == "__main__":
    write_result(compare, Options)
