import numpy as np

from onnxgc.api.planned_step import trace_problem
from onnxgc.model.read import read_model
from tests.model.model_helpers import normal, text_model, with_weights


def test_only_tensors_that_backward_does_not_read_are_transient():
    model = text_model("""(float[8, 16] x) => (float[8, 4] y) {
        p = Neg (x)  a = MatMul (p, w)  t = Tanh (a)  n = Neg (t)  s = Neg (n)  first = Neg (s)  second = Neg (s)
        e = Add (first, second)  l = Neg (e)  r = ReduceSum <keepdims = 1> (l, last)  y = MatMul (r, v) }""")
    model = with_weights(model, w=normal(16, 16), v=normal(1, 4), last=np.array([1]))
    traced = trace_problem(read_model(model))
    vertices = {name: traced.vertex(name) for name in "xpatnselr"}
    # Inputs are always live. Backward of MatMul reads p and r, that of Tanh its result, that of Neg and
    # ReduceSum nothing. Two operators read s, and r has another size than l.
    assert vertices == {
        "x": "x", "p": "p", "a": "t", "t": "t", "n": "s", "s": "s", "e": "l", "l": "l", "r": "r"
    }  # fmt: skip
