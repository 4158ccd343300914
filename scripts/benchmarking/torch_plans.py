"""Memory and time of whole PyTorch modules: onnxgc, manual checkpointing and PyTorch's own memory budget.

Each model runs in a separate process, one step of forward and backward. Peaks are those of PyTorch's CPU
allocator during a step, gradients included. Steps are interleaved; times are the best of all rounds. onnxgc
plans twice: within the peak of manual checkpointing, and within the peak of PyTorch's memory budget.

    python -m scripts.benchmarking.torch_plans NAME REQUEST RESULT    one model in this process
"""

import copy
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scripts.benchmarking.manual_checkpoints import checkpoint_blocks
from scripts.benchmarking.processes import failed_processes, rows_of_processes, write_result
from scripts.benchmarking.records import Progress, Record
from scripts.benchmarking.step import inputs_label
from scripts.benchmarking.tables import machine_of, markdown_table, megabytes
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


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """One row a model: peak and times of each contender."""
    rows = rows_of_processes("torch_plans", "model", options.only or SUBJECTS, options, progress)
    return {"rounds": options.rounds, "own_share": OWN_SHARE, "rows": rows}


def failures(figures: Mapping[str, Any]) -> list[str]:
    return failed_processes(figures["rows"])


def cells(row: Mapping[str, Any]) -> list[str]:
    """The peak of each contender, with its best time as a multiple of eager's."""
    seconds = row["seconds"]
    times = {contender: f"{seconds[contender] / seconds[EAGER]:.2f}" for contender in CONTENDERS}
    times[EAGER] = f"{seconds[EAGER]:.2f} s"
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
    plans: dict[str, int] = {}
    for contender, rival in ((OURS_BY_HAND, BY_HAND), (OURS_BUDGET, OWN_BUDGET)):
        progress(f"{name}: {contender}")
        made, plans[contender] = _planned(plain, inputs, peaks[rival], options.time_limit)
        contenders[contender] = made
        peaks[contender] = _measured_peak(made, inputs)
    steps = {contender: functools.partial(_step, made, inputs) for contender, made in contenders.items()}
    seconds = interleaved_seconds(steps, options.rounds, lambda stage: progress(f"{name}: {stage}"))
    gradients = {contender: [one.grad for one in made.parameters()] for contender, made in contenders.items()}
    return {
        "inputs": {key: list(value.shape) for key, value in batch.items()},
        "peak_bytes": peaks,
        "seconds": {contender: min(times) for contender, times in seconds.items()},
        "simulated_peak_bytes": plans,
        "parameters": len(gradients[EAGER]),
        "bit_equal_gradients": {
            contender: sum(map(_is_equal, gradients[EAGER], found)) for contender, found in gradients.items()
        },
    }


def results_section(record: Record) -> str:
    figures = record["figures"]
    rows = [row for row in figures["rows"] if "error" not in row]
    difference = max(
        (
            abs(simulated / row["peak_bytes"][contender] - 1)
            for row in rows
            for contender, simulated in row["simulated_peak_bytes"].items()
        ),
        default=0.0,
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


def _planned(plain: Any, inputs: Any, budget_bytes: int, time_limit: float) -> tuple[Any, int]:
    """A module with a plan within a budget, and the plan's simulated peak."""
    from onnxgc.torch import checkpoint, plans_of

    made = checkpoint(copy.deepcopy(plain), inputs, budget=str(budget_bytes), time_limit=time_limit)
    (plan,) = plans_of(made)
    return made, plan.planned_peak_bytes


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
    _step(module, inputs)
    module.zero_grad()
    return measured_peak(lambda: module(*inputs).backward())


def measured_peak(step: Callable[[], object]) -> int:
    """The most bytes allocated at once during a step, without those allocated before it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def _is_equal(one: Any, other: Any) -> bool:
    import torch

    return (one is None and other is None) or torch.equal(one, other)


if __name__ == "__main__":
    write_result(compare, Options)
