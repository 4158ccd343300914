"""Cases of operators that pick elements by index, put them there, or repeat them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor

from onnxgc.model.core.ir import Array
from tests.gradients.gradient_case import Case, Draw, Formula, case, normal, positive


def gathered(indices: list[Any], axis: int) -> Formula:
    def gather(operands: Mapping[str, Tensor]) -> Tensor:
        x = operands["x"]
        return torch.gather(x, axis, _from_start(np.asarray(indices), x.shape[axis]))

    return gather


def _from_start(indices: Array, extent: int) -> Tensor:
    places = torch.from_numpy(indices.astype(np.int64))
    return torch.where(places < 0, places + extent, places)


def _gather_elements(name: str, shape: tuple[int, ...], indices: list[Any], axis: int) -> Case:
    return case(
        "GatherElements",
        name,
        f"y = GatherElements<axis={axis}>(x, indices)",
        x=normal(*shape),
        indices=indices,
        formula=gathered(indices, axis),
    )


# The fed values lie below 1, so their integer parts are zeros that nothing can be folded with.
_COMPUTED = "none = Cast<to={kind}>(data) zero = ReduceMax<keepdims=0>(none) i = Add(indices, zero)"
_INT32, _INT64 = 6, 7


def _by_indices(
    rule: str, name: str, call: str, indices: Any, formula: Formula, is_computed: bool, **settings: Any
) -> Case:
    """y = exp(call), which reads the indices as `i`; computed in the graph, or constant."""
    constant = np.asarray(indices, settings.pop("dtype", np.int64))
    kind = _INT32 if constant.dtype == np.int32 else _INT64
    found = _COMPUTED.format(kind=kind) if is_computed else "i = Identity(indices)"
    return case(
        rule,
        name,
        f"{found} v = {call} y = Exp(v)",
        indices=constant,
        formula=lambda operands: torch.exp(formula(operands)),
        **settings,
    )


def _gather(
    name: str, shape: tuple[int, ...], indices: Any, axis: int = 0, computed: bool = False, **settings: Any
) -> Case:
    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        x = operands["x"]
        dimension = axis % x.ndim
        return x[(slice(None),) * dimension + (_from_start(np.asarray(indices), x.shape[dimension]),)]

    call = f"Gather<axis={axis}>(x, i)"
    return _by_indices("Gather", name, call, indices, formula, computed, x=normal(*shape), **settings)


def _narrow(rule: str, call: str, x: Draw, indices: list[Any]) -> Case:
    """In float16, whose additions ONNX Runtime's CPU kernels lack."""
    constant = np.asarray(indices)

    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        data, places = operands["x"], torch.from_numpy(constant)
        if rule == "GatherElements":
            return torch.exp(data.gather(0, places))
        if rule == "GatherND":
            return torch.exp(data[_vector(constant, x.shape)])
        return torch.exp(data.index_select(int("axis=1" in call), places))

    return case(
        rule,
        f"float16, {' x '.join(map(str, x.shape))}",
        f"v = {call} y = Exp(v)",
        x=x,
        i=constant,
        formula=formula,
        output_type=TensorProto.FLOAT16,
        # Of the loss, and of a mean over so few elements.
        tolerance=5e-3,
        smooth=False,
    )


def _gather_nd(
    name: str, shape: tuple[int, ...], indices: Any, lead: int = 0, computed: bool = False, **settings: Any
) -> Case:
    vectors = np.asarray(indices)

    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        x, depth = operands["x"], vectors.shape[-1]
        flat = x.reshape(-1, *x.shape[lead:])
        places = vectors.reshape(-1, *vectors.shape[lead:])
        parts = [flat[n][_vector(places[n], x.shape[lead : lead + depth])] for n in range(len(flat))]
        return torch.stack(parts).reshape((*x.shape[:lead], *parts[0].shape))

    call = f"GatherND<batch_dims={lead}>(x, i)" if lead else "GatherND(x, i)"
    return _by_indices("GatherND", name, call, indices, formula, computed, x=normal(*shape), **settings)


def _vector(vectors: Array, extents: Sequence[int]) -> tuple[Tensor, ...]:
    """Index vectors along the last axis as one tensor of indices an axis."""
    return tuple(_from_start(vectors[..., axis], extent) for axis, extent in enumerate(extents))


_TORCH_REDUCTION = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _scatter_elements(
    name: str,
    shape: tuple[int, ...],
    indices: list[Any],
    axis: int = 0,
    reduction: str = "none",
    computed: bool = False,
    **settings: Any,
) -> Case:
    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        x, updates = operands["x"], operands["u"]
        places = _from_start(np.asarray(indices), x.shape[axis])
        if reduction == "none":
            return x.scatter(axis, places, updates)
        return x.scatter_reduce(axis, places, updates, _TORCH_REDUCTION[reduction])

    how = f"axis={axis}" if reduction == "none" else f'axis={axis}, reduction="{reduction}"'
    operator = settings.pop("operator", "ScatterElements")
    operands = {"x": positive(*shape), "u": positive(*np.shape(indices)), **settings}
    call = f"{operator}<{how}>(x, i, u)"
    return _by_indices("ScatterElements", name, call, indices, formula, computed, **operands)


def _scatter_nd(
    name: str,
    shape: tuple[int, ...],
    indices: list[Any],
    reduction: str = "none",
    computed: bool = False,
    **settings: Any,
) -> Case:
    vectors = np.asarray(indices)
    depth = vectors.shape[-1]

    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        x, updates = operands["x"], operands["u"]
        numbers = torch.arange(x.numel()).reshape(x.shape)[_vector(vectors, x.shape[:depth])].reshape(-1)
        if reduction == "none":
            return x.reshape(-1).scatter(0, numbers, updates.reshape(-1)).reshape(x.shape)
        how = _TORCH_REDUCTION[reduction]
        return x.reshape(-1).scatter_reduce(0, numbers, updates.reshape(-1), how).reshape(x.shape)

    how = "" if reduction == "none" else f'<reduction="{reduction}">'
    updates = positive(*vectors.shape[:-1], *shape[depth:])
    operands = {"x": positive(*shape), "u": updates, **settings}
    return _by_indices("ScatterND", name, f"ScatterND{how}(x, i, u)", indices, formula, computed, **operands)


def _top_k(
    name: str, shape: tuple[int, ...], attributes: str, axis: int, largest: bool, **settings: Any
) -> Case:
    count = int(settings.pop("count", 2))

    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        values = torch.topk(operands["x"], count, dim=axis, largest=largest).values
        return values * operands["w"]

    operator = f"TopK<{attributes}>" if attributes else "TopK"
    opset = settings.get("opset", 18)
    call = f"{operator}(x)" if opset < 10 else f"{operator}(x, k)"
    spread = list(shape)
    spread[axis] = count
    constants = {} if opset < 10 else {"k": [count]}
    return case(
        "TopK",
        name,
        f"v, i = {call} y = Mul(v, w)",
        x=normal(*shape),
        w=positive(*spread),
        formula=formula,
        **constants,
        **settings,
    )


def _reverse(
    name: str, shape: tuple[int, ...], lengths: list[int], time: int, batch: int, attributes: str
) -> Case:
    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        x = operands["x"].movedim((batch, time), (0, 1))
        rows = [torch.cat([row[:n].flip(0), row[n:]]) for row, n in zip(x, lengths, strict=True)]
        return torch.exp(torch.stack(rows).movedim((0, 1), (batch, time)))

    operator = f"ReverseSequence<{attributes}>" if attributes else "ReverseSequence"
    return case(
        "ReverseSequence",
        name,
        f"v = {operator}(x, lengths) y = Exp(v)",
        x=normal(*shape),
        lengths=lengths,
        formula=formula,
    )


def _one_hot(name: str, indices: list[Any], axis: int | None, body: str = "{call}") -> Case:
    """Off and on are trained; depth 4."""
    places = _from_start(np.asarray(indices), 4)

    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        x = operands["x"]
        hot = torch.nn.functional.one_hot(places, 4).movedim(-1, -1 if axis is None else axis)
        return torch.exp(torch.where(hot == 1, x[1], x[0]))

    operator = "OneHot" if axis is None else f"OneHot<axis={axis}>"
    return case(
        "OneHot",
        name,
        f"v = {operator}(indices, depth, x) y = Exp(v)",
        x=normal(2),
        indices=indices,
        depth=[4],
        formula=formula,
    )


def _expand(name: str, shape: tuple[int, ...], to: list[int], **settings: Any) -> Case:
    return case("Expand", name, "v = Expand(x, to) y = Mul(v, w)", x=normal(*shape), to=to, **settings)


def _tile(name: str, shape: tuple[int, ...], repeats: list[int], **settings: Any) -> Case:
    tiled = [size * count for size, count in zip(shape, repeats, strict=True)]
    return case(
        "Tile",
        name,
        "v = Tile(x, repeats) y = Mul(v, w)",
        x=normal(*shape),
        w=normal(*tiled),
        repeats=repeats,
        formula=lambda operands: operands["x"].repeat(*repeats) * operands["w"],
        **settings,
    )


_RANDOM = np.random.default_rng(0)

GATHERING_CASES = (
    _gather("scalar, constant", (5, 3), 2),
    _gather("negative scalar, constant", (4, 5, 3), -2, axis=1),
    _gather("scalar, computed", (5, 3), 2, computed=True),
    _gather("negative scalar of the last axis, computed", (5, 3), -1, axis=-1, computed=True),
    _gather("a range", (6, 3), [1, 2, 3]),
    _gather("a range in steps of two", (7, 3), [1, 3, 5]),
    _gather("a range in steps of three in the middle, backwards", (2, 9, 3), [7, 4, 1], axis=1),
    _gather("all backwards by negative indices", (4, 3), [-1, -2, -3, -4]),
    _gather("a range in two rows", (2, 7), [[0, 1, 2], [3, 4, 5]], axis=1),
    _gather("a permutation", (2, 5, 3), [3, 0, 4, 1, 2], axis=1),
    _gather("repeated, constant", (4, 3), [0, 2, 2, 3, 2]),
    _gather("one row again and again", (4, 3), [1, 1, 1]),
    _gather("repeated, computed", (4, 3), [0, 2, 2, 3, 2], computed=True),
    _gather("repeated in int32, computed", (4, 3), [0, -2, 2, 3, -2], computed=True, dtype=np.int32),
    _gather("two axes of indices, last axis", (3, 4), [[0, -1], [3, 1], [1, 1]], axis=-1, computed=True),
    _gather("two axes of indices in the middle", (2, 5, 3), [[0, -1], [3, 1]], axis=1, computed=True),
    _gather("one row", (1, 3), [0, 0, -1], computed=True),
    _gather("vector", (6,), [5, 0, -6, 5], computed=True),
    _gather("vector of many", (600,), [5, 0, -600, 5, 599], computed=True),
    _gather("many narrow rows, constant", (40, 2), [7, 0, -40, 7, 39]),
    _gather("many rows, computed", (300, 5), [7, 0, -300, 7, 299], computed=True),
    _gather("many rows in int32, computed", (300, 5), [7, 0, -300, 7, 299], computed=True, dtype=np.int32),
    _gather("many rows in the middle", (2, 300, 3), [[7, 0], [7, 299]], axis=1, computed=True),
    _gather("many rows, most of them read", (300, 2), _RANDOM.integers(-300, 300, 280), computed=True),
    _gather("many rows of two images", (2, 300, 3), [5, 5, -1, 0], axis=1, computed=True),
    _gather("many rows, constant", (300, 2), [5, 5, -1, 0]),
    _gather("many rows of two images, constant", (2, 300, 3), [5, 5, -1, 0], axis=1),
    _gather("many rows, each once", (2, 300, 3), [5, -1, 9, 0], axis=1),
    _gather("opset 9", (4, 3), [0, 2, 2], computed=True, opset=9),
    _gather("opset 11", (4, 3), [0, -2, 2], opset=11),
    case(
        "Gather",
        "nothing",
        "v = Gather<axis=0>(x, none) u = Gather<axis=0>(x, one) y = Concat<axis=0>(u, v)",
        x=normal(3, 2),
        none=[],
        one=[1],
    ),
    case(
        "Gather",
        "two from one table",
        "u = Gather<axis=0>(x, a) v = Gather<axis=0>(x, b) y = Mul(u, v)",
        x=normal(4, 3),
        a=[0, 2, 2],
        b=[2, 2, 1],
    ),
    case(
        "Gather",
        "float64",
        "i = Cast<to=7>(n) v = Gather<axis=0>(x, i) y = Exp(v)",
        x=normal(4, 3, dtype=np.float64),
        n=np.asarray([1, 1, 3], np.int32),
    ),
    *(
        _narrow(rule, body, normal(*shape, dtype=np.float16), indices)
        for rule, body, shape, indices in (
            ("Gather", "Gather<axis=0>(x, i)", (4, 3), [0, 2, 2]),
            ("Gather", "Gather<axis=1>(x, i)", (2, 300), [0, 2, 2]),
            ("GatherElements", "GatherElements<axis=0>(x, i)", (4, 3), [[0, 2, 2], [0, 1, 2]]),
            ("GatherND", "GatherND(x, i)", (30, 30), [[0, 2], [2, -1], [0, 2]]),
        )
    ),
    _gather_nd("a scalar", (3, 4), [1, -2]),
    _gather_elements("each once", (3, 4), [[1, 3], [0, 2], [2, 1]], 1),
    _gather_elements("duplicates", (3, 4), [[1, 1, 1, 3], [0, 0, 2, 2], [3, 3, 3, 3]], 1),
    _gather_elements("negative indices", (3, 4), [[-1, 3, 0], [-4, 0, -2], [1, -3, 1]], 1),
    _gather_elements(
        "first axis, duplicates", (4, 3), [[0, 2, -1], [0, 2, 3], [1, 2, 0], [0, 1, 1], [2, 2, 2]], 0
    ),
    _gather_elements("negative axis", (2, 3, 4), [[[0, 0], [3, -1], [2, 2]], [[1, 1], [1, 0], [-2, 2]]], -1),
    _gather_elements("fewer rows than the data", (4, 3), [[2, 0], [2, 1]], 0),
    _gather_nd("elements", (3, 4), [[0, 1], [2, -1], [0, 1]], computed=True),
    _gather_nd("elements, constant", (3, 4), [[0, 1], [-1, -1], [0, 1]]),
    _gather_nd("rows", (3, 4), [[2], [-3], [2]], computed=True),
    _gather_nd("rows, constant", (3, 4), [[2], [-3], [2]]),
    _gather_nd("one element", (3, 4), [[2, 1]], computed=True),
    _gather_nd("one element, constant", (3, 4, 2), [[2, -3]]),
    _gather_nd("index vectors in two axes", (3, 4, 2), [[[0, 1], [2, 3]], [[0, 1], [1, -4]]], computed=True),
    _gather_nd("rows in order", (5, 4), [[1], [2], [3]]),
    _gather_nd("three axes, many elements", (7, 9, 11), [[6, 8, 10], [0, -9, 3], [0, 0, 3]], computed=True),
    _gather_nd("three axes, many elements, constant", (7, 9, 11), [[6, 8, 10], [0, -9, 3], [0, 0, 3]]),
    _gather_nd("batch", (2, 3, 4), [[[1], [1]], [[-1], [0]]], lead=1, computed=True),
    _gather_nd("batch, constant", (2, 3, 4), [[[1], [1]], [[-1], [0]]], lead=1),
    _gather_nd("batch with equal indices", (2, 3, 4), [[[1], [1]], [[1], [-2]]], lead=1),
    _gather_nd("batch, one an image", (3, 5), [[4], [0], [-2]], lead=1, computed=True),
    _gather_nd(
        "batch of two axes, many rows", (2, 2, 300), [[[9], [0]], [[-300], [9]]], lead=2, computed=True
    ),
    _gather_nd(
        "batch, vectors", (2, 20, 30, 2), [[[1, 2], [1, 2]], [[-1, 0], [5, -30]]], lead=1, computed=True
    ),
    _gather_nd("opset 11", (3, 4), [[0, 1], [2, -1]], computed=True, opset=11),
    _scatter_elements("first axis", (4, 3), [[0, -1, 2], [2, 1, 0]]),
    _scatter_elements("last axis, computed", (3, 4), [[1, -1], [0, 2], [3, 1]], axis=-1, computed=True),
    _scatter_elements("middle axis", (2, 4, 3), [[[0, 1, 2], [3, 0, 1]]], axis=1),
    _scatter_elements("vector in int32", (5,), [3, -5], dtype=np.int32),
    _scatter_elements("opset 11", (4, 3), [[0, -1, 2], [2, 1, 0]], opset=11),
    _scatter_elements("Scatter, opset 9", (4, 3), [[0, 3, 2], [2, 1, 0]], operator="Scatter", opset=9),
    _scatter_elements("added", (4, 3), [[0, -1, 2], [0, 1, 2]], reduction="add"),
    _scatter_elements("added, computed", (3, 4), [[1, 1, -1]], axis=1, reduction="add", computed=True),
    _scatter_elements("added, opset 16", (4, 3), [[0, -1, 2], [0, 1, 2]], reduction="add", opset=16),
    _scatter_elements("multiplied", (4, 3), [[0, -1, 2], [0, 1, 2], [0, 0, 0]], reduction="mul"),
    _scatter_elements("multiplied, computed", (3, 4), [[1, 1, -1]], axis=1, reduction="mul", computed=True),
    _scatter_elements("largest", (4, 3), [[0, -1, 2], [0, 1, 2], [0, 0, 0]], reduction="max"),
    _scatter_elements("smallest", (4, 3), [[0, -1, 2], [0, 1, 2], [0, 0, 0]], reduction="min"),
    case(
        "ScatterElements",
        "frozen updates",
        "y = ScatterElements<axis=1>(x, i, u)",
        x=normal(2, 4),
        u=normal(2, 2),
        i=[[0, 3], [1, -1]],
        frozen=("u",),
        formula=lambda operands: operands["x"].scatter(1, torch.tensor([[0, 3], [1, 3]]), operands["u"]),
    ),
    case(
        "ScatterElements",
        "multiplied by zeros",
        'r = Relu(u) v = ScatterElements<axis=1, reduction="mul">(x, i, r) y = Exp(v)',
        x=positive(3, 3),
        u=normal(3, 4),
        i=[[0, 0, 1, 1], [0, 1, 0, 1], [2, 2, 2, 0]],
        formula=lambda operands: torch.exp(
            operands["x"].scatter_reduce(
                1,
                torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1], [2, 2, 2, 0]]),
                torch.relu(operands["u"]),
                "prod",
            )
        ),
    ),
    case(
        "ScatterElements",
        "largest with ties",
        'u = Concat<axis=1>(x, x) v = ScatterElements<axis=1, reduction="max">(x, i, u) y = Exp(v)',
        x=positive(2, 3),
        i=[[0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2]],
        formula=lambda operands: torch.exp(
            operands["x"].scatter_reduce(
                1,
                torch.tensor([[0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2]]),
                torch.cat([operands["x"], operands["x"]], 1),
                "amax",
            )
        ),
    ),
    _scatter_nd("elements", (3, 4), [[0, 1], [2, -1]]),
    _scatter_nd("rows, computed", (4, 3), [[2], [-4]], computed=True),
    _scatter_nd("index vectors in two axes", (3, 4, 2), [[[0, 1], [2, 3]], [[0, 2], [1, -4]]]),
    _scatter_nd("opset 11", (3, 4), [[0, 1], [2, -1]], opset=11),
    _scatter_nd("added", (4, 3), [[2], [-4], [2]], reduction="add"),
    _scatter_nd("multiplied", (3, 4, 2), [[0, 1], [2, -1], [0, 1]], reduction="mul", computed=True),
    case(
        "ScatterND",
        "multiplied by zeros",
        'r = Relu(u) v = ScatterND<reduction="mul">(x, i, r) y = Exp(v)',
        x=positive(3, 4),
        u=normal(4, 4),
        i=[[0], [1], [0], [1]],
        formula=lambda operands: torch.exp(
            operands["x"].scatter_reduce(
                0,
                torch.tensor([0, 1, 0, 1])[:, None].expand(4, 4),
                torch.relu(operands["u"]),
                "prod",
            )
        ),
    ),
    _scatter_nd("multiplied, constant", (4, 3), [[2], [-4], [2]], reduction="mul"),
    _scatter_nd("largest", (4, 3), [[2], [-4], [2]], reduction="max", computed=True),
    _scatter_nd("smallest", (3, 4), [[0, 1], [2, -1], [0, 1]], reduction="min"),
    _top_k("last axis", (3, 5), "", -1, True),
    _top_k("smallest of the first axis", (6, 3), "axis=0, largest=0", 0, False),
    _top_k("in the middle", (2, 6, 3), "axis=1", 1, True, count=4),
    _top_k("negative axis", (2, 6, 3), "axis=-2", -2, True),
    _top_k("vector", (7,), "axis=0", 0, True),
    _top_k("everything", (2, 3), "", -1, True, count=3),
    _top_k("attribute, opset 9", (3, 5), "axis=1, k=2", 1, True, opset=9),
    _top_k("opset 10", (3, 5), "axis=1", 1, True, opset=10),
    _reverse("time first", (4, 3, 2), [4, 1, 3], 0, 1, ""),
    _reverse("batch first", (3, 4), [2, 4, 1], 1, 0, "batch_axis=0, time_axis=1"),
    _one_hot("last axis", [0, 2, 2, -1, -4], None),
    _one_hot("first axis", [[0, 2], [2, 3]], 0),
    _one_hot("in the middle", [[0, 2], [2, 3], [1, 0]], 1),
    _expand("an axis", (3, 1, 4), [3, 2, 4], w=normal(3, 2, 4)),
    _expand("new axes", (3, 1), [2, 1, 1, 4], w=normal(2, 1, 3, 4)),
    _expand("shorter and smaller than x", (2, 3, 1), [1, 4], w=normal(2, 3, 4)),
    _expand("scalar", (), [2, 3], w=normal(2, 3)),
    _expand("to its own shape", (2, 3), [2, 3], w=normal(2, 3)),
    _expand("five axes, opset 9", (1, 2, 1, 1, 3), [2, 1, 2, 1, 3], w=normal(2, 2, 2, 1, 3), opset=9),
    _tile("both axes", (2, 3), [3, 2]),
    _tile("once", (2, 3), [1, 1]),
    _tile("first axis", (2, 3, 2), [4, 1, 1]),
    _tile("middle axis", (2, 3, 2), [1, 3, 1]),
    _tile("axes of one", (1, 3, 1), [2, 1, 3]),
    _tile("vector", (4,), [3]),
    _tile("five axes", (1, 2, 1, 3, 2), [2, 2, 1, 1, 3]),
    _tile("opset 9", (2, 3), [1, 2], opset=9),
)
