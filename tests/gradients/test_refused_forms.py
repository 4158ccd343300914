"""Forms of operators that no rule differentiates: an error of one line, not a wrong gradient."""

import re
from dataclasses import replace

import numpy as np
import pytest

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.model.core.ir import TrainableModel
from tests.gradients.gradient_case import Case, case, emitted


def _with_computed_axes(model: TrainableModel) -> TrainableModel:
    """Makes the axes computed; reading would find no static shape for such a result."""
    return replace(model, weights={name: value for name, value in model.weights.items() if name != "axes"})


def _with_larger_result(model: TrainableModel) -> TrainableModel:
    """MaxUnpool with an `output_shape` that differs from the extent of its windows."""
    nodes = tuple(
        node.with_changes(attributes={**node.attributes, "kernel_shape": [3, 3]}) if node.op == "MaxUnpool" else node
        for node in model.nodes
    )
    return replace(model, nodes=nodes)


_CROPPED = "that leaves 3 elements uncovered, which runtimes crop in different places"
REFUSED: tuple[tuple[Case, str], ...] = (
    *(
        (
            case(rule, "axes", f"y = {rule}(x, axes)", x=(2, 3), axes=[1], change=_with_computed_axes),
            f"{rule} '{rule}_y' computes its axes in the graph",
        )
        for rule in ("ReduceSum", "ReduceMax")
    ),
    (
        case("Einsum", "axis of 1", 'y = Einsum<equation="i,ij->ij">(a, b)', a=(1,), b=(3, 4)),
        "Einsum 'Einsum_y' has an axis of 1 that broadcasts over another of the same letter",
    ),
    (
        case(
            "MaxUnpool",
            "output_shape",
            "y = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(x, places)",
            x=(1, 1, 2, 2),
            places=np.asarray([[[[0, 3], [9, 14]]]]),
            change=_with_larger_result,
        ),
        "MaxUnpool 'MaxUnpool_y' has an output_shape other than [5, 5]",
    ),
    (
        case(
            "Conv", "auto_pad", 'y = Conv<strides=[4,1], auto_pad="SAME_UPPER">(x, w)', x=(1, 2, 8, 5), w=(3, 2, 1, 1)
        ),
        f"Conv 'Conv_y' has auto_pad SAME_UPPER and a stride {_CROPPED}",
    ),
    (case("Det", "no rule", "d = Det(x) y = Mul(d, w)", x=(2, 3, 3), w=(2,)), "no gradient rule for: Det at 'Det_d'"),
    (
        case(
            "DeformConv",
            "no rule",
            "y = DeformConv<kernel_shape=[2,2]>(x, w, offset)",
            x=(1, 2, 4, 4),
            w=(3, 2, 2, 2),
            offset=(1, 8, 3, 3),
            opset=19,
        ),
        "no gradient rule for: DeformConv at 'DeformConv_y'",
    ),
    (
        case("Elu", "Celu of a negative alpha", "y = Celu<alpha=-0.5>(x)", x=(2, 3)),
        "no gradient rule for: Celu at 'Celu_y'",
    ),
)


@pytest.mark.parametrize("refused, message", REFUSED, ids=[str(entry) for entry, _ in REFUSED])
def test_a_form_without_a_rule_raises(refused: Case, message: str):
    with pytest.raises(UnsupportedOperatorError, match=re.escape(message)) as caught:
        emitted(refused)
    assert "\n" not in str(caught.value)


def test_hardmax_stops_the_gradient():
    _, graph = emitted(
        case("Hardmax", "added", "h = Hardmax(v) m = Mul(h, w) y = Add(x, m)", x=(2, 3), v=(2, 3), w=(2, 3))
    )
    assert set(graph.gradient_of) == {"x_weight", "w"}
