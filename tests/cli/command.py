"""Commands that run in this process."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from onnxgc.cli import main as command_line


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def run_command(*arguments: str | Path, code: int = 0, cwd: Path | None = None, width: int = 80) -> Done:
    """Runs a command, which must exit with `code`; an error is one line."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["onnxgc", *map(str, arguments)])
        patch.setenv("COLUMNS", str(width))
        if cwd is not None:
            patch.chdir(cwd)
        with pytest.raises(SystemExit) as ended:
            command_line.main()
    done = Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())
    assert done.code == code, done
    assert code < 2 or not arguments or (done.err.startswith("onnxgc: ") and done.err.count("\n") == 1), done.err
    return done
