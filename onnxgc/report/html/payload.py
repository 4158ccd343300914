"""What the page's script reads: the courses and the network, as short as they can be told."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

from onnxgc.report.html.memory_data import Course, ForwardOperator, MemoryRole, Phase, TensorFate


class _Texts:
    """Texts by number, each once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def payload(courses: Sequence[Course], network: Sequence[ForwardOperator]) -> str:
    """JSON, compressed and in base64: nothing in it can end the element that it is put into.

    A column for each figure; texts are numbers into `texts`, and lifetimes are intervals of runs.
    """
    texts = _Texts()
    value = {
        "phases": [phase.value for phase in Phase],
        "roles": [role.value for role in MemoryRole],
        "fates": [fate.value for fate in TensorFate],
        "courses": [_course(course, texts) for course in courses],
        "network": _network(network, texts),
        "texts": list(texts.numbers),
    }
    compact = json.dumps(value, separators=(",", ":"))
    return base64.b64encode(zlib.compress(compact.encode("ascii"), 9)).decode("ascii")


def _course(course: Course, texts: _Texts) -> dict[str, Any]:
    phases, roles = list(Phase), list(MemoryRole)
    return {
        "label": course.label,
        "name": [texts.number(run.name) for run in course.runs],
        "kind": [texts.number(run.kind) for run in course.runs],
        "phase": [phases.index(run.phase) for run in course.runs],
        "source": [texts.number(run.source) for run in course.runs],
        "tensor": [texts.number(life.tensor) for life in course.lifetimes],
        "form": [texts.number(life.form) for life in course.lifetimes],
        "first": [life.first for life in course.lifetimes],
        "last": [life.last for life in course.lifetimes],
        "bytes": [life.size_bytes for life in course.lifetimes],
        "role": [roles.index(life.role) for life in course.lifetimes],
    }


def _network(network: Sequence[ForwardOperator], texts: _Texts) -> dict[str, Any]:
    fates = list(TensorFate)
    return {
        "name": [texts.number(operator.name) for operator in network],
        "kind": [texts.number(operator.kind) for operator in network],
        "tensor": [texts.number(operator.tensor) for operator in network],
        "form": [texts.number(operator.form) for operator in network],
        "bytes": [operator.size_bytes for operator in network],
        "fate": [fates.index(operator.fate) for operator in network],
        "again": [operator.times_again for operator in network],
        "segment": [-1 if operator.segment is None else operator.segment for operator in network],
        "checkpoint": [int(operator.is_checkpoint) for operator in network],
        "reads": [list(operator.reads) for operator in network],
    }
