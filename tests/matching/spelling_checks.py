import numpy as np
import onnx

from onnxgc.matching.match import Matching, match
from onnxgc.model.read import read_model
from tests.matching.networks import BATCH, CHANNELS, SEQUENCE, Part, start
from tests.model.model_helpers import normal, run


def network_of(part: Part, shape: tuple[int, ...] = SEQUENCE, *, is_channels_last: bool = False) -> onnx.ModelProto:
    """The part between an activation and a linear layer."""
    x = start().Sigmoid()
    if is_channels_last:
        x = x.Transpose(perm=[0, 2, 3, 1])
    y = part(x).Tanh()
    axes = [1] if len(shape) == 3 else [1, 2] if is_channels_last else [2, 3]
    head = y.ReduceMean(axes, keepdims=0) @ y.stored(CHANNELS, 3, seed=7)
    return y.net.model(head.name, shape, (BATCH, 3))


def compared(first: onnx.ModelProto, second: onnx.ModelProto, *, freeze_bn: bool = False) -> Matching:
    """The matching of two models; raises if a pair has different sizes."""
    a, b = (read_model(model, freeze_bn=freeze_bn) for model in (first, second))
    found = match(a, b)
    for pair in found.pairs:
        sizes = a.types[pair.a].element_count, b.types[pair.b].element_count
        assert sizes[0] == sizes[1] or not pair.is_same_function, pair
    return found


def assert_same(first: onnx.ModelProto, second: onnx.ModelProto) -> Matching:
    found = compared(first, second)
    assert found.is_same_network
    assert all(pair.is_same_function for pair in found.pairs)
    shape = tuple(size.dim_value for size in first.graph.input[0].type.tensor_type.shape.dim)
    feeds = {"x": normal(*shape)}
    results = [{name for node in model.graph.node for name in node.output} for model in (first, second)]
    for pair in found.pairs:
        if pair.a not in results[0] or pair.b not in results[1]:
            continue
        here, there = (
            np.sort(np.maximum(run(_with_output(model, name), feeds, name)[0], -1e4), axis=None)
            for model, name in ((first, pair.a), (second, pair.b))
        )
        np.testing.assert_allclose(here, np.sort(there / pair.factor), rtol=1e-3, atol=1e-5, err_msg=str(pair))
    return found


def assert_equal_parts(*parts: Part) -> None:
    first, second = map(network_of, parts)
    x = normal(*SEQUENCE)
    np.testing.assert_allclose(run(first, {"x": x})[0], run(second, {"x": x})[0], rtol=1e-4, atol=1e-5)
    assert_same(first, second)


def assert_different(first: onnx.ModelProto, second: onnx.ModelProto) -> None:
    found = compared(first, second)
    assert not found.is_same_network
    assert found.last_from_inputs
    assert found.last_from_outputs


def _with_output(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if name not in {value.name for value in copy.graph.output}:
        copy.graph.output.append(onnx.ValueInfoProto(name=name))
    return copy
