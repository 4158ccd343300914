"""Reasons why a module cannot be traced: the operator, its submodule, the cause and a remedy."""

import os
import re
import traceback
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from onnxgc.torch.object_contents import LIBRARIES

_HERE = os.path.dirname(__file__)
_OUTSIDE = "compute it outside of the module and pass its result as an input"
_UNSUPPORTED = {
    "pad_packed|pack_padded|packed.sequence|failed to unpack the object": (
        "lengths of packed sequences are values, which a trace does not have; pass the padded batch and mask "
        "its outputs by the lengths"
    ),
    r"Cache\b": ("a cache of keys and values is not a tensor; pass use_cache=False (module.config.use_cache = False)"),
    "ctc_loss": (
        "lengths of targets are values, which a trace does not have; return the log probabilities, and "
        "compute the loss outside of the module"
    ),
    r"guard on data-dependent|Could not extract specialized|data-dependent"
    r"|aten\.(_local_scalar_dense|is_nonzero|equal|allclose)": (
        "forward branches on the values of a tensor; use torch.where, or branch outside of the module"
    ),
    "bincount|histc": ("the length of its result depends on values; sum torch.nn.functional.one_hot(x, classes)"),
    "unique": f"the number of distinct values is known at run time only; {_OUTSIDE}",
    "nonzero|masked_select|masked_scatter|argwhere|index.Tensor|NonZero": (
        "the number of selected elements depends on values; weight all elements by a mask, as in "
        "torch.where, in place of selecting some"
    ),
    "repeat_interleave": f"the length of its result depends on values; {_OUTSIDE}",
    "numpy|fake tensor": f"it leaves torch, which a trace cannot follow; write it in torch, or {_OUTSIDE}",
    "known type|not.*pytree": "forward may return only tensors, and tuples, lists and dicts of them",
    "No ONNX function": (
        "ONNX does not have this operator; write it in other operators, or compute it outside of the module"
    ),
}
"""Advice on errors of any trace, by pattern."""
_OF_PLANNED_MODULES = {
    "invalid syntax": (
        "PyTorch cannot print an operator, such as random_(from, to); use another, such as torch.randint"
    ),
    "convert all Tensors to FakeTensors": (
        "it reads a tensor that is not an input, parameter, buffer or attribute; register it by "
        "register_buffer, or pass it to forward"
    ),
    "flags of leaf variables": "it changes `requires_grad` of a tensor in forward; set it outside of forward",
    r"^FunctionalTensor\(|^FakeTensor\(": (
        "it uses a tensor as a key, which a trace replaces; use a name or a number as the key"
    ),
    "use_reentrant=True": (
        "torch.utils.checkpoint with use_reentrant=True runs outside of a trace; pass use_reentrant=False"
    ),
    r"nested_tensor|SparseTensorImpl|aten\.\w*sparse": (
        "a trace supports dense tensors only; use padded or dense tensors"
    ),
}
"""Advice on errors of planned modules, which precedes the others."""


def advice_on(text: str, advice: Mapping[str, str] = _UNSUPPORTED) -> str:
    """The cause of an error with this text, and a remedy; empty if unknown."""
    return next((answer for pattern, answer in advice.items() if re.search(pattern, text)), "")


def reason_of(error: BaseException, module: nn.Module) -> str:
    """One line for an error that ended a trace of a module."""
    first_line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    location, last = _location_of(error, module)
    if isinstance(last, _NormBase) and last.momentum is None and "_local_scalar_dense" in first_line:
        return (
            f"{location}'{type(last).__name__}' averages its running statistics over all steps "
            "(momentum=None), for which it reads a counter; give it a momentum"
        )
    text = " ".join(str(one) for one in _chain(error))
    answer = advice_on(text, _OF_PLANNED_MODULES | _UNSUPPORTED)
    if not answer:
        return f"{location}{first_line}"
    operator = re.match(r"aten\.\w+(\.\w+)?", first_line)
    named = f"{operator[0]}: " if operator else ""
    return f"{location}{named}{answer}; or plan the submodules around it one by one"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _location_of(error: BaseException, module: nn.Module) -> tuple[str, nn.Module | None]:
    """The path of the submodule and the program's line that an error came from, and the submodule."""
    names = {id(part): name for name, part in module.named_modules()}
    part: nn.Module | None = None
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        first = _first_argument(frame)
        if id(first) in names:
            part = first
        is_own = not path.startswith("<") and not any(library in path for library in (*LIBRARIES, _HERE))
        if part is not None and is_own:
            line = f"{os.path.basename(path)}:{number}"
    name = "" if part is None else names[id(part)]
    location = ", ".join(filter(None, (f"'{name}'" if name else "", line)))
    return f"in {location}: " if location else "", part


def failing_submodule(error: BaseException, module: nn.Module) -> str:
    """The innermost submodule that was called when an export failed, or ""."""
    names = {id(part): name for name, part in module.named_modules()}
    path: str | None = None
    for one in _chain(error):
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if frame.f_code.co_name == "_call_impl":
                path = names.get(id(_first_argument(frame)), path)
    return "" if path is None else f"'{path}'" if path else "forward"


def _first_argument(frame: types.FrameType) -> Any:
    return frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
