"""`optimize --report`: the page is complete, and an unusable path is rejected before any work."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from onnxgc.cli import optimize as command
from tests.api.chains import chain
from tests.cli.command import run_command


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    onnx.save(chain(3, 8, 4), tmp_path / "chain.onnx")
    monkeypatch.chdir(tmp_path)
    return "chain.onnx"


def test_a_page_is_written_with_the_settings_of_the_call(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = (model, "--dry-run", "--no-check", "--loss", "mse", "--freeze", "w0", "--freeze", "w1")
    assert run_command("optimize", *call, "--report", "a.html", "--json", "a.json") == 0
    assert "wrote a.html" in capsys.readouterr().out
    text = Path("a.html").read_text(encoding="ascii")
    assert "<dd>--loss mse; --freeze w0 w1; --no-check; --dry-run</dd>" in text
    assert "<h1>chain.onnx: memory of one training step</h1>" in text
    assert sorted(path.name for path in Path().iterdir()) == ["a.html", "a.json", "chain.onnx"]
    assert run_command("optimize", *call, "--report", "b.html") == 0
    assert Path("b.html").read_bytes() == Path("a.html").read_bytes()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--report", "chain.onnx"),
        ("--report", "out.onnx"),
        ("--report", "out.onnx.data"),
        ("--report", "a.html", "--json", "./a.html"),
        ("--report", "nowhere/a.html"),
        ("--report", "."),
    ],
)
def test_an_unusable_path_is_rejected_before_any_work(
    model: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "optimize", lambda *_, **__: pytest.fail("work was done"))
    assert run_command("optimize", model, "out.onnx", *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "--report" in shown.err or arguments[1] in shown.err
