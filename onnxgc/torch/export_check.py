"""Whether an exported file computes and trains as the module that it was made from."""

from __future__ import annotations

import ast
import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from onnxgc.errors import ExportError, OnnxgcError
from onnxgc.model.core.constant_folding import RANDOM
from onnxgc.torch.export_forms import WithoutChoices
from onnxgc.torch.first_mismatch import place_of
from onnxgc.torch.onnx_module import OnnxModule, from_onnx
from onnxgc.torch.trace_advice import advice_on

# Of what the file rounds itself (constants, attributes) and what becomes of it, in units of rounding.
_UNITS = 32.0
_MOVES = 16.0
# Of the largest norm of a kind: in float64 a gradient that vanishes is as small as that.
_VANISHING_UNITS = 1e3
# What differs in this many draws of inputs and factors is no kink.
_CONFIRMED = 2
_MAX_DRAWS = 4
# Values of a draw lie this share nearer to zero at most, so that what is a probability or positive stays so.
_SPREAD = 0.1
# A number with no more bits than that is the one that was meant: 1, 0.5, -2.
_EXACT_BITS = 12
_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_TYPES = {onnx.TensorProto.FLOAT16: torch.float16, onnx.TensorProto.BFLOAT16: torch.bfloat16}
# Counts the steps of a normalisation; only an average over all steps reads it.
_COUNTER = "num_batches_tracked"


# A kind (output, statistic, gradient) and a name or number.
Key = tuple[str, str]
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Exported:
    """A file, the module as it was captured, and the same in the operators that were converted."""

    proto: onnx.ModelProto
    captured: ExportedProgram
    converted: ExportedProgram


@contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Modes, buffers and random numbers afterwards are those from before, also after an error."""
    modes = [(part, part.training) for part in module.modules()]
    buffers = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    devices = sorted({parameter.device.index for parameter in module.parameters() if parameter.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for part, mode in modes:
            part.training = mode
        with torch.no_grad():
            for part, name, buffer, before in buffers:
                part._buffers[name] = buffer
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def check_equal(
    exported: Exported, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Compares what a file computes, and its gradients, with the module in training mode.

    Both run in float64, on the given inputs and on others like them. What differs by more than the file's
    own rounding of constants, inputs and weights makes of it, in two draws, is a fault. Where a module that
    rounds by itself differs in float64, its own types decide.

    Raises:
        ExportError: they differ; the line names the output, the statistic or the parameter, and the place.
    """
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    try:
        network = _read(exported, inputs)
    except OnnxgcError as error:
        raise ExportError(_unreadable(exported, error)) from error
    _check_roles(network, module)
    _tell_of_changed_buffers(network, module, args, kwargs)
    random = sorted({node.op_type for node in exported.proto.graph.node} & (RANDOM - {"Dropout"}))
    if random:
        warnings.warn(
            f"the file draws random numbers in evaluation too ({', '.join(random)}), so that it is not "
            "compared with the module",
            stacklevel=3,
        )
        return
    call = (args, dict(kwargs))
    sides, rounds = _in_double(network, module, call)
    fault = None if sides is None else _fault(sides, call)
    if sides is None or (fault is not None and rounds):
        sides = Sides(_read(exported, inputs), module, None, _coarsest(exported, module))
        fault = _fault(sides, call)
    if fault is not None:
        raise ExportError(f"{fault.text}; {place_of(exported.converted, sides, fault)}")


def _unreadable(exported: Exported, error: OnnxgcError) -> str:
    """The error, with the submodule and the operator of the node that it names, and what to do."""
    text = str(error)
    named = [node for node in exported.proto.graph.node if node.name and f"'{node.name}'" in text]
    told = {e.key: e.value for node in named[:1] for e in node.metadata_props}
    scopes = ast.literal_eval(told.get(_SCOPES, "[]"))
    classes = ast.literal_eval(told.get(_CLASSES, "[]"))
    operator = classes[-1] if classes else ""
    advice = advice_on(operator) or advice_on(text)
    if not advice:
        return f"the exported file cannot be read back: {text}; check=False writes it"
    where = f"'{scopes[-2]}'" if len(scopes) > 1 and scopes[-2] else "forward"
    return f"the exported file cannot be read back: {operator or text} in {where}: {advice}"


@dataclass(frozen=True, slots=True)
class Sides:
    """What is compared, in which type (None: as it is), and the rounding of the file's types."""

    network: OnnxModule
    module: nn.Module
    dtype: torch.dtype | None
    unit: float

    @property
    def exactness(self) -> float:
        """The rounding of the type that both run in."""
        return self.unit if self.dtype is None else torch.finfo(self.dtype).eps

    def step(self, side: nn.Module, call: _Arguments, seed: int, training: bool) -> dict[Key, Tensor]:
        """Outputs, and of training running statistics and gradients, without random choices."""
        args, kwargs = call
        if not training or side is self.network:
            side.train(training)
        with (
            left_as_it_was(side),
            _default_type(self.dtype),
            torch.enable_grad(),
            WithoutChoices() if training else nullcontext(),
        ):
            if side is self.network:
                args, kwargs = tuple(_tensors(call)), {}
            outputs = _tensors(side(*args, **kwargs))
            found = {("output", str(place)): output.detach() for place, output in enumerate(outputs)}
            if not training:
                return found
            parameters, buffers = self._named(side)
            found |= {("statistic", name): buffer.detach().clone() for name, buffer in buffers.items()}
            gradients = gradients_of(outputs, list(parameters.values()), seed)
            return found | {
                ("gradient", name): gradient
                for name, gradient in zip(parameters, gradients, strict=True)
                if gradient is not None
            }

    def _named(self, side: nn.Module) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        if side is self.module:
            trained = {name: p for name, p in side.named_parameters() if p.requires_grad}
            return trained, dict(side.named_buffers())
        names = self.network.onnx_names()
        buffers = {names[key]: value for key, value in self.network.named_buffers() if key in names}
        return _trained(self.network), buffers

    def fault(self, key: Key, call: _Arguments, seed: int, training: bool) -> Fault:
        kind, name = key
        if kind == "output":
            mode = "training mode" if training else "evaluation"
            text = (
                f"output '{self.network.output_names[int(name)]}' of the file is not the module's in {mode}"
            )
        elif kind == "statistic":
            text = f"the running statistic '{name}' is not updated as in the module"
        else:
            text = f"the gradient of the parameter '{name}' is not the module's"
        return Fault(key, text, call, seed, training)

    @contextmanager
    def rounded(self, seed: int) -> Iterator[None]:
        """The file with weights and constants moved by one unit of rounding."""
        generator = torch.Generator().manual_seed(seed)
        tensors = [*self.network.parameters(), *self.network.buffers()]
        before = [tensor.detach().clone() for tensor in tensors]
        try:
            with torch.no_grad():
                for tensor in tensors:
                    tensor.copy_(moved(tensor, self.unit, generator))
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, before, strict=True):
                    tensor.copy_(value)


@dataclass(frozen=True, slots=True)
class Fault:
    """What differs: an output, a statistic or a gradient, by name, and the draw in which it does."""

    key: Key
    text: str
    call: _Arguments
    seed: int
    training: bool


def moved(tensor: Tensor, unit: float, generator: torch.Generator) -> Tensor:
    """A tensor whose numbers are off by a unit of rounding, but for those that are exact in any type."""
    if not tensor.is_floating_point():
        return tensor.detach()
    signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
    mantissa, _ = torch.frexp(tensor.detach().double())
    is_exact = (mantissa * 2**_EXACT_BITS).frac() == 0
    step = torch.where(is_exact | ~tensor.isfinite(), 0.0, unit * tensor.detach().double().abs())
    return (tensor.detach() + (signs * step).to(tensor.dtype)).detach()


def gradients_of(outputs: list[Tensor], of: list[Tensor], seed: int) -> list[Tensor | None]:
    """Of all outputs with random factors, where there are any."""
    generator = torch.Generator().manual_seed(seed)
    factors = [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]
    total = [
        (output.to(torch.promote_types(output.dtype, torch.float32)) * factor.to(output.device)).sum()
        for output, factor in zip(outputs, factors, strict=True)
        if output.requires_grad
    ]
    if not total or not of:
        return [None] * len(of)
    return list(torch.autograd.grad(sum(total[1:], total[0]), of, allow_unused=True))


def _fault(sides: Sides, call: _Arguments) -> Fault | None:
    return _fault_in(sides, call, training=True) or _fault_in(sides, call, training=False)


def _fault_in(sides: Sides, call: _Arguments, *, training: bool) -> Fault | None:
    """What differs in two draws, of which each that differs asks for one more."""
    found: list[Fault] = []
    for seed in range(_MAX_DRAWS):
        fault = _fault_of_draw(sides, call, seed, training)
        if fault is not None:
            found.append(fault)
        if len(found) == _CONFIRMED:
            return found[0]
        if seed + 1 >= _CONFIRMED and not found:
            return None
    return None


def _fault_of_draw(sides: Sides, call: _Arguments, seed: int, training: bool) -> Fault | None:
    given = _drawn(call, 0, sides.dtype)
    call = _drawn(call, seed, sides.dtype) if seed else given
    try:
        expected = sides.step(sides.module, call, seed, training)
    except Exception:
        if not seed:
            raise
        # Some modules check values, such as lengths in falling order; then the factors alone are others.
        call = given
        expected = sides.step(sides.module, call, seed, training)
    found = sides.step(sides.network, call, seed, training)
    counts = [sum(kind == "output" for kind, _ in each) for each in (found, expected)]
    if counts[0] != counts[1]:
        if not training:
            # It returns something else in evaluation, such as no auxiliary outputs; training was compared.
            return None
        raise ExportError(f"the file has {counts[0]} outputs, and the module returns {counts[1]} tensors")
    largest = {kind: max(map(_norm, _of_kind(expected, kind)), default=0.0) for kind, _ in expected}
    suspects: dict[Key, float] = {}
    for key in [*found, *(key for key in expected if key not in found)]:
        kind = key[0]
        if kind != "gradient" and (key not in expected or key not in found):
            continue
        # What one side gives no gradient has one of zeros.
        one, other = _both(found.get(key), expected.get(key))
        if one.shape != other.shape:
            return sides.fault(key, call, seed, training)
        least = _VANISHING_UNITS * sides.exactness * largest.get(kind, 0.0)
        off = _distance(one, other)
        if not off <= max(_UNITS * sides.unit * _norm(other), least):
            suspects[key] = off
    if not suspects:
        return None
    generator = torch.Generator().manual_seed(seed)
    near = pytree.tree_map(lambda x: moved(x, sides.unit, generator) if isinstance(x, Tensor) else x, call)
    with sides.rounded(seed):
        rounded = sides.step(sides.network, near, seed, training)
    for key, off in suspects.items():
        moves = _distance(rounded[key], found[key]) if key in found and key in rounded else 0.0
        if not off <= _MOVES * moves:
            return sides.fault(key, call, seed, training)
    return None


def _read(exported: Exported, inputs: list[Tensor]) -> OnnxModule:
    names = [value.name for value in exported.proto.graph.input]
    shapes = {name: tuple(value.shape) for name, value in zip(names, inputs, strict=True)}
    network = from_onnx(exported.proto, input_shapes=shapes)
    return network.to(inputs[0].device if inputs else "cpu")


def _check_roles(network: OnnxModule, module: nn.Module) -> None:
    """No constant of the file is taken for a parameter; a parameter taken for one has no gradient."""
    theirs = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in sorted(set(_trained(network)) - theirs):
        raise ExportError(f"the constant '{name}' of the file is taken for a parameter; make it a buffer")


def _both(one: Tensor | None, other: Tensor | None) -> tuple[Tensor, Tensor]:
    """Two tensors, of which an absent one is zeros like the other."""
    if one is None:
        assert other is not None, "one side has the tensor"
        return torch.zeros_like(other), other
    return one, torch.zeros_like(one) if other is None else other


def _drawn(call: _Arguments, seed: int, dtype: torch.dtype | None) -> _Arguments:
    """The given arguments for the first draw; then samples in another order, and numbers nearer to zero."""
    generator = torch.Generator().manual_seed(seed)
    batch = next((leaf.shape[0] for leaf in _tensors(call) if leaf.ndim), 0)
    order = torch.randperm(batch, generator=generator)

    def drawn(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if seed and leaf.ndim and leaf.shape[0] == batch:
            leaf = leaf[order.to(leaf.device)]
        if not leaf.is_floating_point():
            return leaf
        if seed:
            shares = 1.0 - _SPREAD * torch.rand(leaf.shape, generator=generator)
            leaf = leaf * shares.to(leaf.device, leaf.dtype)
        return leaf if dtype is None else leaf.to(dtype)

    args, kwargs = pytree.tree_map(drawn, call)
    return args, kwargs


class _Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether anything is computed in another floating type than float64."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
                self.found = True
        return result


@contextmanager
def _default_type(dtype: torch.dtype | None) -> Iterator[None]:
    """Tensors that forward makes have the type too, unless it says another."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype or before)
        yield
    finally:
        torch.set_default_dtype(before)


def _in_double(network: OnnxModule, module: nn.Module, call: _Arguments) -> tuple[Sides | None, bool]:
    """Both in float64, if they can be, and whether a part of the module rounds to a type of its own."""
    types = {p.dtype for p in module.parameters() if p.is_floating_point()}
    unit = max(map(_eps, types), default=_eps(torch.float32)) / 2
    try:
        double = copy.deepcopy(module).double()
        for part in double.modules():
            if isinstance(part, nn.RMSNorm) and part.eps is None:
                # Its default is the rounding of the type that it runs in.
                part.eps = max(map(_eps, types), default=_eps(torch.float32))
            for name, value in vars(part).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    vars(part)[name] = value.double()
        sides = Sides(network.double(), double, torch.float64, unit)
        with _Rounding() as rounding:  # type: ignore[no-untyped-call]
            sides.step(double, _drawn(call, 0, torch.float64), 0, True)
        sides.step(sides.network, _drawn(call, 0, torch.float64), 0, True)
    except Exception:  # Copying and running in another type fail in as many ways as there are modules.
        return None, True
    return sides, rounding.found


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _coarsest(exported: Exported, module: nn.Module) -> float:
    """The rounding of the coarsest type in which the file computes."""
    types = {p.dtype for p in module.parameters() if p.is_floating_point()}
    for node in exported.proto.graph.node:
        types |= {
            _TYPES[a.i] for a in node.attribute if node.op_type == "Cast" and a.name == "to" and a.i in _TYPES
        }
    return max(map(_eps, types), default=_eps(torch.float32))


def _tell_of_changed_buffers(
    network: OnnxModule, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    updated = set(network.onnx_names().values())
    with left_as_it_was(module), torch.enable_grad(), WithoutChoices():
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        module(*args, **kwargs)
        for name, buffer in module.named_buffers():
            if name not in updated and not name.endswith(_COUNTER) and not torch.equal(buffer, before[name]):
                warnings.warn(
                    f"forward changes the buffer '{name}', which the file keeps as it is", stacklevel=4
                )


def _trained(network: OnnxModule) -> dict[str, Tensor]:
    names = network.onnx_names()
    return {names[key]: value for key, value in network.named_parameters() if value.requires_grad}


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _of_kind(values: Mapping[Key, Tensor], kind: str) -> list[Tensor]:
    return [value for (found, _), value in values.items() if found == kind]


def _norm(tensor: Tensor) -> float:
    tensor = tensor.double()
    return float(torch.where(tensor.isfinite(), tensor, 0.0).norm())


def _distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference; equal infinities differ not, and what is no number is itself."""
    one, other = one.double(), other.to(one.device).double()
    is_same = (one == other) | (one.isnan() & other.isnan())
    apart = float(torch.where(is_same, 0.0, one - other).norm())
    return math.inf if math.isnan(apart) else apart
