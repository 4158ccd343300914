"""The simulator's allocation rules against ONNX Runtime, one operator at a time.

Each case is a small training step whose peak depends on the operator, with tensors of 1 MB, so that a wrong
rule is off by far more than the tolerance.
"""

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxgc.api import OptimizeResult, optimize
from onnxgc.model.core.ir import Array, Node, TensorType
from onnxgc.model.operators.registry import IN_PLACE_OPERATORS, workspace_bytes
from onnxgc.planning.schedule import Release
from onnxgc.runtime.measure import executed_order, measure
from onnxgc.runtime.ort import SessionSettings

N, C, H, W = 4, 16, 64, 64
IMAGE = f"float[{N},{C},{H},{W}]"
# Barriers, shapes, per-channel vectors, and the slack of a workspace's chunk.
TOLERANCE_BYTES = 80 * 1024

# One case for each kind of allocation rule. Which operators run in place is tested for each of them below.
CASES = {
    "Relu": "b = Relu(a)",
    "PRelu": "b = PRelu(a, slope)",
    "Mean of three": "b = Mean(a, x, w)",
    "Where": "p = Greater(x, low) b = Where(p, a, w)",
    "Hardmax, channels": "p = Hardmax <axis = 1> (a) b = Mul(a, p)",
    "LRN": "b = LRN <size = 5> (a)",
    "BatchNormalization": "b = BatchNormalization(a, one, one, one, one)",
    "LayerNormalization, three axes": "b = LayerNormalization <axis = 1> (a, whole)",
    "LpPool, overlapping": "b = LpPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1], p = 3> (a)",
    "MaxUnpool": "p, i = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a) "
    "b = MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> (p, i)",
    "ConvTranspose, grouped": "b = ConvTranspose <group = 4, pads = [1, 1, 1, 1]> (a, kg)",
    "Einsum, three operands": 'b = Einsum <equation = "nchw,wv,vu->nchu"> (a, square, square)',
    "MaxPool": "b = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a)",
    "AveragePool": "b = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (a)",
    "Conv 3x3": "b = Conv <pads = [1, 1, 1, 1]> (a, k3)",
    "Conv 1x1 stride 2": "b = Conv <strides = [2, 2]> (a, k1)",
    "Conv, more filters than positions": "p = Conv <strides = [16, 16]> (a, k16) b = Conv(p, wide)",
    "Conv, depthwise": "b = Conv <pads = [1, 1, 1, 1], group = 16> (a, kd)",
    "Concat": "b = Concat <axis = 1> (a, x)",
    "Slice, backwards": "p = Slice(a, fifty, three, axis, minus) b = GlobalAveragePool(p)",
    "Split, last piece unread": "p, q, r = Split <axis = 2> (a, thirds) b = Mul(p, q)",
    "ScatterND": "p = Slice(x, zero, two, zero) b = ScatterND(a, rows, p)",
    "TopK": "b, i = TopK <axis = 1> (a, eight)",
    "Pad, reflect": 'b = Pad <mode = "reflect"> (a, pads)',
    "DepthToSpace": "b = DepthToSpace <blocksize = 2> (a)",
    "Resize, a volume": 'p = Reshape(a, volume) b = Resize <mode = "linear"> (p, , enlarged)',
    "GridSample": 'b = GridSample <mode = "bilinear"> (a, grid)',
    "Dropout": "b = Dropout(a)",
    "ReduceL2, last axes": "b = ReduceL2 <axes = [2, 3]> (a)",
}
NIGHTLY_CASES = {
    "Max of three, broadcast": "b = Max(slope, a, low)",
    "CumSum": "b = CumSum(a, axis)",
    "Sum of four, growing": "b = Sum(low, slope, row, a)",
    "Softmax, channels": "b = Softmax <axis = 1> (a)",
    "InstanceNormalization": "b = InstanceNormalization(a, one, one)",
    "LpNormalization": "b = LpNormalization <axis = 1> (a)",
    "Einsum, heads last": 'b = Einsum <equation = "nhcd,nwcd->nchw"> (a, x)',
    "Gather": "b = Gather <axis = 2> (a, many)",
    "Resize, linear": 'b = Resize <mode = "linear"> (a, , larger)',
    "ReduceProd, channels": "b = ReduceProd <axes = [1]> (a)",
    "Clip": "b = Clip(a, low, high)",
    "Softplus": "b = Softplus(a)",
    "Pow": "p = Exp(x) b = Pow(p, a)",
    "Max of three, growing": "b = Max(low, slope, a)",
    "Where, by channel": "p = Greater(slope, low) b = Where(p, a, low)",
    "Mod": "p = Exp(x) b = Mod <fmod = 1> (p, a)",
    "Trilu": "b = Trilu <upper = 0> (a)",
    "Add": "b = Add(a, x)",
    "Div": "p = Exp(x) b = Div(a, p)",
    "Sum of three": "b = Sum(a, x, x)",
    "LogSoftmax, channels": "b = LogSoftmax <axis = 1> (a)",
    "GlobalLpPool": "b = GlobalLpPool(a)",
    "GlobalMaxPool": "b = GlobalMaxPool(a)",
    "ConvTranspose 2x2 stride 2": "b = ConvTranspose <strides = [2, 2]> (a, t2)",
    "Einsum, batched product": 'b = Einsum <equation = "nchw,ncvw->nchv"> (a, x)',
    "Einsum, sum": 'b = Einsum <equation = "nchw->nc"> (a)',
    "AveragePool, stride 1": "b = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (a)",
    "GlobalAveragePool": "b = GlobalAveragePool(a)",
    "Conv 1x1": "b = Conv(a, k1)",
    "Conv, grouped": "b = Conv <pads = [1, 1, 1, 1], group = 4> (a, kg)",
    "Slice": "p = Slice(a, three, fifty, axis) b = GlobalAveragePool(p)",
    "Pad": "p = Pad(a, pads) b = GlobalAveragePool(p)",
    "GatherElements": "b = GatherElements <axis = 2> (a, elements)",
    "GatherND": "p = GatherND(a, vectors) b = Exp(p)",
    "ScatterElements": "b = ScatterElements <axis = 2> (a, elements, x)",
    "ScatterElements, added": 'b = ScatterElements <axis = 2, reduction = "add"> (a, elements, x)',
    "ReverseSequence": "b = ReverseSequence <batch_axis = 0, time_axis = 1> (a, lengths)",
    "Tile": "b = Tile(a, repeats)",
    "Expand": "p = ReduceMean <axes = [1]> (a) b = Expand(p, image)",
    "Resize, nearest": "b = Resize(a, , twice)",
    "Resize, cubic": 'b = Resize <mode = "cubic"> (a, , larger)',
    "Transpose": "b = Transpose <perm = [0, 2, 3, 1]> (a)",
    "Flatten": "b = Flatten(a)",
    "ReduceMean": "b = ReduceMean <axes = [2, 3]> (a)",
    "ReduceLogSumExp, channels": "b = ReduceLogSumExp <axes = [1]> (a)",
    "ReduceMax, last axes": "b = ReduceMax <axes = [2, 3]> (a)",
}


def normal(*shape: int) -> Array:
    return (np.random.default_rng(0).standard_normal(shape) * 0.3).astype(np.float32)


WEIGHTS: dict[str, Array] = {
    "w": normal(N, C, H, W),
    "one": np.ones(C, np.float32),
    "row": np.ones(W, np.float32),
    "whole": np.ones((C, H, W), np.float32),
    "square": normal(W, W),
    "t2": normal(C, C, 2, 2),
    "slope": normal(C, 1, 1),
    "low": np.asarray(-0.5, np.float32),
    "high": np.asarray(0.5, np.float32),
    "k1": normal(C, C, 1, 1),
    "k3": normal(C, C, 3, 3),
    "k16": normal(C, C, 3, 3),
    "kg": normal(C, C // 4, 3, 3),
    "kd": normal(C, 1, 3, 3),
    "wide": normal(4096, C, 2, 2),
    **{
        name: np.asarray([number], np.int64)
        for name, number in {"zero": 0, "three": 3, "fifty": 50, "axis": 2, "two": 2, "minus": -1}.items()
    },
    "pads": np.asarray([0, 0, 1, 1, 0, 0, 2, 2], np.int64),
    "thirds": np.asarray([10, 10, 44], np.int64),
    "many": np.arange(128) % 63,
    "elements": np.arange(N * C * H * W).reshape(N, C, H, W) % H,
    "vectors": np.stack([np.arange(64) % N, np.arange(64) * 5 % C], axis=1),
    "rows": np.asarray([[0], [2]], np.int64),
    "eight": np.asarray([8], np.int64),
    "lengths": np.asarray([16, 3, 9, 1], np.int64),
    "repeats": np.asarray([1, 1, 2, 2], np.int64),
    "image": np.asarray([N, C, H, W], np.int64),
    "twice": np.asarray([1, 1, 2, 2], np.float32),
    "larger": np.asarray([1, 1, 1.7, 1.3], np.float32),
    "volume": np.asarray([1, C, 16, 16, 64], np.int64),
    "enlarged": np.asarray([1, 1, 1, 2, 2], np.float32),
    "grid": np.linspace(-0.95, 0.95, N * H * W * 2, dtype=np.float32).reshape(N, H, W, 2),
}


def model(nodes: str) -> onnx.ModelProto:
    text = f"g ({IMAGE} x) => (float[?] y) {{ a = Mul(x, w) {nodes} c = Neg(b) y = Abs(c) }}"
    # Cases use the reductions of opset 17.
    built = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 17]> {text.replace("float[?]", "float")}')
    used = {name for node in built.graph.node for name in node.input}
    built.graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in WEIGHTS.items() if name in used
    )
    built.graph.output[0].type.Clear()
    built.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return built


def assert_equal_peaks(result: OptimizeResult, folder: Path) -> None:
    """Compares the running maximum of memory at each node of one step.

    Measured in a separate process: workspaces are visible only in the arena's maximum, which is per process.
    """
    planned = result.planned
    types = planned.model.types
    feeds = {name: normal(*types[name].shape) for name in ("x", "target")}
    onnx.save(result.training_graph.model, folder / "step.onnx")
    run = measure(folder / "step.onnx", feeds, settings=SessionSettings(threads=1), runs=1).runs[0]
    used_bytes = map(sum, zip(run.held_bytes, run.workspace_bytes, strict=True))
    measured = dict(zip(run.order, itertools.accumulate(used_bytes, max), strict=True))
    operators = [step.operator.name for step in planned.schedule.instructions if not isinstance(step, Release)]
    simulated = dict(zip(operators, itertools.accumulate(planned.profile.timeline, max), strict=True))
    names = [name for name in operators if name in measured]
    assert len(names) > len(operators) // 2
    assert [measured[name] for name in names] == pytest.approx([simulated[name] for name in names], abs=TOLERANCE_BYTES)


@pytest.mark.parametrize(
    "nodes",
    [
        *(pytest.param(nodes, id=name) for name, nodes in CASES.items()),
        *(pytest.param(nodes, id=name, marks=pytest.mark.slow) for name, nodes in NIGHTLY_CASES.items()),
    ],
)
def test_the_simulated_peak_equals_the_measured_peak(nodes: str, tmp_path: Path):
    assert_equal_peaks(optimize(model(nodes), loss="mse", solver="store-all"), tmp_path)


@pytest.mark.parametrize("name", ["LRN", "Conv 3x3"])
def test_the_simulated_peak_with_recomputation_equals_the_measured_peak(name: str, tmp_path: Path):
    result = optimize(model(CASES[name]), loss="mse", checkpoints=["c"])
    assert result.planned.schedule.recomputed
    assert_equal_peaks(result, tmp_path)


def test_an_unread_recomputed_output_is_freed(tmp_path: Path):
    """MaxPool is recomputed for its indices only; its other output must be released."""
    nodes = "r = Relu(a) p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r) b = GlobalAveragePool(p)"
    result = optimize(model(nodes), loss="mse", checkpoints=["r", "b"])
    written = [node.name for node in result.training_graph.model.graph.node]
    assert any(name.endswith("/unread") for name in written)
    assert_equal_peaks(result, tmp_path)


def test_a_view_that_is_an_output_is_a_copy(tmp_path: Path):
    assert_equal_peaks(optimize(model("b = Flatten(a)"), loss="mse", solver="store-all", keep_outputs=True), tmp_path)


@pytest.mark.parametrize(
    "filters, kernel, threads, expected",
    [(8, 3, 1, 65536), (8, 3, 2, 2 * 65536), (512, 3, 1, 16 * 9 * 256 * 4), (8, 1, 1, 0)],
)
def test_the_workspace_of_a_convolution(filters: int, kernel: int, threads: int, expected: int, tmp_path: Path):
    """The tensors are too small for slack in their chunks. The simulator assumes a single thread."""
    margin = kernel // 2
    text = (
        f"g (float[2,16,16,16] x, float[{filters},16,{kernel},{kernel}] w) => (float[2,{filters},16,16] y) "
        f"{{ c = Conv <pads = [{margin}, {margin}, {margin}, {margin}]> (x, w) y = Neg(c) }}"
    )
    step = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {text}')
    early = onnx.helper.make_node("Shape", ["x"], ["shape"], "early")
    step.graph.node.insert(0, early)
    step.graph.output.append(onnx.helper.make_tensor_value_info("shape", onnx.TensorProto.INT64, [4]))
    step.graph.node[1].name = "conv"
    onnx.save(step, tmp_path / "step.onnx")
    fed = {"x": normal(2, 16, 16, 16), "w": normal(filters, 16, kernel, kernel)}
    run = measure(tmp_path / "step.onnx", fed, settings=SessionSettings(threads=threads), runs=1).runs[0]
    assert run.workspace_bytes[run.order.index("conv")] == expected
    types = {name: TensorType(onnx.TensorProto.FLOAT, value.shape) for name, value in fed.items()}
    types["c"] = TensorType(onnx.TensorProto.FLOAT, (2, filters, 16, 16))
    node = Node("Conv", ("x", "w"), ("c",), {"pads": [margin] * 4})
    assert workspace_bytes(node, types) * threads == expected


UNARY = [
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Clip", "Cos", "Cosh", "Elu", "Erf",
    "Exp", "Floor", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "LogSoftmax", "Mean", "Neg", "Reciprocal",
    "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softmax", "Softplus", "Softsign",
    "Sqrt", "Tan", "Tanh", "ThresholdedRelu", "Trilu",
]  # fmt: skip
BINARY = ["Add", "Div", "Max", "Mul", "PRelu", "Pow", "Sub"]
# Calls that change nothing, so that the result would fit into the memory of `t`.
MOVING = {
    "Concat": "Concat <axis = 0> (t)",
    "Expand": "Expand(t, whole)",
    "Gather": "Gather <axis = 0> (t, in_order)",
    "GatherElements": "GatherElements <axis = 0> (t, place)",
    "Pad": "Pad(t, none)",
    "ReverseSequence": "ReverseSequence(t, lengths)",
    "ScatterElements": "ScatterElements <axis = 0> (t, place, x)",
    "ScatterND": "ScatterND(t, rows, x)",
    "Slice": "Slice(t, zero, far)",
    "Split": "Split <axis = 0, num_outputs = 1> (t)",
    "Transpose": "Transpose <perm = [0, 1, 2, 3]> (t)",
}


@pytest.mark.parametrize("operator", [*UNARY, *BINARY, *MOVING])
def test_operators_run_in_place_exactly_as_in_the_runtime(operator: str):
    """If the operator runs in place, never more than one tensor is live."""
    call = MOVING.get(operator) or (f"{operator}(t)" if operator in UNARY else f"{operator}(t, x)")
    text = f"g ({IMAGE} x) => (float total) {{ t = Mul(x, x) u = {call} total = ReduceSum <keepdims = 0> (u) }}"
    step = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {text}')
    constants = {
        "place": np.zeros((N, C, H, W)),
        "none": np.zeros(8),
        "whole": np.asarray([N, C, H, W]),
        "in_order": np.arange(N),
        "rows": np.arange(N)[:, None],
        "lengths": np.full(C, N),
        "zero": np.zeros(1),
        "far": np.full(1, N),
    }
    step.graph.initializer.extend(
        numpy_helper.from_array(value.astype(np.int64), name) for name, value in constants.items()
    )
    for index, node in enumerate(step.graph.node):
        node.name = f"{node.op_type}{index}"
    size = normal(N, C, H, W).nbytes
    found = executed_order(step, {"x": normal(N, C, H, W)}, SessionSettings(threads=1))
    in_place = found.requested_peak_bytes < 1.5 * size
    assert in_place == (operator in IN_PLACE_OPERATORS)
