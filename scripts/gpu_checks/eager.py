"""Models exported from PyTorch, and PyTorch's own step on the card: eager, and with manual checkpointing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from onnxgc.api import emit, optimize, store_all_schedule
from scripts.gpu_checks.graph_runs import simulated_peak_of
from scripts.gpu_checks.settings import GRAPHS, Json
from scripts.gpu_checks.worker_process import save_arrays

# Classes of blocks that users checkpoint.
BLOCKS = ("Bottleneck", "BertLayer", "GPT2Block", "EncoderBlock")
ROUNDS = 5


def export_and_plan(name: str, small: bool, folder: Path) -> Json:
    """Exports and plans a model, and writes both graphs and their feeds."""
    from scripts.exports.torch_export import Export, write_torch_model
    from scripts.exports.torch_models import TORCH_MODELS, Recipe

    started = time.perf_counter()
    recipe = Recipe.SCRIPT if small else Recipe.DYNAMO
    source = write_torch_model(name, TORCH_MODELS[name], folder, Export(recipe, False), small)
    exported = time.perf_counter()
    planned = optimize(source, loss=TORCH_MODELS[name].loss, check=False).planned
    with np.load(source.with_suffix(".npz")) as stored:
        feeds = {key: stored[key] for key in stored.files}
    (target,) = planned.model.targets
    feeds[target] = feeds.pop("target")
    feeds = {key: value for key, value in feeds.items() if key in (*planned.model.inputs, target)}
    save_arrays(folder / "feeds.npz", feeds.values())
    peaks = {}
    for graph, schedule in zip(GRAPHS, (store_all_schedule(planned), planned.schedule), strict=True):
        emitted = emit(planned, schedule=schedule).model
        (folder / f"{graph}.onnx").write_bytes(emitted.SerializeToString())
        peaks[graph] = simulated_peak_of(emitted)
    return {
        "names": list(feeds),
        "inputs": {key: list(value.shape) for key, value in feeds.items()},
        "simulated_peak_bytes": peaks,
        "export_seconds": exported - started,
        "plan_seconds": time.perf_counter() - exported,
    }


def measure_eager(name: str, small: bool, device: str) -> Json:
    """Step times and peaks of PyTorch; the peak includes `kept_bytes`, parameters and inputs."""
    import torch

    from scripts.benchmarking.manual_checkpoints import checkpoint_blocks
    from scripts.exports.torch_models import TORCH_MODELS

    # ONNX Runtime's default.
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
            checkpoint_blocks(module, BLOCKS)

        def step(module: Any = module, inputs: Any = inputs, target: Any = target) -> None:
            module.zero_grad(set_to_none=True)
            model.loss_of(module(*inputs), target).backward()  # type: ignore[no-untyped-call]

        kept = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers(), *inputs, target))
        answer[kind] = {**_timed(step, device), "kept_bytes": kept}
        del module, inputs
    return answer


def _timed(step: Callable[[], None], device: str) -> Json:
    import torch

    step()
    if device != "cuda":
        started = time.perf_counter()
        step()
        return {"step_seconds": [time.perf_counter() - started]}
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
