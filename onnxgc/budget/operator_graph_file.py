"""A bare operator graph from a JSON file.

`{"nodes": [{"id": 0, "size": 5, "duration": 2}, ...], "edges": [[0, 1], ...]}`: each node is an
operator with one output of that size; the second node of an edge reads the output of the first. Unread
outputs are kept to the end. Sizes and durations are numbers of any unit, at least 0; fractions are exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import lcm
from typing import Any

from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator
from onnxgc.errors import GraphFileError
from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.graph.graph_file import MAX_EXPONENT, is_identifier

FORM = '{"nodes": [{"id": 0, "size": 5, "duration": 2}, ...], "edges": [[0, 1], ...]}'
MAX_TOTAL = 2**60
"""Sum of all sizes, and of all durations, in whole units: sums fit into 64 bits."""


@dataclass(frozen=True, slots=True)
class OperatorGraphFile:
    """The problem of a file; operator `i` is the node `nodes[i]`.

    Sizes and durations are `size_scale` and `duration_scale` times those in the file. The order is the
    file's own if that is topological, otherwise the nearest topological one.
    """

    problem: OperatorProblem
    nodes: tuple[Vertex, ...]
    size_scale: int
    duration_scale: int


def parse_operator_graph(document: Any) -> OperatorGraphFile:
    """Check the content of an operator graph (fractions as `Decimal`).

    Raises:
        GraphFileError: it violates the form; the message names the first violation.
    """
    if not isinstance(document, dict):
        raise GraphFileError(f"an operator graph is one JSON object; write {FORM}")
    for key in ("nodes", "edges"):
        if not isinstance(document.get(key), list):
            hint = "; for checkpoints of a forward graph leave --budget out" if "vertices" in document else ""
            raise GraphFileError(f"the operator graph has no list '{key}'; write {FORM}{hint}")
    entries = _entries(document["nodes"])
    sizes, size_scale = _scaled({node: entry["size"] for node, entry in entries.items()}, "sizes")
    times, time_scale = _scaled({node: entry["duration"] for node, entry in entries.items()}, "durations")
    graph = ComputationGraph.from_unsorted(entries, _edges(document["edges"], entries))
    predecessors, _ = graph.adjacency()
    operators = tuple(
        ProblemOperator(str(node), tuple(predecessors[index]), (index,), times[node])
        for index, node in enumerate(graph.vertices)
    )
    kept = frozenset(graph.topological_index(node) for node in graph.sinks)
    problem = OperatorProblem(operators, tuple(sizes[node] for node in graph.vertices), kept)
    return OperatorGraphFile(problem, graph.vertices, size_scale, time_scale)


def _entries(nodes: list[Any]) -> dict[Vertex, dict[str, Fraction]]:
    if not nodes:
        raise GraphFileError(f"the operator graph has no nodes; write {FORM}")
    entries: dict[Vertex, dict[str, Fraction]] = {}
    for index, entry in enumerate(nodes):
        node = entry.get("id") if isinstance(entry, dict) else None
        if not is_identifier(node):
            raise GraphFileError(f"node number {index} has no 'id', a string or a whole number; write {FORM}")
        if node in entries:
            raise GraphFileError(f"node {node!r} is given twice; identifiers must be distinct")
        entries[node] = {key: _number(node, key, entry) for key in ("size", "duration")}
    return entries


def _number(node: Vertex, key: str, entry: Mapping[str, Any]) -> Fraction:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise GraphFileError(f"node {node!r} has the {key} {value!r}; give a number of at least 0")
    number = Decimal(value)
    if number < 0:
        raise GraphFileError(f"node {node!r} has the {key} {value}; give a number of at least 0")
    if number and not -MAX_EXPONENT <= number.adjusted() < MAX_EXPONENT:
        raise GraphFileError(
            f"node {node!r} has the {key} {number:.3e}; numbers are 0 or lie "
            f"between 1e-{MAX_EXPONENT} and 1e{MAX_EXPONENT}"
        )
    return Fraction(number)


def _scaled(values: Mapping[Vertex, Fraction], what: str) -> tuple[dict[Vertex, int], int]:
    scale = lcm(*(value.denominator for value in values.values()))
    whole = {node: int(value * scale) for node, value in values.items()}
    if sum(whole.values()) >= MAX_TOTAL:
        raise GraphFileError(f"the {what} cannot all be scaled to 60-bit integers; give fewer digits")
    return whole, scale


def _edges(edges: list[Any], known: Mapping[Vertex, Any]) -> list[tuple[Vertex, Vertex]]:
    for number, edge in enumerate(edges):
        if not isinstance(edge, list) or len(edge) != 2:
            raise GraphFileError(f"edge number {number} must be a pair such as [0, 1]: writer, reader")
        for end in edge:
            if not is_identifier(end) or end not in known:
                raise GraphFileError(f"edge number {number} names {end!r}, which is not a node")
    return [(tail, head) for tail, head in edges]
