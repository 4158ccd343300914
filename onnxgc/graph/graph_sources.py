"""Bare graphs of files and objects, as the documents that `graph_file` and `operator_graph_file` read.

Besides these documents: networkx graphs, also in JSON (node-link form, as in Moccasin's data), and graphs
of Checkmate, as objects or with their attributes in JSON.
"""

import math
import operator
import os
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from onnxgc.errors import GraphFileError
from onnxgc.graph.graph_file import read_document

SIZE_KEYS = ("size", "cost_ram", "out_cost")
DURATION_KEYS = ("duration", "cost_cpu")
FORMS = (
    '{"vertices": [{"id": 0, "size": 5}, ...], "edges": [[0, 1], ...]}, or "nodes" with a "duration" each for a budget'
)
UNDIRECTED = "the graph is undirected; give a networkx.DiGraph with edges from writer to reader"


def is_bare_graph(source: Any) -> bool:
    """Whether a source is a graph in JSON or in memory, and not a model."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source).lower().endswith(".json")
    return isinstance(source, Mapping) or hasattr(source, "is_directed") or hasattr(source, "cost_ram")


def graph_document(source: Any) -> Any:
    """A source as a document with `vertices` or `nodes`; fractions are `Decimal`.

    Nodes of networkx have a `size` (or `cost_ram`, `out_cost`) and for a budget a `duration` (or `cost_cpu`);
    a true `backward` marks nodes that are not of forward. Memory of Checkmate's parameters is not included.

    Raises:
        GraphFileError: a file cannot be read or is not JSON, or the graph is undirected.
    """
    document = source
    if isinstance(source, str | os.PathLike):
        document = read_document(source, FORMS)
    elif hasattr(source, "is_directed"):
        document = _of_networkx(source)
    elif hasattr(source, "cost_ram"):
        document = vars(source)
    if not isinstance(document, Mapping):
        return document
    if document.get("directed") is False:
        raise GraphFileError(UNDIRECTED)
    if "cost_ram" in document:
        document = _of_checkmate(document)
    document = _of_node_link(document) if "nodes" in document else dict(document)
    return {key: _plain_entries(value) for key, value in document.items()}


def forward_document(document: Any) -> Any:
    """A document with `vertices`; nodes of an operator graph become vertices.

    Raises:
        GraphFileError: the nodes contain backward.
    """
    if not isinstance(document, dict) or "vertices" in document or not isinstance(document.get("nodes"), list):
        return document
    if any(isinstance(node, dict) and node.get("backward") for node in document["nodes"]):
        raise GraphFileError("the graph contains backward; give a budget, such as --budget .8, for its sequence")
    return {**document, "vertices": document["nodes"]}


def _of_networkx(graph: Any) -> dict[str, Any]:
    if not graph.is_directed():
        raise GraphFileError(UNDIRECTED)
    nodes = [{**attributes, "id": node} for node, attributes in graph.nodes(data=True)]
    return {"nodes": nodes, "edges": [[tail, head] for tail, head in graph.edges()]}


def _of_node_link(document: Mapping[str, Any]) -> dict[str, Any]:
    """Nodes with the keys `id`, `size` and `duration`, in the order that the graph gives; what is malformed stays."""
    nodes, links = document["nodes"], document.get("links", document.get("edges"))
    if not isinstance(nodes, list) or not isinstance(links, list):
        return dict(document)
    named = [_with_known_keys(node) if isinstance(node, Mapping) else node for node in nodes]
    settings = document.get("graph")
    order = settings.get("order") if isinstance(settings, Mapping) else None
    if isinstance(order, list) and all(isinstance(node, dict) for node in named):
        place = {str(node): number for number, node in enumerate(order)}
        named.sort(key=lambda node: place.get(str(node.get("id")), len(place)))
    edges = [[link.get("source"), link.get("target")] if isinstance(link, Mapping) else link for link in links]
    return {"nodes": named, "edges": edges}


def _with_known_keys(node: Mapping[str, Any]) -> dict[str, Any]:
    known = {"id": ("id", "name"), "size": SIZE_KEYS, "duration": DURATION_KEYS, "backward": ("backward",)}
    found = {name: next((node[key] for key in keys if key in node), None) for name, keys in known.items()}
    return {name: value for name, value in found.items() if value is not None}


def _of_checkmate(graph: Mapping[str, Any]) -> dict[str, Any]:
    """A graph with the attributes of Checkmate's `DFGraph`; keys of JSON objects are numbers in text."""

    def plain(table: Any) -> dict[Any, Any]:
        items = table.items() if isinstance(table, Mapping) else ()
        return {int(key) if isinstance(key, str) and key.isdigit() else key: value for key, value in items}

    sizes, times, reads = (plain(graph.get(key)) for key in ("cost_ram", "cost_cpu", "args"))
    forward = plain(graph.get("vfwd_map")) or sizes
    nodes = [
        {"id": node, "size": size, "backward": node not in forward}
        | ({"duration": times[node]} if node in times else {})
        for node, size in sizes.items()
    ]
    lists = (value if isinstance(value, Iterable) else () for value in reads.values())
    return {"nodes": nodes, "edges": [[tail, head] for head, tails in zip(reads, lists, strict=True) for tail in tails]}


def _plain_entries(value: Any) -> Any:
    """A list of nodes or edges with plain numbers, or another value as `_plain` gives it."""
    if not isinstance(value, list | tuple):
        return _plain(value)
    entries = [dict(entry) if isinstance(entry, Mapping) else entry for entry in value]
    return [
        {key: _plain(item) for key, item in entry.items()}
        if isinstance(entry, dict)
        else [_plain(item) for item in entry]
        if isinstance(entry, list | tuple)
        else _plain(entry)
        for entry in entries
    ]


def _plain(value: Any) -> Any:
    """Integers of any library as `int`, finite fractions as `Decimal`; all else as it is."""
    if isinstance(value, str | bool | int | Decimal):
        return value
    if hasattr(value, "__index__"):
        return operator.index(value)
    is_fraction = hasattr(value, "__float__") and math.isfinite(value)
    return Decimal(repr(float(value))) if is_fraction else value
