"""Where in a module an export fails, and what to do about it."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.export import ExportedProgram
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from onnxgc.torch.places import path_of

_SHAPES = (
    "a file has fixed shapes; weigh all elements by a mask in place of a choice of them, as by torch.where"
)
_OUTSIDE = "compute it outside of the module and pass its result as an input"
_ANSWERS = (
    (
        "pad_packed|pack_padded|packed.sequence|failed to unpack the object",
        "packed sequences have no form in ONNX; pass the padded batch and mask its outputs by the lengths",
    ),
    (
        "Cache\\b",
        "a cache of keys and values is no tensor; pass use_cache=False (module.config.use_cache = False)",
    ),
    (
        "ctc_loss",
        "it has no form in ONNX; export the log probabilities, and compute the loss outside of the module",
    ),
    (
        "bincount|histc",
        "how long its result is depends on values; sum torch.nn.functional.one_hot(x, classes)",
    ),
    ("unique", f"how many values differ is known at run time only; {_OUTSIDE}"),
    (
        "nonzero|masked_select|masked_scatter|argwhere|index.Tensor|NonZero",
        f"how much it chooses depends on values; {_SHAPES}",
    ),
    ("repeat_interleave", f"how long its result is depends on values; {_OUTSIDE}"),
    (
        "guard on data-dependent|Could not extract specialized|data-dependent",
        "forward decides by the values of a tensor; choose by torch.where, or decide outside of the module",
    ),
    ("numpy|fake tensor", f"it leaves torch, which no trace follows; write it in torch, or {_OUTSIDE}"),
    (
        "not a known type|not.*pytree|is not supported|known type",
        "forward returns tensors, tuples, lists and dicts of them; return no other objects",
    ),
    (
        "No ONNX function",
        "ONNX has no such operator; write it in other operators, or compute it outside of the module",
    ),
)


def advice_on(text: str) -> str:
    """The reason and the next step for what an error tells, or ""."""
    return next((answer for pattern, answer in _ANSWERS if re.search(pattern, text)), "")


class Whereabouts:
    """Notes the submodule whose forward runs; after an error, the innermost that it came from."""

    def __init__(self, module: nn.Module) -> None:
        self._names = {id(part): name for name, part in module.named_modules()}
        self._running: list[str] = []

    @property
    def is_inside(self) -> bool:
        return bool(self._running)

    @property
    def told(self) -> str:
        path = self._running[-1]
        return f"'{path}'" if path else "forward"

    def __enter__(self) -> Self:
        self._hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave),
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, part: nn.Module, _: Any) -> None:
        if id(part) in self._names:
            self._running.append(self._names[id(part)])

    def _leave(self, part: nn.Module, _: Any, __: Any) -> None:
        if id(part) in self._names and self._running:
            self._running.pop()


def place_of_operator(program: ExportedProgram, operator: str) -> str:
    """The path of the first submodule that calls an operator, as errors name it: `aten.cdist.default`."""
    wanted = re.sub(r"^aten\._?|_forward\b|\.\w+$", "", operator)
    for node in program.graph_module.graph.nodes:
        if node.op == "call_function" and wanted and wanted in str(node.target):
            return path_of(node)
    return ""
