"""Forms of the gradients of gathering and resampling, and the settings that these rules reject."""

import numpy as np
import pytest
import torch

from onnxgc.errors import UnsupportedOperatorError
from onnxgc.gradients import resize, rows_by_index
from onnxgc.gradients.registry import differentiate
from onnxgc.model.read import read_model
from tests.gradients.gradient_case import Case, as_runtime, backward_operators, case, wrong
from tests.gradients.gradient_cases import CASES

_CASES = {str(entry): entry for entry in CASES}


@pytest.mark.parametrize(
    "name",
    [
        "Gather: many rows in the middle",
        "Gather: many narrow rows, constant",
        "GatherND: three axes, many elements, constant",
    ],
)
def test_rows_are_added_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch):
    entry = _CASES[name]
    in_one_piece = backward_operators(entry).count("ScatterElements")
    monkeypatch.setattr(rows_by_index, "_PIECE_ELEMENTS", 2)
    assert backward_operators(entry).count("ScatterElements") > in_one_piece > 0
    assert wrong(entry) == {}


def test_large_one_hot_matrices_are_not_constants(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rows_by_index, "_MAX_CONSTANT_ONE_HOT", 4)
    assert "OneHot" not in backward_operators(_CASES["Gather: repeated, constant"])
    assert "OneHot" in backward_operators(_CASES["Gather: repeated, computed"])


def test_there_are_no_more_pieces_than_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rows_by_index, "_PIECE_ELEMENTS", 1)
    entry = _CASES["Gather: vector of many"]
    assert backward_operators(entry).count("ScatterElements") == 1 + 5
    assert wrong(entry) == {}


@pytest.mark.parametrize(
    "name",
    [
        "Resize: linear by scales",
        "Resize: nearest, fraction",
        "Resize: crop beyond the edges",
        "Resize: cubic, excluded outside",
        "Resize: antialias, cubic",
        "Resize: linear, five axes",
    ],
)
def test_long_axes_are_resampled_by_taps(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resize, "_MAX_EXTENT_BY_BLOCKS", 0)
    entry = _CASES[name]
    assert "MatMul" not in backward_operators(entry)
    assert wrong(entry) == {}


@pytest.mark.parametrize("operator, to", [("Expand", [0, 1, 3]), ("Tile", [0, 1, 1])])
def test_an_empty_expansion_contributes_no_gradient(operator: str, to: list[int]):
    entry = case(
        operator,
        "to nothing",
        f"v = {operator}(x, to) s = ReduceSum<keepdims=0>(v, axes) u = Add(s, x) y = Exp(u)",
        x=(1, 1, 3),
        axes=[0],
        to=to,
        formula=lambda operands: torch.exp(operands["x"]),
    )
    assert wrong(entry) == {}


_INDICES = np.random.default_rng(0).integers(-300, 300, 4000)
_POINTS = np.random.default_rng(0).uniform(-1.2, 1.2, (1, 60, 60, 2)).astype(np.float32)
_RACES = (
    *(
        case(
            operator,
            "many duplicates",
            f"y = {operator}(x, indices)",
            x=(300, 4),
            indices=indices,
            formula=lambda operands: operands["x"][torch.from_numpy(_INDICES)],
        )
        for operator, indices in (("Gather", _INDICES), ("GatherND", _INDICES[:, None]))
    ),
    case(
        "GridSample",
        "many points",
        'y = GridSample<mode="bilinear">(x, points)',
        x=(1, 3, 4, 4),
        points=_POINTS,
        formula=lambda operands: torch.nn.functional.grid_sample(
            operands["x"], torch.from_numpy(_POINTS).double(), align_corners=False
        ),
    ),
    case(
        "ScatterElements",
        "many updates of few elements",
        'r = Add(x, x) y = ScatterElements<axis=0, reduction="max">(x, indices, u)',
        x=(300,),
        u=(4000,),
        indices=_INDICES,
        formula=lambda operands: operands["x"].scatter_reduce(
            0, torch.from_numpy(_INDICES % 300), operands["u"], "amax"
        ),
    ),
)


@pytest.mark.parametrize("race", _RACES, ids=str)
def test_sums_over_duplicates_are_correct_on_several_threads(race: Case):
    for _ in range(3):
        assert wrong(race, threads=4) == {}


def test_computed_scales_raise():
    body = "z = ReduceMin<keepdims=0>(data) o = Mul(z, zero) k = Add(scales, o) y = Resize(x, , k)"
    entry = case(
        "Resize",
        "computed scales",
        body,
        x=(1, 1, 2, 3),
        scales=np.asarray([1, 1, 2, 2], np.float32),
        zero=np.float32(0),
    )
    with pytest.raises(Exception, match="static shape"):
        read_model(entry.model(), loss="mse", trainable=["x_weight"])


def test_a_computed_region_raises():
    body = (
        "z = ReduceMin<keepdims=0>(data) o = Mul(z, zero) k = Add(roi, o) "
        'y = Resize<mode="linear", coordinate_transformation_mode="tf_crop_and_resize">(x, k, , sizes)'
    )
    entry = case(
        "Resize",
        "computed region",
        body,
        x=(1, 1, 2, 3),
        roi=np.asarray([0, 0, 0, 0, 1, 1, 0.5, 0.5], np.float32),
        zero=np.float32(0),
        sizes=[1, 1, 4, 5],
    )
    model = read_model(entry.model(), loss="mse", trainable=["x_weight"])
    with pytest.raises(UnsupportedOperatorError, match="Resize 'Resize_y' computes its region in the graph"):
        differentiate(model)


def test_the_reference_of_resize_follows_the_runtime():
    scales = np.asarray([1, 1, 2, 2], np.float32)
    formula = as_runtime("Resize(x, , scales)", {"scales": scales}, (1, 1, 1, 2))
    found = formula({"x": torch.tensor([[[[3.0, 4.0]]]], dtype=torch.float64)})
    assert found.tolist() == [[[[3, 3, 4, 4], [3, 3, 4, 4]]]]
