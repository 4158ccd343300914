"""Planned modules where a trace sees less than a call: settings, objects, what is left behind."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from onnxgc.errors import PlanError  # noqa: E402
from onnxgc.torch import checkpoint  # noqa: E402

QUICK: dict[str, Any] = {"device": "a100", "time_limit": None, "step_limit": 2}


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class Layers(nn.Module):
    """Two layers and a Dropout, and an attribute that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 8))
        self.scale = 1.0
        self.calls = 0

    def forward(self, x: Tensor, *_: Any) -> Any:
        self.calls += 1
        return self.layers(x).exp() * self.scale


def step(module: nn.Module, *inputs: Any, total: Callable[[Any], Tensor] = torch.mean) -> list[Tensor | None]:
    """Loss, gradients and buffers after a step."""
    module.zero_grad()
    torch.manual_seed(0)
    loss = total(module(*inputs))
    loss.backward()
    return [loss.detach(), *(one.grad for one in module.parameters()), *module.buffers()]


def assert_same(one: nn.Module, other: nn.Module, *inputs: Any, **options: Any) -> None:
    for mine, yours in zip(step(one, *inputs, **options), step(other, *inputs, **options), strict=True):
        assert (mine is None) == (yours is None)
        assert mine is None or torch.equal(mine, yours)


def pair(make: Callable[[], nn.Module], *inputs: Any, budget: Any = 1.0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make()
    return plain, checkpoint(copy.deepcopy(plain), inputs, budget=budget, **QUICK)


def changed_scale(module: Any) -> None:
    module.scale = 3.0


def changed_rate(module: Any) -> None:
    module.layers[2].p = 0.8


def changed_layer(module: Any) -> None:
    module.layers[1] = nn.Tanh()


def hooked_layer(module: Any) -> None:
    module.layers[0].register_forward_hook(lambda part, given, made: 2 * made)


@pytest.mark.parametrize("change", [changed_scale, changed_rate, changed_layer, hooked_layer])
def test_what_changes_between_steps_counts(change: Callable[[nn.Module], None]) -> None:
    plain, planned = pair(Layers, drawn(16, 8))
    assert_same(plain, planned, drawn(16, 8))
    for module in (plain, planned):
        change(module)
    assert_same(plain, planned, drawn(16, 8))


def test_a_counter_in_forward_does_not_make_each_call_a_new_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    _, planned = pair(Layers, drawn(16, 8))
    step(planned, drawn(16, 8))
    monkeypatch.setattr("onnxgc.torch.checkpointing.aot_function", None)
    step(planned, drawn(16, 8))


class Indexed(nn.Linear):
    def forward(self, x: Tensor, numbers: Any = None) -> Tensor:
        return super().forward(x).exp() * float(numbers[1500])


def test_a_long_array_counts_with_all_its_numbers() -> None:
    numbers = np.zeros(3000)
    plain, planned = pair(lambda: Indexed(8, 8), drawn(16, 8), numbers)
    for value in (1.0, 2.0):
        numbers = numbers.copy()
        numbers[1500] = value
        assert_same(plain, planned, drawn(16, 8), numbers)


def test_a_forward_of_the_instance_is_the_one_that_runs() -> None:
    plain = Layers()
    own = types.MethodType(lambda self, x: 5 * self.layers[0](x).exp(), plain)
    vars(plain)["forward"] = own
    assert_same(plain, checkpoint(plain, drawn(16, 8), budget=1.0, **QUICK), drawn(16, 8))


class Average(nn.Linear):
    """Puts another tensor in the place of a buffer, and one into an attribute."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.penalty: Any = None

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x).exp()
        self.average = 0.9 * self.average + 0.1 * made.detach().mean(0)
        self.penalty = made.square().mean()
        return made.tanh() * self.average


def test_what_forward_leaves_behind_is_there() -> None:
    plain, planned = pair(Average, drawn(16, 8))
    assert plain.penalty is planned.penalty is None
    for _ in range(3):
        modules = iter((plain, planned))
        assert_same(
            plain,
            planned,
            drawn(16, 8),
            total=lambda made: made.mean() + next(modules).penalty,  # noqa: B023
        )


class Cache:
    """Nothing that PyTorch knows."""

    def __init__(self, keys: list[Tensor]) -> None:
        self.keys = keys


@dataclasses.dataclass
class Result:
    made: Tensor
    cache: Cache
    name: str


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Result:
        made = self.layer(x).exp()
        return Result(made, Cache([made.tanh()]), "one")


def test_objects_that_forward_returns_hold_the_call_s_tensors() -> None:
    plain, planned = pair(Returning, drawn(16, 8))
    for factor in (1, 2):
        assert_same(
            plain,
            planned,
            factor * drawn(16, 8),
            total=lambda found: found.made.mean() + found.cache.keys[0].square().mean(),
        )
    assert planned(drawn(16, 8)).name == "one"


class Drawing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            noise = torch.rand(x.shape, generator=self.generator)
            x = F.dropout(super().forward(x).exp().tanh() * noise)
        return x


def test_a_generator_of_the_module_is_drawn_from_as_often_as_without_a_plan() -> None:
    for options in ({**QUICK, "budget": "min"}, {"budget": 1.0}):
        torch.manual_seed(0)
        plain = Drawing()
        planned = checkpoint(copy.deepcopy(plain), drawn(16, 8), **options)
        assert_same(plain, planned, drawn(16, 8))


class Skipping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class LazySequence(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(8))


@pytest.mark.parametrize(
    ("make", "told"),
    [(lambda: Skipping(8, 8), "from Python or NumPy"), (LazySequence, "has no shape before")],
)
def test_refusals_are_one_line(make: Callable[[], nn.Module], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        checkpoint(make(), drawn(16, 8), **QUICK)


def test_a_wrong_shape_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("torch").propagate, before = True, logging.getLogger("torch").propagate
    try:
        with pytest.raises(PlanError, match="cannot be traced"):
            checkpoint(nn.Linear(8, 8, bias=False), drawn(3, 5), **QUICK)
    finally:
        logging.getLogger("torch").propagate = before
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_inputs_go_when_the_step_is_done() -> None:
    _, planned = pair(Layers, drawn(16, 8))
    data = drawn(16, 8)
    gone = weakref.ref(data)
    planned(data).sum().backward()
    del data
    gc.collect()
    assert gone() is None


def test_traces_of_many_kinds_do_not_pile_up() -> None:
    plain, planned = pair(lambda: nn.Linear(8, 8), drawn(1, 8), budget=1.0)
    limit = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onnxgc.torch.checkpointing._MOST_KINDS", limit)
        for count in (1, 2, 3, 4, 5, 1):
            assert_same(plain, planned, drawn(count, 8))
    assert len(vars(planned)["forward"]._traces) == limit


def test_a_graph_can_be_walked_twice() -> None:
    modules = pair(Layers, drawn(16, 8))
    for module in modules:
        torch.manual_seed(0)
        loss = module(drawn(16, 8)).mean()
        loss.backward(retain_graph=True)
        loss.backward()
    for one, other in zip(*(module.parameters() for module in modules), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_it_runs_plainly_inside_of_other_traces() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x))

    plain, planned = pair(Layers, drawn(16, 8))
    assert_same(Outer(plain), checkpoint(Outer(planned), drawn(16, 8), budget=1.0, **QUICK), drawn(16, 8))
    plain.eval()
    planned.eval()
    assert torch.equal(torch.export.export(planned, (drawn(2, 8),)).module()(drawn(2, 8)), plain(drawn(2, 8)))


def test_a_parametrized_module_is_planned() -> None:
    made = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    assert_same(made, checkpoint(made, drawn(16, 8), budget=1.0, **QUICK), drawn(16, 8))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
@pytest.mark.parametrize("options", [QUICK, {}])
def test_recurrent_layers_run_as_they_are(kind: type[nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = kind(8, 8, 2, dropout=0.5)
    planned = checkpoint(copy.deepcopy(plain), drawn(2, 3, 8), budget=1.0, **options)
    assert_same(plain, planned, drawn(2, 3, 8), total=lambda made: made[0].square().mean())


def test_a_smaller_batch_has_what_the_example_takes() -> None:
    plain, planned = pair(
        lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), drawn(64, 16), budget="95%"
    )
    assert_same(plain, planned, drawn(2, 16))
