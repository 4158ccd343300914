"""Whole PyTorch modules in less memory: ours beside checkpoints by hand and PyTorch's own memory budget.

One step, forward and backward, in one process a model. Peaks are those of PyTorch's CPU allocator over a
step, gradients included. Contenders take turns, so that a machine that slows down slows all of them; times
are the best of their rounds. Ours is planned twice: within the peak of the checkpoints by hand, and within
that of PyTorch's memory budget.

    python -m scripts.benchmarking.torch_plans NAME RESULT REQUEST    one model in this process
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarking.records import ROOT, Progress

MEGABYTE = 10**6

EAGER, BY_HAND, OWN_BUDGET = "eager", "per-block checkpoint", "activation_memory_budget"
OURS_BY_HAND, OURS_BUDGET = "ours within per-block", "ours within activation_memory_budget"
CONTENDERS = (EAGER, BY_HAND, OURS_BY_HAND, OWN_BUDGET, OURS_BUDGET)
OWN_SHARE = 0.5
"""What PyTorch's memory budget is set to: this share of what its default saves."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The modules of a model that people checkpoint, by class, and the batch."""

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
    """Which models, in which size, how many steps are timed, and how long a plan is searched for."""

    only: tuple[str, ...] = ()
    small: bool = False
    rounds: int = 5
    threads: int = 2
    time_limit: float = 30.0


def run_torch_plans(options: Options, tell: Progress) -> dict[str, Any]:
    """One row a model: peak and best time of each contender."""
    rows = []
    for name in options.only or tuple(SUBJECTS):
        tell(name)
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "row.json"
            command = [sys.executable, "-m", "scripts.benchmarking.torch_plans", name, str(result)]
            status = subprocess.run([*command, json.dumps(asdict(options))], cwd=ROOT).returncode
            if status:
                rows.append({"model": name, "error": f"the process ended with status {status}"})
            else:
                rows.append(json.loads(result.read_text(encoding="utf-8")))
    return {"rounds": options.rounds, "time_limit": options.time_limit, "own_share": OWN_SHARE, "rows": rows}


def cells(row: Mapping[str, Any]) -> list[str]:
    """For each contender its peak, and its best time as a multiple of eager's."""
    best = {contender: min(seconds) for contender, seconds in row["seconds"].items()}
    return [
        f"{row['peak_bytes'][contender] / MEGABYTE:,.0f}"
        + (f", {best[contender]:.2f} s" if contender == EAGER else f", {best[contender] / best[EAGER]:.2f}")
        for contender in CONTENDERS
    ]


def compare(name: str, options: Options, tell: Callable[[str], None]) -> dict[str, Any]:
    """The row of one model, in this process."""
    import torch
    from torch import nn

    from onnxgc.torch import checkpoint, plans_of
    from onnxgc.torch.checkpointing import planned_module
    from onnxgc.torch.operator_timing import Measured
    from onnxgc.torch.torch_partitioner_budget import PartitionerBudget
    from scripts.exports.torch_models import TORCH_MODELS

    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    subject = SUBJECTS[name]
    model = TORCH_MODELS[name]
    module = model.module(options.small)
    batch = {key: value[: subject.batch] for key, value in model.batch(options.small).items()}
    inputs = tuple(batch.values())
    with torch.no_grad():
        target = model.target(copy.deepcopy(module)(*inputs))
    plain = _with_loss(module, model.loss_of, target)

    contenders: dict[str, nn.Module] = {
        EAGER: plain,
        BY_HAND: _by_hand(copy.deepcopy(plain), subject.blocks),
        OWN_BUDGET: planned_module(copy.deepcopy(plain), PartitionerBudget(OWN_SHARE), Measured(), inputs),
    }
    peaks: dict[str, int] = {}
    for contender, made in contenders.items():
        tell(f"{name}: {contender}")
        _step(made, inputs)
        peaks[contender] = _peak(made, inputs)
    plans: dict[str, Any] = {}
    for contender, rival in ((OURS_BY_HAND, BY_HAND), (OURS_BUDGET, OWN_BUDGET)):
        tell(f"{name}: {contender}")
        started = time.perf_counter()
        made = checkpoint(
            copy.deepcopy(plain), inputs, budget=str(peaks[rival]), time_limit=options.time_limit
        )
        seconds = time.perf_counter() - started
        (plan,) = plans_of(made)
        contenders[contender] = made
        _step(made, inputs)
        peaks[contender] = _peak(made, inputs)
        plans[contender] = {
            "planning_seconds": seconds,
            "simulated_peak_bytes": plan.planned_peak_bytes,
            "simulated_regular_peak_bytes": plan.regular_peak_bytes,
            "repeated": plan.repeated,
            "operators": plan.operators,
            "extra_time_ratio": plan.extra_time_ratio,
            "lower_bound_ratio": plan.lower_bound_ratio,
            "simulated_saved_bytes": sum(one.size_bytes for one in plan.saved),
            "saved_bytes": _saved(made, inputs),
        }
    seconds_of: dict[str, list[float]] = {contender: [] for contender in contenders}
    for number in range(options.rounds):
        tell(f"{name}: round {number + 1} of {options.rounds}")
        for contender, made in contenders.items():
            started = time.perf_counter()
            _step(made, inputs)
            seconds_of[contender].append(time.perf_counter() - started)
    gradients = {contender: [one.grad for one in made.parameters()] for contender, made in contenders.items()}
    return {
        "model": name,
        "inputs": {key: list(value.shape) for key, value in batch.items()},
        "peak_bytes": peaks,
        "seconds": seconds_of,
        "plans": plans,
        "parameters": len(gradients[EAGER]),
        "bit_equal_gradients": {
            contender: sum(map(_equal, gradients[EAGER], found)) for contender, found in gradients.items()
        },
    }


def _with_loss(module: Any, loss: Callable[[Any, Any], Any], target: Any) -> Any:
    """The module and its loss as one: what a step calls."""
    from torch import nn

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            self.register_buffer("target", target)

        def forward(self, *inputs: Any) -> Any:
            return loss(self.module(*inputs), self.target)

    return WithLoss()


def _by_hand(module: Any, blocks: tuple[str, ...]) -> Any:
    """Each block of these classes under `torch.utils.checkpoint`, the outermost of them."""
    from torch.utils.checkpoint import checkpoint

    def wrap(parent: Any) -> None:
        for child in parent.children():
            if type(child).__name__ not in blocks:
                wrap(child)
                continue
            if hasattr(child, "memory_efficient"):
                # It is handed a list that grows, which a recomputation would find longer.
                child.memory_efficient = True
                continue
            child.forward = functools.partial(checkpoint, child.forward, use_reentrant=False)

    wrap(module)
    return module


def _step(module: Any, inputs: Any) -> None:
    module.zero_grad()
    module(*inputs).backward()


def _peak(module: Any, inputs: Any) -> int:
    """The most bytes that a step holds at once, beyond what was there before it."""
    from torch.profiler import ProfilerActivity, profile

    module.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        module(*inputs).backward()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def _saved(module: Any, inputs: Any) -> int:
    """The bytes of what autograd saves, but for parameters, buffers and inputs."""
    import torch

    there = {one.untyped_storage().data_ptr() for one in (*module.parameters(), *module.buffers(), *inputs)}
    found: dict[int, int] = {}

    def pack(one: Any) -> Any:
        storage = one.untyped_storage()
        if storage.data_ptr() not in there:
            found[storage.data_ptr()] = storage.nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        loss = module(*inputs)
    del loss
    return sum(found.values())


def _equal(one: Any, other: Any) -> bool:
    import torch

    return (one is None and other is None) or torch.equal(one, other)


def main() -> None:
    name, result, request = sys.argv[1:]
    given = json.loads(request)
    given["only"] = tuple(given["only"])
    tell = Progress()
    Path(result).write_text(json.dumps(compare(name, Options(**given), tell)), encoding="utf-8")


if __name__ == "__main__":
    main()
