"""Modules under a budget: gradients and statistics bit for bit, memory as promised, calls of every form."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from onnxgc.errors import BudgetError, PlanError  # noqa: E402
from onnxgc.torch import TorchPlan, checkpoint, checkpointing, partition, plans_of  # noqa: E402
from onnxgc.torch.checkpointing import described, planned_module  # noqa: E402
from onnxgc.torch.joint import Estimated, JointStep, is_random, normalizes_a_batch  # noqa: E402
from onnxgc.torch.partition import STATE_BYTES  # noqa: E402
from onnxgc.tracing.devices import device  # noqa: E402

QUICK: dict[str, Any] = {"device": "a100", "time_limit": None, "step_limit": 2}
"""Costs from a data sheet, and a search that does not depend on the clock."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.relu(self.norm(self.conv(x))))


def convolutional(blocks: int = 6, width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3), *(Block(width) for _ in range(blocks)), nn.Flatten(), nn.LazyLinear(5)
    )


class Uneven(nn.Module):
    """Its best cuts lie where neither submodules nor blocks begin."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.inner:
            wide = torch.cat([linear(x), x.sin(), x.exp().tanh()], 1)
            x = torch.stack(wide.chunk(3, 1)).prod(0).sigmoid() + x
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.5, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, *, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.layers(self.tokens(ids), src_key_padding_mask=mask)
        return {"logits": scale * self.head(hidden), "hidden": hidden, "nothing": None}


def materialised(module: nn.Module, *inputs: Any) -> nn.Module:
    """The module with its lazy parameters made, and its statistics as they were."""
    module.eval()
    module(*inputs)
    return module.train()


def images(count: int = 8) -> Tensor:
    return torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(count))


def step(module: nn.Module, loss: Callable[[nn.Module], Tensor], seed: int = 0) -> Tensor:
    """One backward; the loss."""
    torch.manual_seed(seed)
    found = loss(module)
    found.backward()
    return found.detach()


def loss_of(count: int, module: nn.Module) -> Tensor:
    """Of so many images."""
    found: Tensor = module(images(count)).square().mean()
    return found


def assert_same(planned: nn.Module, plain: nn.Module) -> None:
    """Gradients and buffers, bit for bit."""
    for (name, one), (_, other) in zip(planned.named_parameters(), plain.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name
    for (name, mine), (_, yours) in zip(planned.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(mine, yours), name


@pytest.mark.parametrize("budget", ["75%", "min"])
def test_dropout_and_statistics_are_the_same_for_many_steps(budget: str) -> None:
    plain = materialised(convolutional(), images())
    planned = checkpoint(copy.deepcopy(plain), images(), budget=budget, **QUICK)
    (plan,) = plans_of(planned)
    assert plan.repeated > 0
    assert plan.planned_peak_bytes < plan.regular_peak_bytes
    for seed in range(10):
        losses = [
            step(one, lambda module: module(images()).square().mean(), seed) for one in (plain, planned)
        ]
        assert torch.equal(*losses)
        assert_same(planned, plain)


@pytest.mark.parametrize("budget", [1.0, "60%"])
def test_memory_is_what_was_promised(budget: str | float) -> None:
    plain = materialised(convolutional(width=16), images(16))
    planned = checkpoint(plain, images(16), budget=budget, time_limit=None, step_limit=2)
    (plan,) = plans_of(planned)
    data = images(16)
    for _ in range(2):
        planned.zero_grad(set_to_none=True)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            planned(data).sum().backward()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert most == pytest.approx(plan.planned_peak_bytes, rel=0.02)


def test_random_operators_draw_in_the_order_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            return F.dropout(2 * made) + F.dropout(made + 1)

    steps: list[JointStep] = []
    described = checkpointing.described

    def noted(step: JointStep, *others: Any) -> Any:
        steps.append(step)
        return described(step, *others)

    monkeypatch.setattr(checkpointing, "described", noted)
    checkpoint(Branches(4, 4), torch.randn(3, 4), budget=1.0, **QUICK)
    (found,) = steps
    first, second = (
        operation
        for operation, node in zip(found.problem.operations, found.nodes, strict=True)
        if node is not None and is_random(node)
    )
    assert set(second.reads) & set(first.writes)


def test_the_generator_goes_on_behind_what_is_drawn_again() -> None:
    """The step after one that draws masks again must not draw those of the step before."""
    module = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Dropout(), nn.Tanh()))
    )
    planned = checkpoint(module, torch.randn(64, 16), budget="min", **QUICK)
    assert plans_of(planned)[0].repeated > 0
    states: list[Tensor] = []
    for network in (module, planned):
        torch.manual_seed(0)
        network(torch.ones(64, 16)).sum().backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_what_is_drawn_again_leaves_the_generator_as_it_is() -> None:
    cpu = torch.device("cpu")
    torch.manual_seed(0)
    state = partition.generator_state(cpu)
    first = torch.rand(3)
    now = torch.get_rng_state()
    again = partition.drawn_again(state, cpu, torch.rand, (3,), {})
    assert torch.equal(again, first)
    assert torch.equal(torch.get_rng_state(), now)


class Decaying(nn.Module):
    """Its forward reads a buffer all along and changes it at the end."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.register_buffer("scale", torch.ones(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(torch.exp(layer(x) + self.scale))
        self.scale.mul_(0.9)
        return x


def test_a_normalisation_that_runs_twice_in_forward_updates_its_statistics_once() -> None:
    def decide(step: JointStep) -> tuple[tuple[int, ...], TorchPlan]:
        (index,) = (at for at, node in enumerate(step.nodes) if node is not None and normalizes_a_batch(node))
        sequence = list(range(len(step.problem)))
        sequence.insert(step.turn, index)
        return tuple(sequence), described(step, sequence)

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    planned = planned_module(copy.deepcopy(plain), decide, Estimated(device("a100")))
    for _ in range(2):
        losses = [step(module, lambda each: each(images()).square().mean()) for module in (plain, planned)]
        assert torch.equal(*losses)
        assert_same(planned, plain)


def test_what_reads_a_buffer_that_changes_does_not_run_again() -> None:
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    plain = Decaying()
    planned = checkpoint(copy.deepcopy(plain), data, budget="min", **QUICK)
    assert plans_of(planned)[0].repeated > 0
    for _ in range(3):
        for module in (plain, planned):
            step(module, lambda module: module(data).square().mean())
        assert_same(planned, plain)


def test_keywords_dictionaries_none_and_tied_parameters() -> None:
    ids = torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(4, 12, dtype=torch.bool)
    mask[:, 9:] = True
    plain = Attention()
    planned = checkpoint(copy.deepcopy(plain), ids, example_kwargs={"mask": mask}, budget="70%", **QUICK)

    def loss(module: nn.Module) -> Tensor:
        found = module(ids, mask=mask)
        assert found["nothing"] is None
        return F.cross_entropy(found["logits"].flatten(0, 1), ids.flatten()) + found["hidden"].mean()

    assert torch.equal(step(plain, loss), step(planned, loss))
    assert_same(planned, plain)
    assert plans_of(planned)[0].repeated > 0
    # Another constant, and another number of sequences, are calls of their own.
    for module in (plain, planned):
        step(module, lambda module: module(ids[:2], scale=2.0)["logits"].mean())
    assert_same(planned, plain)
    assert len(plans_of(planned)) == 2


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class SharedTwice(nn.Module):
    """One block that runs twice, a frozen table in front, and a named tuple behind."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 16)
        self.table.weight.requires_grad_(False)
        self.block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, ids: Tensor) -> Pair:
        first = self.block(self.table(ids))
        return Pair(first, self.block(first))


def test_a_shared_block_a_frozen_table_and_a_named_tuple() -> None:
    ids = torch.arange(9).repeat(8, 1)
    plain = SharedTwice()
    planned = checkpoint(copy.deepcopy(plain), ids, budget="80%", **QUICK)

    def loss(module: nn.Module) -> Tensor:
        found = module(ids)
        assert isinstance(found, Pair)
        # Twice in one step.
        return found.left.mean() + (found.right * module(ids).left).mean()

    assert torch.equal(step(plain, loss), step(planned, loss))
    # Each call adds up its own gradients first: the order of four terms is another one.
    for one, other in zip(planned.block.parameters(), plain.block.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert planned.table.weight.grad is None


def test_inputs_get_gradients_and_autocast_is_kept() -> None:
    plain = materialised(convolutional(), images())
    planned = checkpoint(copy.deepcopy(plain), images().requires_grad_(), budget="75%", **QUICK)
    gradients = []
    for module in (plain, planned):
        data = images().requires_grad_()
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(data)
        assert out.dtype is torch.bfloat16
        out.float().square().mean().backward()
        gradients.append(data.grad)
    assert torch.equal(*gradients)
    assert_same(planned, plain)


def test_batches_of_other_sizes_evaluation_and_no_gradients() -> None:
    plain = materialised(convolutional(), images())
    planned = checkpoint(copy.deepcopy(plain), images(), budget="75%", **QUICK)
    for count in (8, 5, 8, 3):
        for module in (plain, planned):
            step(module, functools.partial(loss_of, count), count)
        assert_same(planned, plain)
    assert len(plans_of(planned)) == 3
    for module in (plain, planned):
        module.eval()
    with torch.no_grad():
        assert torch.equal(plain(images()), planned(images()))
    for module in (plain, planned):
        module.zero_grad()
        step(module, lambda module: module(images()).square().mean())
    assert_same(planned, plain)


def test_it_is_the_same_class_shares_its_parameters_and_can_be_copied() -> None:
    plain = materialised(convolutional(), images())
    planned = checkpoint(plain, images(), budget="75%", **QUICK)
    assert type(planned) is type(plain)
    assert list(planned.state_dict()) == list(plain.state_dict())
    assert all(one is other for one, other in zip(planned.parameters(), plain.parameters(), strict=True))
    calls: list[str] = []
    copied = copy.deepcopy(planned)
    restored = pickle.loads(pickle.dumps(planned))
    planned.register_forward_hook(lambda *_: calls.append("planned"))
    for module in (plain, planned, copied):
        module.zero_grad()
    step(copied, lambda module: module(images()).square().mean())
    assert all(one.grad is None for one in plain.parameters())
    step(restored, lambda module: module(images()).square().mean())
    assert_same(copied, restored)
    step(planned, lambda module: module(images()).square().mean())
    assert calls == ["planned"]


@pytest.mark.parametrize(
    "make", [lambda: (convolutional(), images()), lambda: (Uneven(), torch.randn(32, 16))]
)
@pytest.mark.parametrize("budget", [1.0, "60%"])
def test_what_autograd_saves_is_the_plan(make: Callable[[], tuple[nn.Module, Tensor]], budget: Any) -> None:
    plain, data = make()
    materialised(plain, data)
    planned = checkpoint(plain, data, budget=budget, **QUICK)
    (plan,) = plans_of(planned)
    assert (plan.repeated > 0) == (budget != 1.0)
    assert saved_by_autograd(planned, data) == Counter((one.dtype, one.size_bytes) for one in plan.saved)


def saved_by_autograd(module: nn.Module, data: Tensor) -> Counter[tuple[Any, int]]:
    """Types and sizes of the memory that hooks see, but for inputs, weights and states of generators."""
    weights = (*module.parameters(), *module.buffers())
    there = {one.untyped_storage().data_ptr() for one in (*weights, data)}
    found: dict[int, tuple[Any, int]] = {}

    def pack(one: Tensor) -> Tensor:
        storage = one.untyped_storage()
        is_state = one.dtype is torch.uint8 and one.numel() == STATE_BYTES
        if storage.data_ptr() not in there and not is_state and storage.nbytes():
            found[storage.data_ptr()] = (one.dtype, storage.nbytes())
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        out = module(data)
    assert found
    del out
    return Counter(found.values())


def test_refusals_are_one_line() -> None:
    plain = materialised(convolutional(), images())
    with pytest.raises(BudgetError, match=r"no plan within .* bytes was found; nothing goes below [\d,]+"):
        checkpoint(plain, images(), budget="1%", **QUICK)

    class Deciding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(PlanError, match="the module cannot be traced") as told:
        checkpoint(Deciding(4, 4), torch.randn(3, 4), **QUICK)
    assert "\n" not in str(told.value)


def test_a_second_derivative_is_refused() -> None:
    plain = materialised(convolutional(2), images())
    planned = checkpoint(plain, images(), budget="90%", **QUICK)
    data = images().requires_grad_()
    (first,) = torch.autograd.grad(planned(data).square().sum(), data, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()


def test_a_shard_of_a_parameter_is_refused() -> None:
    class Sharded(nn.Parameter):
        def full_tensor(self) -> Tensor:
            return self.data

    block = nn.Linear(4, 4)
    block.weight = Sharded(torch.randn(4, 4))
    with pytest.raises(PlanError, match=r"'1\.weight' is only a shard when forward begins"):
        checkpoint(nn.Sequential(nn.Linear(4, 4), block), torch.randn(3, 4), **QUICK)
