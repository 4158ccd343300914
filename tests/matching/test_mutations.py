"""No match is wrong after tensors are renamed, nodes reordered, blocks doubled or activations replaced."""

import random
from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxgc.matching.match import Matching, Reason, match
from onnxgc.model.read import read_model
from tests.matching.networks import (
    IMAGE_BLOCKS,
    TOKEN_BLOCKS,
    activations,
    network,
    renamed,
    with_activation,
    with_block_twice,
)
from tests.model.model_helpers import light_path

MODELS = Path(__file__).resolve().parents[2] / "models"
_BLOCKS = st.sampled_from([IMAGE_BLOCKS, TOKEN_BLOCKS]).flatmap(
    lambda kind: st.lists(st.sampled_from(sorted(kind)), min_size=1, max_size=5)
)
_SEEDS = st.integers(0, 1 << 20).map(random.Random)


def _matched(model: onnx.ModelProto, other: onnx.ModelProto, draw: random.Random) -> Matching:
    """The matching with a renamed and reordered `other`; raises if a match is wrong."""
    shuffled, names = renamed(other, draw)
    found = match(read_model(model), read_model(shuffled))
    tensors = set(names.values())
    wrong = [p for p in found.pairs if p.b in tensors and p.a in names and names[p.a] != p.b]
    assert wrong == []
    return found


@settings(deadline=None, max_examples=15)
@given(_BLOCKS, _SEEDS)
def test_a_renamed_network_is_the_same(blocks: list[str], draw: random.Random):
    model, _ = network(blocks)
    found = _matched(model, model, draw)
    assert found.is_same_network
    assert all(pair.is_same_function for pair in found.pairs)
    assert {item.reason for item in found.unmatched_a} <= {Reason.AMBIGUOUS}
    assert "twins" in blocks or not found.unmatched_a


@settings(deadline=None, max_examples=12)
@given(_BLOCKS, _SEEDS)
def test_a_doubled_block_is_ambiguous(blocks: list[str], draw: random.Random):
    model, ends = network(blocks)
    start, end = draw.choice(ends)
    found = _matched(model, with_block_twice(model, start, end), draw)
    assert not found.is_same_network
    assert end in _ambiguous(found)


def _ambiguous(found: Matching) -> set[str]:
    return {item.tensor for item in found.unmatched_a if item.reason is Reason.AMBIGUOUS}


def test_a_tensor_of_one_spelling_belongs_to_the_layer_before_it():
    """The first operator of a composed activation has no path to an output in the normal form."""
    model, ends = network(["composed"] * 3)
    found = _matched(model, with_block_twice(model, *ends[0]), random.Random(0))
    inside = [node.output[0] for node in model.graph.node if node.op_type in ("Relu", "Min")]
    assert found.of_a.keys().isdisjoint(inside[2:4])
    assert _ambiguous(found) >= set(inside[2:4])


@settings(deadline=None, max_examples=12)
@given(_BLOCKS.filter(lambda blocks: not {"linear", "attention", "packed attention"}.issuperset(blocks)), _SEEDS)
def test_networks_diverge_at_another_activation(blocks: list[str], draw: random.Random):
    model, _ = network(blocks)
    tensor = draw.choice(activations(model))
    found = _matched(model, with_activation(model, tensor, "Softplus"), draw)
    assert not found.is_same_network
    assert tensor not in found.of_a
    assert found.of_a[model.graph.output[0].name]


@pytest.mark.parametrize(
    "name, max_unmatched", [("resnet18", 0), ("mobilenet_v2", 0), pytest.param("darts", 16, marks=pytest.mark.slow)]
)
def test_every_tensor_of_a_real_network_is_matched(name: str, max_unmatched: int):
    """Symmetric tensors are exceptions: the first cells of DARTS read one tensor twice."""
    model = onnx.load(MODELS / f"{name}.onnx")
    found = _matched(model, model, random.Random(0))
    assert found.is_same_network
    assert len(found.unmatched_a) <= max_unmatched


def test_a_doubled_block_of_a_light_model_affects_equal_blocks_only():
    model = onnx.load(light_path("light_resnet50"))
    relus = [node.output[0] for node in model.graph.node if node.op_type == "Relu"]
    # The second block of the first stage, which equals the third.
    found = _matched(model, with_block_twice(model, relus[3], relus[6]), random.Random(0))
    assert not found.is_same_network
    assert len(found.of_a) > 0.7 * (len(found.of_a) + len(found.unmatched_a))
    assert relus[0] in found.of_a
    assert relus[-1] in found.of_a
    assert relus[6] not in found.of_a
