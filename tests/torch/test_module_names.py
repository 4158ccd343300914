import json
from pathlib import Path

import pytest
import torch
from torch import nn

import onnxgc
from onnxgc.model.read import read_model
from scripts.exports.torch_export import Export, export_module
from scripts.exports.torch_models import Recipe
from tests.cli.command import run_command
from tests.report.page_data import data_of

pytest.importorskip("onnxscript")


@pytest.mark.parametrize("recipe", Recipe)
def test_modules_are_named(recipe: Recipe, tmp_path: Path) -> None:
    """Parts of GELU, an expanded function, too."""
    parts = (nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, size)) for size in (8, 8, 3))
    network = nn.Sequential(*parts)
    path, figures, page = (tmp_path / name for name in ("model.onnx", "figures.json", "page.html"))
    export_module(network, {"x": torch.ones(64, 8)}, path, Export(recipe, False))
    nodes = [node for node in read_model(path).nodes if node.origin != "loss"]
    assert {node.module for node in nodes} == {f"{block}.{part}" for block in range(3) for part in range(3)}
    model = onnxgc.optimize(path, optimizer="sgd", check=False).training_graph.model
    entries = [{entry.key: entry.value for entry in node.metadata_props} for node in model.graph.node]
    stated = {(found["onnxgc.role"], found.get("onnxgc.module")) for found in entries}
    assert stated >= {("forward", "1.1"), ("backward", "1.1"), ("recompute", "1.1"), ("update", None)}

    options = ["--dry-run", "-v", "--no-check", "--json", str(figures), "--report", str(page)]
    printed = " ".join(run_command("optimize", path, *options).out.split())
    report = json.loads(figures.read_text())
    modules, planned, html = report["modules"], report["planned"], page.read_text()
    live, (kept, *_) = planned["largest_at_peak"][0]["tensor"], filter(modules.get, report["checkpoints"])
    for name in (f"'{planned['peak_step']}'", f"'{live}'", kept):
        assert f"{name} in '{modules[name.strip(chr(39))]}'" in printed
    assert f'<span class="name module">{modules[live]}</span>' in html
    texts, curve = data_of(html)["texts"], data_of(html)["courses"][0]
    shown = {(texts[name], texts[at]) for name, at in zip(curve["tensor"], curve["module"], strict=True)}
    assert (live, modules[live]) in shown
    assert kept in onnxgc.compare(path, solvers=["peak"]).report["modules"]
