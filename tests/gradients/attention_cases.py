from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onnxgc.model.core.ir import Array
from tests.gradients.gradient_case import Case, Formula, case, normal, operator

_QUERY, _KEY, _VALUE = (2, 4, 5, 6), (2, 4, 7, 6), (2, 4, 7, 3)
_VISIBLE = np.tril(np.ones((5, 7), np.bool_), 2)


def _attention(
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = False,
    visible: Array | None = None,
    heads: tuple[int, int] | None = None,
) -> Formula:
    """softmax(cap(scale q k^T) + mask) v; `heads` of query and key where heads are in the last axis."""

    def apart(tensor: Tensor, count: int) -> Tensor:
        return tensor.unflatten(-1, (count, -1)).transpose(1, 2) if heads else tensor

    def formula(o: Mapping[str, Tensor]) -> Tensor:
        of_query, of_key = heads or (0, 0)
        q, k, v = apart(o["q"], of_query), apart(o["k"], of_key), apart(o["v"], of_key)
        if "past_k" in o:
            k, v = torch.cat([o["past_k"], k], 2), torch.cat([o["past_v"], v], 2)
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if "mask" in o:
            scores = scores + o["mask"]
        hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool)
        if is_causal:
            hidden |= torch.ones_like(hidden).triu(1)
        if visible is not None:
            hidden |= ~torch.from_numpy(visible)
        y = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v
        return y.transpose(1, 2).flatten(2) if heads else y

    return formula


def _case(name: str, attributes: str, formula: Formula, *more: str, opset: int = 23, **operands: Any) -> Case:
    operands = {"q": normal(*_QUERY), "k": normal(*_KEY), "v": normal(*_VALUE)} | operands
    body = f"y = {operator('Attention', attributes)}({', '.join(('q', 'k', 'v', *more))})"
    return case("Attention", name, body, formula=formula, opset=opset, **operands)


ATTENTION_CASES = (
    _case("four axes", "", _attention()),
    _case("scale", "scale=0.3", _attention(scale=0.3)),
    _case("mask [N, 1, L, S]", "", _attention(), "mask", mask=(2, 1, 5, 7)),
    _case("mask of booleans", "", _attention(visible=_VISIBLE), "visible", visible=_VISIBLE),
    _case("causal and mask", "is_causal=1", _attention(is_causal=True), "mask", mask=(5, 7)),
    _case("one head of keys", "", _attention(), k=(2, 1, 7, 6), v=(2, 1, 7, 3)),
    _case(
        "three axes, groups of heads, causal",
        "q_num_heads=4, kv_num_heads=2, is_causal=1",
        _attention(heads=(4, 2), is_causal=True),
        q=(2, 5, 24),
        k=(2, 5, 12),
        v=(2, 5, 6),
    ),
    _case("softcap", "softcap=1.5", _attention(softcap=1.5)),
    # Finite differences need float64, which this softmax does not use.
    _case("softmax in float32", "softmax_precision=1", _attention(), smooth=False),
    case(
        "Attention",
        "keys and values of before",
        'y, all_k, all_v = Attention(q, k, v, "", past_k, past_v)',
        formula=_attention(),
        opset=23,
        q=_QUERY,
        k=_KEY,
        v=_VALUE,
        past_k=(2, 4, 3, 6),
        past_v=(2, 4, 3, 3),
    ),
    _case("opset 24", "softcap=1.5, is_causal=1", _attention(softcap=1.5, is_causal=True), opset=24),
)
