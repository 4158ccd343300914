from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor

from onnxgc.model.core.ir import Array
from tests.gradients.gradient_case import Case, Formula, as_runtime, case, linear_case, normal, operator, positive


def from_start(indices: Array, extent: int) -> Tensor:
    places = torch.from_numpy(indices.astype(np.int64))
    return torch.where(places < 0, places + extent, places)


def _gather_elements(name: str, shape: tuple[int, ...], indices: list[Any], axis: int) -> Case:
    return linear_case("GatherElements", name, f"GatherElements<axis={axis}>(x, indices)", shape, indices=indices)


# The fed values are below 1: their integer parts are zeros that constant folding cannot see.
_COMPUTED = "none = Cast<to={kind}>(data) zero = ReduceMax<keepdims=0>(none) i = Add(indices, zero)"
_INT32, _INT64 = 6, 7


def indexed_case(
    rule: str, name: str, call: str, indices: Any, formula: Formula, is_computed: bool, **settings: Any
) -> Case:
    """y = exp(call), where the call reads the indices as `i`: constant, or computed in the graph."""
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


def _indexed(
    rule: str, name: str, call: str, shape: tuple[int, ...], indices: Any, computed: bool, **settings: Any
) -> Case:
    formula = as_runtime(call, {"i": np.asarray(indices)}, shape)
    return indexed_case(rule, name, call, indices, formula, computed, x=shape, **settings)


def _gather(
    name: str, shape: tuple[int, ...], indices: Any, axis: int = 0, computed: bool = False, **settings: Any
) -> Case:
    return _indexed("Gather", name, f"Gather<axis={axis}>(x, i)", shape, indices, computed, **settings)


def _narrow(rule: str, call: str, shape: tuple[int, ...], indices: list[Any]) -> Case:
    """In float16, for which ONNX Runtime's CPU kernels have no additions."""
    return replace(
        linear_case(rule, f"float16, {' x '.join(map(str, shape))}", call, shape, i=indices),
        operands={"x": normal(*shape, dtype=np.float16)},
        output_type=TensorProto.FLOAT16,
        # For the loss too, a mean over few elements.
        tolerance=5e-3,
        smooth=False,
    )


def _gather_nd(
    name: str, shape: tuple[int, ...], indices: Any, lead: int = 0, computed: bool = False, **settings: Any
) -> Case:
    call = f"GatherND<batch_dims={lead}>(x, i)"
    return _indexed("GatherND", name, call, shape, indices, computed, **settings)


def index_axes(vectors: Array, extents: Sequence[int]) -> tuple[Tensor, ...]:
    """Index vectors along the last axis as one tensor of indices per axis."""
    return tuple(from_start(vectors[..., axis], extent) for axis, extent in enumerate(extents))


def _top_k(name: str, shape: tuple[int, ...], attributes: str, axis: int, largest: bool, **settings: Any) -> Case:
    count = int(settings.pop("count", 2))

    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        values = torch.topk(operands["x"], count, dim=axis, largest=largest).values
        return values * operands["w"]

    opset = settings.get("opset", 18)
    call = operator("TopK", attributes) + ("(x)" if opset < 10 else "(x, k)")
    spread = list(shape)
    spread[axis] = count
    constants = {} if opset < 10 else {"k": [count]}
    return case(
        "TopK",
        name,
        f"v, i = {call} y = Mul(v, w)",
        x=shape,
        w=positive(*spread),
        formula=formula,
        **constants,
        **settings,
    )


def _one_hot(name: str, indices: list[Any], attributes: str = "") -> Case:
    """The values for off and on train; depth 4."""
    call = f"{operator('OneHot', attributes)}(indices, depth, x)"
    return linear_case("OneHot", name, call, (2,), indices=indices, depth=[4])


_RANDOM = np.random.default_rng(0)

GATHERING_CASES = (
    _gather("scalar, constant", (5, 3), 2),
    _gather("negative scalar, constant", (4, 5, 3), -2, axis=1),
    _gather("negative scalar of the last axis, computed", (5, 3), -1, axis=-1, computed=True),
    _gather("a range", (6, 3), [1, 2, 3]),
    _gather("a range in steps of two", (7, 3), [1, 3, 5]),
    _gather("all backwards by negative indices", (4, 3), [-1, -2, -3, -4]),
    _gather("a permutation", (2, 5, 3), [3, 0, 4, 1, 2], axis=1),
    _gather("repeated, constant", (4, 3), [0, 2, 2, 3, 2]),
    _gather("repeated, computed", (4, 3), [0, 2, 2, 3, 2], computed=True),
    _gather("two axes of indices in the middle", (2, 5, 3), [[0, -1], [3, 1]], axis=1, computed=True),
    _gather("vector", (6,), [5, 0, -6, 5], computed=True),
    _gather("vector of many", (600,), [5, 0, -600, 5, 599], computed=True),
    _gather("many narrow rows, constant", (40, 2), [7, 0, -40, 7, 39]),
    _gather("many rows, computed", (300, 5), [7, 0, -300, 7, 299], computed=True),
    _gather("many rows in the middle", (2, 300, 3), [[7, 0], [7, 299]], axis=1, computed=True),
    _gather("many rows, most of them read", (300, 2), _RANDOM.integers(-300, 300, 280), computed=True),
    _gather("many rows, constant", (300, 2), [5, 5, -1, 0]),
    _gather("many rows, each once", (2, 300, 3), [5, -1, 9, 0], axis=1),
    case(
        "Gather",
        "nothing",
        "v = Gather<axis=0>(x, none) u = Gather<axis=0>(x, one) y = Concat<axis=0>(u, v)",
        x=(3, 2),
        none=[],
        one=[1],
    ),
    case(
        "Gather",
        "two from one table",
        "u = Gather<axis=0>(x, a) v = Gather<axis=0>(x, b) y = Mul(u, v)",
        x=(4, 3),
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
        _narrow(rule, body, shape, indices)
        for rule, body, shape, indices in (
            ("Gather", "Gather<axis=0>(x, i)", (4, 3), [0, 2, 2]),
            ("Gather", "Gather<axis=1>(x, i)", (2, 300), [0, 2, 2]),
            ("GatherElements", "GatherElements<axis=0>(x, i)", (4, 3), [[0, 2, 2], [0, 1, 2]]),
            ("GatherND", "GatherND(x, i)", (30, 30), [[0, 2], [2, -1], [0, 2]]),
        )
    ),
    _gather_elements("duplicates", (3, 4), [[1, 1, 1, 3], [0, 0, 2, 2], [3, 3, 3, 3]], 1),
    _gather_elements("negative indices", (3, 4), [[-1, 3, 0], [-4, 0, -2], [1, -3, 1]], 1),
    _gather_elements("first axis, duplicates", (4, 3), [[0, 2, -1], [0, 2, 3], [1, 2, 0], [0, 1, 1], [2, 2, 2]], 0),
    _gather_elements("fewer rows than the data", (4, 3), [[2, 0], [2, 1]], 0),
    _gather_nd("elements", (3, 4), [[0, 1], [2, -1], [0, 1]], computed=True),
    _gather_nd("elements, constant", (3, 4), [[0, 1], [-1, -1], [0, 1]]),
    _gather_nd("index vectors in two axes", (3, 4, 2), [[[0, 1], [2, 3]], [[0, 1], [1, -4]]], computed=True),
    _gather_nd("rows in order", (5, 4), [[1], [2], [3]]),
    _gather_nd("three axes, many elements, constant", (7, 9, 11), [[6, 8, 10], [0, -9, 3], [0, 0, 3]]),
    _gather_nd("one element", (3, 4), [[2, 1]], computed=True),
    _gather_nd("a scalar", (3, 4), [1, -2]),
    _gather_nd("batch, one an image", (3, 5), [[4], [0], [-2]], lead=1, computed=True),
    _gather_nd("batch, constant", (2, 3, 4), [[[1], [1]], [[-1], [0]]], lead=1),
    _gather_nd("batch", (2, 3, 4), [[[1], [1]], [[-1], [0]]], lead=1, computed=True),
    _gather_nd("batch with equal indices", (2, 3, 4), [[[1], [1]], [[1], [-2]]], lead=1),
    _gather_nd("batch of two axes, many rows", (2, 2, 300), [[[9], [0]], [[-300], [9]]], lead=2, computed=True),
    _gather_nd("batch, vectors", (2, 20, 30, 2), [[[1, 2], [1, 2]], [[-1, 0], [5, -30]]], lead=1, computed=True),
    _top_k("last axis", (3, 5), "", -1, True),
    _top_k("smallest of the first axis", (6, 3), "axis=0, largest=0", 0, False),
    _top_k("attribute, opset 9", (3, 5), "axis=1, k=2", 1, True, opset=9),
    _one_hot("last axis", [0, 2, 2, -1, -4]),
    _one_hot("first axis", [[0, 2], [2, 3]], "axis=0"),
)
