"""The submodule in which an export fails."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.export import ExportedProgram
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from onnxgc.torch.first_mismatch import submodule_path


class SubmoduleTracker:
    """Tracks the submodule whose forward runs; after an error, the innermost in which it occurred."""

    def __init__(self, module: nn.Module) -> None:
        self._names = {id(part): name for name, part in module.named_modules()}
        self._running: list[str] = []

    @property
    def is_inside(self) -> bool:
        return bool(self._running)

    @property
    def location(self) -> str:
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


def submodule_calling(program: ExportedProgram, operator: str) -> str:
    """The path of the first submodule that calls an operator such as `aten.cdist.default`; empty if none."""
    wanted = re.sub(r"^aten\._?|_forward\b|\.\w+$", "", operator)
    for node in program.graph_module.graph.nodes:
        if node.op == "call_function" and wanted and wanted in str(node.target):
            return submodule_path(node)
    return ""
