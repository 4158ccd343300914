"""Runs `onnxgc optimize` under faults: kills, interrupts, limits, full outputs, and two writers of one file.

    python -m scripts.faults --kills 100 --interrupts 50

After each fault the output is whole or absent, and the run ended in at most one line. The exit code is 1
if one did not.
"""

import argparse
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from scripts.hostile_files import network

_ADDRESS_MEGABYTES = (30, 60, 100, 150, 200, 300, 500, 800, 1200, 2000)
_OPEN_FILES = range(5, 25)
"""Python itself needs five."""
_FILE_KILOBYTES = (0, 1, 4, 16, 64, 256, 1024)
_PAIRS = 10


class Faults:
    """Runs on one model in a folder; `wrong` has a line for each that did not end well."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.wrong, self.counts = folder, list[str](), Counter[str]()
        self.model, self.output = folder / "net.onnx", folder / "out.onnx"
        model = network("k = Gemm(h, v) y = Relu(k)")
        model.graph.initializer.append(numpy_helper.from_array(np.zeros((4, 500_000), np.float32), "v"))
        del model.graph.output[0].type.tensor_type.shape.dim[:]
        onnx.save(model, self.model)
        started = time.monotonic()
        self.check("plain", self.start())
        self._seconds = time.monotonic() - started

    def start(self, limit: tuple[int, int] | None = None, stdout: Any = subprocess.PIPE) -> subprocess.Popen[bytes]:
        """A run with a resource limit."""
        before = None if limit is None else lambda: resource.setrlimit(limit[0], (limit[1], limit[1]))
        command = [sys.executable, "-m", "onnxgc", "optimize", str(self.model), str(self.output), "--no-check"]
        command += ["--save-external-data", "--solver", "acg"]
        return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, preexec_fn=before)

    def check(self, fault: str, process: subprocess.Popen[bytes], codes: tuple[int, ...] = (0,)) -> int:
        """Waits for a run, and checks its code, its lines and its output."""
        text = process.communicate()[1].decode(errors="replace")
        code = process.returncode
        self.counts[fault] += 1
        if code not in codes:
            self.wrong.append(f"{fault}: exit code {code}: {text.strip()[-200:]}")
        elif code and len(text.strip().splitlines()) != (code > 0 and fault != "closed pipe"):
            self.wrong.append(f"{fault}: {len(text.splitlines())} lines: {text.strip()[-200:]}")
        try:
            if self.output.exists():
                onnx.load(self.output)
        except Exception as error:
            self.wrong.append(f"{fault}: the output is not whole: {error}")
        return code

    def signals(self, fault: str, number: int, count: int, codes: tuple[int, ...]) -> None:
        """Runs that receive a signal at a random time."""
        drawn = random.Random(0)
        for _ in range(count):
            process = self.start()
            time.sleep(drawn.uniform(0, self._seconds))
            process.send_signal(number)
            self.check(fault, process, codes)
            if number == signal.SIGINT:
                self.check_folder(fault)

    def check_folder(self, fault: str) -> None:
        known = {"net.onnx", "out.onnx", "out.onnx.data"}
        if left := sorted({path.name for path in self.folder.iterdir()} - known):
            self.wrong.append(f"{fault}: left behind: {', '.join(left)}")

    def pairs(self) -> None:
        for _ in range(_PAIRS):
            for process in [self.start(), self.start()]:
                self.check("two writers", process)


def _limits() -> Iterator[tuple[str, tuple[int, int]]]:
    yield from (("memory", (resource.RLIMIT_AS, size * 10**6)) for size in _ADDRESS_MEGABYTES)
    yield from (("open files", (resource.RLIMIT_NOFILE, count)) for count in _OPEN_FILES)
    yield from (("full disk", (resource.RLIMIT_FSIZE, size * 1000)) for size in _FILE_KILOBYTES)


def _closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="runs ended by SIGKILL")
    parser.add_argument("--interrupts", type=int, default=50, help="runs ended by SIGINT")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        faults = Faults(Path(name))
        faults.signals("kill", signal.SIGKILL, given.kills, (0, -signal.SIGKILL))
        faults.check("after kills", faults.start())
        faults.check_folder("after kills")
        faults.signals("interrupt", signal.SIGINT, given.interrupts, (0, 130))
        for fault, limit in _limits():
            faults.check(fault, faults.start(limit), (0, 1, 2))
        openers: dict[str, Callable[[], int]] = {
            "/dev/full": lambda: os.open("/dev/full", os.O_WRONLY), "closed pipe": _closed_pipe
        }  # fmt: skip
        for fault, opened in openers.items():
            faults.check(fault, faults.start(stdout=opened()), (1,))
        faults.pairs()
        faults.check_folder("end")
    print(*faults.wrong, f"{dict(faults.counts)}; wrong: {len(faults.wrong)}", sep="\n")
    return 1 if faults.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
