"""Makes hostile, odd and huge model files, and runs `onnxgc` on each in limited child processes.

    python -m scripts.hostile --count 1000

Children are forks of one process that has imported and run everything once. A run fails by a traceback, a
crash, more than `CPU_SECONDS` or `MEMORY_BYTES`, a refusal of more than one line, control characters in the
output, or a file left behind. The exit code is 1 if a run fails.
"""

import argparse
import contextlib
import gc
import io
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from onnxgc.cli.main import main as onnxgc_main
from scripts.hostile_files import cases, mutated, network

CPU_SECONDS = 5
MEMORY_BYTES = 1 << 30
COMMANDS = (("inspect",), ("optimize", "--dry-run", "--no-check"))
_ADDRESS_BYTES = 6 << 30
_RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_LONGEST_NAME = re.compile(r"x{1000}")
_LONG_CPU_SECONDS = 20
_REAL_WORK = ("add_chain", "reversed", "many_readers", "doubling_8")
"""Files whose thousands of operators are planned, in up to `_LONG_CPU_SECONDS`."""
# Bounded work of seconds.
_SLOW = ("add_chain", "reversed", "many_readers", "identities", "scan_10_6", "doubling", "lstm")


def failure(arguments: Sequence[str], folder: Path) -> str:
    """Why a run of `onnxgc` on files of a folder fails, or ""."""
    before = sorted(folder.iterdir())
    allowed = _LONG_CPU_SECONDS if Path(arguments[1]).name.startswith(_REAL_WORK) else CPU_SECONDS
    with tempfile.TemporaryFile() as output:
        started, child = time.monotonic(), os.fork()
        if not child:
            _limit(allowed)
            _run(arguments, output.fileno())
        _, status, usage = os.wait4(child, 0)
        waited = time.monotonic() - started
        output.seek(0)
        text = output.read().decode(errors="replace")
    code, seconds = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
    if code in (-signal.SIGKILL, -signal.SIGALRM, -signal.SIGXCPU) or seconds > allowed:
        return f"time: {seconds:.1f} s of processor, {waited:.0f} s of wall time"
    if code < 0:
        return f"crash: signal {-code}"
    if "Traceback (most recent call last)" in text:
        return "traceback: " + text.rstrip().splitlines()[-1][:150]
    if (found := _RAW.search(text)) is not None:
        return f"raw: {found[0]!a}"
    if _LONGEST_NAME.search(text):
        return "long: a name of over 1,000 characters is printed"
    if code and len(text.strip().splitlines()) != 1:
        return f"lines: {len(text.strip().splitlines())} in place of one"
    if "MemoryError" in text or "bad_alloc" in text or usage.ru_maxrss << 10 > MEMORY_BYTES:
        return f"memory: {usage.ru_maxrss >> 10} MiB"
    return "stray files" if sorted(folder.iterdir()) != before else ""


def _limit(seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_BYTES, _ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds + 3, seconds + 4))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(150)


def _run(arguments: Sequence[str], output: int) -> None:
    """Runs the command line in this process, which ends with it."""
    code = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["onnxgc", *arguments]
        onnxgc_main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _warm_up(folder: Path) -> None:
    """Runs each command once in this process: children share its imports and compiled loops."""
    (plain := folder / "plain.onnx").write_bytes(network().SerializeToString())
    for command in COMMANDS:
        sys.argv = ["onnxgc", command[0], str(plain), *command[1:]]
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            onnxgc_main()
    plain.unlink()
    gc.collect()
    gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="number of files")
    parser.add_argument("--seed", type=int, default=0, help="seed of mutations")
    parser.add_argument("--only", default="", help="only files whose name contains this")
    parser.add_argument("--quick", action="store_true", help="one command a file, no file that takes seconds")
    given = parser.parse_args()
    failures, ran = Counter[str](), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "files")
        folder.mkdir()
        _warm_up(folder)
        for file, make in _drawn(folder, given.count, given.seed):
            if given.only not in file or (given.quick and file.startswith(_SLOW)):
                continue
            path = folder / file
            path.write_bytes(make())
            ran += 1
            for command in [COMMANDS[ran % 2]] if given.quick else COMMANDS:
                if reason := failure([command[0], str(path), *command[1:]], folder):
                    failures[reason.partition(":")[0]] += 1
                    print(f"{file} {command[0]}: {reason}", flush=True)
            path.unlink()
    print(f"{ran} files; failed runs: {dict(failures) or 'none'}")
    return 1 if failures else 0


def _drawn(folder: Path, count: int, seed: int) -> list[tuple[str, Callable[[], bytes]]]:
    """Files of all fixed kinds, and mutations; a sample of both where `count` is less."""
    made = list(cases(folder))
    made += [
        (f"mutated_{number}.onnx", partial(mutated, random.Random(f"{seed} {number}")))
        for number in range(max(count - len(made), count // 4))
    ]
    return made if count >= len(made) else random.Random(seed).sample(made, count)


if __name__ == "__main__":
    sys.exit(main())
