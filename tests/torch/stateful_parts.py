"""Layers whose forward keeps state in Python objects, one class for each kind of state."""

import contextvars
import dataclasses
import functools
import types
import weakref
from collections import deque
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

WIDTH = 8
FACTOR: contextvars.ContextVar[float] = contextvars.ContextVar("factor", default=1.0)
SHARED: dict[str, Any] = {"calls": 0, "last": None}


class StatefulPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.init_state()

    def init_state(self) -> None: ...


class NoneAttribute(StatefulPart):
    def init_state(self) -> None:
        self.h: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) if self.h is None else self.layer(x + self.h)
        self.h = x.detach()
        return x


class MissingAttribute(StatefulPart):
    h: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if hasattr(self, "h"):
            x = x * self.h.sigmoid()
        self.h = x.detach().mean(0)
        return x


class DeletedAttribute(StatefulPart):
    h: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if "h" in self.__dict__:
            x = x - self.h
            del self.h
        else:
            vars(self)["h"] = x.detach().tanh()
        return self.layer(x)


class CallCounter(StatefulPart):
    def init_state(self) -> None:
        self.calls, self.share = 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.share = 2 * self.share + 0.25
        return self.layer(x)


class CounterBranch(StatefulPart):
    def init_state(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) if self.calls % 3 else x.tanh() + self.layer.bias


class DecayingTemperature(StatefulPart):
    def init_state(self) -> None:
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.temperature *= 0.5
        return self.layer(x) * self.temperature


class DequeHistory(StatefulPart):
    def init_state(self) -> None:
        self.history: Any = deque(maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        for before in self.history:
            x = x + 0.1 * before
        self.history.append(x.detach())
        return x


class GrowingList(StatefulPart):
    def init_state(self) -> None:
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.layer(x))
        return torch.stack(self.seen[-1:]).sum(0) + len(self.seen)


class DictCache(StatefulPart):
    def init_state(self) -> None:
        self.cache: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.cache["calls"] = self.cache.get("calls", 0) + 1
        if "keys" in self.cache:
            x = x + self.cache["keys"]
        self.cache["keys"] = (0.5 * x).detach()
        return self.layer(x)


class NestedTuple(StatefulPart):
    def init_state(self) -> None:
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


class DataclassState(StatefulPart):
    def init_state(self) -> None:
        self.moments = Moments()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.moments.mean is not None:
            x = x - self.moments.mean
        self.moments.mean = x.detach().mean(0)
        self.moments.count += 1
        return x


class SlottedObject:
    __slots__ = ("parts", "value")

    def __init__(self) -> None:
        self.value: Any = 1.0
        self.parts = types.SimpleNamespace(h=None)


class ObjectState(StatefulPart):
    def init_state(self) -> None:
        self.own = SlottedObject()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) * self.own.value
        if self.own.parts.h is not None:
            x = x + self.own.parts.h
        self.own.parts.h = x.detach()
        self.own.value = self.own.value + 1 if self.own.value < 3 else 0.5
        return x


class NoneBuffer(StatefulPart):
    mean: Tensor | None
    total: Tensor

    def init_state(self) -> None:
        self.register_buffer("mean", None)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.mean is not None:
            x = x - self.mean
        self.mean = x.detach().mean(0)
        self.total += 1
        return x * self.total


class BufferFromForward(StatefulPart):
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if hasattr(self, "scale"):
            return x * self.scale
        self.register_buffer("scale", x.detach().std() + 1)
        return x


class InPlaceTensor(StatefulPart):
    def init_state(self) -> None:
        self.total = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x + self.total)
        with torch.no_grad():
            self.total.mul_(0.5).add_(x.mean(0))
        return x


class ClassAttribute(StatefulPart):
    shift: ClassVar[Any] = None
    calls: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.shift is not None:
            x = x + self.shift
        self.shift = 0.1 * x.detach()  # type: ignore[misc]
        return x


class ComputedNames(StatefulPart):
    def init_state(self) -> None:
        self.at = 0

    def forward(self, x: Tensor) -> Tensor:
        setattr(self, f"h{self.at}", x.detach())
        self.at = (self.at + 1) % 2
        return self.layer(x + getattr(self, f"h{self.at}", 0))


class ChildAttribute(StatefulPart):
    layer: Any

    def init_state(self) -> None:
        self.layer.extra = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.layer.extra is not None:
            x = x + self.layer.extra
        self.layer.extra = x.detach()
        return x


class EmaTeacher(StatefulPart):
    def init_state(self) -> None:
        self.others = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for kept, one in zip(self.others[0].parameters(), self.layer.parameters(), strict=True):
                kept.mul_(0.9).add_(one, alpha=0.1)
        return self.layer(x) - self.others[0](x)


class LruCached(StatefulPart):
    @functools.lru_cache  # noqa: B019 - programs do it
    def steps(self, size: int) -> Tensor:
        return torch.arange(size) / size

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.steps(WIDTH)


class WeakReference(StatefulPart):
    def init_state(self) -> None:
        self.moments = Moments()
        self.reference = weakref.ref(self.moments)

    def forward(self, x: Tensor) -> Tensor:
        moments = self.reference()
        assert moments is not None
        moments.count += 1
        return self.layer(x) * (moments.count % 2 + 1)


class TypeCheck(StatefulPart):
    def init_state(self) -> None:
        self.calls: float = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) if type(self.calls) is int else x
        self.calls += 1 if self.calls < 2 else 0.5
        return self.layer(x)


class ContextVariable(StatefulPart):
    def forward(self, x: Tensor) -> Tensor:
        FACTOR.set(3.0 - FACTOR.get())
        return self.layer(x) * FACTOR.get()


class ArrayState(StatefulPart):
    def init_state(self) -> None:
        self.counts = np.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.counts[0] += 1
        return self.layer(x) * float(self.counts[0] % 2 + 1)


class SetState(StatefulPart):
    def init_state(self) -> None:
        self.seen: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        name = "first" if not self.seen else "second"
        self.seen.add(name)
        return self.layer(x) * len(self.seen)


class TrainingOnly(StatefulPart):
    def init_state(self) -> None:
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.training:
            self.kept = x.detach()
        return x if self.kept is None else x + self.kept


class ModuleGlobal(StatefulPart):
    def forward(self, x: Tensor) -> Tensor:
        SHARED["calls"] += 1
        x = self.layer(x) * (1 + SHARED["calls"] % 2)
        if SHARED["last"] is not None and SHARED["last"].shape == x.shape:
            x = x + SHARED["last"]
        SHARED["last"] = x.detach()
        return x


class Stateless(StatefulPart):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Interpolation(StatefulPart):
    def forward(self, x: Tensor) -> Tensor:
        image = self.layer(x).reshape(len(x), 1, 2, 4)
        modes = {"bilinear": False, "bicubic": False, "nearest": None}
        resized = [F.interpolate(image, scale_factor=2.0, mode=m, align_corners=c) for m, c in modes.items()]
        return self.layer(F.interpolate(torch.stack(resized).sum(0).flatten(2), size=WIDTH, mode="linear").squeeze(1))


STATEFUL: tuple[type[StatefulPart], ...] = tuple(
    kind for kind in list(globals().values()) if isinstance(kind, type) and StatefulPart in kind.__mro__[1:]
)
