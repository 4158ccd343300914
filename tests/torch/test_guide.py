"""The code blocks of the PyTorch guide run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import code_blocks

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]


def test_the_blocks_run_in_order(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "models", tmp_path / "models")
    text = "\n".join(
        text for language, text in code_blocks(ROOT / "docs" / "pytorch.md") if language == "python"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", text], cwd=tmp_path, env=environment, check=True, timeout=300)
