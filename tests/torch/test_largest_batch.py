"""Plans of one module for many shapes: transferred at once, and the largest batch within a memory."""

import copy
import logging
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from onnxgc.errors import BudgetError, BudgetFormError  # noqa: E402
from onnxgc.torch import checkpoint, largest_batch, plan_search, plans_of  # noqa: E402

QUICK: dict[str, Any] = {"device": "a100", "time_limit": None, "step_limit": 2}
WIDTH, LAYERS = 32, 4


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def make_inputs(batch: int) -> Tensor:
    return torch.linspace(-1, 1, batch * WIDTH).reshape(batch, WIDTH)


@pytest.mark.parametrize("budget", ["70%", 150_000, "min"])
def test_other_batches_take_the_plan_without_a_search(
    budget: str | int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = module()
    planned = checkpoint(copy.deepcopy(plain), make_inputs(256), budget=budget, **QUICK)
    for search in ("within_budget", "least_peak"):
        monkeypatch.setattr(plan_search, search, None)
    with caplog.at_level(logging.INFO, "onnxgc.torch.planned_forward"):
        for batch in (250, 192):
            for one in (plain, planned):
                one(make_inputs(batch)).square().sum().backward()
            gradients = [[parameter.grad for parameter in one.parameters()] for one in (plain, planned)]
            assert all(map(torch.equal, *gradients))
    assert sum("planned in" in record.message for record in caplog.records) == 2
    first, *others = plans_of(planned)
    for plan in others:
        limit = {"70%": 0.7 * plan.regular_peak_bytes, "min": first.planned_peak_bytes}.get(str(budget), 150_000)
        assert plan.planned_peak_bytes <= limit
        assert plan.repeated <= first.repeated


def test_a_larger_batch_is_searched_for() -> None:
    planned = checkpoint(module(), make_inputs(64), budget=150_000, **QUICK)
    planned(make_inputs(300)).sum().backward()
    assert [plan.repeated > 0 for plan in plans_of(planned)] == [False, True]
    assert plans_of(planned)[1].planned_peak_bytes <= 150_000


def test_the_largest_batch_fits_and_the_next_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["onnxgc.torch.largest_batch"], "_SECONDS_PER_SIZE", 0.5)
    found = largest_batch(module(), make_inputs, "1MiB", device="a100", start=64)
    by_batch = {point.size: point for point in found.points}
    assert max(by_batch) == found.batch
    assert by_batch[found.batch].total_bytes <= 1 << 20
    assert 0 < by_batch[found.batch].extra_time_ratio <= 0.2
    planned = checkpoint(module(), make_inputs(found.batch), budget=found.budget_bytes, device="a100", step_limit=4)
    (plan,) = plans_of(planned)
    parameters = sum(one.numel() * 4 for one in module().parameters())
    assert 3 * parameters + found.batch * WIDTH * 4 + plan.planned_peak_bytes <= 1 << 20
    # Without extra time there is room for less, without an optimizer's states for more.
    plain = largest_batch(module(), make_inputs, "1MiB", device="a100", extra_time=0, start=64)
    stateless = largest_batch(module(), make_inputs, "1MiB", device="a100", extra_time=0, optimizer_states=0, start=64)
    assert stateless.batch > plain.batch
    assert plain.batch < found.batch
    assert plain.points[-1].extra_time_ratio == 0


def test_too_little_memory_for_any_batch() -> None:
    for wrong in ("min", "50%"):
        with pytest.raises(BudgetFormError, match="is not a number of bytes"):
            largest_batch(module(), make_inputs, wrong, device="a100")
    with pytest.raises(BudgetError, match="no batch trains within 1,000 bytes"):
        largest_batch(module(), make_inputs, 1000, device="a100")


def test_a_layer_under_two_names_is_one() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(self.first(x).relu()).tanh()
            return y

    torch.manual_seed(0)
    plain = Shared()
    planned = checkpoint(copy.deepcopy(plain), make_inputs(64), budget="90%", **QUICK)
    for one in (plain, planned):
        one(make_inputs(64)).sum().backward()
    assert torch.equal(*(one.first.weight.grad for one in (plain, planned)))
    assert planned.second is planned.first
