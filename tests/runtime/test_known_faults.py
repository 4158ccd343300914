from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgc.api import inspect, optimize
from onnxgc.model.core.draft import Draft
from onnxgc.model.core.ir import Array, TensorType
from onnxgc.model.files.load import load_proto
from onnxgc.model.files.proto_to_draft import draft_of
from onnxgc.runtime.known_faults import FAULTS, faults_in
from onnxgc.runtime.ort import make_session
from tests.model.model_helpers import LIGHT_MODELS, light_path, model_of, normal, text_model, with_weights
from tests.runtime.fault_cases import CASES, FaultCase

ALL, PLAIN = "ORT_ENABLE_ALL", "ORT_DISABLE_ALL"
# A race is not lost each time.
MAX_RACES = 30
QUICK_LIGHT_MODELS = [name for name in LIGHT_MODELS if "squeezenet" in name or "shufflenet" in name]


def outputs(model: onnx.ModelProto, feeds: Mapping[str, Array], level: str, threads: int = 1) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def typed(model: onnx.ModelProto) -> Draft:
    proto, folder = load_proto(onnx.shape_inference.infer_shapes(model))
    draft = draft_of(proto, folder)
    values = (*proto.graph.value_info, *proto.graph.input, *proto.graph.output)
    types = {
        value.name: TensorType(
            value.type.tensor_type.elem_type,
            tuple(dim.dim_value if dim.HasField("dim_value") else 1 for dim in value.type.tensor_type.shape.dim),
        )
        for value in values
        if value.type.tensor_type.HasField("shape")
    }
    return draft.with_changes(types=types)


def shown(model: onnx.ModelProto) -> list[str]:
    return [found.fault.name for found in faults_in(typed(model))]


cases = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.shown}: {case.name}")


@cases
def test_the_installed_version_has_the_fault(case: FaultCase):
    """Skipped where a version mends it: then its entry in the table may go."""
    model = case.model()
    assert case.shown in shown(model)
    right = outputs(model, case.feeds, PLAIN)
    for _ in range(1 if case.threads == 1 else MAX_RACES):
        try:
            found = outputs(model, case.feeds, ALL, case.threads)
        except Exception:  # The fault is that the file is refused.
            return
        if not all(np.allclose(one, two, rtol=1e-4) for one, two in zip(right, found, strict=True)):
            return
    pytest.skip(f"onnxruntime {onnxruntime.__version__} does not show '{case.shown}' ({case.name})")


@pytest.mark.parametrize("case", [case for case in CASES if case.trains], ids=lambda case: f"{case.shown}: {case.name}")
def test_training_files_are_right_in_every_session(case: FaultCase):
    """The loss of the model itself without optimisation, and the same gradients by default settings."""
    model = case.model()
    (right,) = outputs(model, case.feeds, PLAIN)
    emitted = optimize(model, loss="loss").training_graph.model
    assert shown(emitted) == []
    own = make_session(emitted, threads=case.threads).run(None, dict(case.feeds))
    default = outputs(emitted, case.feeds, ALL, case.threads)
    np.testing.assert_allclose(own[0], right, rtol=1e-5)
    for one, two in zip(own, default, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5 * max(1.0, np.abs(one).max(initial=0)))


def test_every_fault_has_a_case():
    assert {fault.name for fault in FAULTS} == {case.shown for case in CASES}


@pytest.mark.parametrize(
    "body",
    [
        "h = Mul(x, w) t = Transpose<perm=[1,0]>(h) y = MatMul(t, m)",
        "h = Mul(x, w) y = MatMul(h, u)",
        "h = Mul(x, w) t = Transpose<perm=[1,0]>(h) y = MatMul(u, t)",
    ],
)
def test_correct_products_are_not_reported(body: str):
    model = text_model(f"(float[4,4] x) => (float[N] y) {{ {body} }}")
    assert shown(with_weights(model, w=normal(4, 4), m=normal(4, 4), u=normal(4))) == []


def test_a_correct_layer_normalisation_is_not_reported():
    case = next(case for case in CASES if case.name == "fourth power")
    weights = {**case.weights, "k": np.asarray(2, np.float32)}
    usual = FaultCase(case.shown, "usual", case.body, weights, case.feeds)
    assert shown(usual.model()) == []
    emitted = optimize(usual.model(), loss="loss").training_graph.model
    assert "Sqrt" in [node.op_type for node in emitted.graph.node]


@pytest.mark.parametrize("name", QUICK_LIGHT_MODELS)
def test_training_files_of_networks_have_no_fault(name: str):
    source = light_path(name)
    emitted = optimize(source, solver="acg", check=False).training_graph.model
    assert shown(emitted) == []


def test_inspect_reports_a_fault_of_the_model():
    found = inspect(CASES[0].model(), loss="loss").as_json()["runtime_faults"]
    assert [fault["name"] for fault in found] == ["vector product"]
    assert "MatmulTransposeFusion" in found[0]["detail"]
    assert found[0]["nodes"]


def test_distinct_indices_keep_scatter_nd():
    case = next(case for case in CASES if case.name == "add")
    weights = {**case.weights, "i": np.asarray([[1], [0]])}
    few = FaultCase(case.shown, "few", case.body, weights, {"x": normal(2, 128)})
    emitted = optimize(few.model(), loss="loss").training_graph.model
    assert "ScatterND" in [node.op_type for node in emitted.graph.node]


@pytest.mark.parametrize("keepdims", [0, 1])
def test_gradients_of_empty_tensors_are_empty_in_every_session(keepdims: int):
    ending = "s = Identity(r)" if keepdims else "s = Unsqueeze(r, one)"
    body = (
        f"(float[3,0] x) => (float[] loss) {{ z = Concat<axis=0>(a, a) h = MatMul(z, x) "
        f"r = ReduceSum<keepdims={keepdims}>(h, one) {ending} t = Add(s, b) l = Mul(t, t) "
        "loss = ReduceSum<keepdims=0>(l) }"
    )
    weights = {"a": normal(2, 3), "b": normal(4, 1), "one": np.asarray([1])}
    emitted = optimize(model_of(body, **weights), loss="loss").training_graph.model
    assert shown(emitted) == []
    feeds = {"x": np.zeros((3, 0), np.float32)}
    own, default = make_session(emitted).run(None, feeds), outputs(emitted, feeds, ALL)
    for one, two in zip(own, default, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-6)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))])
def test_random_chains_are_right_in_every_session(seed: int):
    """Products with vectors and matrices, transposed on either side, scaled, cast and padded."""
    generator = np.random.default_rng(seed)
    draws: list[str] = []
    weights: dict[str, Array] = {}
    current, shape = "x", [int(size) for size in generator.integers(2, 5, generator.integers(2, 4))]
    feeds = {"x": normal(*shape, seed=seed)}
    inputs = ",".join(map(str, shape))
    for index in range(6):
        new, weight = f"t{index}", f"w{index}"
        kind = generator.choice(["turn", "scale", "vector", "matrix", "round trip", "relu"])
        if kind == "turn":
            order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2] if len(shape) > 1 else [0]
            draws.append(f"{new} = Transpose<perm=[{','.join(map(str, order))}]>({current})")
            shape = [shape[axis] for axis in order]
        elif kind == "scale":
            weights[weight] = np.asarray(generator.normal(), np.float32)
            draws.append(f"{new} = Mul({current}, {weight})")
        elif kind == "vector" and len(shape) > 1:
            left = bool(generator.integers(2))
            weights[weight] = normal(shape[-2 if left else -1], seed=index)
            operands = f"{weight}, {current}" if left else f"{current}, {weight}"
            draws.append(f"{new} = MatMul({operands})")
            shape = [*shape[:-2], shape[-1 if left else -2]]
        elif kind == "matrix":
            weights[weight] = normal(shape[-1], 3, seed=index)
            draws.append(f"{new} = MatMul({current}, {weight})")
            shape = [*shape[:-1], 3]
        elif kind == "round trip":
            draws.append(f"{new}d = Cast<to=11>({current}) {new} = Cast<to=1>({new}d)")
        else:
            draws.append(f"{new} = LeakyRelu({current})")
        current = new
    weights["scale"] = normal(2, *(1 for _ in shape))
    body = f"{' '.join(draws)} y = Mul({current}, scale) l = Mul(y, y) loss = ReduceSum<keepdims=0>(l)"
    model = model_of(f"(float[{inputs}] x) => (float[] loss) {{ {body} }}", **weights)
    (right,) = outputs(model, feeds, PLAIN)
    emitted = optimize(model, loss="loss", check=False).training_graph.model
    assert shown(emitted) == []
    own, default = make_session(emitted).run(None, feeds), outputs(emitted, feeds, ALL)
    np.testing.assert_allclose(own[0], right, rtol=1e-4)
    for one, two in zip(own, default, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-4 * max(1.0, np.abs(one).max(initial=0)))
