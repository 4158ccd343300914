"""Training with the optimizer in the file, in place, against the same updates in PyTorch."""

import os
import time
from pathlib import Path

import numpy as np

from onnxgc.training import Trainer
from scripts.gpu_checks.settings import SEED, Json, Network, device_of, light_model, median

UPDATES, SMOKE_UPDATES = 50, 5
NETWORK, SHAPE, SMOKE_SHAPE = "resnet18", (32, 3, 224, 224), (4, 3, 64, 64)
MAX_LOSS_DISTANCE = 5e-2
"""Relative, after the last update: rounding errors grow with each."""
_RATE, _CLASSES = 1e-4, 1000


def work_optimizer(request: Json, folder: Path) -> Json:
    """The same batch, initial weights and settings of AdamW for both, without TF32."""
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    import torch
    from torch.nn.functional import cross_entropy

    from onnxgc.torch import from_onnx

    device = device_of(request["provider"])
    shape, updates = (SMOKE_SHAPE, SMOKE_UPDATES) if request["smoke"] else (SHAPE, UPDATES)
    path, shapes = light_model(Network(NETWORK, shape))
    options: Json = {"input_shapes": shapes, "provider": device, "threads": request["threads"], "seed": SEED}
    trainer = Trainer(path, optimizer="adamw", learning_rate=_RATE, check=False, **options)
    generator = np.random.default_rng(SEED)
    x = generator.standard_normal(shape, np.float32)
    labels = generator.integers(0, _CLASSES, shape[:1])
    module = from_onnx(path, input_shapes=shapes).train()
    stored = {key: torch.from_numpy(trainer.array(name)) for key, name in module.onnx_names().items()}
    module.load_state_dict(stored)
    module = module.to(device)
    before = trainer.addresses()
    names, seconds, losses = list(trainer.inputs), [], []
    for _ in range(updates):
        started = time.perf_counter()
        losses.append(trainer.step(dict(zip(names, (x, labels), strict=True))))
        seconds.append(time.perf_counter() - started)
    own = torch.optim.AdamW(module.parameters(), lr=_RATE)
    x_tensor, label_tensor = torch.from_numpy(x).to(device), torch.from_numpy(labels).to(device)
    expected, own_seconds = [], []
    for _ in range(updates):
        started = time.perf_counter()
        own.zero_grad()
        loss = cross_entropy(module(x_tensor), label_tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        own.step()
        expected.append(float(loss.detach()))
        own_seconds.append(time.perf_counter() - started)
    far = [abs(one - other) / abs(other) for one, other in zip(losses, expected, strict=True)]
    in_place = trainer.addresses() == before
    return {
        "status": "held" if in_place and max(far) < MAX_LOSS_DISTANCE else "not held",
        "updates": updates,
        "shape": list(shape),
        "losses": losses,
        "torch_losses": expected,
        "loss_distance": max(far),
        "in_place": in_place,
        "median_seconds": median(seconds),
        "torch_seconds": median(own_seconds),
        "simulated_peak_bytes": trainer.simulated_peak_bytes,
    }
