"""Facts about operators that create, move, select, repeat or resample elements, and signals."""

import math
from collections.abc import Mapping

from onnxgc.model.core.draft import INITIAL_STATE
from onnxgc.model.core.ir import Node
from onnxgc.model.operators.facts import (
    OperatorFacts,
    Place,
    Settings,
    Types,
    all_axes,
    all_but_named_axis,
    axes_of_data,
    first_axis,
    itemsize,
    pointwise,
)


def _independent_gather_nd(place: Place) -> bool:
    batch = int(place.node.attribute("batch_dims", 0))
    return place.axis < batch if place.index == 0 else place.axis != place.rank - 1


def _independent_reverse_sequence(place: Place) -> bool:
    return place.index == 1 or place.axis != int(place.node.attribute("time_axis", 0)) % place.rank


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


_COMPUTED_SIZE = ("ConstantOfShape", "EyeLike", "NonZero", "Range", "Shape", "Size")
_RANDOM = ("RandomNormal", "RandomUniform")
_SEQUENCES = ("ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SplitToSequence")

FACTS: Mapping[str, OperatorFacts] = {
    **dict.fromkeys((*_RANDOM, *_SEQUENCES, "Compress", "Constant", "ScatterND", "Unique"), OperatorFacts(flops=0)),
    **dict.fromkeys(_COMPUTED_SIZE, OperatorFacts(flops=0, has_gradient=False)),
    **dict.fromkeys(("RandomNormalLike", "RandomUniformLike"), pointwise(0, has_gradient=False)),
    **dict.fromkeys(
        ("Concat", "Expand", "Slice", "Split", "Tile", "Transpose"),
        OperatorFacts(flops=0, independent=all_axes, passes_weights=True),
    ),
    **dict.fromkeys(
        ("Flatten", "Reshape", "Squeeze", "Unsqueeze"),
        OperatorFacts(flops=0, independent=all_axes, is_view=True, passes_weights=True),
    ),
    **dict.fromkeys(
        ("DepthToSpace", "SpaceToDepth"), OperatorFacts(flops=0, independent=axes_of_data(0), passes_weights=True)
    ),
    "Bernoulli": pointwise(0),
    "Col2Im": OperatorFacts(independent=first_axis),
    "DFT": OperatorFacts(independent=axes_of_data(0)),
    "Gather": OperatorFacts(
        flops=0, independent=lambda place: place.index == 1 or place.axis != place.own_axis(0), parameters=(0,)
    ),
    "GatherElements": OperatorFacts(flops=0, independent=all_but_named_axis(0, 0, 1, 2)),
    "GatherND": OperatorFacts(flops=0, independent=_independent_gather_nd, parameters=(0,)),
    "GridSample": OperatorFacts(flops=16, independent=first_axis),
    "Identity": pointwise(0, is_view=True, passes_weights=True),
    "Multinomial": OperatorFacts(independent=axes_of_data(0)),
    "NonMaxSuppression": OperatorFacts(has_gradient=False),
    "OneHot": OperatorFacts(flops=0, independent=lambda place: place.index == 0, has_gradient=False),
    "Pad": OperatorFacts(
        flops=0,
        independent=axes_of_data(*range(16)),
        settings=Settings((2,), "value of the padding"),
        passes_weights=True,
    ),
    "Resize": OperatorFacts(
        flops=8, independent=all_axes, workspace=_resize_workspace, settings=Settings((1, 2), "region and scales")
    ),
    "ReverseSequence": OperatorFacts(flops=0, independent=_independent_reverse_sequence),
    "STFT": OperatorFacts(independent=axes_of_data(0), settings=Settings((2,), "window")),
    "ScatterElements": OperatorFacts(flops=0, independent=all_but_named_axis(0, 0, 1, 2), runs_in_place=True),
    "Trilu": OperatorFacts(
        flops=0, independent=lambda place: place.index == 0 and place.axis < place.rank - 2, runs_in_place=True
    ),
    "Upsample": OperatorFacts(flops=8, independent=all_axes, settings=Settings((1,), "scales")),
    INITIAL_STATE: OperatorFacts(passes_weights=True),
}
