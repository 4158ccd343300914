import json
from pathlib import Path
from typing import Any

import pytest

from onnxgc.errors import GraphFileError
from onnxgc.graph.graph_file import GraphFile, parse_graph
from onnxgc.graph.graph_sources import graph_document

ROW: dict[str, Any] = {
    "vertices": [{"id": 0, "size": 5}, {"id": 1, "size": 2}, {"id": "out", "size": 0}],
    "edges": [[0, 1], [1, "out"]],
    "source": 0,
    "target": "out",
}


def vertices(*sizes: Any) -> list[dict[str, Any]]:
    return [{"id": number, "size": size} for number, size in enumerate(sizes)]


def write(folder: Path, text: str) -> Path:
    path = folder / "graph.json"
    path.write_text(text, encoding="utf-8")
    return path


def read_graph_file(path: Path) -> GraphFile:
    return parse_graph(graph_document(path))


def test_reads_vertices_edges_and_ends():
    file = parse_graph(ROW)
    assert file.graph.vertices == (0, 1, "out")
    assert file.graph.edges == ((0, 1), (1, "out"))
    assert (file.source, file.target, file.scale) == (0, "out", 1)
    assert file.sizes == {0: 5, 1: 2, "out": 0}


def test_any_order_and_repeated_edges():
    file = parse_graph({"vertices": vertices(1, 1, 1), "edges": [[1, 2], [2, 0], [1, 2]], "source": 1, "target": 0})
    assert file.graph.vertices == (1, 2, 0)
    assert len(file.graph.edges) == 2


def test_one_vertex_is_source_and_target():
    assert len(parse_graph({"vertices": vertices(3), "edges": [], "source": 0, "target": 0}).graph) == 1


def test_fractions_are_exact(tmp_path: Path):
    text = json.dumps(ROW).replace('"size": 5', '"size": 0.1').replace('"size": 2', '"size": 1.25e1')
    file = read_graph_file(write(tmp_path, text))
    assert file.sizes == {0: 1, 1: 125, "out": 0}
    assert [file.in_file_units(size) for size in (1, 125, 130)] == [0.1, 12.5, 13]
    whole = read_graph_file(write(tmp_path, json.dumps(ROW).replace('"size": 5', '"size": 5.0')))
    assert (whole.sizes[0], whole.scale) == (5, 1)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vertices": []}, "no vertices|not among the vertices"),
        ({"vertices": {}}, "'vertices' must be a list"),
        ({"vertices": [0, 1]}, "vertex number 0 must be an object"),
        ({"vertices": [{"size": 1}]}, "vertex number 0 has no 'id'"),
        ({"vertices": [{"id": None, "size": 1}]}, "vertex number 0 has null as 'id'"),
        ({"vertices": [{"id": [1], "size": 1}]}, r"vertex number 0 has \[1\] as 'id'"),
        ({"vertices": [*ROW["vertices"], {"id": "1", "size": 1}]}, "vertex '1' is given twice"),
        ({"vertices": [{"id": 0}]}, "vertex 0 has no 'size'"),
        ({"vertices": vertices(-1)}, "vertex 0 has the negative size -1"),
        ({"vertices": vertices("5")}, "vertex 0 has the size '5'"),
        ({"vertices": vertices(True)}, "vertex 0 has the size True"),
        ({"vertices": vertices(10**400)}, "vertex 0 has the size 1.000e.400"),
        ({"edges": {}}, "'edges' must be a list of pairs"),
        ({"edges": [[0, 1], [1]]}, "edge number 1 must be a pair"),
        ({"edges": ["01"]}, "edge number 0 must be a pair"),
        ({"edges": [[0, 1], [1, 7]]}, r"edge number 1, \[1, 7\], names vertex 7, which is not among"),
        ({"edges": [[0, {}]]}, "which is not among the vertices"),
        ({"edges": [[0, 1], [1, "out"], [1, 1]]}, "cycle: 1 -> 1"),
        ({"source": 7}, "the source names vertex 7, which is not among"),
        ({"target": "0"}, "the target names vertex '0', which is not among"),
        ({"source": 1}, "the source 1 is computed from 0; it must come first"),
        ({"target": 1}, "the target 1 is read by 'out'; it must come last"),
        ({"edges": [[0, "out"]]}, "vertex 1 is not reached from the source 0"),
        ({"edges": [[0, "out"], [0, 1]]}, "vertex 1 does not reach the target 'out'"),
    ],
)
def test_each_violation_is_one_line(change: dict[str, Any], message: str):
    with pytest.raises(GraphFileError, match=message) as caught:
        parse_graph({**ROW, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["vertices", "edges"])
def test_missing_keys_are_named(key: str):
    with pytest.raises(GraphFileError, match=f"no '{key}'"):
        parse_graph({name: part for name, part in ROW.items() if name != key})


def test_ends_may_be_left_out_where_there_is_one_of_each():
    without = {"vertices": ROW["vertices"], "edges": ROW["edges"]}
    assert parse_graph(without) == parse_graph(ROW)
    with pytest.raises(GraphFileError, match=r"no 'target', and 2 vertices may be it \(1, 'out'\)"):
        parse_graph({**without, "edges": [[0, 1], [0, "out"]]})


@pytest.mark.parametrize("document", [[], None])
def test_other_json_raises(document: Any):
    with pytest.raises(GraphFileError, match="holds one JSON object"):
        parse_graph(document)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"size": ' + "9" * 5000 + "}"])
def test_invalid_json_raises(tmp_path: Path, text: str):
    with pytest.raises(GraphFileError, match="is not JSON"):
        read_graph_file(write(tmp_path, text))


@pytest.mark.parametrize("size", ["NaN", "-Infinity", "1e999999999", "1e-999999999"])
def test_extreme_numbers_raise(tmp_path: Path, size: str):
    with pytest.raises(GraphFileError, match="vertex 0 has the size"):
        read_graph_file(write(tmp_path, json.dumps(ROW).replace('"size": 5', f'"size": {size}')))


def test_unreadable_files_raise(tmp_path: Path):
    for path in (tmp_path, tmp_path / "nowhere.json"):
        with pytest.raises(GraphFileError, match="cannot read the graph"):
            read_graph_file(path)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GraphFileError, match="is not JSON"):
        read_graph_file(binary)
