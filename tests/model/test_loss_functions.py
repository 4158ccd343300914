from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from onnxgc.model.read import read_model
from tests.gradients.gradient_case import Case, case, wrong
from tests.gradients.gradient_case import normal as draw

_REDUCTIONS = ("none", "sum", "mean")
_WEIGHT = np.asarray([0.5, 1.5, 2.0, 0.25, 1.0], np.float32)
_SHAPES: Mapping[str, tuple[tuple[int, ...], list[object]]] = {
    "[N, C]": ((4, 5), [0, 2, 4, 1]),
    "[N, C, d]": ((2, 5, 3), [[0, 2, 4], [1, 2, 3]]),
    "[N, C, d, d]": ((2, 5, 2, 2), [[[0, 2], [4, 1]], [[2, 3], [3, 0]]]),
}


def loss_case(operator: str, shape: str, reduction: str, weighted: bool, ignored: int | None, opset: int) -> Case:
    size, labels = _SHAPES[shape]
    attributes = [f'reduction="{reduction}"', *([] if ignored is None else [f"ignore_index={ignored}"])]
    inputs = "s, labels, weight" if weighted else "s, labels"
    before = "s = LogSoftmax<axis=1>(x)" if operator.startswith("Negative") else "s = Identity(x)"
    body = f"{before} total = {operator}<{', '.join(attributes)}>({inputs}) y = Mul(total, spread)"
    target = torch.tensor(labels)
    weight = torch.from_numpy(_WEIGHT).double() if weighted else None
    index = -100 if ignored is None else ignored

    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        loss = functional.cross_entropy(operands["x"], target, weight, ignore_index=index, reduction=reduction)
        return loss * operands["spread"]

    spread = draw(*target.shape) if reduction == "none" else draw(2)
    name = f"{shape} {reduction}{', weights' * weighted}{'' if ignored is None else f', without {ignored}'}"
    return case(
        operator,
        f"{name}, opset {opset}",
        body,
        x=size,
        spread=spread,
        labels=labels,
        opset=opset,
        formula=formula,
        **({"weight": _WEIGHT} if weighted else {}),
    )


def _with_log_probabilities(operands: Mapping[str, Tensor]) -> Tensor:
    labels = torch.tensor(_SHAPES["[N, C]"][1])
    logs = functional.log_softmax(operands["x"], 1)
    return torch.exp(logs) * functional.nll_loss(logs, labels)


CASES = [
    *(
        loss_case(operator, shape, reduction, weighted, ignored, opset)
        for operator in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
        for shape, reduction, weighted, ignored, opset in (
            *(("[N, C]", reduction, False, None, 18) for reduction in _REDUCTIONS),
            ("[N, C]", "none", True, 2, 12),
            ("[N, C]", "sum", True, 2, 13),
            ("[N, C]", "mean", True, None, 22),
            ("[N, C]", "mean", False, 2, 18),
            ("[N, C, d]", "mean", True, 2, 18),
            ("[N, C, d, d]", "none", True, None, 18),
        )
    ),
    case(
        "SoftmaxCrossEntropyLoss",
        "with its second output",
        "total, logs = SoftmaxCrossEntropyLoss(x, labels)  p = Exp(logs)  y = Mul(p, total)",
        x=(4, 5),
        labels=_SHAPES["[N, C]"][1],
        formula=_with_log_probabilities,
    ),
]


@pytest.mark.parametrize("entry", CASES, ids=str)
def test_gradients_match_torch(entry: Case):
    assert wrong(entry) == {}
    model = read_model(entry.model(), loss="mse", trainable=list(entry.parameters))
    assert not any(node.op == entry.rule for node in model.nodes)
