import dataclasses

import numpy as np
import pytest

from onnxgc.model.core.ir import TrainableModel
from onnxgc.model.draw_weights import draw_weights
from onnxgc.model.read import read_model
from tests.model.model_helpers import light_path, model_of, normal, read


@pytest.fixture(scope="module")
def shufflenet() -> TrainableModel:
    return read_model(light_path("light_shufflenet"))


def test_values_depend_on_seed_and_name_but_not_on_order(shufflenet: TrainableModel):
    first, again, other = (draw_weights(shufflenet, seed) for seed in (1, 1, 2))
    backwards = dataclasses.replace(shufflenet, weights=dict(reversed(list(shufflenet.weights.items()))))
    reordered = draw_weights(backwards, 1)
    assert first.keys() == again.keys() == reordered.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
        np.testing.assert_array_equal(value, reordered[name])
        assert not np.array_equal(value, other[name])


def test_every_parameter_and_statistic_is_drawn_in_its_own_type(shufflenet: TrainableModel):
    drawn = draw_weights(shufflenet, 0)
    statistics = {statistic.name for statistic in shufflenet.statistics}
    assert drawn.keys() == {*shufflenet.parameters, *statistics}
    for name, value in drawn.items():
        assert value.shape == shufflenet.weights[name].type.shape
        assert value.dtype == np.float32
        assert np.isfinite(value).all()
    variances = {name for name in statistics if "riv" in name}
    assert len(variances) == 49
    assert all((drawn[name] >= 0.5).all() for name in variances)
    assert all(np.abs(drawn[name]).max() <= 0.1 for name in statistics - variances)


@pytest.mark.parametrize(
    "body, shape, fan_in",
    [
        ("(float[1,64,9,9] x) => (float[a] y) { y = Conv(x, w) }", (128, 64, 3, 3), 576),
        ("(float[1,64,9,9] x) => (float[a] y) { y = Conv<group=64>(x, w) }", (640, 1, 3, 3), 9),
        ("(float[4,500] x) => (float[a] y) { t = Transpose(w)  y = MatMul(x, t) }", (90, 500), 500),
        ("(float[4,500] x) => (float[a] y) { y = Gemm<transB=1>(x, w) }", (90, 500), 500),
        ("(float[500,4] x) => (float[a] y) { y = MatMul(w, x) }", (90, 500), 500),
        ("(float[1,500,3,3] x) => (float[a] y) { y = ConvTranspose(x, w) }", (500, 90, 2, 2), 2000),
    ],
)
def test_kernels_have_variance_two_over_fan_in(body: str, shape: tuple[int, ...], fan_in: int):
    model = read(model_of(body, w=np.zeros(shape)))
    assert draw_weights(model, 3)["w"].std() == pytest.approx(np.sqrt(2 / fan_in), rel=0.05)


def test_scales_near_one_and_biases_small():
    body = """(float[4,30] x) => (float[4,30] y) {
        n = LayerNormalization(x, scale, shift)  z = MatMul(n, w)  s = Mul(z, gain)  y = Add(s, bias) }"""
    values = {"scale": normal(30), "shift": normal(30), "w": normal(30, 30), "gain": normal(30), "bias": normal(30)}
    drawn = draw_weights(read(model_of(body, **values)), 0)
    for name in ("scale", "gain"):
        assert np.abs(drawn[name] - 1).max() <= 0.1
    for name in ("shift", "bias"):
        assert np.abs(drawn[name]).max() <= 0.1


def test_constants_of_formulas_are_not_drawn():
    body = """(float[4,30] x) => (float[4,30] y) <float eps = {0.5}, float two = {2.0}> {
        z = MatMul(x, w)  a = Add(z, eps)  c = Clip(a, eps)  y = Pow(c, two) }"""
    assert draw_weights(read(model_of(body, w=(30, 30))), 0).keys() == {"w"}


def test_frozen_weights_are_drawn_too_or_constant_filled_ones_alone():
    body = """(float[4,30] x) => (float[4,30] y) <int64[2] s = {30, 30}> {
        v = ConstantOfShape<value = float[1] {0.5}>(s)  z = MatMul(x, w)  y = MatMul(z, v) }"""
    model = read(model_of(body, w=(30, 30)), freeze=["w"])
    assert draw_weights(model, 0).keys() == {"w", "v"}
    assert draw_weights(model, 0, only_constant_filled=True).keys() == {"v"}
