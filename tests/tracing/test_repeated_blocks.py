from pathlib import Path

import pytest

from onnxgc.api.planned_step import trace_problem
from onnxgc.model.read import read_model
from onnxgc.tracing.checkpoint_problem import TracedProblem
from onnxgc.tracing.ort_layerwise import layerwise_checkpoints
from onnxgc.tracing.repeated_blocks import repeated_blocks
from tests.tracing.encoders import Names, by_torchscript, dotted, encoder, numbered

MODELS = Path(__file__).resolve().parent.parent.parent / "models"


def inside(traced: TracedProblem, names: Names, layer: int) -> set[str]:
    parts = "norm1 query key value scores softmax attended added norm2 wide relu narrow".split()  # noqa: SIM905
    found = {traced.vertex_of[names(layer, part)] for part in parts if names(layer, part) in traced.vertex_of}
    return found - {traced.vertex_of[names(layer, "result")]}


@pytest.mark.parametrize(
    "names, read_outside",
    # If only parameters have paths, the last sum is outside the layer that it ends.
    [(dotted, ()), (by_torchscript, ()), (numbered, ("added", "narrow"))],
)
def test_blocks_are_found_with_all_styles_of_names_and_recomputed_as_a_whole(
    names: Names, read_outside: tuple[str, ...]
):
    traced = trace_problem(read_model(encoder(names=names)))
    blocks = repeated_blocks(traced)[0]
    assert (blocks.pattern, blocks.count) == ("encoder.layers.#", 3)
    kept = set(blocks.checkpoints)
    assert traced.vertex_of["embedded"] in kept
    for layer in range(3):
        assert kept & inside(traced, names, layer) == {
            traced.vertex_of[names(layer, part)] for part in read_outside
        } - {traced.vertex_of[names(layer, "result")]}
        assert traced.vertex_of[names(layer, "result")] in kept


def test_without_paths_or_repetition_there_are_no_blocks():
    assert repeated_blocks(trace_problem(read_model(encoder(1)))) == ()
    assert repeated_blocks(trace_problem(read_model(MODELS / "vgg11.onnx"))) == ()


def test_each_nesting_level_gives_blocks():
    traced = trace_problem(read_model(MODELS / "resnet18.onnx", input_shapes={"x": (1, 3, 32, 32)}))
    found = repeated_blocks(traced)
    assert [(blocks.pattern, blocks.count) for blocks in found] == [("layer#", 4), ("layer#.#", 8)]
    assert {"layer1.1.relu2", "layer2.1.relu2"} <= set(found[0].checkpoints)
    assert "layer1.0.relu2" in set(found[1].checkpoints) - set(found[0].checkpoints)


def test_layer_wise_recomputation_keeps_layer_boundaries_and_unlisted_operators():
    traced = trace_problem(read_model(encoder()))
    kept = layerwise_checkpoints(traced)
    assert kept is not None
    # Layer boundaries, and Relu, which is not in the list.
    for layer in range(3):
        assert traced.vertex_of[dotted(layer, "relu")] in kept
        if layer:
            assert traced.vertex_of[dotted(layer - 1, "result")] in kept
        for part in ("norm1", "softmax", "query", "added"):
            assert traced.vertex_of[dotted(layer, part)] not in kept


def test_without_normalised_attention_there_are_no_layers():
    assert layerwise_checkpoints(trace_problem(read_model(encoder(normalised=False)))) is None
