"""Reasons and remedies for operators that no trace of a module supports."""

from __future__ import annotations

import re

_PACKED = "lengths of packed sequences are values, which a trace does not have"
_TARGETS = "lengths of targets are values, which a trace does not have"
_MASK = "weight all elements by a mask, as in torch.where, in place of selecting some"
_OUTSIDE = "compute it outside of the module and pass its result as an input"
_ADVICE = (
    (
        "pad_packed|pack_padded|packed.sequence|failed to unpack the object",
        f"{_PACKED}; pass the padded batch and mask its outputs by the lengths",
    ),
    (
        "Cache\\b",
        "a cache of keys and values is not a tensor; pass use_cache=False (module.config.use_cache = False)",
    ),
    (
        "ctc_loss",
        f"{_TARGETS}; return the log probabilities, and compute the loss outside of the module",
    ),
    (
        "guard on data-dependent|Could not extract specialized|data-dependent"
        "|aten\\.(_local_scalar_dense|is_nonzero|equal|allclose)",
        "forward branches on the values of a tensor; use torch.where, or branch outside of the module",
    ),
    (
        "bincount|histc",
        "the length of its result depends on values; sum torch.nn.functional.one_hot(x, classes)",
    ),
    ("unique", f"the number of distinct values is known at run time only; {_OUTSIDE}"),
    (
        "nonzero|masked_select|masked_scatter|argwhere|index.Tensor|NonZero",
        f"the number of selected elements depends on values; {_MASK}",
    ),
    ("repeat_interleave", f"the length of its result depends on values; {_OUTSIDE}"),
    ("numpy|fake tensor", f"it leaves torch, which a trace cannot follow; write it in torch, or {_OUTSIDE}"),
    (
        "known type|not.*pytree",
        "forward may return only tensors, and tuples, lists and dicts of them",
    ),
    (
        "No ONNX function",
        "ONNX does not have this operator; write it in other operators, or compute it outside of the module",
    ),
)


def advice_on(text: str) -> str:
    """The reason and the remedy for an error with this text; empty if unknown."""
    return next((answer for pattern, answer in _ADVICE if re.search(pattern, text)), "")
