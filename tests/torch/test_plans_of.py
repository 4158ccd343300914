"""Plans are found inside wrappers of planned modules."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from onnxgc.torch import checkpoint, plans_of  # noqa: E402
from tests.torch.test_trainers import QUICK  # noqa: E402


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())


def planned_layers() -> nn.Module:
    found: nn.Module = checkpoint(layers(), torch.randn(4, 8), budget="100%", **QUICK)
    return found


def by_accelerate(module: nn.Module) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    prepared: nn.Module = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(module)
    return prepared


def by_hooks(module: nn.Module) -> nn.Module:
    hooks = pytest.importorskip("accelerate.hooks")
    hooked: nn.Module = hooks.add_hook_to_module(module, hooks.ModelHook())
    return hooked


def in_another_forward(wrap: Callable[[Any], Any]) -> Callable[[nn.Module], nn.Module]:
    def wrapped(module: nn.Module) -> nn.Module:
        module.forward = wrap(module.forward)
        return module

    return wrapped


def with_a_closure(forward: Any) -> Any:
    return lambda *arguments: forward(*arguments) * 2


def with_a_name(forward: Any) -> Any:
    @functools.wraps(forward)
    def named(*arguments: Any) -> Any:
        return forward(*arguments)

    return named


def of_an_instance(forward: Any) -> Any:
    class Caller:
        def __init__(self) -> None:
            self.inner = forward

        def __call__(self, *arguments: Any) -> Any:
            return self.inner(*arguments)

    return Caller()


class Adapter(nn.Module):
    """Nests a module as adapter libraries do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": module})

    def forward(self, x: Any) -> Any:
        return self.base_model["model"](x)


# PyTorch warns when it imports its compiler.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda module: module,
        nn.DataParallel,
        Adapter,
        lambda module: Adapter(nn.Sequential(layers(), Adapter(module))),
        torch.compile,
        copy.deepcopy,
        by_accelerate,
        by_hooks,
        in_another_forward(with_a_closure),
        in_another_forward(with_a_name),
        in_another_forward(functools.partial),
        in_another_forward(of_an_instance),
        in_another_forward(lambda forward: types.MethodType(lambda self, *given: forward(*given), object())),
        in_another_forward(lambda forward: with_a_name(with_a_closure(functools.partial(forward)))),
    ],
)
def test_a_plan_is_found_inside_wrappers(wrap: Callable[[nn.Module], nn.Module]) -> None:
    planned = planned_layers()
    plans = plans_of(planned)
    assert len(plans) == 1
    assert plans_of(wrap(planned)) == plans


def test_plans_of_submodules_are_ordered_and_unique() -> None:
    first, second = planned_layers(), checkpoint(layers(), torch.randn(6, 8), budget="100%", **QUICK)
    model = nn.Sequential(first, layers(), second, first)
    assert plans_of(model) == (*plans_of(first), *plans_of(second))
    assert plans_of(layers()) == ()
