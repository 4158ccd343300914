"""Computation graphs in JSON files: `{"vertices": [{"id": 0, "size": 5}], "edges": [[0, 1]], ...}`.

Without `source` and `target` these are the only vertices without edges into or out of them. Identifiers
are strings or integers. Sizes are numbers in any unit, at least 0. Fractions are exact, since all sizes are
scaled to integers.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any, TypeGuard

from onnxgc.errors import GraphFileError
from onnxgc.graph.computation_graph import ComputationGraph, Edge, Vertex

FORM = '{"vertices": [{"id": 0, "size": 5}, ...], "edges": [[0, 1], ...], "source": 0, "target": 9}'
MAX_EXPONENT = 30
"""Sizes are 0 or between 10^-30 and 10^30, which limits the length of the scaled integers."""


@dataclass(frozen=True, slots=True)
class GraphFile:
    """A forward graph with one source and one target.

    `sizes` are `scale` times those in the file; `scale` is 1 unless the file has fractions.
    """

    graph: ComputationGraph
    sizes: Mapping[Vertex, int] = field(hash=False)
    source: Vertex
    target: Vertex
    scale: int = 1

    def in_file_units(self, size: int) -> int | float:
        """A sum of sizes in the units of the file."""
        return size // self.scale if size % self.scale == 0 else size / self.scale


def read_document(path: str | os.PathLike[str], form: str) -> Any:
    """The content of a JSON file, fractions as `Decimal`; error messages show `form` as an example.

    Raises:
        GraphFileError: the file cannot be read, is empty, or is not JSON.
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        if not text.strip():
            raise GraphFileError(f"the graph '{name}' is empty; write {form}")
        return json.loads(text, parse_float=Decimal)
    except OSError as error:
        raise GraphFileError(f"cannot read the graph '{name}': {error.strerror}") from error
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise GraphFileError(f"the graph '{name}' is not JSON: {error}; write {form}") from error


def parse_graph(document: Any) -> GraphFile:
    """Check the content of a graph file (fractions as `Decimal`).

    Every vertex must lie on a path from the source to the target.

    Raises:
        GraphFileError: the document violates the form; the message names the first violation.
    """
    if not isinstance(document, dict):
        raise GraphFileError(f"a graph file holds one JSON object; write {FORM}")
    for key in ("vertices", "edges"):
        if key not in document:
            raise GraphFileError(f"the graph file has no '{key}'; write {FORM}")
    sizes = _vertices(document["vertices"])
    graph = ComputationGraph.from_unsorted(sizes, _edges(document["edges"], sizes))
    ends = {"source": graph.sources, "target": graph.sinks}
    source, target = (_end(document.get(end), vertices, sizes, end) for end, vertices in ends.items())
    _require_single_ends(graph, source, target)
    scale = lcm(*(size.denominator for size in sizes.values()))
    return GraphFile(graph, {v: int(size * scale) for v, size in sizes.items()}, source, target, scale)


def _end(given: Any, found: Sequence[Vertex], sizes: Mapping[Vertex, Fraction], end: str) -> Vertex:
    """The given source or target, or the only one that there is."""
    if given is not None:
        return _known(given, sizes, f"the {end}")
    if len(found) > 1:
        raise GraphFileError(
            f"the graph has no '{end}', and {len(found)} vertices may be it ({found[0]!r}, {found[1]!r}); every vertex "
            "must lie on a path from one source to one target"
        )
    return found[0]


def _vertices(entries: Any) -> dict[Vertex, Fraction]:
    if not isinstance(entries, list):
        raise GraphFileError(f"'vertices' must be a list; write {FORM}")
    sizes: dict[Vertex, Fraction] = {}
    texts: set[str] = set()
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise GraphFileError(f'vertex number {number} must be an object such as {{"id": 0, "size": 5}}')
        if "id" not in entry:
            raise GraphFileError(f"vertex number {number} has no 'id'; give it a string or an integer")
        vertex = entry["id"]
        if not is_identifier(vertex):
            shown = json.dumps(vertex, default=str)
            raise GraphFileError(f"vertex number {number} has {shown} as 'id'; use a string or an integer")
        # --checkpoints identifies vertices by text.
        if str(vertex) in texts:
            raise GraphFileError(f"vertex {vertex!r} is given twice; identifiers must be distinct")
        texts.add(str(vertex))
        sizes[vertex] = _size(vertex, entry)
    return sizes


def _size(vertex: Vertex, entry: dict[str, Any]) -> Fraction:
    if "size" not in entry:
        raise GraphFileError(f"vertex {vertex!r} has no 'size'; give a number of at least 0")
    size = entry["size"]
    if isinstance(size, bool) or not isinstance(size, int | Decimal):
        raise GraphFileError(f"vertex {vertex!r} has the size {size!r}; give a number of at least 0")
    value = Decimal(size)
    if value < 0:
        raise GraphFileError(f"vertex {vertex!r} has the negative size {size}; sizes are at least 0")
    if value and not -MAX_EXPONENT <= value.adjusted() < MAX_EXPONENT:
        raise GraphFileError(
            f"vertex {vertex!r} has the size {value:.3e}; sizes are 0 or lie "
            f"between 1e-{MAX_EXPONENT} and 1e{MAX_EXPONENT}"
        )
    return Fraction(value)


def _edges(entries: Any, sizes: Mapping[Vertex, Fraction]) -> list[Edge]:
    if not isinstance(entries, list):
        raise GraphFileError(f"'edges' must be a list of pairs; write {FORM}")
    edges: list[Edge] = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, list) or len(entry) != 2:
            raise GraphFileError(
                f"edge number {number} must be a pair such as [0, 1]: the tensor read and the tensor computed"
            )
        what = f"edge number {number}, {json.dumps(entry, default=str)},"
        edges.append((_known(entry[0], sizes, what), _known(entry[1], sizes, what)))
    return edges


def _known(vertex: Any, sizes: Mapping[Vertex, Fraction], what: str) -> Vertex:
    if is_identifier(vertex) and vertex in sizes:
        return vertex
    raise GraphFileError(f"{what} names vertex {vertex!r}, which is not among the vertices")


def _require_single_ends(graph: ComputationGraph, source: Vertex, target: Vertex) -> None:
    """Raise unless every vertex is on a path from source to target.

    In an acyclic graph this holds if there is no other source and no other sink.
    """
    if graph.predecessors(source):
        raise GraphFileError(
            f"the source {source!r} is computed from {graph.predecessors(source)[0]!r}; "
            "it must come first, with no edge into it"
        )
    if graph.successors(target):
        raise GraphFileError(
            f"the target {target!r} is read by {graph.successors(target)[0]!r}; "
            "it must come last, with no edge out of it"
        )
    for vertex in graph.sources:
        if vertex != source:
            raise GraphFileError(
                f"vertex {vertex!r} is not reached from the source {source!r}; "
                "every vertex must lie on a path from source to target"
            )
    for vertex in graph.sinks:
        if vertex != target:
            raise GraphFileError(
                f"vertex {vertex!r} does not reach the target {target!r}; "
                "every vertex must lie on a path from source to target"
            )


def is_identifier(value: Any) -> TypeGuard[str | int]:
    """Whether a value of a JSON file can name a vertex: a string or an integer."""
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))
