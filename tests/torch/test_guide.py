"""The code blocks of the PyTorch guide run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import SHORT_SEARCH, code_blocks, copy_models

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]


def test_the_blocks_run_in_order(tmp_path: Path) -> None:
    copy_models(tmp_path, are_short=True)
    text = "\n".join(text for language, text in code_blocks(ROOT / "docs" / "pytorch.md") if language == "python")
    text = text.replace("time_limit=2", f"time_limit={SHORT_SEARCH}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", text], cwd=tmp_path, env=environment, check=True, timeout=300)
