"""The benchmark program on small networks: it runs, and its figures are what they are called."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import onnx
import pytest

from scripts import benchmark
from scripts.benchmarking import networks, picture, readme
from scripts.benchmarking.records import MODELS


def figures(folder: Path, name: str) -> Any:
    record = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    assert record["environment"]["versions"]["onnx"] == onnx.__version__
    return record["figures"]


def test_all_figures_of_one_network(tmp_path: Path) -> None:
    size = ["--network", "resnet18", "--batch", "2", "--pixels", "64"]
    arguments = ["resnet50", *size, "--threads", "1", "--rounds", "1", "--record", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    found = figures(tmp_path, "resnet50")
    assert found["identical"] == {
        "loss": True, "gradients": 62, "gradients_of": 62, "statistics": 40, "statistics_of": 40,
    }  # fmt: skip
    simulated, measured = found["simulated_peak_bytes"], found["measured"]["make_session"]
    for kind in ("regular", "planned"):
        assert abs(measured[kind]["requested_bytes"] - simulated[kind]) < 0.01 * simulated[kind] + 2**20
        assert measured[kind]["in_use_bytes"] >= measured[kind]["requested_bytes"]
        assert len(measured[kind]["in_use_bytes_by_run"]) == found["memory_runs"]
    assert found["accuracy"]["parameters"] == 62
    assert found["accuracy"]["ratio_max"] < 2
    assert all(found["step_seconds"][name]["minimum"] > 0 for name in ("regular", "planned", "torch"))
    assert "62 of 62 gradients" in readme.BLOCKS["results"](tmp_path)


def test_light_networks_are_verified(tmp_path: Path) -> None:
    assert len(networks.light_networks()) == 9 + len(list(MODELS.glob("*.onnx")))
    arguments = ["light", "--only", "light_squeezenet", "--only", "models/resnet18", "--pixels", "64"]
    assert benchmark.main([*arguments, "--threads", "1", "--record", str(tmp_path)]) == 0
    rows = figures(tmp_path, "light")
    assert [row["network"] for row in rows] == ["light_squeezenet", "models/resnet18"]
    assert rows[1]["inputs"] == {"x": [2, 3, 64, 64]}
    assert all(row["planned_peak_bytes"] <= row["regular_peak_bytes"] for row in rows)
    assert readme.BLOCKS["results"](tmp_path).count("all hold") == 2


def test_an_obstacle_is_recorded_and_told_by_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "empty.onnx"
    path.touch()
    monkeypatch.setattr(networks, "light_networks", lambda: {"empty": path})
    assert benchmark.main(["light", "--record", str(tmp_path)]) == 1
    assert "is empty" in figures(tmp_path, "light")[0]["error"]


def test_paper_table_is_taken_at_its_batch_and_input(tmp_path: Path) -> None:
    assert benchmark.main(["paper", "--only", "alexnet", "--record", str(tmp_path)]) == 0
    (row,) = figures(tmp_path, "paper")
    assert (row["batch"], row["input"], row["paper_regular_mb"], row["paper_optimal_mb"]) == (
        1024, "3x224x224", 4955, 3287,
    )  # fmt: skip
    assert row["planned_bytes"] < row["regular_bytes"]


def test_picture_is_well_formed_and_reaches_both_peaks(tmp_path: Path) -> None:
    arguments = ["picture", "--network", "resnet18", "--batch", "2", "--record", str(tmp_path)]
    assert benchmark.main(arguments) == 0
    found = figures(tmp_path, "memory")
    for kind in ("regular", "planned"):
        assert max(size for _, size in found["timeline"][kind]) == found["peak_bytes"][kind]
    root = ElementTree.fromstring(picture.draw(found))
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
