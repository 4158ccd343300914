"""The data of a page's script, in compact form."""

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from onnxgc.report.data.memory_curve import ForwardOperator, MemoryCurve, MemoryRole, Phase, TensorFate
from onnxgc.report.text.printable import printable

_Numbers = Callable[[Iterable[str]], list[int]]
"""Numbers of texts, each of which is stored once."""


def payload(curves: Sequence[MemoryCurve], network: Sequence[ForwardOperator]) -> str:
    """Compressed JSON in base64, which cannot end the HTML element around it.

    There is a column for each figure; texts are indices into `texts`, and lifetimes are intervals of runs.
    """
    texts: dict[str, int] = {}

    def numbers(found: Iterable[str]) -> list[int]:
        return [texts.setdefault(printable(text), len(texts)) for text in found]

    value = {
        "phases": [phase.value for phase in Phase],
        "roles": [role.value for role in MemoryRole],
        "fates": [fate.value for fate in TensorFate],
        "courses": [_curve(curve, numbers) for curve in curves],
        "network": _network(network, numbers),
        "texts": list(texts),
    }
    compact = json.dumps(value, separators=(",", ":"))
    return base64.b64encode(zlib.compress(compact.encode("ascii"), 9)).decode("ascii")


def _curve(curve: MemoryCurve, numbers: _Numbers) -> dict[str, Any]:
    phases, roles = list(Phase), list(MemoryRole)
    return {
        "label": curve.label,
        "name": numbers(run.name for run in curve.runs),
        "kind": numbers(run.kind for run in curve.runs),
        "phase": [phases.index(run.phase) for run in curve.runs],
        "source": numbers(run.source for run in curve.runs),
        "tensor": numbers(life.tensor for life in curve.lifetimes),
        "form": numbers(life.form for life in curve.lifetimes),
        "first": [life.first for life in curve.lifetimes],
        "last": [life.last for life in curve.lifetimes],
        "bytes": [life.size_bytes for life in curve.lifetimes],
        "role": [roles.index(life.role) for life in curve.lifetimes],
        "module": numbers(life.module for life in curve.lifetimes),
        "module of run": numbers(run.module for run in curve.runs),
    }


def _network(network: Sequence[ForwardOperator], numbers: _Numbers) -> dict[str, Any]:
    fates = list(TensorFate)
    return {
        "name": numbers(operator.name for operator in network),
        "kind": numbers(operator.kind for operator in network),
        "tensor": numbers(operator.tensor for operator in network),
        "form": numbers(operator.form for operator in network),
        "bytes": [operator.size_bytes for operator in network],
        "fate": [fates.index(operator.fate) for operator in network],
        "again": [operator.recomputations for operator in network],
        "segment": [-1 if operator.segment is None else operator.segment for operator in network],
        "checkpoint": [int(operator.is_checkpoint) for operator in network],
        "reads": [list(operator.reads) for operator in network],
        "module": numbers(operator.module for operator in network),
    }
