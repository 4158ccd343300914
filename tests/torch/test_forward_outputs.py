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
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onnxgc.errors import PlanError
from onnxgc.torch import checkpoint

QUICK: dict[str, Any] = {"device": "a100", "time_limit": None, "step_limit": 2}


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 8))
        self.scale = 1.0
        self.calls = 0

    def forward(self, x: Tensor, *_: Any) -> Any:
        self.calls += 1
        return self.layers(x).exp() * self.scale


def step(module: nn.Module, *inputs: Any, total: Callable[[Any], Tensor] = torch.mean) -> list[Tensor | None]:
    module.zero_grad()
    torch.manual_seed(0)
    loss = total(module(*inputs))
    loss.backward()
    return [loss.detach(), *(one.grad for one in module.parameters()), *module.buffers()]


def assert_same(one: nn.Module, other: nn.Module, *inputs: Any, **options: Any) -> None:
    for mine, yours in zip(step(one, *inputs, **options), step(other, *inputs, **options), strict=True):
        assert (mine is None) == (yours is None)
        assert mine is None or yours is None or torch.equal(mine, yours)


def pair(make: Callable[[], nn.Module], *inputs: Any, budget: Any = 1.0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make()
    return plain, checkpoint(copy.deepcopy(plain), inputs, budget=budget, **QUICK)


def change_scale(module: Any) -> None:
    module.scale = 3.0


def change_rate(module: Any) -> None:
    module.layers[2].p = 0.8


def change_layer(module: Any) -> None:
    module.layers[1] = nn.Tanh()


def add_hook(module: Any) -> None:
    module.layers[0].register_forward_hook(lambda part, inputs, output: 2 * output)


@pytest.mark.parametrize("change", [change_scale, change_rate, change_layer, add_hook])
def test_changes_between_steps_take_effect(change: Callable[[nn.Module], None]) -> None:
    plain, planned = pair(Layers, drawn(16, 8))
    assert_same(plain, planned, drawn(16, 8))
    for module in (plain, planned):
        change(module)
    assert_same(plain, planned, drawn(16, 8))


class Indexed(nn.Linear):
    def forward(self, x: Tensor, numbers: Any = None) -> Tensor:
        return super().forward(x).exp() * float(numbers[1500])


def test_long_arrays_are_compared_completely() -> None:
    numbers = np.zeros(3000)
    plain, planned = pair(lambda: Indexed(8, 8), drawn(16, 8), numbers)
    for value in (1.0, 2.0):
        numbers = numbers.copy()
        numbers[1500] = value
        assert_same(plain, planned, drawn(16, 8), numbers)


def test_the_forward_of_an_instance_is_planned() -> None:
    plain = Layers()
    own = types.MethodType(lambda self, x: 5 * self.layers[0](x).exp(), plain)
    vars(plain)["forward"] = own
    assert_same(plain, checkpoint(plain, drawn(16, 8), budget=1.0, **QUICK), drawn(16, 8))


class Average(nn.Linear):
    average: Tensor

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.penalty: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).exp()
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        self.penalty = y.square().mean()
        return y.tanh() * self.average


def test_side_effects_of_forward_happen_in_each_step() -> None:
    plain, planned = pair(Average, drawn(16, 8))
    assert plain.penalty is planned.penalty is None
    for _ in range(3):
        modules = iter((plain, planned))
        assert_same(plain, planned, drawn(16, 8), total=lambda y: y.mean() + next(modules).penalty)  # noqa: B023


class Cache:
    def __init__(self, keys: list[Tensor]) -> None:
        self.keys = keys


@dataclasses.dataclass
class Result:
    output: Tensor
    cache: Cache
    name: str


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Result:
        output = self.layer(x).exp()
        return Result(output, Cache([output.tanh()]), "one")


def test_returned_objects_contain_the_tensors_of_the_call() -> None:
    plain, planned = pair(Returning, drawn(16, 8))
    for factor in (1, 2):
        total = lambda found: found.output.mean() + found.cache.keys[0].square().mean()  # noqa: E731
        assert_same(plain, planned, factor * drawn(16, 8), total=total)
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


def test_the_modules_own_generator_draws_equally_often() -> None:
    for options in ({**QUICK, "budget": "min"}, {"budget": 1.0}):
        torch.manual_seed(0)
        plain = Drawing()
        planned = checkpoint(copy.deepcopy(plain), drawn(16, 8), **options)
        assert_same(plain, planned, drawn(16, 8))


class PythonRandom(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class LazySequence(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(8))


@pytest.mark.parametrize(
    ("make", "message"), [(lambda: PythonRandom(8, 8), "from Python or NumPy"), (LazySequence, "has no shape before")]
)
def test_unsupported_modules_raise(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        checkpoint(make(), drawn(16, 8), **QUICK)


def test_a_wrong_shape_raises_without_logged_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("torch").propagate, before = True, logging.getLogger("torch").propagate
    try:
        with pytest.raises(PlanError, match="cannot be traced"):
            checkpoint(nn.Linear(8, 8, bias=False), drawn(3, 5), **QUICK)
    finally:
        logging.getLogger("torch").propagate = before
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_inputs_are_released_after_the_step() -> None:
    _, planned = pair(Layers, drawn(16, 8))
    data = drawn(16, 8)
    reference = weakref.ref(data)
    planned(data).sum().backward()
    del data
    gc.collect()
    assert reference() is None


def test_the_number_of_signatures_is_limited() -> None:
    plain, planned = pair(lambda: nn.Linear(8, 8), drawn(1, 8), budget=1.0)
    limit = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onnxgc.torch.planned_forward._MAX_SIGNATURES", limit)
        for count in (1, 2, 3, 4, 5, 1):
            assert_same(plain, planned, drawn(count, 8))
    assert len(vars(planned)["forward"]._traces) == limit


def test_backward_can_run_twice_with_a_retained_graph() -> None:
    modules = pair(Layers, drawn(16, 8))
    for module in modules:
        torch.manual_seed(0)
        loss = module(drawn(16, 8)).mean()
        loss.backward(retain_graph=True)
        loss.backward()
    for one, other in zip(*(module.parameters() for module in modules), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_it_is_not_planned_inside_other_traces() -> None:
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


@pytest.mark.parametrize("kind, options", [(nn.LSTM, {}), (nn.RNN, QUICK)])
def test_recurrent_layers_run_undecomposed(kind: type[nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = kind(8, 8, 2, dropout=0.5)
    planned = checkpoint(copy.deepcopy(plain), drawn(2, 3, 8), budget=1.0, **options)
    assert_same(plain, planned, drawn(2, 3, 8), total=lambda outputs: outputs[0].square().mean())


def test_a_smaller_batch_may_use_the_memory_of_the_example() -> None:
    plain, planned = pair(lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), drawn(64, 16), budget="95%")
    assert_same(plain, planned, drawn(2, 16))
