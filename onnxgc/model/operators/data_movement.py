"""Facts about operators that move, select or repeat elements."""

from __future__ import annotations

from collections.abc import Mapping

from onnxgc.model.core.draft import INITIAL_STATE
from onnxgc.model.operators.facts import (
    OperatorFacts,
    Place,
    Settings,
    all_axes,
    all_but_named_axis,
    axes_of_data,
    pointwise,
)


def _independent_gather_nd(place: Place) -> bool:
    batch = int(place.node.attribute("batch_dims", 0))
    return place.axis < batch if place.index == 0 else place.axis != place.rank - 1


def _independent_reverse_sequence(place: Place) -> bool:
    return place.index == 1 or place.axis != int(place.node.attribute("time_axis", 0)) % place.rank


FACTS: Mapping[str, OperatorFacts] = {
    "Compress": OperatorFacts(flops=0),
    "Concat": OperatorFacts(flops=0, independent=all_axes, passes_weights=True),
    "ConcatFromSequence": OperatorFacts(flops=0),
    "DepthToSpace": OperatorFacts(flops=0, independent=axes_of_data(0), passes_weights=True),
    "Expand": OperatorFacts(flops=0, independent=all_axes, passes_weights=True),
    "Flatten": OperatorFacts(flops=0, independent=all_axes, is_view=True, passes_weights=True),
    "Gather": OperatorFacts(
        flops=0,
        independent=lambda place: place.index == 1 or place.axis != place.own_axis(0),
        parameters=(0,),
    ),
    "GatherElements": OperatorFacts(flops=0, independent=all_but_named_axis(0, 0, 1, 2)),
    "GatherND": OperatorFacts(flops=0, independent=_independent_gather_nd, parameters=(0,)),
    "Identity": pointwise(0, is_view=True, passes_weights=True),
    "Pad": OperatorFacts(
        flops=0,
        independent=axes_of_data(*range(16)),
        settings=Settings((2,), "value of the padding"),
        passes_weights=True,
    ),
    "Reshape": OperatorFacts(flops=0, independent=all_axes, is_view=True, passes_weights=True),
    "ReverseSequence": OperatorFacts(flops=0, independent=_independent_reverse_sequence),
    "ScatterElements": OperatorFacts(flops=0, independent=all_but_named_axis(0, 0, 1, 2), runs_in_place=True),
    "ScatterND": OperatorFacts(flops=0),
    "SequenceAt": OperatorFacts(flops=0),
    "SequenceConstruct": OperatorFacts(flops=0),
    "Slice": OperatorFacts(flops=0, independent=all_axes, passes_weights=True),
    "SpaceToDepth": OperatorFacts(flops=0, independent=axes_of_data(0), passes_weights=True),
    "Split": OperatorFacts(flops=0, independent=all_axes, passes_weights=True),
    "SplitToSequence": OperatorFacts(flops=0),
    "Squeeze": OperatorFacts(flops=0, independent=all_axes, is_view=True, passes_weights=True),
    "Tile": OperatorFacts(flops=0, independent=all_axes, passes_weights=True),
    "Transpose": OperatorFacts(flops=0, independent=all_axes, passes_weights=True),
    "Trilu": OperatorFacts(
        flops=0,
        independent=lambda place: place.index == 0 and place.axis < place.rank - 2,
        runs_in_place=True,
    ),
    "Unique": OperatorFacts(flops=0),
    "Unsqueeze": OperatorFacts(flops=0, independent=all_axes, is_view=True, passes_weights=True),
    INITIAL_STATE: OperatorFacts(passes_weights=True),
}
