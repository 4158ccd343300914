"""The nine light models of the `onnx` package, from file to a trainable graph."""

import time

import numpy as np
import onnx
import pytest

from onnxgc.model.core.draft import reads_of
from onnxgc.model.core.ir import TrainableModel
from onnxgc.model.draw_weights import draw_weights
from onnxgc.model.read import read_model
from tests.model.model_helpers import LIGHT_MODELS, image_input, light_path, normal, run, run_read, with_values

# Parameters and running statistics, counted in the files.
COUNTS = {
    "light_bvlc_alexnet": (16, 0),
    "light_densenet121": (606, 242),
    "light_inception_v1": (116, 0),
    "light_inception_v2": (347, 138),
    "light_resnet50": (161, 106),
    "light_shufflenet": (150, 98),
    "light_squeezenet": (52, 0),
    "light_vgg19": (38, 0),
    "light_zfnet512": (16, 0),
}


def read_light(name: str, batch: int) -> TrainableModel:
    path = light_path(name)
    return read_model(path, input_shapes={image_input(path): (batch, 3, 224, 224)})


def assert_well_formed(model: TrainableModel) -> None:
    known = {*model.inputs, *model.targets, *model.weights}
    names = [node.name for node in model.nodes]
    assert all(names)
    assert len(set(names)) == len(names)
    for node in model.nodes:
        assert node.origin
        assert set(reads_of(node)) <= known, node
        known.update(node.outputs)
        assert all(name in model.types for name in node.outputs if name)
        assert (node.rule == "") == node.once
    assert set(model.parameters) <= model.weights.keys()
    assert model.types[model.loss].shape == ()
    assert all(name in known for name in (*model.outputs, model.loss))


@pytest.mark.parametrize(
    "name, batch", [(name, 5 if name in ("light_shufflenet", "light_vgg19") else 2) for name in LIGHT_MODELS]
)
def test_reads_at_another_batch(name: str, batch: int):
    model = read_light(name, batch)
    assert_well_formed(model)
    assert (model.opset, model.ir_version) == (18, 9)
    assert model.loss_kind == "cross-entropy"
    assert (len(model.parameters), len(model.statistics)) == COUNTS[name]
    assert model.types[model.targets[0]].shape == (batch,)
    assert model.types[model.outputs[0]].element_count == batch * 1000
    maps = [node.outputs[0] for node in model.nodes if node.op in ("Conv", "Relu", "MaxPool", "Concat")]
    assert all(model.types[name].shape[0] == batch for name in maps)
    assert not any(node.op in ("Identity", "Shape", "Softmax", "Constant") for node in model.nodes)


def test_reading_takes_under_a_second_and_a_half():
    def seconds() -> float:
        start = time.process_time()
        read_light("light_densenet121", 64)
        return time.process_time() - start

    assert any(seconds() < 1.5 for _ in range(3))


def test_reading_is_deterministic():
    first, second = read_light("light_shufflenet", 2), read_light("light_shufflenet", 2)
    assert first.nodes == second.nodes
    assert first.types == second.types
    assert list(first.weights) == list(second.weights)
    assert first.parameters == second.parameters
    assert first.notes == second.notes


@pytest.mark.parametrize("name", ["light_squeezenet", pytest.param("light_inception_v1", marks=pytest.mark.slow)])
def test_forward_equals_the_source(name: str):
    path = light_path(name)
    source, image = onnx.load(path), image_input(path)
    model = read_model(path)
    values = draw_weights(model, seed=1)
    source_values = {key: values[key] for key in model.parameters}
    x = normal(1, 3, 224, 224)
    (expected,) = run(with_values(source, source_values), {image: x})

    # A ratio of 0 turns Dropout off without changing the graph.
    ratios = {node.inputs[1]: np.zeros((), np.float32) for node in model.nodes if node.op == "Dropout"}
    label = np.asarray([3])
    feeds = {image: x, model.targets[0]: label}
    logits, loss = run_read(model, feeds, model.outputs[0], model.loss, values={**values, **ratios})
    probabilities = np.exp(logits - logits.max()).ravel()
    probabilities /= probabilities.sum()
    np.testing.assert_allclose(probabilities, expected.ravel(), rtol=2e-4, atol=1e-7)
    assert np.ptp(expected) > 1e-4, "a uniform output proves nothing"
    np.testing.assert_allclose(loss, -np.log(expected.ravel()[3]), rtol=1e-4)
