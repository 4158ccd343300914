"""Commands that run in this process."""

import pytest

from onnxgc.cli import main as command_line


def run_command(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["onnxgc", *arguments])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
    return int(ended.value.code or 0)
