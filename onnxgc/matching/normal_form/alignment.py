"""How the dimensions of two operands lie on each other."""

from dataclasses import replace

from onnxgc.matching.normal_form.dimensions import Dim, Dims, as_set, extent
from onnxgc.matching.normal_form.entities import View
from onnxgc.matching.normal_form.recognized_forms import Expanded
from onnxgc.matching.normal_form.value_graph import Structure, padded


def both_orders(x: View, y: View) -> tuple[tuple[View, View], tuple[View, View]]:
    return ((x, y), (y, x))


def is_over_its_elements(structure: Structure, reduced: View, x: View, over: Dim) -> bool:
    """Whether each element of the reduced x lines up with the elements it was computed from."""
    rank = max(len(reduced.dims), len(x.dims))
    pairs = zip(padded(x.dims, rank), padded(reduced.dims, rank), strict=True)
    different = [(here, there) for here, there in pairs if here != there]
    is_repeated = not any(_without_broadcast(structure, tuple(there for _, there in different)))
    return is_repeated and as_set(*(here for here, _ in different)) == over


def are_aligned(structure: Structure, x: View, y: View) -> bool:
    """Whether two values extend along the same dimensions, except those of weights."""
    rank = max(len(x.dims), len(y.dims))
    first, second = (padded(_without_broadcast(structure, view.dims), rank) for view in (x, y))
    return first == second


def _without_broadcast(structure: Structure, dims: Dims) -> Dims:
    return tuple(() if all(map(structure.is_broadcast, dim)) else dim for dim in dims)


def before_expansion(structure: Structure, x: View, other: View) -> View:
    """x before it was expanded, if broadcasting with the other operand repeats x anyway."""
    expansion = structure.facts.get(x.value)
    if not isinstance(expansion, Expanded) or len(other.dims) < len(x.dims):
        return x
    aligned = zip(reversed(expansion.dims), reversed(x.dims), reversed(other.dims), strict=False)
    is_covered = all(own or not here or extent(here) == extent(there) for own, here, there in aligned)
    return replace(x, value=expansion.value, dims=expansion.dims) if is_covered else x
