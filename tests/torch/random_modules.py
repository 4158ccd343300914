import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.torch.stateful_parts import STATEFUL, WIDTH, DecayingTemperature, NoneAttribute


def with_hook(part: nn.Module) -> nn.Module:
    kept: list[Tensor] = []

    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        if kept:
            output = output + kept.pop().mean()
        kept.append(output.detach())
        return output

    part.register_forward_hook(hook)
    return part


def random_normalisation(choice: random.Random) -> nn.Module:
    return choice.choice(
        [
            lambda: nn.LayerNorm(WIDTH),
            lambda: nn.BatchNorm1d(WIDTH),
            lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
            lambda: nn.BatchNorm1d(WIDTH, momentum=None),
            lambda: nn.GroupNorm(2, WIDTH),
            lambda: nn.RMSNorm(WIDTH),
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
            lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
            lambda: deprecated(nn.utils.spectral_norm, nn.Linear(WIDTH, WIDTH)),
            lambda: deprecated(nn.utils.weight_norm, nn.Linear(WIDTH, WIDTH)),
        ]
    )()


def deprecated(change: Callable[[nn.Module], nn.Module], layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return change(layer)


def random_module(seed: int) -> nn.Module:
    choice = random.Random(seed)
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(choice.randint(2, 5)):
        part: nn.Module = choice.choice(STATEFUL)()
        if choice.random() < 0.15:
            part = with_hook(part)
        layers.append(part)
        if choice.random() < 0.5:
            layers.append(random_normalisation(choice))
        if choice.random() < 0.3:
            layers.append(choice.choice([nn.Dropout(0.3), nn.ReLU(), nn.GELU(), nn.AlphaDropout(0.2)]))
    return nn.Sequential(*layers)


def is_autocast(seed: int) -> bool:
    return seed % 4 == 1


def change_state(module: nn.Module, step: int, seed: int) -> None:
    choice = random.Random(1000 * seed + step)
    parts = [part for part in module.modules() if part is not module]
    if choice.random() < 0.3:
        choice.choice(parts).train(choice.random() < 0.5)
    if choice.random() < 0.1:
        module.train(choice.random() < 0.8)
    for part in parts:
        if isinstance(part, DecayingTemperature) and choice.random() < 0.5:
            part.temperature = 2.0
        if isinstance(part, NoneAttribute) and choice.random() < 0.3:
            part.h = None
        if isinstance(part, nn.Dropout) and choice.random() < 0.3:
            part.p = choice.choice([0.1, 0.5])


def inputs(seed: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * seed + step))
