"""Comparison of an exported file with its module: outputs, running statistics and gradients."""

import ast
import copy
import warnings
from collections import defaultdict
from collections.abc import Iterable
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
from onnxgc.torch.exportable_functions import WithoutRandomness
from onnxgc.torch.first_mismatch import locate
from onnxgc.torch.module_pair import (
    Arguments,
    Discrepancy,
    Key,
    ModulePair,
    batch_of,
    distance,
    norm,
    perturb,
    preserve_state,
    tensor_leaves,
    trained_parameters,
)
from onnxgc.torch.onnx_module import OnnxModule, from_onnx
from onnxgc.torch.trace_errors import advice_on

# Tolerated relative distance, in the file's units of rounding.
_MAX_UNITS = 32.0
# Tolerated distance, as a multiple of the effect of perturbing the file by one unit of rounding.
_MAX_EFFECTS = 16.0
# Tolerated distance, in units of rounding of the largest norm of a kind: vanishing gradients are that small.
_MAX_VANISHING_UNITS = 1e3
# A discrepancy in one draw may be a kink of the function; in this many draws it is confirmed.
_CONFIRMATIONS = 2
_MAX_DRAWS = 4
# Draws scale inputs towards zero by at most this share: positive numbers and probabilities stay valid.
_MAX_SHRINKAGE = 0.1
_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_TYPES = {onnx.TensorProto.FLOAT16: torch.float16, onnx.TensorProto.BFLOAT16: torch.bfloat16}
# The step counter of a normalisation, which only an average over all steps reads.
_COUNTER = "num_batches_tracked"


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A file, and its captured module in the operators that the exporter converted."""

    proto: onnx.ModelProto
    converted: ExportedProgram


def check_equal(exported: ExportedModel, module: nn.Module, call: Arguments) -> None:
    """Compares outputs, running statistics and gradients of a file with those of the module.

    Both run in float64, on the given inputs and on perturbed ones. A difference counts if it exceeds the
    effect of the file's own rounding of constants, inputs and weights, in two draws. If the module casts
    internally and differs in float64, it is compared again in its own types.

    Raises:
        ExportError: they differ; the message names the output, statistic or parameter, and the operator.
    """
    inputs = tensor_leaves(call)
    try:
        network = _read(exported, inputs)
    except OnnxgcError as error:
        raise ExportError(_unreadable(exported, error)) from error
    _check_roles(network, module)
    _warn_of_changed_buffers(network, module, call)
    random = sorted({node.op_type for node in exported.proto.graph.node} & (RANDOM - {"Dropout"}))
    if random:
        warnings.warn(
            f"the file draws random numbers in evaluation, too ({', '.join(random)}); it is not "
            "compared with the module",
            stacklevel=3,
        )
        return
    pair, rounds = _in_double(network, module, call)
    discrepancy = None if pair is None else _discrepancy(pair, call)
    if pair is None or (discrepancy is not None and rounds):
        pair = ModulePair(_read(exported, inputs), module, None, _coarsest(exported, module))
        discrepancy = _discrepancy(pair, call)
    if discrepancy is not None:
        raise ExportError(f"{discrepancy.text}; {locate(exported.converted, pair, discrepancy)}")


def _unreadable(exported: ExportedModel, error: OnnxgcError) -> str:
    """The error, with the submodule and operator of its node, and a remedy."""
    text = str(error)
    nodes = (node for node in exported.proto.graph.node if node.name and f"'{node.name}'" in text)
    node = next(nodes, onnx.NodeProto())
    metadata = {entry.key: entry.value for entry in node.metadata_props}
    scopes = ast.literal_eval(metadata.get(_SCOPES, "[]"))
    classes = ast.literal_eval(metadata.get(_CLASSES, "[]"))
    operator = classes[-1] if classes else ""
    advice = advice_on(operator) or advice_on(text)
    if not advice:
        return f"the exported file cannot be read back: {text}; check=False writes it"
    scope = f"'{scopes[-2]}'" if len(scopes) > 1 and scopes[-2] else "forward"
    return f"the exported file cannot be read back: {operator or text} in {scope}: {advice}"


def _discrepancy(pair: ModulePair, call: Arguments) -> Discrepancy | None:
    return _discrepancy_in_mode(pair, call, training=True) or _discrepancy_in_mode(pair, call, training=False)


def _discrepancy_in_mode(pair: ModulePair, call: Arguments, *, training: bool) -> Discrepancy | None:
    """The first discrepancy that a second draw confirms."""
    discrepancies: list[Discrepancy] = []
    for seed in range(_MAX_DRAWS):
        discrepancy = _discrepancy_in_draw(pair, call, seed, training)
        if discrepancy is not None:
            discrepancies.append(discrepancy)
        if len(discrepancies) == _CONFIRMATIONS:
            return discrepancies[0]
        if seed + 1 >= _CONFIRMATIONS and not discrepancies:
            return None
    return None


def _discrepancy_in_draw(pair: ModulePair, call: Arguments, seed: int, training: bool) -> Discrepancy | None:
    given = _drawn(call, 0, pair.dtype)
    call = _drawn(call, seed, pair.dtype) if seed else given
    try:
        expected = pair.step(pair.module, call, seed, training)
    except Exception:
        if not seed:
            raise
        # Some modules check values, such as descending lengths; then only the gradients' weights differ.
        call = given
        expected = pair.step(pair.module, call, seed, training)
    found = pair.step(pair.network, call, seed, training)
    counts = [sum(kind == "output" for kind, _ in each) for each in (found, expected)]
    if counts[0] != counts[1]:
        if not training:
            # Other outputs in evaluation, such as no auxiliary ones, are permitted.
            return None
        raise ExportError(f"the file has {counts[0]} outputs, and the module returns {counts[1]} tensors")
    largest: defaultdict[str, float] = defaultdict(float)
    for (kind, _), value in expected.items():
        largest[kind] = max(largest[kind], norm(value))
    suspects: dict[Key, float] = {}
    for key in {**found, **expected}:
        kind = key[0]
        if kind != "gradient" and (key not in expected or key not in found):
            continue
        # An absent gradient equals zeros.
        absent = torch.zeros_like(found[key] if key in found else expected[key])
        one, other = found.get(key, absent), expected.get(key, absent)
        if one.shape != other.shape:
            return pair.discrepancy(key, call, seed, training)
        difference = distance(one, other)
        vanishing = _MAX_VANISHING_UNITS * pair.rounding * largest[kind]
        if not difference <= max(_MAX_UNITS * pair.unit * norm(other), vanishing):
            suspects[key] = difference
    if not suspects:
        return None
    generator = torch.Generator().manual_seed(seed)
    near = pytree.tree_map(lambda x: perturb(x, pair.unit, generator) if isinstance(x, Tensor) else x, call)
    with pair.rounded(seed):
        rounded = pair.step(pair.network, near, seed, training)
    for key, difference in suspects.items():
        effect = distance(rounded[key], found[key]) if key in found and key in rounded else 0.0
        if not difference <= _MAX_EFFECTS * effect:
            return pair.discrepancy(key, call, seed, training)
    return None


def _read(exported: ExportedModel, inputs: list[Tensor]) -> OnnxModule:
    names = [value.name for value in exported.proto.graph.input]
    shapes = {name: tuple(value.shape) for name, value in zip(names, inputs, strict=True)}
    network = from_onnx(exported.proto, input_shapes=shapes)
    return network.to(inputs[0].device if inputs else "cpu")


def _check_roles(network: OnnxModule, module: nn.Module) -> None:
    """Rejects a constant in the role of a parameter; the reverse shows as an absent gradient."""
    expected = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in sorted(set(trained_parameters(network)) - expected):
        raise ExportError(f"the file has the constant '{name}' in the role of a parameter; make it a buffer")


def _drawn(call: Arguments, seed: int, dtype: torch.dtype | None) -> Arguments:
    """The given arguments for seed 0; otherwise with samples permuted and numbers scaled towards zero."""
    generator = torch.Generator().manual_seed(seed)
    batch = batch_of(call)
    order = torch.randperm(batch or 0, generator=generator)

    def drawn(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if seed and leaf.ndim and leaf.shape[0] == batch:
            leaf = leaf[order.to(leaf.device)]
        if not leaf.is_floating_point():
            return leaf
        if seed:
            shares = 1.0 - _MAX_SHRINKAGE * torch.rand(leaf.shape, generator=generator)
            leaf = leaf * shares.to(leaf.device, leaf.dtype)
        return leaf if dtype is None else leaf.to(dtype)

    args, kwargs = pytree.tree_map(drawn, call)
    return args, kwargs


class _RoundingTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records whether an operator computes in a floating type other than float64."""

    is_rounding = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tensor_leaves(result)
        self.is_rounding |= any(leaf.is_floating_point() and leaf.dtype != torch.float64 for leaf in leaves)
        return result


def _in_double(network: OnnxModule, module: nn.Module, call: Arguments) -> tuple[ModulePair | None, bool]:
    """The pair in float64, or None if it cannot run so, and whether the module rounds to other types."""
    eps = _eps_of(_float_types(module))
    try:
        double = copy.deepcopy(module).double()
        for part in double.modules():
            if isinstance(part, nn.RMSNorm) and part.eps is None:
                # The default depends on the type that it runs in.
                part.eps = eps
            for name, value in vars(part).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    vars(part)[name] = value.double()
        pair = ModulePair(network.double(), double, torch.float64, eps / 2)
        with _RoundingTracker() as tracker:  # type: ignore[no-untyped-call]
            pair.step(double, _drawn(call, 0, torch.float64), 0, True)
        pair.step(pair.network, _drawn(call, 0, torch.float64), 0, True)
    except Exception:  # Copying and running in another type may raise anything.
        return None, True
    return pair, tracker.is_rounding


def _coarsest(exported: ExportedModel, module: nn.Module) -> float:
    """The unit of rounding of the coarsest type in which the file computes."""
    casts = (node for node in exported.proto.graph.node if node.op_type == "Cast")
    wanted = (a.i for node in casts for a in node.attribute if a.name == "to")
    return _eps_of(_float_types(module) | {_TYPES[dtype] for dtype in wanted if dtype in _TYPES})


def _float_types(module: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}


def _eps_of(types: Iterable[torch.dtype]) -> float:
    """The unit of rounding of the coarsest type, float32 by default."""
    return max((torch.finfo(dtype).eps for dtype in types), default=torch.finfo(torch.float32).eps)


def _warn_of_changed_buffers(network: OnnxModule, module: nn.Module, call: Arguments) -> None:
    args, kwargs = call
    updated = set(network.onnx_names().values())
    with preserve_state(module), torch.enable_grad(), WithoutRandomness():
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        module(*args, **kwargs)
        for name, buffer in module.named_buffers():
            if name not in updated and not name.endswith(_COUNTER) and not torch.equal(buffer, before[name]):
                warnings.warn(f"forward changes the buffer '{name}', which is constant in the file", stacklevel=4)
