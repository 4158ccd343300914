"""Small random modules whose forward keeps state in the ways that Python has for it."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import random
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

WIDTH = 8
FACTOR: contextvars.ContextVar[float] = contextvars.ContextVar("factor", default=1.0)
SHARED: dict[str, Any] = {"calls": 0, "last": None}


class Part(nn.Module):
    """A layer, and state that `forward` of a subclass keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.begin()

    def begin(self) -> None: ...


class NoneFirst(Part):
    def begin(self) -> None:
        self.h: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) if self.h is None else self.layer(x + self.h)
        self.h = x.detach()
        return x


class AbsentFirst(Part):
    h: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if hasattr(self, "h"):
            x = x * self.h.sigmoid()
        self.h = x.detach().mean(0)
        return x


class ByDefault(Part):
    shift: float

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) + getattr(self, "shift", 0.0)
        self.shift = 0.5
        return x


class Deleted(Part):
    h: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if "h" in self.__dict__:
            x = x - self.h
            del self.h
        else:
            vars(self)["h"] = x.detach().tanh()
        return self.layer(x)


class Counting(Part):
    def begin(self) -> None:
        self.calls, self.share = 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.share = 2 * self.share + 0.25
        return self.layer(x)


class Steering(Part):
    def begin(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) if self.calls % 3 else x.tanh() + self.layer.bias


class Warming(Part):
    def begin(self) -> None:
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.temperature *= 0.5
        return self.layer(x) * self.temperature


class Toggled(Part):
    def begin(self) -> None:
        self.is_even = True

    def forward(self, x: Tensor) -> Tensor:
        self.is_even = not self.is_even
        return self.layer(x).relu() if self.is_even else self.layer(x)


class History(Part):
    def begin(self) -> None:
        self.history: Any = deque(maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        for before in self.history:
            x = x + 0.1 * before
        self.history.append(x.detach())
        return x


class Growing(Part):
    def begin(self) -> None:
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.layer(x))
        return torch.stack(self.seen[-1:]).sum(0) + len(self.seen)


class Cached(Part):
    def begin(self) -> None:
        self.cache: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.cache["calls"] = self.cache.get("calls", 0) + 1
        if "keys" in self.cache:
            x = x + self.cache["keys"]
        self.cache["keys"] = (0.5 * x).detach()
        return self.layer(x)


class Replaced(Part):
    def begin(self) -> None:
        self.state: Any = {}

    def forward(self, x: Tensor) -> Tensor:
        for before, (one, *_) in self.state.items():
            x = x + one[before]
        self.state = OrderedDict({1: ([x.detach(), x.detach().cos()], "any")})
        return self.layer(x)


class Tupled(Part):
    def begin(self) -> None:
        self.state: Any = (torch.zeros(WIDTH), {"c": torch.ones(WIDTH)}, None)

    def forward(self, x: Tensor) -> Tensor:
        h, c, _ = self.state
        x = self.layer(x) * c["c"] + h
        self.state = (x.detach().mean(0), {"c": c["c"] * 0.5}, "later")
        return x


@dataclasses.dataclass
class Moments:
    mean: Tensor | None = None
    count: int = 0


class Dataclass(Part):
    def begin(self) -> None:
        self.moments = Moments()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.moments.mean is not None:
            x = x - self.moments.mean
        self.moments.mean = x.detach().mean(0)
        self.moments.count += 1
        return x


class Own:
    __slots__ = ("parts", "value")

    def __init__(self) -> None:
        self.value: Any = 1.0
        self.parts = types.SimpleNamespace(h=None)


class Objects(Part):
    def begin(self) -> None:
        self.own = Own()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) * self.own.value
        if self.own.parts.h is not None:
            x = x + self.own.parts.h
        self.own.parts.h = x.detach()
        self.own.value = self.own.value + 1 if self.own.value < 3 else 0.5
        return x


class LateBuffer(Part):
    mean: Tensor | None
    total: Tensor

    def begin(self) -> None:
        self.register_buffer("mean", None)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.mean is not None:
            x = x - self.mean
        self.mean = x.detach().mean(0)
        self.total += 1
        return x * self.total


class NewBuffer(Part):
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if hasattr(self, "scale"):
            return x * self.scale
        self.register_buffer("scale", x.detach().std() + 1)
        return x


class InPlace(Part):
    def begin(self) -> None:
        self.total = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x + self.total)
        with torch.no_grad():
            self.total.mul_(0.5).add_(x.mean(0))
        return x


class OfClass(Part):
    shift: ClassVar[Any] = None
    calls: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.shift is not None:
            x = x + self.shift
        self.shift = 0.1 * x.detach()  # type: ignore[misc]
        return x


class Named(Part):
    def begin(self) -> None:
        self.at = 0

    def forward(self, x: Tensor) -> Tensor:
        setattr(self, f"h{self.at}", x.detach())
        self.at = (self.at + 1) % 2
        return self.layer(x + getattr(self, f"h{self.at}", 0))


class Property(Part):
    def begin(self) -> None:
        self._h: Any = None

    @property
    def h(self) -> Any:
        return self._h

    @h.setter
    def h(self, value: Tensor) -> None:
        self._h = [value]

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) if self.h is None else self.layer(x) + self.h[0]
        self.h = x.detach()
        return x


class OfChild(Part):
    layer: Any

    def begin(self) -> None:
        self.layer.extra = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.layer.extra is not None:
            x = x + self.layer.extra
        self.layer.extra = x.detach()
        return x


class Unregistered(Part):
    def begin(self) -> None:
        self.others: list[Any] = [nn.Linear(WIDTH, WIDTH), {"kept": None}]

    def forward(self, x: Tensor) -> Tensor:
        return self.others[0](self.layer(x))


class Teacher(Part):
    def begin(self) -> None:
        self.others = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for kept, one in zip(self.others[0].parameters(), self.layer.parameters(), strict=True):
                kept.mul_(0.9).add_(one, alpha=0.1)
        return self.layer(x) - self.others[0](x)


class OfCache(Part):
    @functools.lru_cache  # noqa: B019 - programs do it
    def steps(self, size: int) -> Tensor:
        return torch.arange(size) / size

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.steps(WIDTH)


class OfReference(Part):
    def begin(self) -> None:
        self.moments = Moments()
        self.reference = weakref.ref(self.moments)

    def forward(self, x: Tensor) -> Tensor:
        moments = self.reference()
        assert moments is not None
        moments.count += 1
        return self.layer(x) * (moments.count % 2 + 1)


class OfTypes(Part):
    def begin(self) -> None:
        self.calls: float = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) if type(self.calls) is int else x
        self.calls += 1 if self.calls < 2 else 0.5
        return self.layer(x)


class OfContext(Part):
    def forward(self, x: Tensor) -> Tensor:
        FACTOR.set(3.0 - FACTOR.get())
        return self.layer(x) * FACTOR.get()


class OfArray(Part):
    def begin(self) -> None:
        self.counts = np.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.counts[0] += 1
        return self.layer(x) * float(self.counts[0] % 2 + 1)


class OfSet(Part):
    def begin(self) -> None:
        self.seen: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        name = "first" if not self.seen else "second"
        self.seen.add(name)
        return self.layer(x) * len(self.seen)


class Moded(Part):
    def begin(self) -> None:
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.training:
            self.kept = x.detach()
        return x if self.kept is None else x + self.kept


class OfModule(Part):
    def forward(self, x: Tensor) -> Tensor:
        SHARED["calls"] += 1
        x = self.layer(x) * (1 + SHARED["calls"] % 2)
        if SHARED["last"] is not None and SHARED["last"].shape == x.shape:
            x = x + SHARED["last"]
        SHARED["last"] = x.detach()
        return x


class Plain(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Interpolating(Part):
    def forward(self, x: Tensor) -> Tensor:
        image = self.layer(x).reshape(len(x), 1, 2, 4)
        modes = {"bilinear": False, "bicubic": False, "nearest": None}
        made = [F.interpolate(image, scale_factor=2.0, mode=m, align_corners=c) for m, c in modes.items()]
        return self.layer(
            F.interpolate(torch.stack(made).sum(0).flatten(2), size=WIDTH, mode="linear").squeeze(1)
        )


def hooked(part: nn.Module) -> nn.Module:
    """A part with a hook that keeps what goes through in a list, and reads the one before."""
    kept: list[Tensor] = []

    def hook(_: nn.Module, __: Any, made: Tensor) -> Tensor:
        if kept:
            made = made + kept.pop().mean()
        kept.append(made.detach())
        return made

    part.register_forward_hook(hook)
    return part


def normalised(choice: random.Random) -> nn.Module:
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
            lambda: old(nn.utils.spectral_norm, nn.Linear(WIDTH, WIDTH)),
            lambda: old(nn.utils.weight_norm, nn.Linear(WIDTH, WIDTH)),
        ]
    )()


def old(change: Callable[[nn.Module], nn.Module], layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return change(layer)


STATEFUL: tuple[type[Part], ...] = tuple(
    kind for kind in list(globals().values()) if isinstance(kind, type) and Part in kind.__mro__[1:]
)


def random_module(seed: int) -> nn.Module:
    """Two to five parts, some of them with normalisations, dropout and hooks around."""
    choice = random.Random(seed)
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(choice.randint(2, 5)):
        part: nn.Module = choice.choice(STATEFUL)()
        if choice.random() < 0.15:
            part = hooked(part)
        layers.append(part)
        if choice.random() < 0.5:
            layers.append(normalised(choice))
        if choice.random() < 0.3:
            layers.append(choice.choice([nn.Dropout(0.3), nn.ReLU(), nn.GELU(), nn.AlphaDropout(0.2)]))
    return nn.Sequential(*layers)


def is_autocast(seed: int) -> bool:
    return seed % 4 == 1


def perturbed(module: nn.Module, step: int, seed: int) -> None:
    """What a training loop changes between steps: modes and attributes."""
    choice = random.Random(1000 * seed + step)
    parts = [part for part in module.modules() if part is not module]
    if choice.random() < 0.3:
        choice.choice(parts).train(choice.random() < 0.5)
    if choice.random() < 0.1:
        module.train(choice.random() < 0.8)
    for part in parts:
        if isinstance(part, Warming) and choice.random() < 0.5:
            part.temperature = 2.0
        if isinstance(part, NoneFirst) and choice.random() < 0.3:
            part.h = None
        if isinstance(part, nn.Dropout) and choice.random() < 0.3:
            part.p = choice.choice([0.1, 0.5])


def inputs(seed: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * seed + step))
