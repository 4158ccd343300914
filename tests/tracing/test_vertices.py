"""Which tensors are vertices: what backward reads can be kept or given up, what passes cannot."""

from __future__ import annotations

import numpy as np
from onnx import numpy_helper, parser

from onnxgc.api.pipeline import trace_problem
from onnxgc.model.read import read_model


def test_only_what_backward_does_not_read_passes() -> None:
    model = parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 17]>
        g (float[8, 16] x) => (float[8, 4] y) {
            a = MatMul (x, w)
            t = Tanh (a)
            n = Neg (t)
            s = Neg (n)
            first = Neg (s)
            second = Neg (s)
            e = Add (first, second)
            y = MatMul (e, v)
        }""")
    draw = np.random.default_rng(0)
    for name, shape in {"w": (16, 16), "v": (16, 4)}.items():
        value = draw.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    traced = trace_problem(read_model(model))
    # Backward of Tanh reads its result, not its input; that of Neg reads nothing; two operators read s.
    assert {name: traced.vertex(name) for name in "atnse"} == {
        "a": "t",
        "t": "t",
        "n": "s",
        "s": "s",
        "e": "e",
    }
