import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

import onnxgc
from onnxgc.errors import ExportError
from onnxgc.runtime.ort import make_session
from onnxgc.torch import export_training, exportable_functions

pytest.importorskip("onnxscript")
pytestmark = pytest.mark.usefixtures("cached_exporter")

_ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
_CLASSES = torch.tensor([0, 2, -100, 4, 1, 2])
_WEIGHT = [0.3, 1.0, 2.0, 0.7, 1.5]
_STEP_TOLERANCE = 2e-5


class FunctionModule(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.linear, self.other = nn.Linear(4, 5), nn.Linear(4, 5)
        self.inner = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
        self.register_buffer("weight", torch.tensor(_WEIGHT))

    weight: Tensor

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def assert_equal_gradients(module: nn.Module, *inputs: Tensor) -> None:
    """Compares the gradients of an exported file, with the mean squared output as loss, with the module's."""
    proto = export_training(module, inputs, dynamic_batch=False)
    result = onnxgc.optimize(proto, loss="mse")
    outputs = module.double()(*(x.double() if x.is_floating_point() else x for x in inputs))
    target = torch.zeros_like(outputs)
    F.mse_loss(outputs, target).backward()
    graph = result.training_graph
    feeds = {value.name: x.numpy() for value, x in zip(proto.graph.input, inputs, strict=True)}
    feeds["target"] = target.float().numpy()
    trained = {name: p for name, p in module.named_parameters() if name in graph.gradient_of}
    session = make_session(graph.model)
    found = session.run([graph.gradient_of[name] for name in trained], feeds)
    for (name, parameter), gradient in zip(trained.items(), found, strict=True):
        true = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert np.allclose(gradient, true.numpy(), rtol=1e-4, atol=_STEP_TOLERANCE), name
    missing = [n for n, p in module.named_parameters() if n not in trained and p.grad is not None and p.grad.any()]
    assert not missing


def _under_no_grad(m: FunctionModule, x: Tensor) -> Tensor:
    with torch.no_grad():
        constant, also = m.other(x).tanh(), m.linear(x)
    return m.linear(x) * constant + m.other(x) + 1e-2 * also


def _evaluated(part: nn.Module) -> nn.Module:
    for other in part.modules():
        if isinstance(other, nn.modules.batchnorm._NormBase) and other.running_mean is not None:
            nn.init.normal_(other.running_mean)
    return part.eval()


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.linear(x) * m.other(x).detach() + m.other(x),
        lambda m, x: F.linear(x, m.linear.weight.detach(), m.linear.bias),
        _under_no_grad,
        lambda m, x: m.linear(x) * m.other(x).sum().item(),
        lambda m, x: F.batch_norm(m.linear(x), None, None, m.weight, training=True) + m.other(x),
        lambda m, x: m.linear(
            F.avg_pool2d(x[:, None].expand(-1, 4, -1)[:, None], 2, 2, 1, divisor_override=3)[:, 0, :2].flatten(1)[:, :4]
        ),
    ],
    ids=["detach", "parameter", "no_grad", "item", "batch_norm", "divisor"],
)
def test_files_keep_information_that_exporters_lose(function: Callable[..., Tensor]) -> None:
    assert_equal_gradients(FunctionModule(function), _ROWS)


@pytest.mark.parametrize(
    "shape, classes, weighted, reduction",
    [
        ((6, 4), _CLASSES, True, "mean"),
        ((6, 4), None, True, "mean"),
        ((6, 3, 4), _CLASSES[:, None].expand(6, 3), False, "none"),
        ((6, 3, 4), _CLASSES[:, None].expand(6, 3), True, "mean"),
    ],
)
def test_label_smoothing_is_exported(
    shape: tuple[int, ...], classes: Tensor | None, weighted: bool, reduction: str
) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(shape, generator=generator)
    labels = torch.rand(6, 5, generator=generator) if classes is None else classes.contiguous()

    def loss(m: FunctionModule, x: Tensor, labels: Tensor) -> Tensor:
        logits = m.linear(x).movedim(-1, 1)
        weight = m.weight if weighted else None
        found = F.cross_entropy(logits, labels, weight, label_smoothing=0.1, reduction=reduction)
        return found.reshape(-1, 1)

    assert_equal_gradients(FunctionModule(loss), x, labels)


@pytest.mark.parametrize(
    "layers, evaluated",
    [
        ([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)], [1]),
        ([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)], [1, 2]),
        ([nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 4)], [0]),
        ([nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, affine=True, track_running_stats=True), nn.Flatten()], [1]),
    ],
    ids=["mixed", "all", "without", "instance"],
)
def test_submodules_keep_their_modes(layers: list[nn.Module], evaluated: list[int]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*layers, nn.Linear(4, 3)).train()
    for place in evaluated:
        _evaluated(module[place])
    assert_equal_gradients(module, _ROWS)
    assert [place for place, part in enumerate(module) if not part.training] == evaluated


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2.001


def _hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return x


@pytest.mark.parametrize(
    "function, lost, place",
    [
        (
            lambda m, x: F.cross_entropy(m.linear(x), x.argmax(1), label_smoothing=1e-3),
            F.cross_entropy,
            "cross_entropy",
        ),
        (lambda m, x: 1e-3 * m.linear(x).detach() * m.linear(x) + m.linear(x), None, "detach in forward"),
        (lambda m, x: F.avg_pool2d(m.linear(x)[None], 2, divisor_override=5), F.avg_pool2d, "avg_pool2d in forward"),
        (lambda m, x: _Scaled.apply(m.linear(x)), None, r"backward of _Scaled \(torch.autograd.Function\)"),
        (lambda m, x: _hooked(m.linear(x)), None, "a tensor hook"),
    ],
    ids=["smoothing", "detach", "divisor", "function", "hook"],
)
def test_lossy_exports_raise_with_the_operator(
    function: Callable[..., Tensor], lost: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = {form: by for form, by in exportable_functions._FORMS.items() if form is not lost}
    monkeypatch.setattr(exportable_functions, "_FORMS", forms)
    monkeypatch.setattr("onnxgc.torch.export_fixes._mark_stopped_gradients", lambda graph: None)
    for seed in range(2):
        module = FunctionModule(function)
        torch.manual_seed(seed)
        with pytest.raises(ExportError, match=place):
            export_training(module, torch.randn(6, 4), dynamic_batch=False)


def test_modules_that_round_are_compared_in_their_own_types() -> None:
    module = FunctionModule(lambda m, x: m.linear(x).to(torch.bfloat16).float().tanh() + m.other(x))
    export_training(module, _ROWS, dynamic_batch=False)


def test_defaults_that_depend_on_the_type_are_equal() -> None:
    torch.manual_seed(0)
    export_training(nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4)), 1e-3 * _ROWS, dynamic_batch=False)
    with torch.no_grad():
        module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.RMSNorm(4))
        next(module.parameters()).mul_(1e-2)
    export_training(module, _ROWS, dynamic_batch=False)


def _packed(m: FunctionModule, x: Tensor) -> Tensor:
    lengths = torch.tensor([3, 2, 1, 1, 1, 1])
    packed = nn.utils.rnn.pack_padded_sequence(m.linear(x)[:, None].expand(-1, 3, -1), lengths, batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]


class _Cache:
    """An object that is not a tensor."""


@pytest.mark.parametrize(
    "function, message",
    [
        (_packed, "lengths of packed sequences are values, which a trace does not have; pass the padded batch"),
        (lambda m, x: m.linear(x)[x[:, 0] > 0], r"aten.index.Tensor in 'inside': the number of selected .*torch.where"),
        (lambda m, x: m.linear(x) if x.sum() > 0 else x, r"data-dependent.*in 'inside'\); .*torch.where"),
        (
            lambda m, x: torch.linalg.svdvals(m.linear(x)),
            r"aten._linalg_svd.* in 'inside': .*ONNX does not have this operator",
        ),
        (lambda m, x: (m.linear(x), _Cache()), "use_cache=False"),
    ],
    ids=["packed", "mask", "branch", "svd", "cache"],
)
def test_errors_name_operator_submodule_and_remedy(function: Callable[..., Any], message: str) -> None:
    module = nn.Sequential()
    module.add_module("inside", FunctionModule(function))
    with pytest.raises(ExportError, match=message) as caught:
        export_training(module, _ROWS, dynamic_batch=False)
    assert "\n" not in str(caught.value)


class _Piece(nn.Module):
    """A random layer, perhaps in evaluation mode, and a random connection around it."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        layers: list[Callable[[], nn.Module]] = [
            lambda: nn.BatchNorm1d(4),
            lambda: nn.BatchNorm1d(4, track_running_stats=False),
            lambda: nn.LayerNorm(4, eps=1e-2),
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
            lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.GroupNorm(1, 2), nn.Flatten()),
            lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten()),
        ]
        self.layer = draw.choice(layers)()
        self.around = draw.choice(["none", "residual", "detach", "no_grad", "item"])
        self.linear = nn.Linear(4, 4)
        if draw.random() < 0.4:
            _evaluated(self.layer)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.around == "residual":
            return x + y
        if self.around == "detach":
            return y + 1e-2 * self.linear(x) * self.linear(x).detach()
        if self.around == "no_grad":
            with torch.no_grad():
                constant = self.linear(x)
            return y + constant * self.linear(x)
        return y * (1.0 + self.linear(x).mean().item()) if self.around == "item" else y


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_random_modules_train_equally_in_the_file(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 4), *(_Piece(draw) for _ in range(3)), nn.Linear(4, 2))
    assert_equal_gradients(module, _ROWS)
