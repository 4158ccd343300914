"""Races of forms of reductions and of weight gradients, each checked against float64.

The product's forms and one candidate are taken from emitted training files. A form's time is the difference
between several copies of it and one, which hides the start of a run.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnxgc.api import emit, plan_step
from onnxgc.api.read_options import ReadOptions
from onnxgc.gradients import weight_gradient
from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import product, reshape, sum_over
from onnxgc.gradients.weight_gradient import WEIGHT_FORMS, Convolution, WeightForm
from onnxgc.model.core.ir import Array
from onnxgc.model.read import read_model
from onnxgc.runtime.measure import bound_step
from scripts.gpu_checks.device import session_on, settings_of
from scripts.gpu_checks.settings import (
    LAYERS,
    SEED,
    SMOKE_LAYERS,
    TIMED_RUNS,
    Json,
    Layer,
    device_of,
    error_line,
    median,
)

MAX_ERROR = 1e-2
"""Relative to the largest value: products may run in TF32."""
COPIES = 4
_OPSETS = (helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1))


def work_reductions(request: Json, folder: Path) -> Json:
    shape = tuple(request["shape"])
    dy = np.random.default_rng(SEED).standard_normal(shape).astype(np.float32)
    spatial = tuple(range(2, len(shape)))
    truth = dy.sum((0, *spatial), np.float64)
    return _outcome(_raced(reduction_forms(shape), {"dy": dy}, truth, request))


def work_weights(request: Json, folder: Path) -> Json:
    import torch
    from torch.nn import grad

    layer = (SMOKE_LAYERS if request["smoke"] else LAYERS)[request["layer"]]
    generator, size = np.random.default_rng(SEED), layer.output_size
    x = generator.standard_normal((layer.batch, layer.channels_in, layer.size, layer.size), np.float32)
    dy = generator.standard_normal((layer.batch, layer.channels_out, size, size), np.float32)
    on_device = [torch.from_numpy(value).to(device_of(request["provider"])) for value in (x, dy)]

    def own(x: Any, dy: Any) -> Any:
        settings = layer.stride, layer.pad, 1, layer.groups
        return grad.conv2d_weight(x, _weight_shape(layer), dy, *settings)  # type: ignore[no-untyped-call]

    truth = own(*(value.double() for value in on_device)).cpu().numpy()
    torch.backends.cudnn.allow_tf32 = True
    yardstick = {
        "seconds": _torch_seconds(lambda: own(*on_device)),
        "error": _error(own(*on_device).cpu().numpy(), truth),
    }
    forms = _raced(weight_forms(layer), {"x": x, "dy": dy}, truth, request)
    return _outcome({"torch": yardstick, **forms})


def _outcome(forms: Json) -> Json:
    """Holds if all forms ran and are right."""
    is_right = all(form["error"] <= MAX_ERROR for form in forms.values())
    return {"status": "held" if is_right else "not held", "forms": forms}


# -- forms -------------------------------------------------------------------------------------------


def reduction_forms(shape: tuple[int, ...]) -> Iterator[tuple[str, onnx.GraphProto]]:
    """The product's gradients of a bias [C] of [N, C, ...], and sums of rows by groups."""
    batch, channels, *spatial = shape
    addition = helper.make_node("Add", ["x", "w"], ["y"])
    for provider in WEIGHT_FORMS:
        bias = (channels, *(1 for _ in spatial))
        yield provider, gradient_graph(addition, shape, bias, provider)
    if not spatial:
        parts = math.gcd(batch, 64)
        middle = ("Reshape", batch // parts, parts, channels), ("ReduceSum", 1), ("ReduceSum", 0)
        yield "middle axis first", _chain(shape, *middle)
        leading = ("Reshape", parts, batch // parts * channels), ("ReduceSum", 0)
        rows = ("Reshape", batch // parts, channels), ("ReduceSum", 0)
        yield "leading axis first", _chain(shape, *leading, *rows)


def weight_forms(layer: Layer) -> Iterator[tuple[str, onnx.GraphProto]]:
    """All applicable forms of both providers: in their own parts, in one part, and by either product.

    With strides, also a candidate for CUDA, by blocks.
    """
    settings: Json = {"strides": [layer.stride] * 2, "pads": [layer.pad] * 4, "group": layer.groups}
    node = helper.make_node("Conv", ["x", "w"], ["y"], **settings)
    x = (layer.batch, layer.channels_in, layer.size, layer.size)
    seen: list[bytes] = []
    raced = {**WEIGHT_FORMS, "cuda": (*WEIGHT_FORMS["cuda"], _BY_BLOCKS)}
    for provider, forms in raced.items():
        for form in forms:
            if layer.groups > 1 and form.name == "by offset":
                continue  # It has no groups.
            whole = replace(form, parts=lambda g, c: 1)
            variants: list[tuple[str, WeightForm, bool | None]] = [("", form, None), (", one part", whole, None)]
            if provider == "cuda":
                variants += [(", by image", whole, True), (", whole batch", whole, False)]
            for suffix, chosen, by_image in variants:
                try:
                    with _forms_replaced(provider, chosen, by_image):
                        graph = gradient_graph(node, x, _weight_shape(layer), provider)
                except StopIteration:
                    continue  # The form does not apply to this layer.
                if (content := graph.SerializeToString()) not in seen:
                    seen.append(content)
                    yield f"{provider}: {form.name}{suffix}", graph


def _by_blocks(g: GradientContext, c: Convolution, x: str, dy: str) -> str:
    """dw = dy columns^T, summed over images, where SpaceToDepth leaves windows of stride 1.

    Each slice of its blocks is one of the columns' [stride^2 C, P], for square kernels and strides.
    """
    stride, kernel, size = c.windows.strides[0], c.windows.kernel[0], c.windows.output_size[0]
    across = -(-kernel // stride)
    begin = c.windows.pads_begin[0]
    end = stride * (size - 1 + across) - c.windows.input_size[0] - begin
    padded = g.emit("Pad", x, g.ints(0, 0, begin, begin, 0, 0, end, end))
    blocks = g.emit("SpaceToDepth", padded, blocksize=stride)
    slices = [
        g.emit("Slice", blocks, g.ints(row, column), g.ints(row + size, column + size), g.ints(2, 3))
        for row, column in itertools.product(range(across), repeat=2)
    ]
    read = (across * stride) ** 2 * c.channels_in
    columns = reshape(g, g.emit("Concat", *slices, axis=1), (c.batch, read, c.positions))
    rows = reshape(g, dy, (c.batch, c.channels_out, c.positions))
    products = product(g, rows, columns, (3, 3), transpose_right=True)
    summed = sum_over(g, products, (c.batch, c.channels_out, read), (0,))
    parts = reshape(g, summed, (c.channels_out, across, across, stride, stride, c.channels_in))
    gradient = g.emit("Transpose", parts, perm=[0, 5, 1, 3, 2, 4])
    gradient = reshape(g, gradient, (c.channels_out, c.channels_in, *[across * stride] * 2))
    return g.emit("Slice", gradient, g.ints(0, 0), g.ints(kernel, kernel), g.ints(2, 3))


_BY_BLOCKS = WeightForm(
    "by blocks", lambda c: c.is_strided and not c.is_pointwise and c.groups == 1, _by_blocks, lambda g, c: 1
)


@contextmanager
def _forms_replaced(provider: str, form: WeightForm, by_image: bool | None) -> Iterator[None]:
    """A context in which weight gradients have one form, optionally with a given product."""
    with ExitStack() as stack:
        forms = {**WEIGHT_FORMS, provider: (form,)}
        stack.enter_context(mock.patch.object(weight_gradient, "WEIGHT_FORMS", forms))
        if by_image is not None:
            stack.enter_context(mock.patch.object(weight_gradient._Sizes, "by_image", by_image))
        yield


def gradient_graph(node: onnx.NodeProto, x: tuple[int, ...], w: tuple[int, ...], provider: str) -> onnx.GraphProto:
    """The nodes that compute the gradient of w from x and dy, where `node` computes y from x and w."""
    filled = helper.make_node("ConstantOfShape", ["shape"], ["w"])
    graph = helper.make_graph(
        [filled, node],
        "forward",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [helper.make_tensor("shape", TensorProto.INT64, [len(w)], w)],
    )
    forward = helper.make_model(graph, ir_version=9, opset_imports=_OPSETS[:1])
    model = read_model(forward, loss="mse", provider=provider, trainable=["w"])
    planned = plan_step(model, "store-all")
    step = planned.step
    gradient_of = step.differentiated.gradient_of
    own = [node.name for node in step.differentiated.backward if node.origin == model.nodes[0].name]
    emitted = emit(planned, options=ReadOptions(provider=provider, has_barriers=False))
    kept = [node for node in emitted.model.graph.node if node.name in own]
    _rename(kept, {gradient_of["y"]: "dy", gradient_of["w"]: "result"})
    return _graph(kept, x, step.types["y"].shape, emitted.model.graph.initializer)


def _chain(shape: tuple[int, ...], *steps: tuple[Any, ...]) -> onnx.GraphProto:
    """Operators on dy one after the other, each with its integers."""
    nodes, constants, tensor = [], [], "dy"
    for index, (op, *numbers) in enumerate(steps):
        result = "result" if index == len(steps) - 1 else f"t{index}"
        constants.append(helper.make_tensor(f"c{index}", TensorProto.INT64, [len(numbers)], numbers))
        options: Json = {"keepdims": 0} if op == "ReduceSum" else {}
        nodes.append(helper.make_node(op, [tensor, f"c{index}"], [result], **options))
        tensor = result
    return _graph(nodes, shape, shape, constants)


def _graph(
    nodes: Sequence[onnx.NodeProto], x: tuple[int, ...], dy: tuple[int, ...], constants: Iterable[onnx.TensorProto]
) -> onnx.GraphProto:
    read = {name for node in nodes for name in node.input}
    inputs = {name: shape for name, shape in (("x", x), ("dy", dy)) if name in read}
    return helper.make_graph(
        nodes,
        "form",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("result", TensorProto.FLOAT, None)],
        [constant for constant in constants if constant.name in read],
    )


def _rename(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    for node in nodes:
        for tensors in (node.input, node.output):
            tensors[:] = [names.get(name, name) for name in tensors]


# -- times -------------------------------------------------------------------------------------------


def _raced(
    forms: Iterable[tuple[str, onnx.GraphProto]], feeds: Mapping[str, Array], truth: Array, request: Json
) -> Json:
    """Seconds and error of each form, or the reason of its failure."""
    found: Json = {}
    for name, graph in forms:
        try:
            found[name] = _timed(graph, feeds, truth, request)
        except Exception as error:
            found[name] = {"failed": error_line(error)[:200], "error": 1.0}
    return found


def _timed(graph: onnx.GraphProto, feeds: Mapping[str, Array], truth: Array, request: Json) -> Json:
    fed = {value.name: feeds[value.name] for value in graph.input}
    medians, error = {}, 0.0
    for copies in (1, 1 + COPIES):
        model = helper.make_model(repeated(graph, copies), ir_version=9, opset_imports=_OPSETS)
        step, binding = bound_step(session_on(model, request), fed, settings_of(request))
        for _ in range(2):
            step()
        error = max(error, *(_error(value, truth) for value in binding.copy_outputs_to_cpu()))
        medians[copies] = median([step() for _ in range(TIMED_RUNS)])
    return {"seconds": max(0.0, medians[1 + COPIES] - medians[1]) / COPIES, "error": error}


def repeated(graph: onnx.GraphProto, copies: int) -> onnx.GraphProto:
    """The graph with several copies of its nodes and outputs, which share inputs and constants."""
    shared = {entry.name for entry in (*graph.input, *graph.initializer)} | {""}
    nodes: list[onnx.NodeProto] = []
    for number in range(copies):
        own = [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node]
        tensors = {name for node in own for name in (*node.input, *node.output)} - shared
        _rename(own, {name: f"{name}_{number}" for name in tensors})
        for index, node in enumerate(own):
            node.name = f"{number}/{index}"
        nodes += own
    outputs = [
        helper.make_tensor_value_info(f"{value.name}_{number}", TensorProto.FLOAT, None)
        for value in graph.output
        for number in range(copies)
    ]
    return helper.make_graph(nodes, graph.name, graph.input, outputs, graph.initializer)


def _error(value: Array, truth: Array) -> float:
    difference = np.abs(value.reshape(truth.shape).astype(np.float64) - truth)
    return float(difference.max() / (np.abs(truth).max() or 1.0))


def _torch_seconds(run: Callable[[], Any]) -> float:
    """Seconds of a call, from several in a row."""
    import torch

    def finish() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for _ in range(2):
        run()
    finish()
    started = time.perf_counter()
    for _ in range(TIMED_RUNS):
        run()
    finish()
    return (time.perf_counter() - started) / TIMED_RUNS


def _weight_shape(layer: Layer) -> tuple[int, ...]:
    return layer.channels_out, layer.channels_in // layer.groups, layer.kernel, layer.kernel
