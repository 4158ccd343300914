"""Light models, models in text form, and runs on ONNX Runtime, for tests of reading."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper, parser

from onnxgc.model.core.ir import Array, TrainableModel
from onnxgc.model.files.forward_file import to_proto
from onnxgc.model.read import read_model

LIGHT_FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
LIGHT_MODELS = tuple(sorted(path.stem for path in LIGHT_FOLDER.glob("*.onnx")))


def light_path(name: str) -> Path:
    return LIGHT_FOLDER / f"{name}.onnx"


def image_input(path: Path) -> str:
    graph = onnx.load(path).graph
    initial = {tensor.name for tensor in graph.initializer}
    (name,) = [value.name for value in graph.input if value.name not in initial]
    return name


def text_model(body: str, *, opset: int = 18, ir_version: int = 8, domains: str = "") -> onnx.ModelProto:
    """A checked model from ONNX text: `(inputs) => (outputs) <initializers> { nodes }`."""
    return parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["": {opset}{domains}]>\nnet {body}')


def with_weights(model: onnx.ModelProto, **values: Array) -> onnx.ModelProto:
    """The model with these initializers; float64 arrays become float32."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for name, value in values.items():
        array = np.asarray(value)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        copy.graph.initializer.append(numpy_helper.from_array(array, name))
    return copy


def model_of(body: str, **given: Any) -> onnx.ModelProto:
    """The model of a text with initializers (values, or shapes of drawn ones) and the settings of `text_model`."""
    settings = {key: given.pop(key) for key in ("opset", "ir_version", "domains") if key in given}
    drawn = {name: normal(*value) if isinstance(value, tuple) else value for name, value in given.items()}
    return with_weights(text_model(body, **settings), **drawn)


def read(source: Any, **options: Any) -> TrainableModel:
    """The model as it is read, with the mean squared error as loss if no other is given."""
    return read_model(source, **{"loss": "mse", **options})


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def run(model: onnx.ModelProto, feeds: dict[str, Array], *outputs: str) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = onnxruntime.InferenceSession(
        model.SerializeToString(),
        options,
        ["CPUExecutionProvider"],
        # It removes a Dropout with an unread mask, even in training mode.
        disabled_optimizers=["EliminateDropout"],
    )
    return list(session.run(list(outputs) or None, feeds))


def run_read(
    model: TrainableModel, feeds: dict[str, Array], *outputs: str, values: dict[str, Array] | None = None
) -> list[Any]:
    """Outputs of a read model, the loss unless `outputs` are named; targets that are not fed are zeros."""
    proto = to_proto(model, values)
    onnx.checker.check_model(proto, full_check=True)
    kinds = {name: model.types[name] for name in model.targets if name not in feeds}
    zeros = {name: np.zeros(kind.shape, helper.tensor_dtype_to_np_dtype(kind.dtype)) for name, kind in kinds.items()}
    return run(proto, feeds | zeros, *outputs)


def assert_same_output(
    source: onnx.ModelProto, model: TrainableModel, feeds: dict[str, Array], rtol: float = 1e-5, atol: float = 1e-6
) -> Array:
    """Checks that a read model has the source's output, and returns it."""
    (expected,), (found,) = run(source, feeds), run_read(model, feeds, *model.outputs)
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)
    return np.asarray(expected)


def with_values(model: onnx.ModelProto, values: dict[str, Array]) -> onnx.ModelProto:
    """A light model with these values for its weights, which are initializers or ConstantOfShape nodes."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = [node for node in model.graph.node if node.output[0] not in values]
    read = {name for node in kept for name in node.input}
    stored = [t for t in model.graph.initializer if t.name in read and t.name not in values]
    stored += [numpy_helper.from_array(value, name) for name, value in values.items()]
    initial = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in initial]
    del copy.graph.node[:], copy.graph.initializer[:], copy.graph.input[:]
    copy.graph.node.extend(kept)
    copy.graph.initializer.extend(stored)
    copy.graph.input.extend(inputs)
    copy.ir_version = 8
    return copy
