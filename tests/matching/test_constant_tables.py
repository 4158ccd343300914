import numpy as np
import onnx
import pytest

from onnxgc.matching.normal_form.constant_tables import Table, table_of
from onnxgc.model.read import read_model
from tests.matching.networks import BATCH, TOKENS, start

_SHAPE = (BATCH, TOKENS, TOKENS)
_SEEN = np.tril(np.ones((TOKENS, TOKENS), bool))
_MASK = np.where(_SEEN, 0, -np.inf).astype(np.float32)
_DRAWN = np.random.default_rng(0).standard_normal((TOKENS, TOKENS)).astype(np.float32)


def _table(values: np.ndarray, is_trained: bool = False) -> Table | None:
    x = start()
    x.net.weights.append(onnx.numpy_helper.from_array(values, "table"))
    proto = x.net.model((x @ x.weight(TOKENS, TOKENS) + "table").name, _SHAPE, _SHAPE)
    trained, frozen = (["table"], []) if is_trained else ([], ["table"])
    return table_of(read_model(proto, trainable=trained, freeze=frozen), "table")


def _contents(values: np.ndarray) -> list[tuple[int, str]]:
    table = _table(values)
    assert table is not None
    return list(table.contents_by_axis())


@pytest.mark.parametrize(
    "values",
    [
        np.where(_SEEN, 0, np.finfo(np.float32).min).astype(np.float32),
        np.stack([_MASK, _MASK]),
        np.where(_SEEN, 0, np.where(_SEEN.T, -2e4, -1e9)).astype(np.float32),
    ],
    ids=["lowest", "of each sample", "of two numbers"],
)
def test_spellings_of_one_mask_have_equal_contents(values: np.ndarray):
    assert _contents(values) == _contents(_MASK)


def test_each_axis_has_its_own_contents():
    transposed = dict(_contents(np.ascontiguousarray(_MASK.T)))
    assert transposed == {1: dict(_contents(_MASK))[2], 2: dict(_contents(_MASK))[1]}
    assert transposed[1] != transposed[2]


@pytest.mark.parametrize(
    "values",
    [_DRAWN, np.full((TOKENS, TOKENS), 0.5, np.float32), np.full((TOKENS, TOKENS), np.nan, np.float32)],
    ids=["many numbers", "one number", "none"],
)
def test_frozen_weights_are_not_tables(values: np.ndarray):
    assert _table(values) is None


def test_a_parameter_is_not_a_table():
    assert _table(np.sign(_DRAWN)) is not None
    assert _table(np.sign(_DRAWN), is_trained=True) is None


def test_mapped_numbers_are_sorted_and_distinct():
    table = _table(np.sign(_DRAWN))
    assert table is not None
    assert table.mapped(abs).numbers == (1.0,)
    negated = table.mapped(lambda number: -number)
    assert negated.numbers == (-1.0, 1.0)
    assert (negated.codes == 1 - table.codes).all()
