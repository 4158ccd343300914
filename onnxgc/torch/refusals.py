"""Why a module cannot be traced: the operator, its place in the module, the reason and a way out."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from onnxgc.torch.object_contents import LIBRARIES

_HERE = os.path.dirname(__file__)
_APART = "or plan the submodules before and behind it one by one"
_VALUE = (
    "what runs depends on the value of a tensor",
    f"keep it a tensor (torch.where in place of a branch), compute it outside of forward, {_APART}",
)
_SHAPE = (
    "the shape of its result depends on values",
    f"use a mask and torch.where, give the size where it can be given, {_APART}",
)
_REASONS: tuple[tuple[str, tuple[str, str]], ...] = (
    (
        r"aten\._pack_padded_sequence|aten\._pad_packed_sequence",
        (
            "lengths of packed sequences are values that a trace does not have",
            f"pass padded tensors and mask what is behind their ends, {_APART}",
        ),
    ),
    (
        r"aten\._ctc_loss|aten\._use_cudnn_ctc_loss|aten\._cudnn_ctc_loss",
        (
            "lengths of targets are values that a trace does not have",
            "return the logits and compute the loss outside of the module",
        ),
    ),
    (r"aten\.(_local_scalar_dense|item|equal|allclose|is_nonzero)", _VALUE),
    (r"aten\.bincount", (_SHAPE[0], f"sum a one_hot with num_classes in its place, {_APART}")),
    (r"aten\.(nonzero|masked_select|_?unique\w*|repeat_interleave|argwhere|where)", _SHAPE),
    (
        r"\.numpy\(\)",
        (
            "NumPy sees the values of a tensor, which a trace does not have",
            f"use operators of torch, {_APART}",
        ),
    ),
    (
        r"invalid syntax",
        (
            "PyTorch cannot write an operator down, such as random_(from, to)",
            f"use another operator, such as torch.randint, {_APART}",
        ),
    ),
    (
        r"convert all Tensors to FakeTensors",
        (
            "it reads a tensor that is none of its inputs, parameters, buffers and attributes",
            "register it by register_buffer, or pass it to forward",
        ),
    ),
    (
        r"flags of leaf variables",
        ("it changes `requires_grad` of a tensor in forward", "set it outside of forward"),
    ),
    (
        r"^FunctionalTensor\(|^FakeTensor\(",
        (
            "it looks a tensor up by itself, for which a trace has another one",
            "use a name or a number as the key",
        ),
    ),
    (
        r"use_reentrant=True",
        (
            "torch.utils.checkpoint with use_reentrant=True runs outside of a trace",
            "pass use_reentrant=False",
        ),
    ),
    (
        r"nested_tensor|SparseTensorImpl|aten\.\w*sparse",
        ("a trace takes dense tensors alone", f"use padded or dense tensors, {_APART}"),
    ),
)


def reason_of(error: BaseException, module: nn.Module) -> str:
    """One line for an error that has ended a trace of a module."""
    said = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    place, last = _place_of(error, module)
    if isinstance(last, _NormBase) and last.momentum is None and "_local_scalar_dense" in said:
        return (
            f"{place}'{type(last).__name__}' averages its running statistics over all steps (momentum=None), "
            "for which it reads a counter; give it a momentum"
        )
    text = " ".join(str(one) for one in _chain(error))
    for pattern, (reason, advice) in _REASONS:
        if re.search(pattern, text):
            operator = re.match(r"aten\.\w+(\.\w+)?", said)
            return f"{place}{f'{operator[0]}: ' if operator else ''}{reason}; {advice}"
    return f"{place}{said}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _place_of(error: BaseException, module: nn.Module) -> tuple[str, nn.Module | None]:
    """Where a forward was, as the path of a submodule and a line of the program, and the submodule."""
    names = {id(part): name for name, part in module.named_modules()}
    part: nn.Module | None = None
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        first = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        if id(first) in names:
            part = first
        if part is not None and not any(library in path for library in (*LIBRARIES, _HERE)):
            line = f"{os.path.basename(path)}:{number}"
    name = "" if part is None else names[id(part)]
    found = ", ".join(filter(None, (f"'{name}'" if name else "", line)))
    return f"in {found}: " if found else "", part
