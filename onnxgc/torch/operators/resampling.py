"""Resampling of images, to another size or at given points."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from onnxgc.gradients.resize_matrices import ResizeNode, axis_resamplings
from onnxgc.model.core.ir import Array
from onnxgc.torch.operators.setting_values import Ints, ints

_GRID_MODES = {"linear": "bilinear", "cubic": "bicubic"}
# torch's names of modes, by the number of spatial axes.
_INTERPOLATIONS = {
    "linear": {1: "linear", 2: "bilinear", 3: "trilinear"},
    "cubic": {2: "bicubic"},
    "nearest": {1: "nearest", 2: "nearest", 3: "nearest"},
}
_Taps = tuple[int, Array, Array]


def grid_sample(
    x: Tensor, grid: Tensor, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Tensor:
    return F.grid_sample(x, grid, _GRID_MODES.get(mode, mode), padding_mode, bool(align_corners))


def resize(
    x: Tensor,
    roi: Sequence[float] | Tensor | None = None,
    scales: Sequence[float] | Tensor | None = None,
    sizes: Ints | None = None,
    **attributes: Any,
) -> Tensor:
    """Torch's interpolation where it is equivalent, otherwise weighted sums along each axis."""
    given = {
        "roi": _numbers(roi),
        "scales": _numbers(scales),
        "sizes": None if sizes is None else tuple(ints(sizes)) or None,
    }
    axes = [axis % x.ndim for axis in attributes.get("axes") or range(x.ndim)]
    shape = _output_shape(tuple(x.shape), axes, given, attributes.get("keep_aspect_ratio_policy", "stretch"))
    if shape == tuple(x.shape):
        return x
    interpolation = _interpolation(x, shape, given["scales"], axes, attributes)
    if interpolation is not None:
        return F.interpolate(x, shape[2:], **interpolation)
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in attributes.items()}
    taps = _taps(tuple(x.shape), shape, tuple(settings.items()), tuple(given.items()))
    outside: float = attributes.get("extrapolation_value", 0.0)
    crops = attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    if not crops or not outside:
        return _resampled(x, taps)
    return _resampled(x, taps) + outside * (1 - _resampled(torch.ones_like(x), taps))


def _numbers(setting: Sequence[float] | Tensor | None) -> tuple[float, ...] | None:
    if setting is None:
        return None
    return tuple(setting.tolist() if isinstance(setting, Tensor) else setting) or None


def _output_shape(shape: tuple[int, ...], axes: Sequence[int], given: dict[str, Any], policy: str) -> tuple[int, ...]:
    """Source: ONNX, Resize, `scales`, `sizes` and `keep_aspect_ratio_policy`."""
    result = list(shape)
    if given["scales"] is not None:
        for axis, scale in zip(axes, given["scales"], strict=True):
            result[axis] = math.floor(np.float32(shape[axis]) * np.float32(scale))
        return tuple(result)
    wanted = [size / shape[axis] for axis, size in zip(axes, given["sizes"], strict=True)]
    for axis, size in zip(axes, given["sizes"], strict=True):
        if policy == "stretch":
            result[axis] = size
        else:
            scale = min(wanted) if policy == "not_larger" else max(wanted)
            result[axis] = math.floor(scale * shape[axis] + 0.5)
    return tuple(result)


def _interpolation(
    x: Tensor, shape: tuple[int, ...], scales: tuple[float, ...] | None, axes: Sequence[int], attributes: dict[str, Any]
) -> dict[str, Any] | None:
    """The settings of torch's equivalent interpolation, or None."""
    mode = attributes.get("mode", "nearest")
    torch_mode = _INTERPOLATIONS[mode].get(x.ndim - 2)
    is_plain = not any(attributes.get(name) for name in ("antialias", "exclude_outside"))
    is_plain = is_plain and attributes.get("keep_aspect_ratio_policy", "stretch") == "stretch"
    fits = scales is None or all(x.shape[axis] * scale == shape[axis] for axis, scale in zip(axes, scales, strict=True))
    if torch_mode is None or shape[:2] != tuple(x.shape[:2]) or not is_plain or not fits:
        return None
    coordinates = attributes.get("coordinate_transformation_mode", "half_pixel")
    if mode == "nearest":
        is_same = coordinates == "asymmetric" and attributes.get("nearest_mode") == "floor"
        return {"mode": torch_mode} if is_same else None
    if not math.isclose(attributes.get("cubic_coeff_a", -0.75), -0.75):
        return None
    if coordinates in ("half_pixel", "pytorch_half_pixel", "align_corners") and min(shape[2:]) > 1:
        return {"mode": torch_mode, "align_corners": coordinates == "align_corners"}
    return None


@lru_cache(maxsize=64)
def _taps(
    shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    attributes: tuple[tuple[str, Any], ...],
    given: tuple[tuple[str, Any], ...],
) -> tuple[_Taps, ...]:
    """For each resampled axis, the source indices and weights of each result."""
    settings = dict(given)

    def setting(name: str) -> Array | None:
        return None if settings[name] is None else np.asarray(settings[name])

    resamplings = axis_resamplings(ResizeNode(shape, output_shape, dict(attributes), setting))
    return tuple((along.axis, along.places, along.weights) for along in resamplings if along.repeats != 1)


def _resampled(x: Tensor, taps: Sequence[_Taps]) -> Tensor:
    for axis, sources, weights in taps:
        shape = [1] * x.ndim
        shape[axis] = sources.shape[1]
        total = x.new_zeros([*x.shape[:axis], sources.shape[1], *x.shape[axis + 1 :]])
        for indices, weight in zip(sources, weights, strict=True):
            taken = x.index_select(axis, torch.from_numpy(indices).to(x.device))
            if (weight != 1).any():
                taken = taken * torch.from_numpy(weight).to(taken).reshape(shape)
            total = total + taken
        x = total
    return x
