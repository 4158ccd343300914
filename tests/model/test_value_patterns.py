"""Constants that are recognised by their values, without marks of the exporter."""

import ml_dtypes
import numpy as np
import onnx
import pytest

from onnxgc.model.core.ir import Array
from onnxgc.model.read import explain_weights, read_model
from onnxgc.model.weight_roles.roles import Role
from onnxgc.model.weight_roles.value_patterns import (
    are_sine_and_cosine,
    holds_sines_and_cosines,
    is_additive_mask,
    is_binary_mask,
    is_geometric,
    is_of_a_formula,
)
from tests.model.model_helpers import model_of, normal

POSITIONS, WIDTH = 6, 8
FREQUENCIES = (10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)).astype(np.float32)
ANGLES = np.outer(np.arange(POSITIONS, dtype=np.float32), FREQUENCIES)
TWICE = np.concatenate([ANGLES, ANGLES], -1)
COSINES, SINES = np.cos(TWICE), np.sin(TWICE)
INTERLEAVED = np.stack([np.sin(ANGLES), np.cos(ANGLES)], -1).reshape(POSITIONS, WIDTH)
LOWER = np.tril(np.ones((POSITIONS, POSITIONS), np.float32))
FORBIDDEN = np.where(LOWER == 1, 0, -np.inf).astype(np.float32)
DISTANCES = np.where(LOWER == 1, -np.abs(np.subtract.outer(np.arange(6), np.arange(6))) / 2, -1e9)
BOTH_WAYS = -0.5 * np.abs(np.arange(8, dtype=np.float32)[:, None] - np.arange(8, dtype=np.float32))
SLOPES = -(0.5 ** np.arange(1, 3, dtype=np.float32)).reshape(2, 1, 1) * np.arange(6, dtype=np.float32)
NO_MASK = np.zeros((1, POSITIONS, POSITIONS), np.float32)
ONES = np.ones((POSITIONS, WIDTH), np.float32)

ATTENTION = """(float[2,6,8] x) => (float[2,6,8] y) <int64 n = {0}> {
    t = Transpose<perm=[0, 2, 1]>(x)  h = MatMul(x, w)  s = MatMul(h, t)
    %s  a = Softmax<axis=-1>(m)  y = MatMul(a, x) }"""
ROTATED = """(float[2,6,8] x) => (float[2,6,8] y) {
    h = MatMul(x, w)  a, b = Split<axis=-1, num_outputs=2>(h)  c = Neg(b)  r = Concat<axis=-1>(c, a)
    p = Mul(h, cos)  q = Mul(r, sin)  y = Add(p, q) }"""
LINEAR = "(float[2,6,8] x, int64[2,6] ids) => (float[a,b,c] y) { h = MatMul(x, w)  %s }"


def number(value: float) -> Array:
    return np.asarray(value, np.float32)


def decisions(body: str, **values: Array) -> dict[str, tuple[Role, str]]:
    source = model_of(body, w=normal(WIDTH, WIDTH), **values)
    found = {weight.name: (weight.role, weight.reason) for weight in explain_weights(source)}
    assert found["w"][0] is Role.PARAMETER
    return found


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_cosines_and_sines_in_two_tables_are_constants(factor: float):
    found = decisions(ROTATED, cos=COSINES * np.float32(factor), sin=SINES * np.float32(factor))
    assert found["cos"] == (Role.CONSTANT, "sines or cosines, paired with 'sin': input 1 of Mul 'Mul_p'")
    assert found["sin"][0] is Role.CONSTANT


def test_tables_read_by_gather_are_constants():
    body = LINEAR % "c = Gather(cos, ids) s = Gather(sin, ids) p = Mul(h, c) y = Add(p, s)"
    found = decisions(body, cos=COSINES, sin=SINES)
    assert (found["cos"][0], found["sin"][0]) == (Role.CONSTANT, Role.CONSTANT)


@pytest.mark.parametrize(
    "table", [np.concatenate([SINES[:, :4], COSINES[:, :4]], -1), INTERLEAVED, np.stack([COSINES, SINES])]
)
def test_one_table_of_sines_and_cosines_is_a_constant(table: Array):
    shape = "" if table.ndim == 2 else "e, o = Split<axis=0, num_outputs=2>(pe) p = Mul(h, e) y = Mul(p, o)"
    found = decisions(LINEAR % (shape or "y = Add(h, pe)"), pe=table)
    role, reason = found["pe"]
    assert role is Role.CONSTANT
    assert "table of sines and cosines" in reason


def test_untrained_scales_and_shifts_are_no_tables():
    """Their squares sum to one, as those of sine and cosine do."""
    for scale, shift in ((ONES, np.zeros_like(ONES)), (normal(6, 8), normal(6, 8, seed=1))):
        found = decisions(LINEAR % "p = Mul(h, g) y = Add(p, b)", g=scale, b=shift)
        assert (found["g"][0], found["b"][0]) == (Role.PARAMETER, Role.PARAMETER)


def test_frequencies_are_constants_for_any_other_factor():
    body = """(float[3] t, float[3,8] x) => (float[3,8] y) <int64[1] last = {1}> {
        c = Unsqueeze(t, last)  f = Mul(c, freqs)  s = Sin(f)  o = Cos(f)  e = Concat<axis=1>(s, o)
        h = MatMul(x, w)  y = Mul(h, e) }"""
    found = decisions(body, freqs=FREQUENCIES)
    assert found["freqs"][0] is Role.CONSTANT
    assert "geometric sequence" in found["freqs"][1]
    assert decisions(body, freqs=normal(4))["freqs"][0] is Role.PARAMETER


@pytest.mark.parametrize("nodes, first", [("p = Softmax(h) y = MatMul(p, k)", 0), ("p = Softmax(h) y = Mul(p, k)", 1)])
def test_consecutive_integers_are_constants(nodes: str, first: int):
    """Detectors and disparity networks compute the mean position of a distribution with them."""
    shape = (8, 1) if "MatMul(p" in nodes else (8,)
    numbers = np.arange(first, first + 8, dtype=np.float32).reshape(shape)
    assert decisions(LINEAR % nodes, k=numbers)["k"][0] is Role.CONSTANT
    numbers[5] += 0.01
    assert decisions(LINEAR % nodes, k=numbers)["k"][0] is Role.PARAMETER


@pytest.mark.parametrize(
    "nodes, mask, reason",
    [
        ("m = Mul(s, k)", LOWER, "mask of zeros and ones"),
        ("o = Sub(one, k) f = Mul(o, big) m = Add(s, f)", LOWER, "mask of zeros and ones"),
        ("m = Add(s, k)", FORBIDDEN, "mask of zeros and large negative values"),
        ("m = Add(s, k)", DISTANCES, "mask of zeros and large negative values"),
        ("c = Cast<to=9>(k) m = Where(c, s, big)", LOWER, "cast to integers or Booleans"),
        ("m = Add(s, k)", NO_MASK, "mask without effect"),
        ("o = Add(s, k) m = Mul(o, big)", SLOPES, "distances of positions"),
        ("m = Add(s, k)", BOTH_WAYS, "distances of positions"),
    ],
)
def test_masks_are_constants(nodes: str, mask: Array, reason: str):
    numbers = {"one": number(1), "big": number(-1e9)}
    used = {name: value for name, value in numbers.items() if name in nodes}
    found = decisions(ATTENTION % nodes, k=mask, **used)
    assert found["k"][0] is Role.CONSTANT
    assert found["k"][1].startswith(reason)


@pytest.mark.parametrize(
    "nodes, value",
    [
        ("y = Mul(h, k)", ONES),
        ("y = Add(h, k)", np.zeros_like(ONES)),
        ("o = Add(h, k) y = Softmax<axis=-1>(o)", np.zeros_like(ONES)),
        ("y = Add(h, k)", np.arange(8, dtype=np.float32)),
        ("y = Add(h, k)", np.asarray([0, 1] * 4, np.float32)),
        ("y = Mul(h, k)", np.asarray([1, 2] * 4, np.float32)),
        ("p = Mul(h, h) y = Div(p, k)", np.asarray([0.5, 1] * 4, np.float32)),
    ],
)
def test_initial_values_are_no_masks(nodes: str, value: Array):
    assert decisions(LINEAR % nodes, k=value)["k"][0] is Role.PARAMETER


def test_a_zero_mask_has_a_note():
    source = model_of(ATTENTION % "m = Add(s, k)", w=(8, 8), k=NO_MASK)
    assert any("'k': classified as a mask without effect" in note for note in read_model(source).notes)
    model = read_model(source, trainable=["+k"])
    assert model.parameters == ("w", "k")
    assert not any("'k'" in note for note in model.notes)


def test_a_large_negative_value_in_a_bias_is_no_mask():
    """It may be the logit of an absent class."""
    bias = normal(WIDTH)
    bias[3] = -1e9
    assert decisions(LINEAR % "y = Add(h, k)", k=bias)["k"][0] is Role.PARAMETER


def _with_number(nodes: str, value: float, is_initializer: bool = True) -> onnx.ModelProto:
    body = LINEAR % nodes
    if is_initializer:
        return model_of(body, w=(8, 8), k=number(value))
    body = body.replace("h = ", f"k = Constant<value = float {{{value!r}}}>() h = ", 1)
    return model_of(body, w=(8, 8))


@pytest.mark.parametrize(
    "nodes, value, is_initializer, is_reported",
    [
        ("y = Mul(k, h)", 1.3847, False, True),
        ("y = Div(h, k)", 0.07, True, True),
        ("y = Add(h, k)", -0.0995, True, True),
        ("y = Mul(h, k)", 1.0, True, True),
        ("e = Exp(k) y = Mul(h, e)", 0.0, True, True),
        ("y = Mul(h, k)", 1.0, False, False),
        ("y = Mul(h, k)", 0.35355338, True, False),
        ("y = Add(h, k)", 3.0, True, False),
        ("y = Mul(h, k)", -1e9, True, False),
    ],
)
def test_numbers_that_may_be_learned_have_a_note(nodes: str, value: float, is_initializer: bool, is_reported: bool):
    source = _with_number(nodes, value, is_initializer)
    notes = [note for note in read_model(source).notes if "'k'" in note]
    assert bool(notes) is is_reported
    if is_reported:
        assert notes == [
            "'k': classified as a constant, like all single numbers; if it is learned, pass --trainable +NAME"
        ]
        assert "k" in read_model(source, trainable=["+k"]).parameters


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_patterns_allow_the_rounding_of_each_type(dtype: type):
    assert are_sine_and_cosine(COSINES.astype(dtype), SINES.astype(dtype))
    assert holds_sines_and_cosines(INTERLEAVED.astype(dtype))
    assert is_geometric(FREQUENCIES.astype(dtype))
    assert is_binary_mask(LOWER.astype(dtype))
    assert is_additive_mask(FORBIDDEN.astype(dtype))
    assert not are_sine_and_cosine(normal(6, 8).astype(dtype), normal(6, 8, seed=1).astype(dtype))
    assert not is_geometric(normal(8).astype(dtype))


def test_large_tables_are_checked_in_full():
    angles = np.outer(np.arange(300), 10000.0 ** (-np.arange(32) / 32))
    table = np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)
    assert holds_sines_and_cosines(table)
    table[123, 7] = 0.5
    assert not holds_sines_and_cosines(table)


def test_numbers_of_formulas():
    assert all(map(is_of_a_formula, (0.5, 2.0, 1 / 6, 2**-0.5, 768**-0.5, 0.044715, 1e9, float("-inf"))))
    assert not any(map(is_of_a_formula, (0.07, 2.6593, 14.2857, 1.0123, -0.0995)))
