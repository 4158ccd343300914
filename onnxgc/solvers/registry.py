"""All solvers by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from onnxgc.solvers.acg import ACG
from onnxgc.solvers.base import Solver
from onnxgc.solvers.exhaustive import EXHAUSTIVE
from onnxgc.solvers.manual import MANUAL
from onnxgc.solvers.store_all import STORE_ALL

SOLVERS: Mapping[str, Solver] = MappingProxyType(
    {solver.name: solver for solver in (ACG, STORE_ALL, MANUAL, EXHAUSTIVE)}
)
