"""Facts about resizing, reading at given points, and signals."""

from __future__ import annotations

import math
from collections.abc import Mapping

from onnxgc.model.core.ir import Node
from onnxgc.model.operators.facts import (
    OperatorFacts,
    Settings,
    Types,
    all_axes,
    axes_of_data,
    first_axis,
    itemsize,
)

# Two indices of eight bytes and two weights of four.
_RESIZE_POSITION_BYTES = 24


def _resize_workspace(node: Node, types: Types) -> int:
    """Interpolation indices and weights per position; with antialiasing also one intermediate image.

    The image is resized one axis at a time, last axis first; all results but the final one are temporaries.
    Source: SetupUpsampleBilinear, SetupUpsampleTrilinear and the ResizeBiLinear functions of antialiasing.
    """
    x, y = types[node.inputs[0]], types[node.outputs[0]]
    is_antialiased = bool(node.attribute("antialias", 0))
    if node.attribute("mode", "nearest") != "linear" and not is_antialiased:
        return 0
    tables = _RESIZE_POSITION_BYTES * sum(y.shape[2:] or y.shape)
    if not is_antialiased:
        return tables
    images = ((*x.shape[1:axis], *y.shape[axis:]) for axis in range(3, len(x.shape)))
    return tables + sum(math.prod(image) for image in images) * itemsize(x)


FACTS: Mapping[str, OperatorFacts] = {
    "Col2Im": OperatorFacts(independent=first_axis),
    "DFT": OperatorFacts(independent=axes_of_data(0)),
    "GridSample": OperatorFacts(flops=16, independent=first_axis),
    "Multinomial": OperatorFacts(independent=axes_of_data(0)),
    "NonMaxSuppression": OperatorFacts(has_gradient=False),
    "Resize": OperatorFacts(
        flops=8,
        independent=all_axes,
        workspace=_resize_workspace,
        settings=Settings((1, 2), "region and scales"),
    ),
    "STFT": OperatorFacts(independent=axes_of_data(0), settings=Settings((2,), "window")),
    "Upsample": OperatorFacts(flops=8, independent=all_axes, settings=Settings((1,), "scales")),
}
