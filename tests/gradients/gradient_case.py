"""A gradient case: a few ONNX nodes, run through the whole pipeline and compared with torch float64.

The first operand of a case is the sum of a fed tensor and a parameter, every other one is a parameter itself,
so the gradient of each of the operator's inputs is that of a parameter.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from torch import Tensor

from onnxgc.api import emit, optimize, plan_step
from onnxgc.emission.training_graph import TrainingGraph
from onnxgc.model.core.ir import Array, TensorType, TrainableModel
from onnxgc.model.read import read_model
from onnxgc.runtime.ort import make_session
from onnxgc.tracing.step_graph import TrainingStep
from tests.torch_reference import reference_step

TOLERANCE = 1e-5
FED = "data"
CPU_ALONE = ("CPUExecutionProvider",)
# A gradient below this norm shows nothing.
MIN_NORM = 1e-4

Formula = Callable[[Mapping[str, Tensor]], Tensor]
Change = Callable[[TrainableModel], TrainableModel]


@dataclass(frozen=True, slots=True)
class Draw:
    """The distribution of an operand: normal around `mean`, or uniform in [0.5, 1.5)."""

    shape: tuple[int, ...]
    mean: float = 0.0
    is_positive: bool = False
    dtype: type = np.float32

    def value(self, *key: str) -> Array:
        generator = np.random.default_rng([zlib.crc32(part.encode()) for part in key])
        if self.is_positive:
            return np.asarray(generator.random(self.shape) + 0.5, self.dtype)
        return np.asarray(generator.standard_normal(self.shape) + self.mean, self.dtype)


def normal(*shape: int, mean: float = 0.0, dtype: type = np.float32) -> Draw:
    return Draw(shape, mean, dtype=dtype)


def positive(*shape: int) -> Draw:
    return Draw(shape, is_positive=True)


@dataclass(frozen=True)
class Case:
    """A gradient rule in one setting.

    `body` are nodes in ONNX text that compute `outputs` from `operands` (drawn; trained unless in `frozen`)
    and `constants`. `formula` computes the output in torch if `tests.torch_reference` lacks the operator.
    `change` edits the model between reading and planning. A case that is not `smooth` is at a kink, such as a
    tie of maxima, where finite differences are invalid. With a `compute_type`, float32 operands and constants
    are cast to it before `body`, and its outputs are cast back.
    """

    rule: str
    name: str
    body: str
    operands: Mapping[str, Draw]
    constants: Mapping[str, Array] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("y",)
    opset: int = 18
    loss: str = "mse"
    target: Array | None = None
    frozen: tuple[str, ...] = ()
    tolerance: float = TOLERANCE
    formula: Formula | None = None
    change: Change | None = None
    smooth: bool = True
    output_type: int = TensorProto.FLOAT
    compute_type: int = TensorProto.FLOAT
    solver: str | None = None

    def __str__(self) -> str:
        return f"{self.rule}: {self.name}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the weights whose gradients are compared."""
        return tuple(_weight(self, name) for name in self.operands if name not in self.frozen)

    def weights(self) -> dict[str, Array]:
        return {_weight(self, name): draw.value(str(self), name) for name, draw in self.operands.items()}

    def fed(self) -> dict[str, Array]:
        """The input, small and positive, so that few operands change their sign."""
        draw = next(iter(self.operands.values()))
        value = Draw(draw.shape, is_positive=True).value(str(self), FED)
        return {FED: np.asarray((value - 0.5) / 10, draw.dtype)}

    def model(self) -> onnx.ModelProto:
        fed = self.fed()[FED]
        first = next(iter(self.operands))
        nodes = [helper.make_node("Add", [FED, _weight(self, first)], [first]), *self._computing()]
        graph = helper.make_graph(
            nodes,
            "case",
            [helper.make_tensor_value_info(FED, helper.np_dtype_to_tensor_dtype(fed.dtype), fed.shape)],
            [helper.make_tensor_value_info(name, self.output_type, None) for name in self.outputs],
            [numpy_helper.from_array(value, name) for name, value in self.weights().items()]
            + [numpy_helper.from_array(value, name) for name, value in self.constants.items()],
        )
        versions = {"": self.opset} | {node.domain: 1 for node in nodes if node.domain}
        imports = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
        return helper.make_model(graph, ir_version=8, opset_imports=imports)

    def _computing(self) -> list[onnx.NodeProto]:
        nodes = _parsed(self.body)
        if self.compute_type == TensorProto.FLOAT:
            return nodes
        floats = [name for name, draw in self.operands.items() if draw.dtype is np.float32]
        floats += [name for name, value in self.constants.items() if value.dtype == np.float32]
        inner = {name: f"{name}__inner" for name in (*floats, *self.outputs)}
        for node in nodes:
            renamed = [inner.get(name, name) for name in node.input], [inner.get(n, n) for n in node.output]
            del node.input[:], node.output[:]
            node.input.extend(renamed[0])
            node.output.extend(renamed[1])
        before = [helper.make_node("Cast", [name], [inner[name]], to=self.compute_type) for name in floats]
        after = [helper.make_node("Cast", [inner[n]], [n], to=TensorProto.FLOAT) for n in self.outputs]
        return [*before, *nodes, *after]


_FIELDS = {field.name for field in fields(Case)}


def case(rule: str, name: str, body: str, **settings: Any) -> Case:
    """A case; settings that are no fields of `Case` are operands (draws, or shapes of normal ones) or constants."""
    given = {key: settings.pop(key) for key in [*settings] if key not in _FIELDS}
    tensors = {key: normal(*value) if isinstance(value, tuple) else value for key, value in given.items()}
    operands = {key: value for key, value in tensors.items() if isinstance(value, Draw)}
    constants = {key: _constant(value) for key, value in tensors.items() if key not in operands}
    return Case(rule, name, body, operands, constants, **settings)


def call(rule: str, name: str, attributes: str = "", **settings: Any) -> Case:
    """The case of y = rule<attributes>(operands and constants in their order)."""
    inputs = ", ".join(key for key in settings if key not in _FIELDS)
    return case(rule, name, f"y = {operator(rule, attributes)}({inputs})", **settings)


def operator(op: str, attributes: str) -> str:
    return f"{op}<{attributes}>" if attributes else op


def _constant(value: Any) -> Array:
    """Lists are of int64, numbers of float32."""
    return np.asarray(value, {list: np.int64, float: np.float32}.get(type(value)))


def _weight(case: Case, operand: str) -> str:
    return f"{operand}_weight" if operand == next(iter(case.operands)) else operand


def _parsed(body: str) -> list[onnx.NodeProto]:
    return list(parser.parse_graph(f"body () => () {{ {body} }}").node)


def backward_operators(entry: Case, views: tuple[str, ...] = ("Identity", "Reshape")) -> list[str]:
    """The operators that the rule of a case emits, without views."""
    step, _ = emitted(entry)
    sources = {node.name for node in step.model.nodes if node.op == entry.rule}
    chunks = [chunk for chunk in step.differentiated.chunks if chunk.source in sources]
    return [node.op for chunk in chunks for node in chunk.nodes if node.op not in views]


def as_runtime(call: str, constants: Mapping[str, Array], shape: tuple[int, ...], opset: int = 18) -> Formula:
    """A linear operator on x, by its matrix in ONNX Runtime.

    Where runtimes deviate from the specification, gradients follow the runtime's forward pass.
    """
    graph = helper.make_graph(
        _parsed(f"y = {call}"),
        "forward",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", opset)])

    def run(operands: Mapping[str, Tensor]) -> Tensor:
        session = make_session(model, providers=CPU_ALONE, threads=1)
        count = int(np.prod(shape))
        inputs = (np.zeros(shape, np.float32), *np.eye(count, dtype=np.float32).reshape(count, *shape))
        offset, *columns = (session.run(None, {"x": x})[0].astype(np.float64) for x in inputs)
        matrix = np.stack([(column - offset).ravel() for column in columns], axis=1)
        y = torch.from_numpy(matrix) @ operands["x"].reshape(-1)
        return y.reshape(offset.shape) + torch.from_numpy(offset)

    return run


def linear_case(rule: str, name: str, call: str, shape: tuple[int, ...], opset: int = 18, **constants: Any) -> Case:
    """y = exp(call), where the call is linear in x: the reference has its matrix in ONNX Runtime."""
    linear = as_runtime(call, {key: _constant(value) for key, value in constants.items()}, shape, opset)
    return case(
        rule,
        name,
        f"v = {call} y = Exp(v)",
        x=shape,
        opset=opset,
        formula=lambda operands: torch.exp(linear(operands)),
        **constants,
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    loss: float
    gradients: Mapping[str, Array]
    target: Array
    masks: Mapping[str, Array]


def emitted(case: Case, forms: str = "cpu") -> tuple[TrainingStep, TrainingGraph]:
    """The case's training step and graph from the pipeline, in the forms of a provider."""
    trainable, frozen = list(case.parameters), [_weight(case, name) for name in case.frozen]
    if case.change is None and forms == "cpu":
        result = optimize(
            case.model(), solver=case.solver, loss=case.loss, trainable=trainable, freeze=frozen, check=False
        )
        return result.planned.step, result.training_graph
    model = read_model(case.model(), loss=case.loss, trainable=trainable, freeze=frozen, provider=forms)
    planned = plan_step(model if case.change is None else case.change(model), case.solver or "acg")
    return planned.step, emit(planned)


def outcome(case: Case, threads: int = 1, providers: Sequence[str] = CPU_ALONE, forms: str = "cpu") -> Outcome:
    step, graph = emitted(case, forms)
    written = {info.name for info in graph.model.graph.value_info}
    mask_of = {
        node.outputs[0]: next(name for name in (node.outputs[1], f"{node.outputs[1]}__recompute") if name in written)
        for node in step.model.nodes
        if node.op == "Dropout"
    }
    proto = _with_outputs(graph.model, mask_of.values())
    session = make_session(proto, providers=providers, threads=threads)
    feeds, target = feeds_of(case, step)
    names = [step.model.loss, *graph.gradient_of.values(), *mask_of.values()]
    loss, *values = session.run(names, feeds)
    gradients = dict(zip(graph.gradient_of, values, strict=False))
    return Outcome(float(loss), gradients, target, dict(zip(mask_of, values[len(gradients) :], strict=True)))


def feeds_of(case: Case, step: TrainingStep) -> tuple[dict[str, Array], Array]:
    feeds, target = case.fed(), np.zeros(0)
    if step.model.targets:
        (name,) = step.model.targets
        target = _target(case, step.model.types[name])
        feeds[name] = target
    return feeds, target


def _with_outputs(model: onnx.ModelProto, names: Any) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    proto.CopyFrom(model)
    wanted = set(names)
    kept = [info for info in proto.graph.value_info if info.name not in wanted]
    proto.graph.output.extend(info for info in proto.graph.value_info if info.name in wanted)
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(kept)
    return proto


def _target(case: Case, kind: TensorType) -> Array:
    if case.target is not None:
        return case.target
    value = Draw(kind.shape, is_positive=case.loss == "bce").value(str(case), "target")
    shifted = value - np.float32(0.5) if case.loss == "bce" else value
    return np.asarray(shifted, helper.tensor_dtype_to_np_dtype(kind.dtype))


def truth(case: Case, target: Array, masks: Mapping[str, Array]) -> tuple[float, dict[str, Array]]:
    if case.formula is not None:
        return _by_formula(case, target)
    step = reference_step(
        case.model(), case.weights(), case.fed(), target, loss=case.loss, masks=masks, dtype=torch.float64
    )
    return step.loss, {name: step.gradients[name] for name in case.parameters}


def _by_formula(case: Case, target: Array) -> tuple[float, dict[str, Array]]:
    assert case.formula is not None
    assert case.loss == "mse"
    weights = {name: torch.from_numpy(value).double() for name, value in case.weights().items()}
    for name in case.parameters:
        weights[name].requires_grad_()
    operands = {name: weights[_weight(case, name)] for name in case.operands}
    first = next(iter(operands))
    operands[first] = operands[first] + torch.from_numpy(case.fed()[FED]).double()
    loss = torch.nn.functional.mse_loss(case.formula(operands), torch.from_numpy(target).double())
    gradients = torch.autograd.grad(loss, [weights[name] for name in case.parameters])
    found = {name: value.numpy() for name, value in zip(case.parameters, gradients, strict=True)}
    return float(loss.detach()), found


def errors(case: Case, threads: int = 1, providers: Sequence[str] = CPU_ALONE, forms: str = "cpu") -> dict[str, float]:
    """Relative error of the loss and, norm-wise, of each gradient; infinite for a missing one.

    Raises:
        ValueError: the true gradient of a parameter is too small to show anything.
    """
    return errors_of(case, outcome(case, threads, providers, forms))


def errors_of(case: Case, found: Outcome) -> dict[str, float]:
    loss, gradients = truth(case, found.target, found.masks)
    compared = {"loss": abs(found.loss - loss) / max(abs(loss), MIN_NORM)}
    for name, expected in gradients.items():
        if expected.size and np.linalg.norm(expected) < MIN_NORM:
            raise ValueError(f"{case}: the gradient of '{name}' is too small to show anything")
        compared[name] = _relative_error(found.gradients.get(name), expected)
    compared |= {name: np.inf for name in found.gradients if name not in gradients}
    return compared


def wrong(entry: Case, **how: Any) -> dict[str, float]:
    """The `errors` above the case's tolerance."""
    return {name: error for name, error in errors(entry, **how).items() if not error <= entry.tolerance}


def _relative_error(found: Array | None, expected: Array) -> float:
    if found is None or found.shape != expected.shape:
        return np.inf
    if not expected.size:
        return 0.0
    error = np.linalg.norm((found - expected).ravel()) / np.linalg.norm(expected.ravel())
    return float(error) if np.isfinite(error) else np.inf
