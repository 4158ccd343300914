"""Exports with other names, another order of nodes, and a block twice: what is matched then is known."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import onnx

from onnxgc.matching.match import Reason, match
from onnxgc.matching.normal_form.structure import Structure
from onnxgc.matching.operators.rules import structure_of
from onnxgc.model.core.ir import TrainableModel
from onnxgc.model.read import read_model
from scripts.exports.compare_twins import hold_the_same, input_shapes, values_of
from scripts.exports.twins import BATCH
from tests.matching.networks import renamed, with_block_twice


@dataclass(frozen=True, slots=True)
class Matched:
    """How many of a file's tensors are matched with a variant's, rightly or wrongly, or are ambiguous."""

    tensors: int
    matched: int
    wrong: int
    ambiguous: int


@dataclass(frozen=True, slots=True)
class Variants:
    """A file beside itself, renamed and reordered, as it is and with a block twice."""

    renamed: Matched
    doubled: Matched


def variants_matched(path: Path, freeze_bn: bool, seed: int = 0) -> Variants:
    """A file is matched with its variants."""
    model, draw = onnx.load(path), random.Random(seed)
    known = _read(model, freeze_bn)
    start, end = _block(known, structure_of(known), model)
    found = []
    for variant in (model, with_block_twice(model, start, end)):
        strange, names = renamed(variant, draw)
        found.append(_judged(known, _read(strange, freeze_bn), names))
    return Variants(*found)


def _read(model: onnx.ModelProto, freeze_bn: bool) -> TrainableModel:
    return read_model(model, freeze_bn=freeze_bn, input_shapes=input_shapes(model, BATCH))


def _block(known: TrainableModel, structure: Structure, model: onnx.ModelProto) -> tuple[str, str]:
    """Two sums of two branches each, one after the other, of one shape: in the middle of the network."""
    made = {name for node in model.graph.node for name in node.output}
    sums = [
        node.outputs[0]
        for node in known.nodes
        if node.op == "Add"
        and node.outputs[0] in made
        and all(name in structure.views for name in node.inputs)
    ]
    shapes = [known.types[name].shape for name in sums]
    blocks = [(sums[i], sums[i + 1]) for i in range(len(sums) - 1) if shapes[i] == shapes[i + 1]]
    return blocks[len(blocks) // 2]


def _judged(known: TrainableModel, other: TrainableModel, names: dict[str, str]) -> Matched:
    """A match is right with the tensor itself, by its new name, or with one that holds the same.

    The mean of what a doubled block begins with is there twice: in the block's copy, and behind it.
    """
    found, structure = match(known, other), structure_of(other)
    doubtful = [
        pair
        for pair in found.pairs
        if (own := structure.views.get(names.get(pair.a, ""))) and own.value != structure.views[pair.b].value
    ]
    values = [values_of(model) for model in (known, other)] if doubtful else []
    wrong = sum(
        not pair.is_same_function or not hold_the_same(values[0][pair.a], values[1][pair.b], pair.factor)
        for pair in doubtful
    )
    ambiguous = sum(item.reason is Reason.AMBIGUOUS for item in found.unmatched_a)
    return Matched(len(found.of_a) + len(found.unmatched_a), len(found.of_a), wrong, ambiguous)
