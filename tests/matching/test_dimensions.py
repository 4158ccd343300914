import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onnxgc.matching.normal_form.dimensions import Atom, Dims, coinciding, extent, merged, reshaped, whole


def _elements(dims: Dims, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The position of each element along every axis, in memory order."""
    atoms = [atom for dim in dims for atom in dim]
    positions = np.indices([atom.size for atom in atoms] or [1]).reshape(max(len(atoms), 1), -1)
    found = np.zeros((len(sizes), positions.shape[1]), int)
    for atom, position in zip(atoms, positions, strict=False):
        found[atom.axis] += position * atom.stride
    return [tuple(map(int, column)) for column in found.T]


@given(st.data())
def test_reshape_and_transpose_move_elements_as_numpy_does(data: st.DataObject):
    sizes = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    dims: Dims = tuple(whole(axis, size) for axis, size in enumerate(sizes))
    array = np.arange(math.prod(sizes)).reshape(sizes)
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            order = data.draw(st.permutations(range(array.ndim)))
            array, dims = array.transpose(order), tuple(dims[axis] for axis in order)
        else:
            factors = [factor for size in array.shape for factor in _factors(size)]
            shape = [1] * data.draw(st.integers(1, 4))
            places = sorted(data.draw(st.sampled_from(range(len(shape)))) for _ in factors)
            for place, factor in zip(places, factors, strict=True):
                shape[place] *= factor
            after = reshaped(dims, shape)
            if after is None:
                continue
            array, dims = array.reshape(shape), after
        assert array.shape == tuple(extent(dim) for dim in dims)
    unravelled = [tuple(map(int, np.unravel_index(n, sizes))) for n in array.reshape(-1)]
    assert _elements(dims, sizes) == unravelled


def _factors(size: int) -> list[int]:
    return {1: [], 2: [2], 3: [3], 4: [2, 2], 6: [2, 3]}.get(size) or [size] * (size > 1)


def test_a_reverse_reshape_restores_the_axis():
    split = reshaped((whole(0, 12), whole(1, 5)), (3, 4, 5))
    assert split == ((Atom(0, 3, 4),), (Atom(0, 4, 1),), (Atom(1, 5),))
    assert reshaped(split, (12, 5)) == (whole(0, 12), whole(1, 5))
    assert reshaped((whole(0, 6), whole(1, 4)), (8, 3)) is None


def test_shuffled_channels_are_not_a_whole_axis():
    first, second = Atom(0, 3, 4), Atom(0, 4, 1)
    assert merged((first, second)) == whole(0, 12)
    assert merged((second, first)) == (second, first)


def test_coinciding_dimensions_are_split_where_either_is():
    pairs = coinciding(whole(0, 12), (Atom(1, 3), Atom(2, 4)))
    assert pairs == [(Atom(0, 3, 4), Atom(1, 3)), (Atom(0, 4, 1), Atom(2, 4))]
    assert coinciding(whole(0, 6), (Atom(1, 4), Atom(2, 3))) is None
