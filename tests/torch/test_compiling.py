"""Budgets for `torch.compile`. Where code need not be compiled, plans run without a C++ compiler."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from onnxgc.errors import BudgetError, BudgetFormError, PlanError
from onnxgc.torch import Partitioner, compiling
from onnxgc.torch.compiling import plans_of_options

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles with g++")
QUICK = {"time_limit": 1.0, "device": "a100"}


class Block(nn.Module):
    """Attention and a gated network, with a residual connection around each."""

    def __init__(self, width: int = 32, *, dropout: float = 0.0, given: bool = False, broken: bool = False) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.project, self.gate = nn.Linear(width, 3 * width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.given, self.broken = given, broken

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.gate(self.norm(x)).chunk(2, -1)
        return self.dropout(nn.functional.silu(a) * b) + x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unsqueeze(1).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1))
        if self.broken:
            torch._dynamo.graph_break()
        return torch_checkpoint(self.feed, x, use_reentrant=False) if self.given else self.feed(x)


def blocks(count: int = 2, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**settings) for _ in range(count)))


def tokens(batch: int = 8) -> torch.Tensor:
    return torch.randn(batch, 32, 32, generator=torch.Generator().manual_seed(1))


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    layers = (layer for _ in range(2) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU()))
    return nn.Sequential(*layers)


def images() -> torch.Tensor:
    return torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(1))


def gradients(call: Any, module: nn.Module, data: torch.Tensor, seed: int = 0) -> torch.Tensor:
    module.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    call(data).square().sum().backward()
    buffers = [buffer.flatten().float() for buffer in module.buffers()]
    return torch.cat([*(one.grad.flatten() for one in module.parameters() if one.grad is not None), *buffers])


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance * float(expected.abs().max()))


def compiled(module: nn.Module, budget: str | float, **settings: Any) -> tuple[Any, Any]:
    """A compiled copy of a module as a call, and the plans of its options."""
    torch._dynamo.reset()
    options = {"budget": budget, **QUICK, **settings}
    return torch.compile(module, backend="onnxgc", options=options), lambda: plans_of_options(options)


def measured_peak(run: Any) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.fixture(autouse=True)
def without_caches() -> Iterator[None]:
    """A graph from a cache has no plan to look at."""
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans run operator by operator."""
    monkeypatch.setattr(compiling, "_missing_compiler", lambda _: "a test")
    monkeypatch.setattr("warnings.warn", lambda *_, **__: None)


@needs_compiler
@pytest.mark.parametrize("make, data", [pytest.param(blocks, tokens, marks=pytest.mark.slow), (convolutional, images)])
def test_compiled_steps_keep_their_gradients_and_their_promised_peak(make: Any, data: Any) -> None:
    plain, module = make(), make()
    call, plans = compiled(module, "70%")
    for _ in range(2):
        assert_close(gradients(call, module, data()), gradients(plain, plain, data()))
    (plan,) = plans()
    assert plan.repeated > 0
    assert plan.planned_peak_bytes <= 0.7 * plan.regular_peak_bytes
    module.zero_grad(set_to_none=True)
    values = data()
    peak = measured_peak(lambda: call(values).sum().backward())
    assert peak == pytest.approx(plan.planned_peak_bytes, rel=0.01)


@needs_compiler
@pytest.mark.slow
def test_compiled_dropout_draws_once() -> None:
    results = []
    for budget in ("100%", "75%"):
        module = blocks(1, dropout=0.5)
        call, plans = compiled(module, budget)
        results.append(gradients(call, module, tokens()))
    assert plans()[0].repeated > 0
    assert_close(results[0], results[1])


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("make, data", [(blocks, tokens), (convolutional, images)])
@pytest.mark.parametrize("budget", ["70%", pytest.param("45%", marks=pytest.mark.slow)])
def test_steps_without_a_compiler_are_within_the_budget(make: Any, data: Any, budget: str) -> None:
    plain, module = make(), make()
    call, plans = compiled(module, budget)
    for _ in range(2):
        assert_close(gradients(call, module, data()), gradients(plain, plain, data()))
    (plan,) = plans()
    assert plan.repeated > 0
    assert plan.planned_peak_bytes < 0.75 * plan.regular_peak_bytes


def test_a_missing_compiler_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def fail() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", fail)
    call, _ = compiled(nn.Linear(2, 2), "100%")
    with pytest.warns(UserWarning, match=r"onnxgc plans without compiled kernels: Inductor has no C\+\+ compiler here"):
        call(torch.ones(1, 2))


@pytest.mark.usefixtures("uncompiled")
def test_a_graph_break_gives_two_plans_within_one_budget() -> None:
    plain, module = Block(broken=True), Block(broken=True)
    module.load_state_dict(plain.state_dict())
    call, plans = compiled(module, 2_000_000)
    assert_close(gradients(call, module, tokens()), gradients(plain, plain, tokens()))
    first, second = plans()
    assert 0 < first.planned_peak_bytes <= 1_000_000
    assert first.saved_bytes + second.planned_peak_bytes <= 2_000_000


@pytest.mark.usefixtures("uncompiled")
def test_a_symbolic_batch_has_one_plan() -> None:
    plain, module = blocks(), blocks()
    call, plans = compiled(module, "70%")
    for batch in (8, 5, 12):
        data = tokens(batch)
        torch._dynamo.mark_dynamic(data, 0)
        assert_close(gradients(call, module, data), gradients(plain, plain, data))
    (plan,) = plans()
    assert plan.repeated > 0


@pytest.mark.usefixtures("uncompiled")
def test_a_checkpoint_of_the_module_is_kept() -> None:
    saved = []
    for given in (False, True):
        plain, module = blocks(given=given), blocks(given=given)
        call, plans = compiled(module, "100%")
        assert_close(gradients(call, module, tokens()), gradients(plain, plain, tokens()))
        saved.append(plans()[0].saved_bytes)
    assert saved[1] < 0.8 * saved[0]


@pytest.mark.usefixtures("uncompiled")
def test_autocast_applies() -> None:
    plain, module = blocks(), blocks()
    call, plans = compiled(module, "70%")
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = gradients(plain, plain, tokens()), gradients(call, module, tokens())
    assert_close(found, expected, 0.05)
    assert any(tensor.dtype is torch.bfloat16 for tensor in plans()[0].saved)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"budget": "8 parsecs"}, BudgetFormError, "'8 parsecs' is not a valid memory size"),
        pytest.param({"budget": 1000}, BudgetError, "no plan within 1,000 bytes", marks=pytest.mark.slow),
        ({"budgets": 1}, PlanError, "Unexpected optimization option budgets"),
    ],
)
def test_wrong_options_are_one_error(options: Any, error: type[Exception], message: str) -> None:
    torch._dynamo.reset()
    call = torch.compile(blocks(), backend="onnxgc", options=options)
    with pytest.raises(Exception, match=message):
        call(tokens())


@pytest.mark.usefixtures("uncompiled")
def test_a_budget_below_the_least_peak_is_one_error() -> None:
    call, _ = compiled(blocks(1), 1000)
    with pytest.raises(Exception, match="BudgetError: no plan within 1,000 bytes was found"):
        call(tokens())


def test_the_identity_depends_on_the_plan_s_options() -> None:
    assert Partitioner("60%").uuid() == Partitioner("60%").uuid()
    assert Partitioner("60%").uuid() != Partitioner("50%").uuid()
    assert Partitioner("60%", device="a100").uuid() != Partitioner("60%").uuid()


def test_the_backend_is_registered() -> None:
    assert lookup_backend("onnxgc") is compiling.compile_within_budget
