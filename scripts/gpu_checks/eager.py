"""Models exported from PyTorch, and PyTorch's own step on the same card: eager, and checkpointed by hand."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from onnxgc.api import emit, optimize, store_all_schedule

Json = dict[str, Any]
# What people put `torch.utils.checkpoint` around.
BLOCKS = ("Bottleneck", "BertLayer", "GPT2Block", "EncoderBlock")
ROUNDS = 5


def work_export(name: str, small: bool, folder: Path) -> Json:
    """Export a model, plan it, and write both graphs and what is fed to them."""
    from scripts.exports.torch_export import Export, write_torch_model
    from scripts.exports.torch_models import TORCH_MODELS, Recipe

    started = time.perf_counter()
    recipe = Recipe.SCRIPT if small else Recipe.DYNAMO
    source = write_torch_model(name, TORCH_MODELS[name], folder, Export(recipe, False), small)
    exported = time.perf_counter()
    result = optimize(source, loss=TORCH_MODELS[name].loss, check=False)
    planned = result.planned
    with np.load(source.with_suffix(".npz")) as stored:
        feeds = {key: stored[key] for key in stored.files}
    (target,) = planned.model.targets
    feeds[target] = feeds.pop("target")
    feeds = {key: value for key, value in feeds.items() if key in (*planned.model.inputs, target)}
    np.savez(folder / "feeds.npz", *feeds.values())
    peaks = {}
    for graph, schedule in (("regular", store_all_schedule(planned)), ("planned", planned.schedule)):
        emitted = emit(planned, schedule=schedule).model
        (folder / f"{graph}.onnx").write_bytes(emitted.SerializeToString())
        properties = {entry.key: entry.value for entry in emitted.metadata_props}
        peaks[graph] = int(properties["onnxgc.simulated_peak_bytes"])
    return {
        "names": list(feeds),
        "inputs": {key: list(value.shape) for key, value in feeds.items()},
        "simulated_peak_bytes": peaks,
        "export_seconds": exported - started,
        "plan_seconds": time.perf_counter() - exported,
    }


def work_eager(name: str, small: bool, device: str) -> Json:
    """Step times and peaks of PyTorch; `kept_bytes`, parameters and inputs, are part of the peak."""
    import torch

    from scripts.exports.torch_models import TORCH_MODELS

    # As ONNX Runtime has it by default.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = TORCH_MODELS[name]
    answer: Json = {"torch": torch.__version__}
    for kind in ("eager", "checkpointed"):
        module = model.module(small)
        batch = model.batch(small)
        with torch.no_grad():
            target = model.target(module(*batch.values())).to(device)
        module = module.to(device)
        inputs = [value.to(device) for value in batch.values()]
        if kind == "checkpointed":
            _checkpoint_blocks(module)

        def step(module: Any = module, inputs: Any = inputs, target: Any = target) -> None:
            module.zero_grad(set_to_none=True)
            model.loss_of(module(*inputs), target).backward()  # type: ignore[no-untyped-call]

        kept = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers(), *inputs, target))
        answer[kind] = {**_timed(step, device), "kept_bytes": kept}
        del module, inputs
    return answer


def _checkpoint_blocks(module: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    for part in module.modules():
        if type(part).__name__ in BLOCKS:
            part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)


def _timed(step: Callable[[], None], device: str) -> Json:
    import torch

    if device != "cuda":
        step()
        started = time.perf_counter()
        step()
        return {"step_seconds": [time.perf_counter() - started]}
    step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    seconds = []
    for _ in range(ROUNDS):
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"step_seconds": seconds, "allocated_peak_bytes": torch.cuda.max_memory_allocated()}
