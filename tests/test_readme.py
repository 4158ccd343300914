import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
import typer.main

from onnxgc.cli.main import app, main
from onnxgc.gradients.registry import RULES
from onnxgc.runtime import interleaved_timing
from onnxgc.solvers.registry import SOLVERS
from scripts import build_models
from scripts.benchmarking import chain_picture, documents, growth_picture, memory_picture, summary
from scripts.benchmarking.records import read_records
from scripts.networks.residual import resnet

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
RECIPES = DOCS / "exporting.md"
# Pages that run one by one. tests/torch/test_guide.py runs those that need PyTorch.
GUIDES = (
    README,
    *(
        DOCS / f"{name}.md"
        for name in (
            *("user-guide", "models", "planning", "comparing", "training", "training-file", "extending"),
            "from-onnxruntime-training",
        )
    ),
)
SLOW_GUIDES = ("comparing", "extending", "models", "planning", "training", "user-guide")
DOCUMENTS = (README, ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "decisions").glob("*.md")))
RECORDS = tuple(sorted((ROOT / "benchmarks").glob("*.*")))

# It would run this test.
NOT_RUN = ("scripts/test",)
SHORT_SEARCH = "0.2"
"""Seconds of a search that a document limits to more."""
# Paths of one machine, and names without meaning to a reader of the project.
FORBIDDEN = re.compile(
    r"/(?:work|tmp|home|root|opt|mnt|Users)/|[A-Z]:\\|\b(?:workplace|localhost|facts\.md|design\.md|style\.md)\b|#\d+\b"
)
FOREIGN_HOSTS = re.compile(r"https?://(?!keepachangelog\.com/|semver\.org/|www\.w3\.org/)[^\s)\"]+")
OTHER_OPTIONS = {"--help", "--version", "--install-completion", "--nproc-per-node", "--ignore-scripts"}
"""Options of the program itself, of torchrun and of npm."""
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_blocks(path: Path) -> Iterator[tuple[str, str]]:
    return blocks_of(path.read_text(encoding="utf-8"))


def blocks_of(text: str) -> Iterator[tuple[str, str]]:
    fenced = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for match in fenced.finditer(text):
        yield match.group(1), match.group(2)


def sections(path: Path) -> dict[str, str]:
    _, *parts = re.split(r"^## (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def commands(text: str) -> Iterator[list[str]]:
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def run(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for language, block in blocks_of(text):
        if language == "python":
            exec(compile(block, "<document>", "exec"), namespace)
        elif language == "sh":
            for command, *arguments in commands(block):
                if command in NOT_RUN:
                    continue
                assert command == "scripts/run"
                arguments = [
                    SHORT_SEARCH if before == "--time-limit" else given for before, given in pairwise(["", *arguments])
                ]
                monkeypatch.setattr(sys, "argv", ["onnxgc", *arguments])
                with pytest.raises(SystemExit) as ended:
                    main()
                assert not ended.value.code, " ".join(arguments)


@functools.cache
def short_networks() -> Mapping[str, bytes]:
    """Files of the networks that documents use most, with fewer blocks."""
    depths = {"resnet18": (1, 1, 1, 1), "resnet34": (1, 1, 1, 2), "resnet50": (1, 1, 1, 1)}
    short = {
        name: build_models.Network(functools.partial(resnet, depths=blocks, bottleneck=name == "resnet50"))
        for name, blocks in depths.items()
    }
    with patch.dict(build_models.NETWORKS, short):
        return {name: build_models.serialize(build_models.build(name)) for name in short}


def copy_models(folder: Path, *, are_short: bool) -> None:
    """Copies the models into `folder`/models."""
    shutil.copytree(ROOT / "models", folder / "models")
    for name, content in short_networks().items() if are_short else ():
        (folder / "models" / f"{name}.onnx").write_bytes(content)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Path]:
    copy_models(tmp_path, are_short=request.node.get_closest_marker("slow") is None)
    monkeypatch.chdir(tmp_path)
    # For measurements, which run in separate processes.
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setattr(interleaved_timing, "_PAUSE_SECONDS", 0.0)
    yield tmp_path
    patch.stopall()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=relative(path), marks=pytest.mark.slow if path.stem in SLOW_GUIDES else ())
        for path in GUIDES
    ],
)
def test_every_block_runs(path: Path, monkeypatch: pytest.MonkeyPatch):
    if path.stem == "extending":
        pytest.importorskip("torch")
    run(path.read_text(encoding="utf-8"), monkeypatch)


# Packages that the recipes of each section need.
NEEDED: Mapping[str, tuple[str, ...]] = {
    "PyTorch": ("torch", "onnxscript"),
    "Keras": ("keras", "tensorflow", "tf2onnx"),
    "PaddlePaddle": ("paddle", "paddle2onnx"),
    "JAX": ("flax", "jax2onnx"),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("ignore")  # Warnings of the frameworks.
@pytest.mark.parametrize("section", NEEDED)
def test_recipes_run_with_their_framework(section: str, monkeypatch: pytest.MonkeyPatch):
    missing = [name for name in NEEDED[section] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    run(sections(RECIPES)[section], monkeypatch)


def test_every_recipe_has_a_test():
    assert {name for name, text in sections(RECIPES).items() if list(blocks_of(text))} == set(NEEDED)


def test_readme_begins_with_two_commands():
    first_screen = README.read_text(encoding="utf-8").splitlines()[:24]
    for command in ("scripts/run optimize models/resnet50.onnx", "scripts/test"):
        assert command in first_screen
        assert os.access(ROOT / command.split()[0], os.X_OK)


def test_readme_is_short_with_one_picture_and_one_table():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100
    assert text.count("![") == 1
    assert list(documents.BLOCKS[README]) == ["summary"]


@pytest.mark.parametrize("path", documents.BLOCKS, ids=relative)
def test_generated_blocks_are_up_to_date(path: Path):
    text = path.read_text(encoding="utf-8")
    assert text == documents.render(path, text), "run `python scripts/benchmark.py render`"


def test_reference_has_every_rule_and_solver():
    text = documents.REFERENCE.read_text(encoding="utf-8")
    assert [name for name in RULES if "." not in name and f"`{name}`" not in text] == []
    assert [name for name in SOLVERS if f"| `{name}` |" not in text] == []


def test_pictures_are_up_to_date():
    drawn = documents.render_pictures()
    assert set(drawn) == {module.PICTURE for module in (memory_picture, growth_picture, chain_picture)}
    for path, picture in drawn.items():
        assert path.read_text(encoding="utf-8") == picture, "run `python scripts/benchmark.py render`"


@pytest.mark.parametrize(
    "name, place, path",
    [
        ("table1", (0, "regular", "activation_peak_bytes"), documents.RESULTS),
        ("peaks", ("rows", 0, "requested_bytes"), documents.RESULTS),
        ("resnet50", ("step_seconds", "planned", "minimum"), README),
    ],
)
def test_changed_records_make_documents_stale(name: str, place: tuple[str | int, ...], path: Path, tmp_path: Path):
    (record,) = read_records(name)
    *inner, last = place
    figures = functools.reduce(lambda found, key: found[key], inner, record["figures"])
    figures[last] *= 2
    for recorded in RECORDS:
        shutil.copy(recorded, tmp_path)
    shutil.copytree(ROOT / "benchmarks" / "gpu", tmp_path / "gpu")
    text = path.read_text(encoding="utf-8")
    assert documents.render(path, text, tmp_path) == text
    (tmp_path / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")
    assert documents.render(path, text, tmp_path) != text


def test_table_of_the_readme_has_the_named_networks(tmp_path: Path):
    rows = [line for line in summary.summary(ROOT / "benchmarks").splitlines() if line.startswith("| ")][2:]
    assert [row.split()[1].rstrip(",") for row in rows] == list(summary.NETWORKS)
    assert summary.summary(tmp_path) == "", "a summary without records"


def test_missing_markers_are_rejected():
    with pytest.raises(ValueError, match=r"reference\.md has no block '<!-- solvers: begin"):
        documents.render(documents.REFERENCE, "<!-- commands: begin -->\n<!-- commands: end -->")


def test_chain_picture_has_the_figures_of_the_guide():
    baseline, planned = chain_picture.panels()
    assert (baseline.peak, planned.peak) == (9, 5)
    assert not any(cell.is_recomputed for cell in baseline.cells)
    assert {cell.tensor for cell in planned.cells if cell.is_recomputed} == {1, 2, 4, 5}
    live = {cell.tensor for cell in planned.cells if cell.step == planned.forward}
    assert live == {0, 3, 6, 7}, "the checkpoints, and the first tensor that backward reads"
    assert ElementTree.fromstring(chain_picture.draw()).tag.endswith("svg")


def anchors(path: Path) -> set[str]:
    """Targets of links in a document, by GitHub's names of headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_links_resolve(path: Path):
    links = re.findall(r"\]\(([^)\s]+)", path.read_text(encoding="utf-8"))
    dead = []
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_guide_links_every_page():
    text = (DOCS / "user-guide.md").read_text(encoding="utf-8")
    pages = {path.name for path in DOCS.glob("*.md")} - {"user-guide.md"}
    assert {name for name in pages if f"({name}" not in text} == set()


def options() -> set[str]:
    group: Any = typer.main.get_command(app)
    parameters = [parameter for command in group.commands.values() for parameter in command.params]
    return {option for parameter in parameters for option in parameter.opts if option.startswith("--")}


@pytest.mark.parametrize("path", sorted({*GUIDES, *DOCS.glob("*.md")}), ids=relative)
def test_documented_options_exist(path: Path):
    documented = set(OPTION.findall(path.read_text(encoding="utf-8")))
    assert documented - options() - OTHER_OPTIONS == set()


@pytest.mark.parametrize("path", [*DOCUMENTS, *documents.render_pictures(), *RECORDS], ids=relative)
def test_documents_name_no_foreign_paths_or_hosts(path: Path):
    text = path.read_text(encoding="utf-8")
    assert [match.group() for match in FORBIDDEN.finditer(text)] == []
    assert [match.group() for match in FOREIGN_HOSTS.finditer(text)] == []


def test_decisions_are_numbered_without_gaps():
    names = [path.name for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
