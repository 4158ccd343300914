"""Running statistics of normalisations that are written out in elementary operators do not train."""

import numpy as np
import pytest

from onnxgc.model.read import explain_weights, read_model
from onnxgc.model.weight_roles.roles import Role
from tests.model.model_helpers import assert_same_output, model_of, normal, read

HEAD = "(float[2,3,4,4] x) => (float[2,3,4,4] y) <float eps = {0.00001}, int64[4] s = {1, -1, 1, 1}> {"
RESHAPED = "g = Reshape(gamma, s) b = Reshape(beta, s) m = Reshape(mean, s) v = Reshape(var, s)"
FORMS = {
    "scale and shift first": """e = Add(v, eps) r = Sqrt(e) i = Reciprocal(r) k = Mul(g, i)
        n = Mul(m, k) t = Sub(b, n) p = Mul(x, k) y = Add(p, t)""",
    "shift by a negative": """e = Add(eps, v) r = Sqrt(e) k = Div(g, r)
        n = Mul(k, m) u = Neg(n) t = Add(b, u) p = Mul(x, k) y = Add(p, t)""",
    "centred first": """c = Sub(x, m) e = Add(v, eps) r = Sqrt(e) d = Div(c, r)
        p = Mul(d, g) y = Add(p, b)""",
    "root as a power": """c = Sub(x, m) e = Add(v, eps) r = Pow(e, half) k = Mul(r, g) p = Mul(c, k)
        y = Add(p, b)""",
}


@pytest.mark.parametrize("form", FORMS)
def test_running_statistics_do_not_train(form: str):
    values = {
        "gamma": normal(3, seed=1),
        "beta": normal(3, seed=2),
        "mean": normal(3, seed=3),
        "var": np.abs(normal(3, seed=4)) + 0.5,
    }
    if "half" in FORMS[form]:
        values["half"] = np.asarray(-0.5, np.float32)
    source = model_of(f"{HEAD} {RESHAPED} {FORMS[form]} }}", **values)
    found = {weight.name: weight for weight in explain_weights(source)}
    assert found["mean"].role is found["var"].role is Role.CONSTANT
    assert found["mean"].reason.startswith("running mean of a decomposed normalisation: input")
    assert found["var"].reason.startswith("running variance of a decomposed normalisation")
    model = read(source)
    assert set(model.parameters) == {"gamma", "beta"}
    assert any("'mean', 'var' (2 weights): classified as a running statistic" in note for note in model.notes)
    assert_same_output(source, model, {"x": normal(2, 3, 4, 4)})
    assert "mean" in read(source, trainable=["mean"]).parameters


def test_normalisation_by_the_batch_has_no_running_statistics():
    body = """(float[4,3] x) => (float[4,3] y) <float eps = {0.00001}, int64[1] a = {0}> {
        m = ReduceMean(x, a) c = Sub(x, m) q = Mul(c, c) v = ReduceMean(q, a) e = Add(v, eps) r = Sqrt(e)
        d = Div(c, r) p = Mul(d, gamma) y = Add(p, beta) }"""
    source = model_of(body, gamma=(3,), beta=normal(3, seed=1))
    assert set(read(source).parameters) == {"gamma", "beta"}


@pytest.mark.parametrize("before", ["", "i = Cast<to=1>(x) j = Div(i, number)", "j = Transpose<perm=[1,0]>(x)"])
def test_mean_and_deviation_of_the_data_do_not_train(before: str):
    source = "j" if before else "x"
    nodes = f"{before} c = Sub({source}, mean) d = Div(c, std) y = MatMul(d, w)"
    body = f"(float[3,3] x) => (float[3,4] y) {{ {nodes} }}"
    values = {"mean": normal(3), "std": np.abs(normal(3, seed=1)), "w": normal(3, 4)}
    if "number" in before:
        values["number"] = np.asarray(255.0)
    model = read_model(model_of(body, **values))
    assert model.parameters == ("w",)
    assert any("'mean', 'std' (2 weights): classified as the mean or deviation" in note for note in model.notes)


def test_centres_of_clusters_train():
    body = """(float[4,1,3] x) => (float[4,5] y) <int64[1] last = {2}> {
        d = Sub(x, centres) s = Div(d, widths) y = ReduceL2<keepdims=0>(s, last) }"""
    source = model_of(body, centres=(5, 3), widths=normal(5, 1, seed=1))
    assert set(read(source).parameters) == {"centres", "widths"}


@pytest.mark.parametrize("operator", ["Mul", "Div"])
def test_a_subtracted_weight_and_a_factor_or_divisor_of_hidden_activations_train(operator: str):
    body = f"(float[4,3] x) => (float[4,3] y) {{ h = MatMul(x, w) c = Sub(h, m) y = {operator}(c, k) }}"
    source = model_of(body, w=(3, 3), m=(3,), k=normal(3, seed=1))
    assert set(read(source).parameters) == {"w", "m", "k"}
