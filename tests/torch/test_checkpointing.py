import copy
import functools
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile

from onnxgc.errors import BudgetError, PlanError
from onnxgc.torch import checkpoint, plans_of
from onnxgc.torch.checkpointing import planned_module
from onnxgc.torch.joint_problem import EstimatedCosts, JointStep, is_batch_normalization, is_random
from onnxgc.torch.partition import STATE_BYTES
from onnxgc.torch.plan_search import BudgetPlanner, TorchPlan
from onnxgc.tracing.devices import device

QUICK: dict[str, Any] = {"device": "a100", "time_limit": None, "step_limit": 2}
"""Costs from a data sheet, and a deterministic search."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.relu(self.norm(self.conv(x))))


def convolutional(blocks: int = 4, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3), *(Block(width) for _ in range(blocks)), nn.Flatten(), nn.LazyLinear(5))


class Uneven(nn.Module):
    """A module whose best cuts are inside of its blocks."""

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
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, *, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.layers(self.tokens(ids), src_key_padding_mask=mask)
        return {"logits": scale * self.head(hidden), "hidden": hidden, "nothing": None}


def materialised(module: nn.Module, *inputs: Any) -> nn.Module:
    module.eval()
    module(*inputs)
    return module.train()


def images(count: int = 8) -> Tensor:
    return torch.randn(count, 3, 24, 24, generator=torch.Generator().manual_seed(count))


def step(module: nn.Module, loss: Callable[[nn.Module], Tensor], seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    found = loss(module)
    found.backward()
    return found.detach()


def mean_square(module: nn.Module, count: int = 8) -> Tensor:
    found: Tensor = module(images(count)).square().mean()
    return found


def assert_same(planned: nn.Module, plain: nn.Module) -> None:
    for (name, one), (_, other) in zip(planned.named_parameters(), plain.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or other.grad is None or torch.equal(one.grad, other.grad), name
    for (name, mine), (_, yours) in zip(planned.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(mine, yours), name


@pytest.mark.parametrize("budget", ["75%", "min"])
def test_steps_with_dropout_and_statistics_are_equal(budget: str) -> None:
    plain = materialised(convolutional(), images())
    planned = checkpoint(copy.deepcopy(plain), images(), budget=budget, **QUICK)
    (plan,) = plans_of(planned)
    assert plan.repeated > 0
    assert plan.planned_peak_bytes < plan.regular_peak_bytes
    for seed in range(4):
        assert torch.equal(*(step(one, mean_square, seed) for one in (plain, planned)))
        assert_same(planned, plain)


@pytest.mark.parametrize("budget", [1.0, "60%"])
def test_measured_memory_equals_the_planned_peak(budget: str | float) -> None:
    plain = materialised(convolutional(width=16), images(16))
    planned = checkpoint(plain, images(16), budget=budget, time_limit=None, step_limit=2)
    (plan,) = plans_of(planned)
    data = images(16)
    for _ in range(2):
        planned.zero_grad(set_to_none=True)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            planned(data).sum().backward()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert peak == pytest.approx(plan.planned_peak_bytes, rel=0.02)


def joint_step_of(module: nn.Module, inputs: Any) -> JointStep:
    steps: list[JointStep] = []

    def plan_baseline(step: JointStep, *_: object) -> tuple[tuple[int, ...], int]:
        steps.append(step)
        return tuple(range(len(step.problem))), 0

    planned_module(module, plan_baseline, EstimatedCosts(device("a100")), inputs)
    return steps[0]


def test_random_operators_keep_their_order() -> None:
    class Branches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return F.dropout(2 * y) + F.dropout(y + 1)

    found = joint_step_of(Branches(4, 4), [torch.randn(3, 4)])
    first, second = (
        operator
        for operator, node in zip(found.problem.operators, found.nodes, strict=True)
        if node is not None and is_random(node)
    )
    assert set(second.reads) & set(first.writes)


def test_recomputed_masks_do_not_change_the_generator() -> None:
    """The next step must not repeat the masks of this one."""
    module = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Dropout(), nn.Tanh())))
    planned = checkpoint(module, torch.randn(64, 16), budget="min", **QUICK)
    assert plans_of(planned)[0].repeated > 0
    states: list[Tensor] = []
    for network in (module, planned):
        torch.manual_seed(0)
        network(torch.ones(64, 16)).sum().backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_recomputed_normalisation_updates_its_statistics_once() -> None:
    def repeat_in_forward(step: JointStep, *_: object) -> tuple[tuple[int, ...], int]:
        (index,) = (at for at, node in enumerate(step.nodes) if node is not None and is_batch_normalization(node))
        sequence = list(range(len(step.problem)))
        sequence.insert(step.boundary, index)
        return tuple(sequence), 0

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    planned = planned_module(copy.deepcopy(plain), repeat_in_forward, EstimatedCosts(device("a100")))
    for _ in range(2):
        assert torch.equal(*(step(module, mean_square) for module in (plain, planned)))
        assert_same(planned, plain)


def test_calls_with_keywords_dictionaries_none_and_tied_parameters() -> None:
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
    # Another constant and another batch make another signature.
    for module in (plain, planned):
        step(module, lambda module: module(ids[:2], scale=2.0)["logits"].mean())
    assert_same(planned, plain)
    assert len(plans_of(planned)) == 2


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class SharedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 16)
        self.table.weight.requires_grad_(False)
        self.block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, ids: Tensor) -> Pair:
        first = self.block(self.table(ids))
        return Pair(first, self.block(first))


def test_shared_blocks_frozen_tables_and_named_tuples() -> None:
    ids = torch.arange(9).repeat(8, 1)
    plain = SharedTwice()
    planned = checkpoint(copy.deepcopy(plain), ids, budget="80%", **QUICK)

    def loss(module: nn.Module) -> Tensor:
        found = module(ids)
        assert isinstance(found, Pair)
        # Two calls in one step.
        return found.left.mean() + (found.right * module(ids).left).mean()

    assert torch.equal(step(plain, loss), step(planned, loss))
    # Each call sums its own gradients first, so that the order of the four terms differs.
    for one, other in zip(planned.block.parameters(), plain.block.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert planned.table.weight.grad is None


def test_other_batches_and_modes_get_their_own_plans() -> None:
    plain = materialised(convolutional(), images())
    planned = checkpoint(copy.deepcopy(plain), images(), budget="75%", **QUICK)
    for count in (8, 5, 8, 3):
        for module in (plain, planned):
            step(module, functools.partial(mean_square, count=count), count)
        assert_same(planned, plain)
    assert len(plans_of(planned)) == 3
    for module in (plain, planned):
        module.eval()
    with torch.no_grad():
        assert torch.equal(plain(images()), planned(images()))
    for module in (plain, planned):
        module.zero_grad()
        step(module, mean_square)
    assert_same(planned, plain)


def test_class_and_parameters_are_shared_and_copies_are_independent() -> None:
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
    step(copied, mean_square)
    assert all(one.grad is None for one in plain.parameters())
    step(restored, mean_square)
    assert_same(copied, restored)
    step(planned, mean_square)
    assert calls == ["planned"]


@pytest.mark.parametrize(
    "make, budget", [(lambda: (convolutional(), images()), 1.0), (lambda: (Uneven(), torch.randn(32, 16)), "60%")]
)
def test_autograd_saves_exactly_the_planned_tensors(make: Callable[[], tuple[nn.Module, Tensor]], budget: Any) -> None:
    plain, data = make()
    materialised(plain, data)
    planned = checkpoint(plain, data, budget=budget, **QUICK)
    (plan,) = plans_of(planned)
    assert (plan.repeated > 0) == (budget != 1.0)
    assert saved_by_autograd(planned, data) == Counter((one.dtype, one.size_bytes) for one in plan.saved)


def saved_by_autograd(module: nn.Module, data: Tensor) -> Counter[tuple[Any, int]]:
    weights = (*module.parameters(), *module.buffers())
    excluded = {one.untyped_storage().data_ptr() for one in (*weights, data)}
    found: dict[int, tuple[Any, int]] = {}

    def pack(one: Tensor) -> Tensor:
        storage = one.untyped_storage()
        is_state = one.dtype is torch.uint8 and one.numel() == STATE_BYTES
        if storage.data_ptr() not in excluded and not is_state and storage.nbytes():
            found[storage.data_ptr()] = (one.dtype, storage.nbytes())
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        out = module(data)
    assert found
    del out
    return Counter(found.values())


def test_errors_are_one_line() -> None:
    plain = materialised(convolutional(), images())
    with pytest.raises(BudgetError, match=r"no plan within .* bytes was found; no plan is below [\d,]+"):
        checkpoint(plain, images(), budget="1%", **QUICK)

    class Deciding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(PlanError, match="the module cannot be traced") as raised:
        checkpoint(Deciding(4, 4), torch.randn(3, 4), **QUICK)
    assert "\n" not in str(raised.value)


def test_second_derivatives_raise() -> None:
    plain = materialised(convolutional(2), images())
    planned = checkpoint(plain, images(), budget="90%", **QUICK)
    data = images().requires_grad_()
    (first,) = torch.autograd.grad(planned(data).square().sum(), data, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()


def test_sharded_parameters_raise() -> None:
    class Sharded(nn.Parameter):
        def full_tensor(self) -> Tensor:
            return self.data

    block = nn.Linear(4, 4)
    block.weight = Sharded(torch.randn(4, 4))
    with pytest.raises(PlanError, match=r"'1\.weight' is only a shard when forward begins"):
        checkpoint(nn.Sequential(nn.Linear(4, 4), block), torch.randn(3, 4), **QUICK)


def test_stored_plans_are_taken_without_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.GELU(), nn.Linear(8, 1))
    data = torch.randn(64, 8)

    def plan() -> tuple[TorchPlan, ...]:
        return plans_of(checkpoint(layers, data, budget="80%", plans=tmp_path, **QUICK))

    first = plan()
    (stored,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(BudgetPlanner, "__call__", None)
        assert plan() == first
    intact = stored.read_text()
    stored.write_text(intact.replace("[[0", "[[1"))
    assert plan() == first
    assert stored.read_text() == intact


def test_layers_that_are_checkpointed_already_are_one_warning() -> None:
    layer = nn.Linear(2, 2)
    vars(layer)["gradient_checkpointing"] = True
    with pytest.warns(UserWarning, match="gradient_checkpointing_disable"):
        checkpoint(layer, torch.ones(1, 2), budget="100%", device="a100")
