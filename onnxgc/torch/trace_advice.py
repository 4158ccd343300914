"""Reasons and remedies for operators that no trace of a module supports."""

from __future__ import annotations

import re

_PACKED = "lengths of packed sequences are values, which no trace has"
_TARGETS = "lengths of targets are values, which no trace has"
_MASK = "weigh all elements by a mask in place of a choice of them, as by torch.where"
_OUTSIDE = "compute it outside of the module and pass its result as an input"
_ANSWERS = (
    (
        "pad_packed|pack_padded|packed.sequence|failed to unpack the object",
        f"{_PACKED}; pass the padded batch and mask its outputs by the lengths",
    ),
    (
        "Cache\\b",
        "a cache of keys and values is no tensor; pass use_cache=False (module.config.use_cache = False)",
    ),
    (
        "ctc_loss",
        f"{_TARGETS}; return the log probabilities, and compute the loss outside of the module",
    ),
    (
        "guard on data-dependent|Could not extract specialized|data-dependent"
        "|aten\\.(_local_scalar_dense|is_nonzero|equal|allclose)",
        "forward decides by the values of a tensor; choose by torch.where, or decide outside of the module",
    ),
    (
        "bincount|histc",
        "how long its result is depends on values; sum torch.nn.functional.one_hot(x, classes)",
    ),
    ("unique", f"how many values differ is known at run time only; {_OUTSIDE}"),
    (
        "nonzero|masked_select|masked_scatter|argwhere|index.Tensor|NonZero",
        f"how much it chooses depends on values; {_MASK}",
    ),
    ("repeat_interleave", f"how long its result is depends on values; {_OUTSIDE}"),
    ("numpy|fake tensor", f"it leaves torch, which no trace follows; write it in torch, or {_OUTSIDE}"),
    (
        "known type|not.*pytree",
        "forward returns tensors, tuples, lists and dicts of them; return no other objects",
    ),
    (
        "No ONNX function",
        "ONNX has no such operator; write it in other operators, or compute it outside of the module",
    ),
)


def advice_on(text: str) -> str:
    """The reason and the remedy for an error with this text, or ""."""
    return next((answer for pattern, answer in _ANSWERS if re.search(pattern, text)), "")
