"""Variants of exports with known matches: other names, another order of nodes, and a doubled block."""

import random
from dataclasses import dataclass
from pathlib import Path

import onnx

from onnxgc.matching.match import match
from onnxgc.matching.normal_form.value_graph import Structure
from onnxgc.matching.operators.registry import structure_of
from onnxgc.model.core.ir import TrainableModel
from onnxgc.model.read import read_model
from scripts.exports.compare_twins import have_equal_elements, input_shapes, tensor_values
from scripts.exports.twins import BATCH
from tests.matching.networks import renamed, with_block_twice


@dataclass(frozen=True, slots=True)
class MatchCounts:
    """Numbers of a file's tensors, of those matched with a variant, and of wrong matches."""

    tensors: int
    matched: int
    wrong: int


@dataclass(frozen=True, slots=True)
class VariantCounts:
    """Counts for a file against its renamed and reordered variant, and against that with a doubled block."""

    renamed: MatchCounts
    doubled: MatchCounts


def match_variants(path: Path, freeze_bn: bool, seed: int = 0) -> VariantCounts:
    """Matches a file with its variants."""
    model, draw = onnx.load(path), random.Random(seed)
    known = _read(model, freeze_bn)
    start, end = _block_ends(known, structure_of(known), model)
    found = []
    for variant in (model, with_block_twice(model, start, end)):
        shuffled, names = renamed(variant, draw)
        found.append(_counted(known, _read(shuffled, freeze_bn), names))
    return VariantCounts(*found)


def _read(model: onnx.ModelProto, freeze_bn: bool) -> TrainableModel:
    return read_model(model, freeze_bn=freeze_bn, input_shapes=input_shapes(model, BATCH))


def _block_ends(known: TrainableModel, structure: Structure, model: onnx.ModelProto) -> tuple[str, str]:
    """Two consecutive sums of equal shape in the middle of the network, each of two branches."""
    outputs = {name for node in model.graph.node for name in node.output}
    sums = [
        node.outputs[0]
        for node in known.nodes
        if node.op == "Add" and node.outputs[0] in outputs and all(name in structure.views for name in node.inputs)
    ]
    shapes = [known.types[name].shape for name in sums]
    blocks = [(sums[i], sums[i + 1]) for i in range(len(sums) - 1) if shapes[i] == shapes[i + 1]]
    return blocks[len(blocks) // 2]


def _counted(known: TrainableModel, other: TrainableModel, names: dict[str, str]) -> MatchCounts:
    """Counts matches; a match is correct with the renamed tensor, or with one of equal elements.

    A reduction of a doubled block's input exists twice: in the copy, and after the block.
    """
    found, structure = match(known, other), structure_of(other)
    doubtful = [
        pair
        for pair in found.pairs
        if (own := structure.views.get(names.get(pair.a, ""))) and own.value != structure.views[pair.b].value
    ]
    values = [tensor_values(model) for model in (known, other)] if doubtful else []
    wrong = sum(
        not pair.is_same_function or not have_equal_elements(values[0][pair.a], values[1][pair.b], pair.factor)
        for pair in doubtful
    )
    return MatchCounts(len(found.of_a) + len(found.unmatched_a), len(found.of_a), wrong)
