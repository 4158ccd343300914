"""Losses with settings, against PyTorch's in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from onnxgc.api import optimize
from onnxgc.errors import LossError
from onnxgc.runtime.ort import make_session
from tests.model.model_helpers import normal, text_model, with_weights

WEIGHTS = [0.5, 0.0, 2.0, 0.25, 1.0]
TEXT = "(float[{shape}] x) => (float[{shape}] y) {{ a = Mul (x, w) y = {last} (a) }}"


def focal(x: Tensor, t: Tensor, gamma: float = 2.0, alpha: float = 0.25) -> Tensor:
    """The formula of the paper."""
    right = torch.where(t == 1, x.sigmoid(), 1 - x.sigmoid())
    balance = torch.where(t == 1, alpha, 1 - alpha)
    return (-balance * (1 - right) ** gamma * right.log()).mean()


def cosine(x: Tensor, t: Tensor) -> Tensor:
    ones = torch.ones(x.shape[:-1].numel())
    return F.cosine_embedding_loss(x.flatten(0, -2), t.flatten(0, -2), ones)


def entropy(x: Tensor, t: Tensor, **how: Any) -> Tensor:
    if "weight" in how:
        how["weight"] = torch.tensor(how["weight"], dtype=torch.float64)
    return F.cross_entropy(x, t, **how)


CASES: dict[str, Any] = {
    "cross-entropy(smoothing=0.1)": lambda x, t: entropy(x, t, label_smoothing=0.1),
    "cross-entropy(ignored=2)": lambda x, t: entropy(x, t, ignore_index=2),
    f"cross-entropy(weights={WEIGHTS})": lambda x, t: entropy(x, t, weight=WEIGHTS),
    f"cross-entropy(weights={WEIGHTS}, smoothing=0.3, ignored=4)": lambda x, t: entropy(
        x, t, weight=WEIGHTS, label_smoothing=0.3, ignore_index=4
    ),
    "bce(positive=3)": lambda x, t: F.binary_cross_entropy_with_logits(x, t, pos_weight=torch.tensor(3.0)),
    "huber": F.huber_loss,
    "huber(delta=0.4)": lambda x, t: F.huber_loss(x, t, delta=0.4),
    "smooth-l1": F.smooth_l1_loss,
    "smooth-l1(beta=0.25)": lambda x, t: F.smooth_l1_loss(x, t, beta=0.25),
    "focal": focal,
    "focal(gamma=0.5, alpha=0.7)": lambda x, t: focal(x, t, 0.5, 0.7),
    "cosine": cosine,
}


@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3)], ids=str)
@pytest.mark.parametrize("loss", CASES)
def test_loss_and_gradient_are_those_of_torch(loss: str, shape: tuple[int, ...]):
    kind = loss.partition("(")[0]
    last = "Sigmoid" if kind in ("bce", "focal") else "Identity"
    text = TEXT.format(shape=",".join(map(str, shape)), last=last)
    model = with_weights(text_model(text), w=normal(*shape[1:], seed=3))
    x, labels = normal(*shape), np.arange(shape[0] * np.prod(shape[2:], dtype=int)) % 5
    if kind == "cross-entropy":
        target = labels.reshape(shape[0], *shape[2:])
    elif last == "Sigmoid":
        target = (normal(*shape, seed=7) > 0).astype(np.float32)
    else:
        target = normal(*shape, seed=7)
    result = optimize(model, loss=loss, solver="store-all", check=False)
    session = make_session(result.training_graph.model, threads=1)
    names = [value.name for value in session.get_inputs()]
    outputs = ["loss", *result.training_graph.gradient_of.values()]
    found = session.run(outputs, dict(zip(names, (x, target), strict=True)))

    weight = torch.from_numpy(normal(*shape[1:], seed=3)).double().requires_grad_()
    expected = CASES[loss](
        torch.from_numpy(x).double() * weight,
        torch.from_numpy(target).to(torch.int64 if kind == "cross-entropy" else torch.float64),
    )
    expected.backward()
    np.testing.assert_allclose(found[0], expected.item(), rtol=2e-6)
    assert weight.grad is not None
    np.testing.assert_allclose(found[1], weight.grad, rtol=1e-4, atol=1e-6)


def test_a_batch_without_labels_has_the_loss_zero():
    model = with_weights(text_model(TEXT.format(shape="4,5", last="Identity")), w=normal(5))
    loss = f"cross-entropy(weights={WEIGHTS}, smoothing=0.3, ignored=4)"
    graph = optimize(model, loss=loss, solver="store-all", check=False).training_graph
    feeds = {"x": normal(4, 5), "labels": np.full(4, 4)}
    found = make_session(graph.model, threads=1).run(["loss", *graph.gradient_of.values()], feeds)
    assert not any(np.any(one) for one in found)


@pytest.mark.parametrize(
    "loss, text",
    [
        ("cross-entropy(smoothing=1)", "smoothing is 1; it must be a number from 0 to below 1"),
        ("cross-entropy(weights=[1, 2])", "has 2 weights, and the output has 5 classes"),
        ("cross-entropy(weights=[])", "it must be a list of numbers"),
        ("cross-entropy(ignored=1.5)", "it must be a whole number"),
        ("huber(beta=1)", "huber has no setting 'beta'; its settings are: delta"),
        ("mse(smoothing=1)", "its settings are: none"),
        ("huber(delta=__import__('os').getcwd())", "cannot be read"),
        ("huber(delta=1", "cannot be read"),
        ("huber(1)", "cannot be read"),
        ("huber(delta=1)(2)", "cannot be read"),
        ("huber(**{})", "huber has no setting '**'"),
        ("huber(delta=True)", "it must be a number above 0"),
        ("huber(delta=nan)", "cannot be read"),
        ("huber(delta=1e999)", "it must be a number above 0"),
        ("huber(delta=" + "(" * 5000, "cannot be read"),
        ("huber(delta=1" + "\0)", "cannot be read"),
    ],
)
def test_wrong_settings_are_one_line(loss: str, text: str):
    model = with_weights(text_model(TEXT.format(shape="4,5", last="Identity")), w=normal(5))
    with pytest.raises(LossError) as caught:
        optimize(model, loss=loss, dry_run=True, check=False)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
