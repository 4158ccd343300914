"""Bare graphs of networkx, Checkmate and Moccasin: equal to the same graph in the project's own form."""

import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networkx
import numpy as np
import pytest

import onnxgc
from onnxgc.errors import BudgetError, GraphFileError, PlanError
from onnxgc.solvers.registry import SOLVERS

# A step of three forward and three backward operators, as (size, duration, backward).
NODES = {0: (8, 2, False), 1: (4, 3, False), 2: (2, 1, False), 3: (1, 1, True), 4: (4, 2, True), 5: (1, 2, True)}
EDGES = [(0, 1), (1, 2), (2, 3), (1, 4), (3, 4), (0, 5), (4, 5)]
OWN = {
    "nodes": [{"id": node, "size": size, "duration": time} for node, (size, time, _) in NODES.items()],
    "edges": [list(edge) for edge in EDGES],
}


def _digraph(size: str = "size", duration: str = "duration") -> networkx.DiGraph:
    graph = networkx.DiGraph(EDGES)
    for node, (bytes_, time, backward) in NODES.items():
        graph.add_node(node, **{size: np.int64(bytes_), duration: float(time), "backward": backward})
    return graph


CHECKMATE = {
    "args": {head: [tail for tail, other in EDGES if other == head] for head in NODES},
    "v": list(NODES),
    "cost_ram": {node: size for node, (size, _, _) in NODES.items()},
    "cost_cpu": {node: time for node, (_, time, _) in NODES.items()},
    "vfwd_map": {0: 5, 1: 4, 2: 3},
}
MOCCASIN = {
    "directed": True,
    "graph": {"name": "step", "order": list(NODES)},
    "nodes": [
        {"name": f"op{node}", "backward": back, "cost_cpu": time, "cost_ram": size, "id": node}
        for node, (size, time, back) in reversed(NODES.items())
    ],
    "links": [{"source": tail, "target": head} for tail, head in EDGES],
}
LAYERED = {
    **MOCCASIN,
    "nodes": [{"out_cost": size, "duration": time, "name": node} for node, (size, time, _) in NODES.items()],
}
FORWARD = {"vertices": [{"id": 0, "size": 1}, {"id": 1, "size": 1}], "edges": [[0, 1]]}
SOURCES = {
    "own": OWN,
    "networkx": _digraph(),
    "checkmate names": _digraph("cost_ram", "cost_cpu"),
    "checkmate": SimpleNamespace(**CHECKMATE),
    "checkmate json": json.loads(json.dumps(CHECKMATE)),
    "moccasin": MOCCASIN,
    "layered": LAYERED,
}


@pytest.mark.parametrize("name", SOURCES)
def test_one_graph_in_every_form_has_one_solution(name: str, tmp_path: Path):
    file = tmp_path / "own.json"
    file.write_text(json.dumps(OWN))
    wanted = onnxgc.solve(file, budget=14, order="fixed")
    found = onnxgc.solve(SOURCES[name], budget=14, order="fixed")
    assert {**found.report, "seconds": 0} == {**wanted.report, "seconds": 0}
    assert found.report["overhead"] > 0
    assert found.memory_curve().max() == found.report["peak"] <= 14 < found.memory_curve(baseline=True).max()


def test_a_forward_graph_of_networkx_has_checkpoints():
    chain = networkx.path_graph(6, networkx.DiGraph)
    networkx.set_node_attributes(chain, 0.5, "size")
    found = onnxgc.solve(chain)
    own = {"vertices": [{"id": node, "size": Fraction(1, 2)} for node in chain], "edges": list(chain.edges)}
    assert found.report["checkpoints"] == onnxgc.solve(own).report["checkpoints"]
    peak = onnxgc.solve(chain, objective="peak")
    assert peak.memory_curve().max() == peak.report["objective"] < peak.memory_curve(baseline=True).max()
    assert repr(peak) == f"<GraphSolution of peak, feasible: peak {peak.report['objective']}>"
    assert peak._repr_html_().count("<path") == 2
    assert onnxgc.solve(chain, solver=SOLVERS["chen-sqrt"]).report["solver"] == "chen-sqrt"


@pytest.mark.parametrize(
    "graph, options, error, message",
    [
        (networkx.Graph(EDGES), {}, GraphFileError, "undirected"),
        ({**MOCCASIN, "directed": False}, {"budget": 9}, GraphFileError, "undirected"),
        (networkx.DiGraph(), {}, GraphFileError, "no vertices"),
        (networkx.DiGraph([(0, 1)]), {}, GraphFileError, "vertex 0 has no 'size'"),
        (networkx.DiGraph([((0, 1), 2)]), {}, GraphFileError, "as 'id'; use a string or an integer"),
        (_digraph(), {}, GraphFileError, "contains backward; give a budget"),
        (_digraph("weight"), {"budget": 9}, GraphFileError, "node 0 has the size None"),
        ({"vertices": [{"id": 0, "size": float("nan")}], "edges": []}, {}, GraphFileError, "has the size nan"),
        ({"nodes": 3, "links": []}, {}, GraphFileError, "no 'vertices'"),
        ({**MOCCASIN, "nodes": [5]}, {"budget": 9}, GraphFileError, "node number 0 has no 'id'"),
        ({**MOCCASIN, "links": [{"source": 0}]}, {"budget": 9}, GraphFileError, "edge number 0 names None"),
        (OWN, {"budget": 9, "solver": "acg"}, PlanError, "--solver applies to checkpoints"),
        (OWN, {"order": "free"}, PlanError, "--order needs --budget"),
        (3, {}, GraphFileError, "holds one JSON object"),
    ],
)
def test_wrong_graphs_and_options(graph: Any, options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        onnxgc.solve(graph, **options)


def test_compare_on_a_forward_graph(tmp_path: Path):
    file = tmp_path / "own.json"
    vertices = [{"id": node, "size": size} for node, size in enumerate([5, 4, 1, 4, 3, 6, 2.5])]
    file.write_text(json.dumps({"vertices": vertices, "edges": [[node, node + 1] for node in range(6)] + [[1, 4]]}))
    found = onnxgc.compare(file)
    rows = {row["name"]: row for row in found.report["rows"]}
    for name, row in rows.items():
        alone = onnxgc.solve(file, solver=name).report
        wanted = (alone["checkpoints"], alone["peak"], alone["sum"])
        assert (row["checkpoints"], row["peak"], row["sum"]) == wanted
    assert {"acg", "peak", "store-all", "chen-sqrt"} <= set(rows)
    assert {row["name"] for row in found.report["left_out"]} >= {"lcg", "revolve"}
    assert rows["store-all"]["peak"] == found.report["baseline_peak"] == 25.5
    two = onnxgc.compare(file, solvers=["acg", "chen-sqrt"])
    assert {row["name"] for row in two.report["rows"]} == {"acg", "chen-sqrt"}
    assert "| plan | peak | share | sum |" in found._repr_markdown_()
    assert "7 vertices, baseline peak 25.5" in repr(found)


def test_compare_on_an_operator_graph():
    found = onnxgc.compare(MOCCASIN, budget="14")
    rows = {row["name"]: row for row in found.report["rows"]}
    assert set(rows) == {"budget, free order", "budget, fixed order"}
    assert all(row["peak"] <= 14 and row["overhead"] > 0 and row["status"] == "optimal" for row in rows.values())
    with pytest.raises(BudgetError, match="no sequence fits 3"):
        onnxgc.compare(MOCCASIN, budget="3")


@pytest.mark.parametrize(
    "graph, options, message",
    [
        (FORWARD, {"solvers": ["per-block"]}, "'per-block' is not a solver of bare forward graphs"),
        (MOCCASIN, {"budget": 14, "solvers": ["acg"]}, "leave --solvers out"),
        (FORWARD, {"solvers": []}, "no solver is given"),
        (MOCCASIN, {"freeze_bn": True}, "a bare graph is compared alone"),
    ],
)
def test_options_that_do_not_apply_to_bare_graphs(graph: Any, options: dict[str, Any], message: str):
    with pytest.raises(PlanError, match=message):
        onnxgc.compare(graph, **options)
