"""All solvers by name.

What each accepts, for which objective and on which graphs it is exact, whether it takes a budget
and whether it is automatic are fields of `Solver`, given in its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from onnxgc.solvers.acg import ACG
from onnxgc.solvers.base import Solver
from onnxgc.solvers.bptt import BPTT
from onnxgc.solvers.chen_greedy import CHEN_GREEDY
from onnxgc.solvers.chen_sqrt import CHEN_SQRT
from onnxgc.solvers.exhaustive import EXHAUSTIVE
from onnxgc.solvers.lcg import LCG
from onnxgc.solvers.manual import MANUAL
from onnxgc.solvers.random_draws import RANDOM
from onnxgc.solvers.revolve import REVOLVE
from onnxgc.solvers.store_all import STORE_ALL

SOLVERS: Mapping[str, Solver] = MappingProxyType(
    {
        solver.name: solver
        for solver in (
            ACG,
            LCG,
            CHEN_SQRT,
            CHEN_GREEDY,
            REVOLVE,
            BPTT,
            RANDOM,
            STORE_ALL,
            MANUAL,
            EXHAUSTIVE,
        )
    }
)
