from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.gradients.gathering_cases import from_start, index_axes, indexed_case
from tests.gradients.gradient_case import Case, case, positive

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
        places = from_start(np.asarray(indices), x.shape[axis])
        if reduction == "none":
            return x.scatter(axis, places, updates)
        return x.scatter_reduce(axis, places, updates, _TORCH_REDUCTION[reduction])

    how = f"axis={axis}" if reduction == "none" else f'axis={axis}, reduction="{reduction}"'
    operator = settings.pop("operator", "ScatterElements")
    operands = {"x": positive(*shape), "u": positive(*np.shape(indices)), **settings}
    call = f"{operator}<{how}>(x, i, u)"
    return indexed_case("ScatterElements", name, call, indices, formula, computed, **operands)


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
        numbers = torch.arange(x.numel()).reshape(x.shape)[index_axes(vectors, x.shape[:depth])].reshape(-1)
        if reduction == "none":
            return x.reshape(-1).scatter(0, numbers, updates.reshape(-1)).reshape(x.shape)
        how = _TORCH_REDUCTION[reduction]
        return x.reshape(-1).scatter_reduce(0, numbers, updates.reshape(-1), how).reshape(x.shape)

    how = "" if reduction == "none" else f'<reduction="{reduction}">'
    updates = positive(*vectors.shape[:-1], *shape[depth:])
    operands = {"x": positive(*shape), "u": updates, **settings}
    return indexed_case("ScatterND", name, f"ScatterND{how}(x, i, u)", indices, formula, computed, **operands)


SCATTERING_CASES = (
    _scatter_elements("last axis, computed", (3, 4), [[1, -1], [0, 2], [3, 1]], axis=-1, computed=True),
    _scatter_elements("middle axis", (2, 4, 3), [[[0, 1, 2], [3, 0, 1]]], axis=1),
    _scatter_elements("Scatter, opset 9", (4, 3), [[0, 3, 2], [2, 1, 0]], operator="Scatter", opset=9),
    _scatter_elements("added", (4, 3), [[0, -1, 2], [0, 1, 2]], reduction="add"),
    _scatter_elements("multiplied", (4, 3), [[0, -1, 2], [0, 1, 2], [0, 0, 0]], reduction="mul"),
    _scatter_elements("multiplied, computed", (3, 4), [[1, 1, -1]], axis=1, reduction="mul", computed=True),
    _scatter_elements("smallest", (4, 3), [[0, -1, 2], [0, 1, 2], [0, 0, 0]], reduction="min"),
    case(
        "ScatterElements",
        "frozen updates",
        "y = ScatterElements<axis=1>(x, i, u)",
        x=(2, 4),
        u=(2, 2),
        i=[[0, 3], [1, -1]],
        frozen=("u",),
        formula=lambda operands: operands["x"].scatter(1, torch.tensor([[0, 3], [1, 3]]), operands["u"]),
    ),
    case(
        "ScatterElements",
        "multiplied by zeros",
        'r = Relu(u) v = ScatterElements<axis=1, reduction="mul">(x, i, r) y = Exp(v)',
        x=positive(3, 3),
        u=(3, 4),
        i=[[0, 0, 1, 1], [0, 1, 0, 1], [2, 2, 2, 0]],
        formula=lambda operands: torch.exp(
            operands["x"].scatter_reduce(
                1, torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1], [2, 2, 2, 0]]), torch.relu(operands["u"]), "prod"
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
    _scatter_nd("added", (4, 3), [[2], [-4], [2]], reduction="add"),
    _scatter_nd("multiplied", (3, 4, 2), [[0, 1], [2, -1], [0, 1]], reduction="mul", computed=True),
    _scatter_nd("largest", (4, 3), [[2], [-4], [2]], reduction="max", computed=True),
    _scatter_nd("smallest", (3, 4), [[0, 1], [2, -1], [0, 1]], reduction="min"),
)
