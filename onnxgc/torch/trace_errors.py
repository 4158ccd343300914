"""Reasons why a module cannot be traced: the operator, its place in the module, the cause and a remedy."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from onnxgc.torch.object_contents import LIBRARIES
from onnxgc.torch.unsupported_operator_advice import advice_on

_HERE = os.path.dirname(__file__)
_ADVICE = (
    (
        r"invalid syntax",
        "PyTorch cannot print an operator, such as random_(from, to); use another, such as torch.randint",
    ),
    (
        r"convert all Tensors to FakeTensors",
        "it reads a tensor that is not an input, parameter, buffer or attribute; register it by "
        "register_buffer, or pass it to forward",
    ),
    (
        r"flags of leaf variables",
        "it changes `requires_grad` of a tensor in forward; set it outside of forward",
    ),
    (
        r"^FunctionalTensor\(|^FakeTensor\(",
        "it uses a tensor as a key, which a trace replaces; use a name or a number as the key",
    ),
    (
        r"use_reentrant=True",
        "torch.utils.checkpoint with use_reentrant=True runs outside of a trace; pass use_reentrant=False",
    ),
    (
        r"nested_tensor|SparseTensorImpl|aten\.\w*sparse",
        "a trace supports dense tensors only; use padded or dense tensors",
    ),
)
"""Advice on traces of planned modules only; `advice_on` has that on all traces."""


def reason_of(error: BaseException, module: nn.Module) -> str:
    """One line for an error that ended a trace of a module."""
    first_line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    place, last = _place_of(error, module)
    if isinstance(last, _NormBase) and last.momentum is None and "_local_scalar_dense" in first_line:
        return (
            f"{place}'{type(last).__name__}' averages its running statistics over all steps (momentum=None), "
            "for which it reads a counter; give it a momentum"
        )
    text = " ".join(str(one) for one in _chain(error))
    answer = next((answer for pattern, answer in _ADVICE if re.search(pattern, text)), "") or advice_on(text)
    if not answer:
        return f"{place}{first_line}"
    operator = re.match(r"aten\.\w+(\.\w+)?", first_line)
    named = f"{operator[0]}: " if operator else ""
    return f"{place}{named}{answer}; or plan the submodules around it one by one"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _place_of(error: BaseException, module: nn.Module) -> tuple[str, nn.Module | None]:
    """The path of the submodule and the program's line that an error came from, and the submodule."""
    names = {id(part): name for name, part in module.named_modules()}
    part: nn.Module | None = None
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        first = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        if id(first) in names:
            part = first
        is_own = not path.startswith("<") and not any(library in path for library in (*LIBRARIES, _HERE))
        if part is not None and is_own:
            line = f"{os.path.basename(path)}:{number}"
    name = "" if part is None else names[id(part)]
    found = ", ".join(filter(None, (f"'{name}'" if name else "", line)))
    return f"in {found}: " if found else "", part
