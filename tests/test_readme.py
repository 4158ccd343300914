"""What the documents say is so: commands and code run, figures are the recorded ones, links resolve."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from onnxgc.cli.main import app
from onnxgc.gradients.registry import RULES
from scripts.benchmarking import readme

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
GUIDES = (README, ROOT / "docs" / "user-guide.md", ROOT / "docs" / "training-file.md")
DOCUMENTS = (
    *GUIDES,
    ROOT / "docs" / "pytorch.md",
    ROOT / "docs" / "rematerialisation.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
)
RECORDS = tuple(sorted((ROOT / "benchmarks").glob("*.*")))

# The one command that a test cannot run: it would run this test.
NOT_RUN = ("scripts/test",)
# Places of one machine, and names that mean nothing to a reader of the project.
FORBIDDEN = re.compile(
    r"/(?:work|tmp|home|root|opt|mnt|Users)/|[A-Z]:\\|\b(?:workplace|localhost|facts|design\.md|style\.md)\b|#\d+\b"
)
FOREIGN_HOSTS = re.compile(r"https?://(?!keepachangelog\.com/|semver\.org/|www\.w3\.org/)[^\s)\"]+")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_blocks(path: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each fenced block, in order."""
    fenced = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for match in fenced.finditer(path.read_text(encoding="utf-8")):
        yield match.group(1), match.group(2)


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block, one a line; `scripts/run` is this interpreter's onnxgc."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["scripts/run"]:
            words = [sys.executable, "-m", "onnxgc", *words[1:]]
        if words:
            found.append(words)
    return found


def run(words: list[str], folder: Path) -> None:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{' '.join(words)}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"


@pytest.mark.parametrize("path", GUIDES, ids=relative)
def test_every_block_runs(path: Path, tmp_path: Path) -> None:
    """All blocks of a document, one after the other, as a reader would in one folder."""
    shutil.copytree(ROOT / "models", tmp_path / "models")
    for language, text in code_blocks(path):
        if language == "python":
            run([sys.executable, "-W", "error", "-c", text], tmp_path)
        elif language == "sh":
            for words in commands(text):
                if words[0] not in NOT_RUN:
                    run(words, tmp_path)


def test_the_two_commands_come_first() -> None:
    first_screen = README.read_text(encoding="utf-8").splitlines()[:24]
    for command in ("scripts/run optimize models/resnet50.onnx", "scripts/test"):
        assert command in first_screen
        assert os.access(ROOT / command.split()[0], os.X_OK)


def test_readme_shows_the_recorded_figures_and_the_registered_rules() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == readme.render_readme(text), "run `python scripts/benchmark.py render`"
    assert all(f"`{name}`" in text for name in RULES if "." not in name)


def test_pictures_show_the_recorded_figures() -> None:
    drawn = readme.render_pictures()
    assert set(drawn) == {readme.PICTURE, readme.GROWTH_PICTURE}
    for path, picture in drawn.items():
        assert path.read_text(encoding="utf-8") == picture, "run `python scripts/benchmark.py render`"


@pytest.mark.parametrize(
    "name, place",
    [
        ("table1", (0, "regular", "activation_peak_bytes")),
        ("peaks", ("rows", 0, "requested_bytes")),
    ],
)
def test_a_changed_record_makes_the_readme_stale(
    name: str, place: tuple[str | int, ...], tmp_path: Path
) -> None:
    record = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
    *inner, last = place
    figures = functools.reduce(lambda found, key: found[key], inner, record["figures"])
    figures[last] *= 2
    for path in RECORDS:
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "benchmarks" / "gpu", tmp_path / "gpu")
    text = README.read_text(encoding="utf-8")
    assert readme.render_readme(text, tmp_path) == text
    (tmp_path / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")
    assert readme.render_readme(text, tmp_path) != text


def test_a_lost_marker_is_noticed() -> None:
    with pytest.raises(ValueError, match="solvers: begin"):
        readme.render_readme("<!-- results: begin -->\n<!-- results: end -->")


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_links_resolve(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
    local = [target for target in targets if not target.startswith(("http://", "https://"))]
    assert [target for target in local if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", GUIDES, ids=relative)
def test_no_option_is_promised_that_does_not_exist(path: Path) -> None:
    command = typer.main.get_command(app)
    options = {"--help", *(option for parameter in command.params for option in parameter.opts)}
    for sub in command.commands.values():  # type: ignore[attr-defined]
        options.update(option for parameter in sub.params for option in parameter.opts)
    assert set(OPTION.findall(path.read_text(encoding="utf-8"))) - options == set()


@pytest.mark.parametrize("path", [*DOCUMENTS, readme.PICTURE, readme.GROWTH_PICTURE, *RECORDS], ids=relative)
def test_documents_speak_of_the_project_alone(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [match.group() for match in FORBIDDEN.finditer(text)] == []
    assert [match.group() for match in FOREIGN_HOSTS.finditer(text)] == []


def test_decisions_are_numbered_without_a_gap() -> None:
    names = [path.name for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
