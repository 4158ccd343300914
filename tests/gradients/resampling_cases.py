from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onnxgc.model.core.ir import Array
from tests.gradients.gradient_case import Case, as_runtime, case, linear_case, normal, operator


def _resize(name: str, shape: tuple[int, ...], attributes: str = "", **settings: Any) -> Case:
    constants: dict[str, Array] = {}
    for key, kind in (("roi", np.float32), ("scales", np.float32), ("sizes", np.int64)):
        if key in settings:
            constants[key] = np.asarray(settings.pop(key), kind)
    inputs = ", ".join(["x", *(key if key in constants else "" for key in ("roi", "scales", "sizes"))])
    call = f"{operator('Resize', attributes)}({inputs.rstrip(', ')})"
    formula = as_runtime(call, constants, shape, settings.get("opset", 18))
    return case("Resize", name, f"y = {call}", x=shape, formula=formula, **constants, **settings)


_TRANSFORMATIONS = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")
_NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
_SIZES = ([1, 2, 7, 5], [1, 2, 3, 2], [1, 2, 1, 5])


def _of_all_modes() -> tuple[Case, ...]:
    """All transformations of nearest and linear, each once larger and once smaller or to one, and some of cubic."""
    modes = [f'mode="nearest", nearest_mode="{nearest}"' for nearest in _NEAREST] + ['mode="linear"', 'mode="cubic"']
    settings = product(modes, _TRANSFORMATIONS)
    return tuple(
        _resize(
            f"{mode}, {transformation} to {sizes[2:]}".replace('"', "").replace("_mode=", " ").replace("=", " "),
            (1, 2, 4, 3),
            f'{mode}, coordinate_transformation_mode="{transformation}"',
            sizes=sizes,
        )
        for number, (mode, transformation) in enumerate(settings)
        for sizes in (_SIZES if "linear" in mode else (_SIZES[0], _SIZES[1 + number % 2]))
    )


def _older(name: str, call: str, shape: tuple[int, ...], scales: list[float], opset: int) -> Case:
    constants = {"scales": np.asarray(scales, np.float32)} if "scales)" in call else {}
    formula = as_runtime(call, constants, shape, opset)
    return case("Resize", name, f"y = {call}", x=shape, formula=formula, opset=opset, **constants)


def _grid_sample(
    name: str,
    shape: tuple[int, ...],
    points: tuple[int, ...],
    mode: str,
    padding: str,
    align_corners: bool,
    **settings: Any,
) -> Case:
    """Points inside and around the image, none at a discontinuity of the derivative."""
    torch_mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)

    def formula(operands: Mapping[str, Tensor]) -> Tensor:
        return torch.nn.functional.grid_sample(operands["x"], operands["grid"], torch_mode, padding, align_corners)

    attributes = f'mode="{mode}", padding_mode="{padding}", align_corners={int(align_corners)}'
    body = f"y = GridSample<{attributes}>(x, grid)"
    grid = normal(shape[0], *points, len(shape) - 2)
    if mode == "nearest":
        # The derivative with respect to the grid is zero.
        settings.setdefault("frozen", ("grid",))
    return case("GridSample", name, body, x=shape, grid=grid, formula=formula, smooth=False, **settings)


def _of_all_grids() -> tuple[Case, ...]:
    return tuple(
        _grid_sample(
            f"{mode}, {padding}{', corners' if align_corners else ''}",
            (2, 3, 5, 4),
            (9, 8),
            mode,
            padding,
            align_corners,
        )
        for mode in ("bilinear", "nearest", "bicubic")
        for padding in ("zeros", "border", "reflection")
        for align_corners in (False, True)
        # The others in pairs.
        if mode == "bilinear" or align_corners == ((mode == "bicubic") == (padding == "border"))
    )


def _affine_grid(name: str, shape: tuple[int, ...], size: list[int], align_corners: bool = False) -> Case:
    call = f"AffineGrid<align_corners={int(align_corners)}>(x, size)"
    entry = linear_case("MatMul", f"AffineGrid, {name}", call, shape, 20, size=size)
    # The evaluator computes the grid in float32.
    return replace(entry, smooth=False)


_INSIDE = [0, 0, 0.2, 0.1, 1, 1, 0.9, 0.7]
RESAMPLING_CASES = (
    *_of_all_modes(),
    _resize("nearest by default", (1, 2, 3, 4), scales=[1, 1, 2, 2]),
    _resize("nearest, channels and batch too", (2, 2, 2, 3), scales=[2, 3, 2, 1]),
    _resize("nearest, fraction", (1, 1, 5, 6), scales=[1, 1, 0.6, 1.5]),
    _resize("nearest, vector doubled", (6,), scales=[2]),
    _resize("nearest, five axes", (1, 2, 2, 3, 2), scales=[1, 1, 2, 2, 3]),
    _resize("nearest, six axes", (1, 2, 1, 3, 2, 2), scales=[1, 1, 1, 2, 2, 3]),
    _resize("linear by scales", (1, 2, 4, 3), 'mode="linear"', scales=[1, 1, 2, 2]),
    _resize("linear by other scales than sizes say", (1, 2, 4, 3), 'mode="linear"', scales=[1, 1, 1.7, 1.3]),
    _resize("linear, five axes", (1, 2, 2, 3, 2), 'mode="linear"', sizes=[1, 2, 3, 4, 5]),
    _resize("linear, channels last", (1, 3, 4, 2), 'mode="linear"', scales=[1, 2, 2, 1]),
    _resize(
        "tf_half_pixel_for_nn, opset 11",
        (1, 1, 5, 3),
        'mode="nearest", nearest_mode="floor", coordinate_transformation_mode="tf_half_pixel_for_nn"',
        roi=[],
        scales=[1, 1, 0.5, 2],
        opset=11,
    ),
    _resize("linear in blocks", (1, 1, 100, 2), 'mode="linear"', sizes=[1, 1, 170, 3]),
    _resize("nearest in blocks, some of them unread", (400,), scales=[0.008]),
    _resize("cubic in blocks", (1, 1, 100, 2), 'mode="cubic"', sizes=[1, 1, 60, 2]),
    _older("Upsample, opset 9", "Upsample(x, scales)", (1, 2, 3, 4), [1, 1, 2, 3], 9),
    _older("Upsample, opset 7", "Upsample<scales=[1.0, 1.0, 3.0, 2.5]>(x)", (1, 2, 3, 4), [], 7),
    _older("nearest, opset 10", "Resize(x, scales)", (1, 2, 3, 4), [1, 1, 2, 1.5], 10),
    _older("linear Upsample, opset 7", 'Upsample<mode="linear", scales=[1.0, 1.0, 3.0, 2.5]>(x)', (1, 2, 3, 4), [], 7),
    _resize("cubic, other coefficient", (1, 2, 4, 5), 'mode="cubic", cubic_coeff_a=-0.5', sizes=[1, 2, 7, 8]),
    _resize("cubic, excluded outside", (1, 1, 4, 5), 'mode="cubic", exclude_outside=1', sizes=[1, 1, 6, 3]),
    _resize("axes", (1, 2, 4, 3), 'mode="linear", axes=[3, 2]', sizes=[5, 7]),
    *(
        _resize(policy, (1, 2, 4, 3), f'mode="linear", axes=[2, 3], keep_aspect_ratio_policy="{policy}"', sizes=[7, 9])
        for policy in ("not_larger", "not_smaller")
    ),
    *(
        _resize(
            f"crop{name}",
            (1, 2, 4, 5),
            f'{attributes}, coordinate_transformation_mode="tf_crop_and_resize"',
            roi=roi,
            sizes=sizes,
        )
        for name, attributes, roi, sizes in (
            ("", 'mode="linear"', _INSIDE, [1, 2, 5, 4]),
            (
                " beyond the edges",
                'mode="linear", extrapolation_value=1.5',
                [0, 0, -0.4, 0.1, 1, 1, 0.9, 1.3],
                [1, 2, 5, 4],
            ),
            (" by nearest, axes", 'mode="nearest", axes=[3, 2]', [-0.2, 0.1, 0.7, 0.9], [6, 5]),
            (" by cubic to one", 'mode="cubic"', _INSIDE, [1, 2, 1, 3]),
        )
    ),
    _resize("antialias, linear, smaller", (1, 2, 7, 6), 'mode="linear", antialias=1', sizes=[1, 2, 3, 2]),
    _resize("antialias, cubic", (1, 1, 9, 6), 'mode="cubic", antialias=1', sizes=[1, 1, 4, 7]),
    _resize(
        "antialias, cubic, excluded outside",
        (1, 1, 9, 6),
        'mode="cubic", antialias=1, exclude_outside=1, cubic_coeff_a=-0.5',
        sizes=[1, 1, 4, 7],
    ),
    *_of_all_grids(),
    _grid_sample("three sizes", (1, 2, 3, 4, 3), (4, 5, 6), "linear", "zeros", False, opset=20),
    _grid_sample("three sizes, border", (2, 1, 3, 3, 4), (4, 3, 5), "linear", "border", True, opset=20),
    _grid_sample("one row", (1, 2, 1, 4), (3, 2), "bilinear", "reflection", False),
    _grid_sample("one row, corners", (1, 2, 1, 4), (3, 2), "bilinear", "reflection", True),
    _grid_sample("one element", (2, 3, 1, 1), (3, 2), "bilinear", "border", False, frozen=("grid",)),
    _affine_grid("image", (2, 2, 3), [2, 1, 3, 4]),
    _affine_grid("image of one row", (2, 2, 3), [2, 1, 1, 4]),
    _affine_grid("volume, corners", (1, 3, 4), [1, 1, 2, 3, 4], True),
)
