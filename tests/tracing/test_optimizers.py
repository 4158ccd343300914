"""Updates in the training graph: PyTorch's results, in place, after every reader of the old value."""

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from onnxgc.api.pipeline import optimize
from onnxgc.api.read_options import ReadOptions
from onnxgc.errors import BudgetError, OptimizerError
from onnxgc.model.read import read_model
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.schedule import Compute, Recompute
from onnxgc.runtime.ort import make_session
from onnxgc.tracing.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    Optimizer,
    ParameterGroup,
    RMSprop,
    UpdateRule,
)  # fmt: skip
from onnxgc.tracing.step_graph import trace
from tests.api.chains import chain
from tests.model.model_helpers import normal, text_model, with_weights
from tests.tracing.encoders import encoder

RATE = np.float32(1e-2)
VIEWS = ("Reshape", "Identity", "Squeeze", "Unsqueeze", "Flatten")
SETTINGS: Mapping[str, Optimizer] = {
    "momentum": SGD(momentum=0.9, weight_decay=0.01),
    "nesterov": SGD(momentum=0.9, nesterov=True, groups=(ParameterGroup("w1", 0.1, 0.2),)),
    "clipped": AdamW(clip_norm=0.05, groups=(ParameterGroup("v", 2.0, 0.0),)),
    # Some batches have gradients below the norm. The first matching group applies.
    "clipped at times": SGD(clip_norm=0.4, groups=(ParameterGroup("w0", 2.0), ParameterGroup("w*", 0.5))),
    "scaled": AdamW(weight_decay=0.3, groups=(ParameterGroup("v", 3.0),)),
    "adam": Adam(weight_decay=0.2, groups=(ParameterGroup("v", 2.0, 0.0),)),
    "rmsprop": RMSprop(eps=1e-2, weight_decay=0.1),
    "rmsprop with momentum": RMSprop(
        alpha=0.9, momentum=0.8, eps=1e-2, clip_norm=0.05, groups=(ParameterGroup("*", 0.1),)
    ),
    "adagrad": Adagrad(weight_decay=0.1, groups=(ParameterGroup("w1", 0.1, 0.2),)),
    "lion": Lion(weight_decay=0.1, groups=(ParameterGroup("v", 0.5, 0.0),)),
}


def tied() -> onnx.ModelProto:
    """One matrix in three places, through a view, and a normalisation in training mode."""
    model = text_model("""(float[64, 8] x) => (float[64, 8] y) {
        shape = Constant <value = int64[2] {8, 8}> ()  matrix = Reshape (w, shape)  a = MatMul (x, matrix)
        r = Relu (a)  n = BatchNormalization (r, s, b, m, v)  c = MatMul (n, matrix)
        t = Tanh (c)  y = MatMul (t, matrix) }""")
    sizes = {"s": 8, "b": 8, "m": 8, "v": 8, "w": 64}
    return with_weights(model, **{name: np.abs(normal(size, seed=ord(name))) / 3 for name, size in sizes.items()})


def names_of(model: onnx.ModelProto) -> dict[str, Any]:
    return json.loads({entry.key: entry.value for entry in model.metadata_props}["onnxgc.names"])


class Run:
    """A training file in a session with parameters and states bound in place."""

    def __init__(self, model: onnx.ModelProto, session: onnxruntime.InferenceSession | None = None) -> None:
        self.names = names_of(model)
        stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        shapes = {
            value.name: [size.dim_value for size in value.type.tensor_type.shape.dim] for value in model.graph.input
        }
        self.pairs = {**self.names["parameters"], **self.names["states"]}
        self.values = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(
                np.array(stored[name]) if name in stored else np.zeros(shapes[name], np.float32)
            )
            for name in self.pairs
        }
        self.session = session or make_session(model, threads=1)
        self.steps = 0

    def step(self, feeds: Mapping[str, Any]) -> float:
        self.steps += 1
        scalars = {"learning_rate": RATE, "step": np.int64(self.steps), "draw": np.int64(self.steps)}
        binding = self.session.io_binding()
        given = {**feeds, **{self.names[key]: value for key, value in scalars.items() if key in self.names}}
        for name, value in given.items():
            binding.bind_cpu_input(name, np.asarray(value))
        for old, new in self.pairs.items():
            binding.bind_ortvalue_input(old, self.values[old])
            binding.bind_ortvalue_output(new, self.values[old])
        binding.bind_output(self.names["loss"])
        self.session.run_with_iobinding(binding)
        return float(binding.get_outputs()[-1].numpy())

    def arrays(self) -> dict[str, Any]:
        return {name: np.array(self.values[name].numpy()) for name in self.pairs}


def batch(seed: int, classes: int = 4, width: int = 16, size: int = 64) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((size, width)).astype(np.float32)
    return {"x": x, "labels": draw.integers(0, classes, size)}


class LionOfThePaper:
    """Algorithm 2 of Chen et al., Symbolic Discovery of Optimization Algorithms."""

    def __init__(self, groups: list[dict[str, Any]], beta1: float, beta2: float) -> None:
        self.groups, self.beta1, self.beta2 = groups, beta1, beta2
        self.means = [0 * group["params"][0].detach() for group in groups]

    def step(self) -> None:
        for group, mean in zip(self.groups, self.means, strict=True):
            (value,) = group["params"]
            change = (self.beta1 * mean + (1 - self.beta1) * value.grad).sign() + group["weight_decay"] * value.detach()
            value.data -= group["lr"] * change
            mean.mul_(self.beta2).add_((1 - self.beta2) * value.grad)


def reference_of(optimizer: UpdateRule, groups: list[dict[str, Any]]) -> Any:
    import torch

    match optimizer:
        case SGD():
            return torch.optim.SGD(groups, momentum=optimizer.momentum, nesterov=optimizer.nesterov)
        case AdamW() | Adam():
            kind: Any = getattr(torch.optim, type(optimizer).__name__)
            return kind(groups, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps)
        case RMSprop():
            return torch.optim.RMSprop(groups, alpha=optimizer.alpha, eps=optimizer.eps, momentum=optimizer.momentum)
        case Adagrad():
            return torch.optim.Adagrad(groups, eps=optimizer.eps)
        case Lion():
            return LionOfThePaper(groups, optimizer.beta1, optimizer.beta2)


@pytest.mark.parametrize("name", SETTINGS)
def test_fifty_steps_equal_those_of_pytorch(name: str):
    torch = pytest.importorskip("torch")
    optimizer = SETTINGS[name]
    assert isinstance(optimizer, UpdateRule)
    source = chain(3, batch=64)
    run = Run(optimize(source, optimizer=optimizer, check=False).training_graph.model)
    graph = optimize(source, solver="store-all", check=False).training_graph
    gradients = make_session(graph.model, threads=1)
    values = {key: torch.nn.Parameter(torch.tensor(run.arrays()[key])) for key in graph.gradient_of}
    settings = []
    for key, value in values.items():
        groups = [group for group in optimizer.groups if fnmatchcase(key, group.pattern)]
        group = groups[0] if groups else ParameterGroup(key)
        decay = optimizer.weight_decay if group.weight_decay is None else group.weight_decay
        settings.append({"params": [value], "lr": float(RATE) * group.lr_scale, "weight_decay": decay})
    reference = reference_of(optimizer, settings)
    places = {key: value.data_ptr() for key, value in run.values.items()}
    norms: list[Any] = []
    for number in range(50):
        feeds = batch(number)
        now = {key: value.detach().numpy() for key, value in values.items()}
        found = gradients.run(list(graph.gradient_of.values()), {**feeds, **now})
        for value, gradient in zip(values.values(), found, strict=True):
            value.grad = torch.tensor(gradient)
        if optimizer.clip_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(list(values.values()), optimizer.clip_norm))
        reference.step()
        run.step(feeds)
    if name == "clipped at times":
        assert optimizer.clip_norm is not None
        assert min(norms) < optimizer.clip_norm < max(norms)
    assert {key: value.data_ptr() for key, value in run.values.items()} == places
    for key, value in values.items():
        wanted = value.detach().numpy()
        assert np.linalg.norm(run.arrays()[key] - wanted) <= 1e-6 * np.linalg.norm(wanted), key


def readers_without_a_path_to_the_update(model: onnx.ModelProto) -> list[str]:
    """Nodes that read a replaced tensor or a view of it, and on which its update does not depend."""
    names = names_of(model)
    producer = {name: node for node in model.graph.node for name in node.output}
    found = []
    for old, new in {**names["parameters"], **names["states"]}.items():
        ancestors: set[str] = set()
        pending = [producer[new]]
        while pending:
            node = pending.pop()
            if node.name not in ancestors:
                ancestors.add(node.name)
                pending.extend(producer[name] for name in node.input if name in producer)
        views = {old}
        for node in model.graph.node:
            if views.intersection(node.input):
                if node.name not in ancestors:
                    found.append(node.name)
                if node.op_type in VIEWS and node.input[0] in views:
                    views.update(node.output)
    return found


SOURCES = {"chain": chain(4, batch=64), "tied": tied(), "encoder": encoder(1)}


@pytest.mark.parametrize(
    "source, plan, optimizer",
    [
        ("chain", {"budget": "min", "step_limit": 1}, SGD(momentum=0.9, weight_decay=0.1)),
        ("tied", {"solver": "peak"}, AdamW()),
        ("tied", {"solver": "store-all"}, AdamW(clip_norm=1.0)),
        ("encoder", {"solver": "peak"}, SGD(momentum=0.9, weight_decay=0.1)),
    ],
)
def test_an_update_waits_for_all_readers(source: str, plan: dict[str, Any], optimizer: Optimizer):
    result = optimize(SOURCES[source], optimizer=optimizer, check=False, **plan)
    model = result.training_graph.model
    onnx.checker.check_model(model, full_check=True)
    assert readers_without_a_path_to_the_update(model) == []


@pytest.mark.parametrize("source", ["tied", "encoder"])
def test_a_traced_step_updates_after_all_readers(source: str):
    """Without a plan that changes the order, updates need no further barriers."""
    step = trace(read_model(SOURCES[source]), seed="loss_scale", optimizer=SGD()).graph
    viewed = {old: old for old in step.replaced.values()}
    replaced: set[str] = set()
    for operator in (*step.forward, *(operator for chunk in step.chunks for operator in chunk)):
        read = {viewed[name] for name in operator.inputs if name in viewed}
        assert replaced.isdisjoint(read), operator.name
        if operator.is_view and operator.inputs[0] in viewed:
            viewed[operator.outputs[0]] = viewed[operator.inputs[0]]
        replaced.update(step.replaced[name] for name in operator.outputs if name in step.replaced)
    assert len(replaced) == len(step.replaced) > 1
    assert len(viewed) > len(replaced)


def stock_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9, weight_decay=0.1), AdamW()])
def test_a_session_with_default_settings_trains_equally(optimizer: Optimizer):
    model = optimize(tied(), optimizer=optimizer, check=False).training_graph.model
    runs = [Run(model), Run(model, stock_session(model))]
    for number in range(5):
        feeds = batch(number, classes=8, width=8)
        one, other = (run.step(feeds) for run in runs)
        assert one == pytest.approx(other, rel=1e-5)
    for key, value in runs[0].arrays().items():
        np.testing.assert_allclose(runs[1].arrays()[key], value, rtol=1e-3, atol=1e-6, err_msg=key)


def test_updates_free_their_gradients():
    """With large weights, updates in the graph reduce the baseline's peak."""
    source = chain(6, batch=4, width=64)
    plain = optimize(source, check=False).report["regular"]["simulated_peak_bytes"]
    report = optimize(source, optimizer="sgd", check=False).report
    assert report["optimizer"] == {"name": "sgd", "state_bytes": 0}
    assert report["regular"]["simulated_peak_bytes"] < plain / 2


def test_the_state_is_part_of_peaks_and_budgets():
    source = chain(6)
    without = optimize(source, optimizer="sgd", check=False).report
    report = optimize(source, optimizer=SGD(momentum=0.9), budget=0.8, step_limit=1, check=False).report
    state = 4 * (6 * 16 * 16 + 16 * 4)
    assert report["optimizer"]["state_bytes"] == state
    regular = report["regular"]["simulated_peak_bytes"]
    assert regular >= without["regular"]["simulated_peak_bytes"] + state
    assert report["budget"]["bytes"] == int(0.8 * regular)
    assert report["planned"]["simulated_peak_bytes"] <= int(0.8 * regular)
    with pytest.raises(BudgetError, match="the optimizer's state alone takes"):
        optimize(source, optimizer="adamw", budget=2 * state, check=False)


def test_a_late_recomputation_that_reads_a_parameter_delays_its_update():
    result = optimize(chain(2, batch=64), optimizer="sgd", solver="store-all", check=False)
    runs = [step for step in result.planned.schedule.instructions if isinstance(step, Compute | Recompute)]
    names = [step.operator.name for step in runs if not step.operator.is_view]
    # The first product is recomputed at the very end, with a reader of its result.
    late = [name for name in names if name.startswith("Tanh_h0/grad")]
    plan = CheckpointPlan((), sequence=(*names, names[0], *late))
    replanned = optimize(chain(2, batch=64), optimizer="sgd", plan=plan, check=False)
    assert readers_without_a_path_to_the_update(replanned.training_graph.model) == []
    place = {
        step.operator.name: number
        for number, step in enumerate(replanned.planned.schedule.instructions)
        if isinstance(step, Compute | Recompute)
    }
    assert place["w0/update/new"] > place[f"{names[0]}__recompute"]


def test_the_file_contains_the_optimizer():
    optimizer = AdamW(weight_decay=0.2, groups=(ParameterGroup("w*", 0.5),))
    source = chain(2)
    source.graph.node[0].name = "w1/update/new"
    model = optimize(source, optimizer=optimizer, check=False).training_graph.model
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    assert {"w0/update/Sqrt", "w0/update/exp_avg_new", "w1/update/new_2"} <= set(names)
    assert not any(name.count("w0") > 1 for name in names if "/update/" in name)
    text = {entry.key: entry.value for entry in model.metadata_props}["onnxgc.options"]
    assert ReadOptions.from_json(text).optimizer == optimizer
    roles = {entry.value for node in model.graph.node for entry in node.metadata_props if "role" in entry.key}
    assert roles == {"forward", "backward", "update", "recompute"}
    outputs = [value.name for value in model.graph.output]
    assert outputs == ["loss", *(f"{name}_new" for name in ("w0", "w1", "v")), *outputs[4:]]
    assert outputs[4:6] == ["w0_exp_avg_new", "w0_exp_avg_sq_new"]


@pytest.mark.parametrize(
    "given, words",
    [
        ("adan", "choose one of none, sgd, adamw, adam"),
        (SGD(nesterov=True), "needs a momentum"),
        (AdamW(beta1=1.0), "beta1 is 1.0; it must be a number of at least 0 and below 1"),
        (SGD(weight_decay=float("nan")), "weight_decay is nan"),
        (SGD(groups=(ParameterGroup("head"),)), "'head' matches none of the 3 parameters"),
    ],
)
def test_invalid_settings_raise(given: Any, words: str):
    with pytest.raises(OptimizerError, match=words):
        optimize(chain(2), optimizer=given, check=False)
