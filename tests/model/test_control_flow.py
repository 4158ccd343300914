import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onnxgc.api import optimize
from onnxgc.errors import ShapeError, UnsupportedOperatorError
from onnxgc.model.read import explain_weights
from onnxgc.model.static_shapes import control_flow
from tests.gradients.gradient_case import Case, Formula, case, wrong
from tests.model.model_helpers import assert_same_output, model_of, normal, read, run, text_model

CONTROL_FLOW = {"If", "Loop", "Scan"}
_BRANCHES = """
    z = If<then_branch = yes () => (float[a,b] t) { t = MatMul(x, w) },
           else_branch = no () => (float[a,b] e) { e = Mul(x, x) }>(c)
    y = Exp(z)
"""
_BY_RANK = "size = Shape(x)  rank = Size(size)  c = Equal(rank, two)" + _BRANCHES


def _looped(body: str, outputs: str, inputs: str) -> str:
    """A Loop over `body`, which computes the tensors named in `outputs`."""
    declared = ", ".join(f"float[a,b] {name}" for name in outputs.split())
    return f"""<body = step (int64 i, bool before, float[2,3] h) => (bool after, {declared}) {{
        {body}
    }}>({inputs})"""


def _loop_formula(operands: Mapping[str, Tensor]) -> Tensor:
    h, each = operands["x"], []
    for _ in range(3):
        h = torch.tanh(h @ operands["w"])
        each.append(h * operands["v"])
    return torch.cat([h[None], torch.stack(each)])


def _counting(operands: Mapping[str, Tensor]) -> Tensor:
    h = operands["x"]
    for step in range(4):
        h = torch.tanh(h) + step * operands["w"]
    return h


def _nested(operands: Mapping[str, Tensor]) -> Tensor:
    h = operands["x"]
    for step in range(2):
        for _ in range(3):
            h = torch.tanh(h @ operands["w"])
        h = h * operands["v"] if step == 0 else h + operands["v"]
    return h


def _scan_case(
    name: str, attributes: str = "", opset: int = 18, shape: tuple[int, ...] = (4, 3), axis: int = 0, out: int = 0
) -> Case:
    """A recurrence over slices: the squared states of all steps, then the last state."""

    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        s, outputs = operands["s"], []
        for part in operands["x"].unbind(axis):
            s = torch.tanh(s * operands["w"] + part)
            outputs.append(s * s)
        return torch.cat([torch.stack(outputs, out).reshape(-1), s.reshape(-1)])

    body = f"""
        last, seen = Scan<num_scan_inputs=1{attributes and ", "}{attributes}, body = step (float[3] h, float[3] part)
            => (float[3] n, float[3] o) {{
            m = Mul(h, w)  a = Add(m, part)  n = Tanh(a)  o = Mul(n, n) }}>(s, x)
        seen_flat = Reshape(seen, flat)  last_flat = Reshape(last, flat)
        y = Concat<axis=0>(seen_flat, last_flat)
    """
    return case("Scan", name, body, x=shape, s=(3,), w=(3,), flat=[-1], opset=opset, formula=formula)


_LOOP_BODY = "p = MatMul(h, w)  n = Tanh(p)  out = Mul(n, v)  after = Identity(before)"
_LOOP = f"""
    last, each = Loop{_looped(_LOOP_BODY, "n out", 'm, "", x')}
    first = Unsqueeze(last, front)  y = Concat<axis=0>(first, each)
"""
_OLD_LOOP = _LOOP.replace("Unsqueeze(last, front)", "Unsqueeze<axes=[0]>(last)").replace('(m, "", x)', "(m, c, x)")
_WHILE_BODY = """
    j = Cast<to=1>(i)  k = Mul(j, w)  q = Tanh(h)  n = Add(q, k)  more = Add(i, one)  after = Less(more, four)
"""
_NESTED_BODY = """
    go = Identity(before)
    inner = Loop<body = again (int64 k, bool b, float[2,3] g) => (bool d, float[2,3] t) {
        p = MatMul(g, w)  t = Tanh(p)  d = Identity(b) }>(three, go, h)
    is_first = Equal(i, zero)
    n = If<then_branch = first () => (float[2,3] a) { a = Mul(inner, v) },
           else_branch = second () => (float[2,3] e) { e = Add(inner, v) }>(is_first)
    after = Identity(before)
"""
_GROWING_BODY = "n = Tanh(h)  p = MatMul(h, w)  grown = SequenceInsert(list, p)  after = Identity(before)"
_GROWING = f"""
    empty = SequenceEmpty<dtype=1>()
    last, all = Loop<body = step (int64 i, bool before, float[2,3] h, seq(float[2,3]) list)
        => (bool after, float[2,3] n, seq(float[2,3]) grown) {{ {_GROWING_BODY} }}>(m, c, x, empty)
"""


def _grown(operands: Mapping[str, Tensor]) -> list[Tensor]:
    h, found = operands["x"], []
    for _ in range(3):
        found.append(h @ operands["w"])
        h = torch.tanh(h)
    return found


def _flow(rule: str, name: str, body: str, *, opset: int = 18, formula: Formula, **inputs: Any) -> Case:
    """A case on x [2, 3] if no other shape is given, with a true condition `c` if it reads one."""
    given = {"x": (2, 3), **({"c": True} if re.search(r"\bc\b", body) and " c = " not in body else {}), **inputs}
    return case(rule, name, body, opset=opset, formula=formula, **given)


CASES = [
    _flow("If", "else", _BRANCHES, c=False, w=np.ones((3, 3), np.float32), formula=lambda o: torch.exp(o["x"] ** 2)),
    _flow("If", "by rank", _BY_RANK, w=(3, 3), two=2, formula=lambda o: torch.exp(o["x"] @ o["w"])),
    _flow("Loop", "opset 11", _OLD_LOOP, w=(3, 3), v=(3,), m=3, opset=11, formula=_loop_formula),
    _flow("Loop", "no condition", _LOOP, w=(3, 3), v=(3,), m=3, front=[0], formula=_loop_formula),
    *(
        _flow(
            "Loop",
            f"while, {count}",
            f"y = Loop{_looped(_WHILE_BODY, 'n', f'{inputs}, c, x')}",
            w=(3,),
            one=1,
            four=4,
            formula=_counting,
            **limit,
        )
        for count, inputs, limit in (("without a limit", '""', {}), ("up to more steps", "m", {"m": 2**62}))
    ),
    _flow(
        "Loop",
        "with Loop and If inside",
        f"y = Loop{_looped(_NESTED_BODY, 'n', 'm, c, x')}",
        w=(3, 3),
        v=(3,),
        m=2,
        three=3,
        zero=0,
        formula=_nested,
    ),
    *(
        _flow(
            "Loop",
            name,
            f"h = Loop{_looped('n = Tanh(h) after = Identity(before)', 'n', 'm, c, x')} y = Exp(h)",
            m=steps,
            c=condition,
            formula=lambda o: torch.exp(o["x"]),
        )
        for name, steps, condition in (("of no steps", 0, True), ("of a false condition", 4, False))
    ),
    *(
        _flow(
            "Loop",
            f"grown list, {attributes}",
            f"{_GROWING} y = ConcatFromSequence<{attributes}>(all)",
            w=(3, 3),
            m=3,
            formula=formula,
        )
        for attributes, formula in (
            ("axis=1", lambda o: torch.cat(_grown(o), 1)),
            ("axis=-1, new_axis=1", lambda o: torch.stack(_grown(o), -1)),
        )
    ),
    _flow(
        "SplitToSequence",
        "single slices, opset 11",
        """parts = SplitToSequence<axis=1, keepdims=0>(x)  last = SequenceAt(parts, back)
        fewer = SequenceErase(parts, zero)  more = SequenceInsert(fewer, last, back)
        h = ConcatFromSequence<axis=-2, new_axis=1>(more)  y = Exp(h)""",
        back=-1,
        zero=0,
        opset=11,
        formula=lambda o: torch.exp(torch.stack([o["x"][:, 1], o["x"][:, 2], o["x"][:, 2]])),
    ),
    _flow(
        "Loop",
        "list of several lengths",
        """empty = SequenceEmpty<dtype=1>()
        all = Loop<body = step (int64 i, bool before, seq(float[2,3]) list)
            => (bool after, seq(float[2,3]) n) {
            p = MatMul(x, w)  n = SequenceInsert(list, p, zero)  after = Identity(before) }>(m, c, empty)
        count = SequenceLength(all)  k = Cast<to=1>(count)  h = SequenceAt(all, zero)  y = Mul(h, k)""",
        w=(3, 3),
        m=3,
        zero=0,
        formula=lambda o: 3 * (o["x"] @ o["w"]),
    ),
    _scan_case("opset 11", opset=11),
    _scan_case("opset 9", opset=9),
    _scan_case("negative input axis", "scan_input_axes=[-1]", shape=(3, 4), axis=1),
    _scan_case("negative output axis", "scan_output_axes=[-1]", out=1),
    _scan_case("one step", shape=(1, 3)),
]


def _swapped(operands: Mapping[str, Tensor]) -> Tensor:
    a, b, seen = operands["x"], operands["v"], []
    for _ in range(3):
        a, b = b, a * operands["w"]
        seen.append(b)
    return torch.cat([torch.stack(seen), a[None], b[None]])


def _growing(operands: Mapping[str, Tensor]) -> Tensor:
    h = operands["x"]
    for _ in range(3):
        h = torch.cat([h, torch.tanh(h[:, -1:]) * operands["w"]], 1)
    return h


def _crossed(operands: Mapping[str, Tensor]) -> Tensor:
    """Two scanned inputs on different axes, two states, two outputs."""
    x, v, a, b = operands["x"], operands["v"], operands["s"], operands["t"]
    first: list[Tensor] = []
    second: list[Tensor] = []
    for step in range(4):
        row, column = x[step], v[:, 3 - step]
        a, b = torch.tanh(a + row * operands["w"]), b * column
        first.append(a * b)
        second.insert(0, column + a)
    return torch.cat([part.reshape(-1) for part in (a, b, torch.stack(first, 1), torch.stack(second, 0))])


CASES += [
    _flow(
        "If",
        "tensors and weights from outside, several outputs",
        """p, q, r = If<then_branch = yes () => (float[2,3] s, float[3] v, float[2,3] t) {
                s = Identity(x)  v = Identity(w)  t = Mul(x, w) },
            else_branch = no () => (float[2,3] f, float[3] g, float[2,3] e) {
                f = Neg(x) g = Neg(w) e = Neg(x) }>(c)
        a = Mul(p, q)  b = Exp(r)  y = Add(a, b)""",
        w=(3,),
        formula=lambda o: o["x"] * o["w"] + torch.exp(o["x"] * o["w"]),
    ),
    _flow(
        "If",
        "in an If",
        """z = If<then_branch = yes () => (float[2,3] t) {
                t = If<then_branch = a () => (float[2,3] k) { k = Mul(x, w) },
                       else_branch = b () => (float[2,3] k) { h = Exp(x)  k = Mul(h, w) }>(d) },
            else_branch = no () => (float[2,3] t) { t = Identity(x) }>(c)
        y = Mul(z, z)""",
        w=(3,),
        d=False,
        formula=lambda o: (torch.exp(o["x"]) * o["w"]) ** 2,
    ),
    _flow(
        "Loop",
        "states that swap",
        """a, b, seen = Loop<body = step (int64 i, bool before, float[2,3] p, float[2,3] q)
            => (bool before, float[2,3] q, float[2,3] r, float[2,3] r) { r = Mul(p, w) }>(m, c, x, v)
        d = Unsqueeze(a, front)  e = Unsqueeze(b, front)  y = Concat<axis=0>(seen, d, e)""",
        v=(2, 3),
        w=(3,),
        m=3,
        front=[0],
        formula=_swapped,
    ),
    _flow(
        "Loop",
        "a state that grows",
        """y = Loop<body = step (int64 i, bool before, float[2,k] h) => (bool before, float[2,n] g) {
            last = Gather<axis=1>(h, back)  t = Tanh(last)  u = Mul(t, w)
            g = Concat<axis=1>(h, u) }>(m, c, x)""",
        w=(1,),
        m=3,
        back=[-1],
        formula=_growing,
    ),
    _flow(
        "Scan",
        "several states, inputs and outputs",
        """a, b, first, second = Scan<num_scan_inputs=2, scan_input_axes=[0, 1], scan_input_directions=[0, 1],
            scan_output_axes=[1, 0], scan_output_directions=[0, 1],
            body = step (float[3] p, float[3] q, float[3] row, float[3] column)
                => (float[3] n, float[3] k, float[3] o, float[3] l) {
                scaled = Mul(row, w)  sum = Add(p, scaled)  n = Tanh(sum)  k = Mul(q, column)
                o = Mul(n, k)  l = Add(column, n) }>(s, t, x, v)
        a_flat = Reshape(a, flat)  b_flat = Reshape(b, flat)
        first_flat = Reshape(first, flat)  second_flat = Reshape(second, flat)
        y = Concat<axis=0>(a_flat, b_flat, first_flat, second_flat)""",
        x=(4, 3),
        v=(3, 4),
        s=(3,),
        t=(3,),
        w=(3,),
        flat=[-1],
        formula=_crossed,
    ),
]


@pytest.mark.parametrize("entry", CASES, ids=str)
def test_gradients_match_torch_and_outputs_the_source_model(entry: Case):
    assert wrong(entry) == {}
    source = entry.model()
    model = read(source, trainable=list(entry.parameters))
    assert not any(node.op in CONTROL_FLOW for node in model.nodes)
    assert_same_output(source, model, entry.fed())


_INNER_WEIGHTS = """(float[2,3] x) => (float[2,3] y) <int64 m = {2}, bool c = {1}> {
    [pick] z = If<then_branch = yes () => (float[2,3] t) <float[3,3] w = {1.,2.,3.,4.,5.,6.,7.,8.,9.}> {
                      t = MatMul(x, w) },
                  else_branch = no () => (float[2,3] e) { e = Identity(x) }>(c)
    [again] y = Loop<body = step (int64 i, bool before, float[2,3] h) => (bool after, float[2,3] n)
        <float[3] w = {1.,2.,3.}, float s = {2.}> {
            [scale] p = Mul(h, w)  k = Constant<value_floats=[1.5, 2.5, 3.5]>()  q = Add(p, k)
            n = Mul(q, s)  after = Identity(before) }>(m, c, z)
}"""


def test_weights_inside_of_bodies_become_weights_of_the_model():
    source = text_model(_INNER_WEIGHTS)
    model = read(source)
    assert set(model.parameters) == {"w", "again/w", "k"}
    found = {decision.name: decision for decision in explain_weights(source)}
    assert (found["s"].role, found["w"].role) == ("constant", "parameter")
    assert found["again/w"].reason == "input 1 of Mul 'scale'"
    assert_same_output(source, model, {"x": normal(2, 3)}, rtol=1e-6)
    assert optimize(source, loss="mse").training_graph.gradient_of.keys() == {"w", "again/w", "k"}
    names = [node.name for node in model.nodes]
    assert {"again/step0/scale", "again/step1/scale"} <= set(names)
    assert "again/step1/p" in model.types
    assert len(names) == len(set(names))


_BY_DATA = """(float[2,3] x) => (float[2,3] y) <float two = {2.}, float half = {0.5}, float zero = {0.}> {
    total = ReduceSum<keepdims=0>(x)  c = Greater(total, zero)
    [choice] k = If<then_branch = yes () => (float t) { t = Identity(two) },
                    else_branch = no () => (float e) { e = Identity(half) }>(c)
    z = MatMul(x, w)  y = Mul(z, k)
}"""


@pytest.mark.parametrize("opset, sign", [(13, 1), (18, -1), (21, 1)])
def test_a_data_dependent_branch_without_a_gradient_stays(opset: int, sign: int):
    source = model_of(_BY_DATA, opset=opset, w=(3, 3))
    entry_x = np.abs(normal(2, 3)) * np.float32(sign)
    model = read(source)
    assert [node.op for node in model.nodes].count("If") == 1
    assert model.parameters == ("w",)
    assert_same_output(source, model, {"x": entry_x}, rtol=1e-6)
    graph = optimize(source, loss="mse").training_graph
    target = np.zeros((2, 3), np.float32)
    (gradient,) = run(graph.model, {"x": entry_x, "target": target}, graph.gradient_of["w"])
    k = 2.0 if sign > 0 else 0.5
    w = normal(3, 3)
    np.testing.assert_allclose(gradient, 2 / 6 * k * k * entry_x.T @ (entry_x @ w), rtol=1e-5)


@pytest.mark.parametrize("is_zero", [True, False])
@pytest.mark.parametrize("operator", ["Loop", "Scan"])
def test_first_states_train_unless_they_are_zero(operator: str, is_zero: bool):
    bodies = {
        "Loop": f"""(float[2,3] x) => (float[2,3] y) <int64 m = {{2}}> {{
            z = Mul(x, w)  h = Loop{_LOOP_OF_STATE}  y = Add(h, z) }}""",
        "Scan": f"(float[9,3] x) => (float[3] y) {{ y = Scan{_SCAN_STEP}(s, x) }}",
    }
    shape = (2, 3) if operator == "Loop" else (3,)
    state = np.zeros(shape, np.float32) if is_zero else normal(*shape)
    source = model_of(bodies[operator], w=(3,), s=state)
    assert set(read(source).parameters) == ({"w"} if is_zero else {"w", "s"})


def test_a_scanned_weight_trains_although_it_is_zero():
    body = f"(float[3] x) => (float[3] y) {{ y = Scan{_SCAN_STEP}(x, b) }}"
    source = model_of(body, w=(3,), b=np.zeros((4, 3), np.float32))
    assert set(read(source).parameters) == {"w", "b"}


_SCAN_STEP = """<num_scan_inputs=1, body = step (float[3] h, float[3] part) => (float[3] n) {
    a = Mul(h, w)  n = Add(a, part) }>"""
_LONGER_STEP = _SCAN_STEP.replace("n = Add(a, part)", "b = Add(a, part)  n = Tanh(b)")
_LOOP_OF_STATE = _looped("p = Mul(h, w) n = Tanh(p) after = Identity(before)", "n", 'm, "", s')


_DOUBLING = """(float[2,3] x) => (float[2,3] y)
    <float[3] d = {2., 2., 3.}, float ten = {10.}, bool c = {1}, int64 m = {9}> {
    [search] h = Loop<body = step (int64 i, bool before, float[2,3] g) => (bool after, float[2,3] n) {
        n = Mul(g, d)  total = ReduceSum<keepdims=0>(n)  after = Less(total, ten) }>(m, c, x)
    z = MatMul(x, w)  y = Mul(z, h)
}"""


@pytest.mark.parametrize("opset, size", [(13, 1.0), (18, 0.01), (21, 1.0)])
def test_a_data_dependent_loop_without_a_gradient_stays(opset: int, size: float):
    x, w = np.full((2, 3), size, np.float32), normal(3, 3)
    source = model_of(_DOUBLING, opset=opset, w=w)
    model = read(source, freeze=["d"])
    assert [node.op for node in model.nodes].count("Loop") == 1
    expected = assert_same_output(source, model, {"x": x}, rtol=1e-6)
    result = optimize(source, loss="mse", freeze=["d"])
    assert any("the data decide how long 'search' runs" in note for note in result.report["notes"])
    graph = result.training_graph
    (gradient,) = run(graph.model, {"x": x, "target": np.zeros_like(expected)}, graph.gradient_of["w"])
    h = expected / (x @ w)
    np.testing.assert_allclose(gradient, 2 / 6 * x.T @ (expected * h), rtol=1e-5)


@pytest.mark.parametrize("operator", ["Loop", "Scan", "LSTM"])
def test_unrolling_has_a_limit_on_operators(operator: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control_flow, "MAX_UNROLLED_OPERATORS", 20)
    bodies = {
        "Loop": f"(float[2,3] x) => (float[2,3] y) <int64 m = {{1000}}> {{ [it] y = Loop{_SHORT_LOOP} }}",
        "Scan": f"(float[9,3] x) => (float[3] y) <float[3] s = {{1.,2.,3.}}> {{ [it] y = Scan{_LONGER_STEP}(s, x) }}",
        "LSTM": "(float[2,1,3] x) => (float[2,1,1,3] y) { [it] y = LSTM<hidden_size=3>(x, a, b) }",
    }
    weights = {"w": normal(3), "a": normal(1, 12, 3), "b": normal(1, 12, 3)}
    used = {name: value for name, value in weights.items() if operator == "LSTM" or name == "w"}
    source = model_of(bodies[operator], **used)
    with pytest.raises(UnsupportedOperatorError, match=f"{operator} 'it' has .* steps.*limit of 20"):
        read(source)


_SHORT_LOOP = _looped("n = Mul(h, w) after = Identity(before)", "n", 'm, "", x')


@pytest.mark.parametrize(
    "body, opset, kind, message",
    [
        (
            _BY_DATA.replace("t = Identity(two)", "a = MatMul(x, w)  t = ReduceSum<keepdims=0>(a)"),
            18,
            UnsupportedOperatorError,
            "no gradient rule for: If at 'choice'",
        ),
        (
            _DOUBLING.replace("Mul(g, d)", "MatMul(g, w)"),
            18,
            UnsupportedOperatorError,
            "no gradient rule for: Loop at 'search'",
        ),
        (
            _DOUBLING.replace("n = Mul(g, d)", "n = Concat<axis=0>(g, g)"),
            18,
            ShapeError,
            "node 'search', Loop.*the data decide the number of iterations",
        ),
        (
            """(float[2,3] x, int64 rate) => (float[a,b] y) <int64 known = {16}> {
            c = Equal(rate, known)  z = MatMul(x, w)
            [which] y = If<then_branch = yes () => (float[2,3] t) { t = Identity(z) },
                           else_branch = no () => (float[1,3] e) { e = ReduceMax<axes=[0]>(z) }>(c) }""",
            13,
            ShapeError,
            "node 'which', If.*the values of 'rate' decide which branch runs",
        ),
        (
            """(float[4,3] x, float[5,3] z) => (float[3] y) <float[3] h = {0, 0, 0}> {
            v = MatMul(x, w)  y = Scan<num_scan_inputs=2, body = step (float[3] h, float[3] a, float[3] b)
                => (float[3] n) { s = Add(a, b)  n = Add(h, s) }>(h, v, z) }""",
            18,
            ShapeError,
            "scans inputs of 4 and 5 elements",
        ),
    ],
    ids=["gradient of a branch", "gradient of a loop", "growing state", "differing shapes", "unequal lengths"],
)
def test_unsupported_control_flow_is_an_error(body: str, opset: int, kind: type[Exception], message: str):
    source = model_of(body, opset=opset, w=(3, 3))
    with pytest.raises(kind, match=message):
        optimize(source, loss="mse")
