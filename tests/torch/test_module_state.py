import copy
import dataclasses
import gc
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onnxgc.errors import OnnxgcError, PlanError
from onnxgc.torch import checkpoint
from tests.torch import random_modules, stateful_parts
from tests.torch.stateful_parts import STATEFUL, WIDTH, Stateless

QUICK: dict[str, Any] = {"budget": 1.0, "device": "a100", "time_limit": None, "step_limit": 2}
STEPS = 4


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), value.requires_grad, value.detach().tolist()
    if isinstance(value, list | tuple | deque):
        return type(value).__name__, [described(entry) for entry in value]
    if isinstance(value, dict):
        return type(value).__name__, [(key, described(entry)) for key, entry in value.items()]
    if dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace):
        return type(value).__name__, described(vars(value))
    if isinstance(value, weakref.ref):
        return described(value())
    if isinstance(value, stateful_parts.SlottedObject):
        return described([value.parts, value.value])
    return repr(value)


def state_of(module: nn.Module) -> dict[str, Any]:
    structure = {*vars(nn.Module()), "forward"} - {"_buffers"}
    return {
        f"{name}.{key}": described(value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(part, stateful_parts.StatefulPart) and key not in structure
    }


def steps(module: nn.Module, seed: int) -> Iterator[dict[str, Any]]:
    stateful_parts.SHARED.update(calls=0, last=None)
    stateful_parts.FACTOR.set(1.0)
    for count in range(STEPS):
        random_modules.change_state(module, count, seed)
        data = random_modules.inputs(seed, count).requires_grad_(count % 2 == 1)
        module.zero_grad()
        torch.manual_seed(count)
        with torch.autocast("cpu", torch.bfloat16, enabled=random_modules.is_autocast(seed)):
            output = module(data)
        output.float().square().mean().backward()
        # A parameter without influence has the gradient zero in a planned module, and None otherwise.
        parameters = [(name, one.grad) for name, one in module.named_parameters()]
        gradients = {name: one for name, one in parameters if one is not None and one.any()}
        yield {
            "output": described(output),
            "input's gradient": described(data.grad),
            **{name: described(gradient) for name, gradient in gradients.items()},
            **{name: described(buffer) for name, buffer in module.named_buffers()},
            **state_of(module),
            "shared": described(stateful_parts.SHARED),
        }


def planned_steps(make: Callable[[], nn.Module], seed: int, options: Any) -> Iterator[dict[str, Any]]:
    with torch.autocast("cpu", torch.bfloat16, enabled=random_modules.is_autocast(seed)):
        budget = "min" if seed % 2 else 1.0
        planned = checkpoint(make(), random_modules.inputs(seed, 0), **{**options, "budget": budget})
    yield from steps(planned, seed)


def check(make: Callable[[], nn.Module], seed: int, options: Any = QUICK) -> str:
    with warnings.catch_warnings():
        # State that changes in each call causes warnings.
        warnings.filterwarnings("ignore", "forward reads")
        expected = list(steps(make(), seed))
        try:
            found = list(planned_steps(make, seed, options))
        except OnnxgcError as error:
            return str(error)
    for count, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert list(one) == list(other), f"step {count} of seed {seed}"
        different = [name for name in one if one[name] != other[name]]
        assert not different, f"step {count} of seed {seed}: {different}"
    return "equal"


@pytest.mark.parametrize("first", range(0, len(STATEFUL), 6))
def test_each_kind_of_state_is_followed(first: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(first)
        return nn.Sequential(*(kind() for kind in STATEFUL[first : first + 6]))

    # Odd seeds have the least budget, and 1 and 5 of these autocast.
    assert check(make, first // 6) == "equal"


@pytest.mark.parametrize("seed", [300, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(301, 308))])
def test_random_modules_are_equal_or_rejected(seed: int) -> None:
    found = check(lambda: random_modules.random_module(seed), seed)
    assert found == "equal" or "momentum=None" in found


def test_an_updated_number_needs_no_new_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = checkpoint(stateful_parts.CallCounter(), torch.randn(4, WIDTH), **QUICK)
    planned(torch.randn(4, WIDTH))
    monkeypatch.setattr("onnxgc.torch.planned_forward.aot_function", None)
    for _ in range(3):
        planned(torch.randn(4, WIDTH))
    assert planned.calls == 4
    assert planned.share == 3.75


def test_planning_preserves_state() -> None:
    module = nn.Sequential(*(kind() for kind in STATEFUL))
    stateful_parts.SHARED.update(calls=0, last=None)
    before = state_of(module), dict(stateful_parts.SHARED)
    planned = checkpoint(module, torch.randn(4, WIDTH), **QUICK)
    assert (state_of(module), dict(stateful_parts.SHARED)) == before
    assert state_of(planned) == before[0]


def test_frequent_retracing_warns_with_the_attribute() -> None:
    planned = checkpoint(nn.Sequential(stateful_parts.GrowingList()), torch.randn(4, WIDTH), **QUICK)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(10):
            planned(torch.randn(4, WIDTH))
    messages = [str(each.message) for each in caught if "forward reads" in str(each.message)]
    assert len(messages) == 1
    assert "'0.seen', which has changed in 8 calls" in messages[0]


def test_traces_release_tensors_of_the_state() -> None:
    module = stateful_parts.NoneAttribute()
    planned = checkpoint(module, torch.randn(4, WIDTH), **QUICK)
    planned(torch.randn(4, WIDTH))
    reference = weakref.ref(planned.h)
    planned(torch.randn(4, WIDTH))
    planned(torch.randn(4, WIDTH))
    gc.collect()
    assert reference() is None


class Session:
    def __init__(self) -> None:
        self.before: Any = None
        self.factor = 1.0


class SessionReader(Stateless):
    def forward(self, x: Tensor, session: Session | None = None) -> Tensor:
        assert session is not None
        x = self.layer(x) * session.factor
        if session.before is not None:
            x = x + session.before
        session.before = x.detach()
        return x


def test_objects_among_the_arguments_are_read_and_changed() -> None:
    torch.manual_seed(0)
    plain, sessions = SessionReader(), (Session(), Session())
    planned = checkpoint(plain, (torch.randn(4, WIDTH), Session()), **QUICK)
    for factor in (1.0, 1.0, 2.0, 1.0):
        x = torch.randn(4, WIDTH)
        for session in sessions:
            session.factor = factor
        outputs = [module(x, each) for module, each in zip((plain, planned), sessions, strict=True)]
        assert torch.equal(*outputs)
        assert torch.equal(sessions[0].before, sessions[1].before)


def test_changing_a_list_among_the_arguments_raises() -> None:
    class Appending(Stateless):
        def forward(self, x: Tensor, seen: Any = ()) -> Tensor:
            seen.append(1.0)
            return self.layer(x) * len(seen)

    with pytest.raises(PlanError, match="changes a list or dictionary among its arguments; return it"):
        checkpoint(Appending(), (torch.randn(4, WIDTH), []), **QUICK)


def test_threads_may_share_a_planned_module() -> None:
    torch.manual_seed(0)
    plain = Stateless()
    planned = checkpoint(plain, torch.randn(4, WIDTH), **QUICK)
    # A copy, since tracing replaces parameters for a moment.
    layer = copy.deepcopy(plain.layer)

    def equal(count: int) -> bool:
        x = torch.randn(count, WIDTH)
        return torch.equal(planned(x), layer(x))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(equal, [1, 2, 3, 4] * 2))


class Calling(Stateless):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.layer(x))


def set_attribute(part: Any, name: str, value: Any) -> Any:
    setattr(part, name, value)


REJECTED: dict[str, tuple[Callable[..., Any], str]] = {
    "item": (lambda part, x: x * x.sum().item(), "forward branches on the values of a tensor; use torch.where"),
    "branch": (lambda part, x: x if x.sum() > 0 else -x, "use torch.where, or branch outside"),
    "mask": (
        lambda part, x: x[x > 0],
        r"aten\.nonzero\.default: the number of selected elements depends on values; weight all elements",
    ),
    "unique": (lambda part, x: torch.unique(x.round()), r"aten\._unique2\.default: the number of distinct values"),
    "bincount": (lambda part, x: x * torch.bincount(x.argmax(-1)).sum(), "sum torch.nn.functional.one_hot"),
    "packed": (
        lambda part, x: nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([4]), batch_first=True).data,
        "pass the padded batch and mask",
    ),
    "ctc": (
        lambda part, x: F.ctc_loss(x[:, None], torch.ones(1, 2).long(), torch.tensor([4]), torch.tensor([2])),
        "compute the loss outside of the module",
    ),
    "numpy": (lambda part, x: x * float(x.detach().numpy().sum()), "write it in torch"),
    "iterator": (lambda part, x: x * next(part.numbers), "'0.numbers' is an iterator"),
    "parameter": (
        lambda part, x: set_attribute(part, "scale", nn.Parameter(torch.ones(8))) or x,
        "forward sets '0.scale', a parameter; call the module once before",
    ),
    "submodule": (
        lambda part, x: set_attribute(part, "late", nn.Linear(8, 8)) or x,
        "forward sets '0.late', a submodule; call the module once before",
    ),
    "backward": (
        lambda part, x: x.register_hook(lambda gradient: set_attribute(part, "gradient", gradient)) and x,
        "backward changes '0.gradient'",
    ),
    "reentrant": (
        lambda part, x: torch.utils.checkpoint.checkpoint(part.layer, x, use_reentrant=True),
        "pass use_reentrant=False",
    ),
    "switched": (
        lambda part, x: part.layer.weight.requires_grad_(False).sum() + x,
        "changes `requires_grad` of a tensor in forward; set it outside",
    ),
    "key": (lambda part, x: x * {1: 2}[part.layer.weight], "use a name or a number as the key"),
    "set": (lambda part, x: x + sum(part.tensors), "'0.tensors' is a set of tensors"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_errors_name_the_place_the_reason_and_a_remedy(name: str) -> None:
    function, message = REJECTED[name]
    part: Any = Calling(function)
    part.numbers = iter([1.0, 2.0])
    part.tensors = {torch.ones(8)}
    with pytest.raises(PlanError, match=message) as raised:
        checkpoint(nn.Sequential(part), torch.randn(4, WIDTH), **QUICK)
    assert "'0" in str(raised.value) or name == "reentrant"
    assert "\n" not in str(raised.value)


def test_statistics_over_all_steps_raise_with_the_layer() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None))
    with pytest.raises(PlanError, match=r"in '1': 'BatchNorm1d' averages.*momentum=None.*give it a momentum"):
        checkpoint(module, torch.randn(4, 8), **QUICK)


def test_operators_that_check_values_can_be_measured() -> None:
    class Gate(Stateless):
        def forward(self, x: Tensor) -> Tensor:
            share = F.one_hot(self.layer(x).argmax(-1), WIDTH).float().mean(0)
            return (share * self.layer(x).softmax(-1)).sum() * x

    def make(*parts: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(part() for part in parts))

    options = {"time_limit": 1}
    assert check(lambda: make(Gate), 0, options) == "equal"
    norms = (lambda: nn.LayerNorm(8), lambda: nn.BatchNorm1d(8))
    assert check(lambda: make(Stateless, *norms), 1, options) == "equal"


RANDOM_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "alpha": lambda x: F.alpha_dropout(x, 0.5, True),
    "channels": lambda x: F.dropout(x[..., None].to(memory_format=torch.channels_last), 0.5),
    "in place": lambda x: x * torch.empty_like(x).bernoulli_(0.3),
    "by tensor": lambda x: x * torch.empty_like(x).bernoulli_(torch.full((WIDTH, 1), 0.3)),
    "slice": lambda x: x[:, ::2] * torch.ones_like(x)[:, ::2].bernoulli_(0.3),
    "out of place": lambda x: x * torch.bernoulli(torch.ones(6, WIDTH).T.expand(3, -1, -1), p=0.3),
    "normal": lambda x: x * torch.empty_like(x).normal_(),
    "rrelu": lambda x: F.rrelu(x.contiguous(), training=True),
}


@pytest.mark.parametrize("name", RANDOM_FUNCTIONS)
def test_random_numbers_equal_those_of_the_module(name: str) -> None:
    class Drawing(Stateless):
        def forward(self, x: Tensor) -> Tensor:
            return RANDOM_FUNCTIONS[name](self.layer(x.expand(3, 6, -1)).transpose(1, 2))

    torch.manual_seed(0)
    plain = Drawing()
    planned = checkpoint(plain, torch.randn(WIDTH), **QUICK)
    results = []
    for module in (plain, planned):
        torch.manual_seed(1)
        module.zero_grad()
        found = module(torch.ones(WIDTH))
        found.square().mean().backward()
        results.append([found, plain.layer.weight.grad, torch.rand(1)])
    assert all(map(torch.equal, *results))
