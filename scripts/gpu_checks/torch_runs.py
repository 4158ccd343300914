"""PyTorch's own step on the device, in one of several ways."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.benchmarking.manual_checkpoints import checkpoint_blocks
from scripts.benchmarking.torch_plans import with_loss
from scripts.gpu_checks.settings import (
    CUDA,
    SEED,
    TIMED_RUNS,
    Json,
    Network,
    Sequences,
    device_of,
    light_model,
    median,
    network_named,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from scripts.exports.torch_models import TorchModel

# Classes of blocks that users checkpoint.
BLOCKS = (
    "Bottleneck", "BasicBlock", "_DenseLayer", "_Transition", "InceptionA", "InceptionC", "InceptionE",
    "BertLayer", "GPT2Block", "LlamaDecoderLayer",
)  # fmt: skip
WARM_UP_RUNS = 3
_CLASSES = 1000


def work_torch(request: Json, folder: Path) -> Json:
    """Step times and the peak of one way; the peak includes `kept_bytes`, parameters and inputs.

    A way has words: `eager`, `channels_last`, `amp`, `checkpointed`, `compiled`, `cuda_graph`, `from_onnx`,
    `planned=BUDGET` and `activation_memory_budget=SHARE`.
    """
    import torch
    from torch._functorch import config

    # ONNX Runtime's default.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(SEED)
    way = {word.partition("=")[0]: word.partition("=")[2] for word in request["way"].split()}
    device = device_of(request["provider"])
    network = network_named(request["network"], request["smoke"])
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    made, inputs, source = _network(network, "from_onnx" in way, request["smoke"], device)
    if "checkpointed" in way and source == "from_onnx":
        return {"status": "not available"}
    made = made.to(device).train()
    if "channels_last" in way:
        made = made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = tuple(value.to(memory_format=torch.channels_last) for value in inputs)
    kept = sum(tensor.nbytes for tensor in (*made.parameters(), *made.buffers(), *inputs))
    called, plan = _in_way(made, inputs, way)

    def step() -> None:
        made.zero_grad(set_to_none=True)
        half = torch.float16 if request["provider"] == CUDA else torch.bfloat16
        with torch.autocast(device, half, enabled="amp" in way):
            loss = called(*inputs)
        loss.backward()

    with config.patch(activation_memory_budget=float(way.get("activation_memory_budget", 1.0))):
        measured = _timed(step, device)
    return {"source": source, **measured, "kept_bytes": kept, **plan}


def torch_model(name: str) -> TorchModel:
    from scripts.exports.torch_models import TORCH_MODELS

    return TORCH_MODELS[name]


def batch_of(sequences: Sequences, small: bool) -> dict[str, Tensor]:
    """The model's own batch, repeated to the size of `sequences`, without padding."""
    import torch

    found = {}
    for name, value in torch_model(sequences.model).batch(small).items():
        times = (-(-sequences.batch // value.shape[0]), -(-sequences.tokens // value.shape[1]))
        tiled = value.repeat(*times)[: sequences.batch, : sequences.tokens].contiguous()
        found[name] = torch.ones_like(tiled) if "mask" in name else tiled
    return found


def _network(
    network: Network | Sequences, is_onnx: bool, small: bool, device: str
) -> tuple[nn.Module, tuple[Tensor, ...], str]:
    """A module that returns the loss, its inputs on the device, and the source of the network."""
    import torch
    from torch.nn.functional import cross_entropy

    if isinstance(network, Sequences):
        model = torch_model(network.model)
        inputs = tuple(value.to(device) for value in batch_of(network, small).values())
        module = model.module(small).to(device)
        with torch.no_grad():
            target = model.target(module(*inputs))
        return with_loss(module, model.loss_of, target), inputs, "transformers"
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(network.shape, generator=generator).to(device)
    target = torch.randint(0, _CLASSES, network.shape[:1], generator=generator)
    if is_onnx or importlib.util.find_spec("torchvision") is None:
        from onnxgc.torch import from_onnx

        path, shapes = light_model(network)
        return with_loss(from_onnx(path, input_shapes=shapes), cross_entropy, target), (x,), "from_onnx"
    models: Any = importlib.import_module("torchvision.models")
    options = {"aux_logits": False, "init_weights": False} if network.name == "inception_v3" else {}
    module = models.get_model(network.name, weights=None, **options)
    return with_loss(module, cross_entropy, target), (x,), "torchvision"


def _in_way(module: nn.Module, inputs: tuple[Tensor, ...], way: Mapping[str, str]) -> tuple[Any, Json]:
    """The module as it is called in a step, and figures of its plan."""
    import torch

    plan: Json = {}
    if "checkpointed" in way:
        checkpoint_blocks(module, BLOCKS)
    budget = way.get("planned")
    if budget is not None:
        from onnxgc.torch import checkpoint, plans_of

        started = time.perf_counter()
        module = checkpoint(module, inputs, budget=budget)
        (made,) = plans_of(module)
        plan = {
            "planning_seconds": time.perf_counter() - started,
            "simulated_peak_bytes": made.planned_peak_bytes,
            "simulated_regular_peak_bytes": made.regular_peak_bytes,
            "extra_time_ratio": made.extra_time_ratio,
        }
    if "compiled" not in way:
        return module, plan
    return torch.compile(module, mode="reduce-overhead" if "cuda_graph" in way else None), plan


def _timed(step: Callable[[], None], device: str) -> Json:
    """Median seconds of ten steps, and the most bytes that PyTorch's allocator held during a step."""
    import torch

    if device != "cuda":
        step()
        started = time.perf_counter()
        step()
        seconds = time.perf_counter() - started
        return {"step_seconds": [seconds], "median_seconds": seconds}
    for _ in range(WARM_UP_RUNS):
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(TIMED_RUNS):
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated()
    return {"step_seconds": times, "median_seconds": median(times), "allocated_peak_bytes": peak}
