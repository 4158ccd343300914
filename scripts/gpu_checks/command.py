"""The command line of the GPU check."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu_checks.check import Check
from scripts.gpu_checks.groups import GROUPS
from scripts.gpu_checks.settings import CheckError, Options
from scripts.gpu_checks.training_files import package_version, recipes
from scripts.gpu_checks.worker_process import answer_of_worker


def main(arguments: Sequence[str], description: str | None = None) -> int:
    """Exit code 1: a step failed, or files could not be made."""
    parser = _parser(description)
    given = parser.parse_args(arguments)
    groups = given.group or list(GROUPS)
    if given.prepare is not None:
        return prepare(given.prepare, groups, given.smoke)
    if given.out is None:
        parser.error("give --out or --prepare")
    options = Options(given.out, given.smoke, given.limit_s, tuple(given.only or ()), given.prepared)
    options.out.mkdir(parents=True, exist_ok=True)
    passed = [_run(options, group) for group in groups]
    return 0 if all(passed) else 1


def prepare(folder: Path, groups: Sequence[str], smoke: bool) -> int:
    """Makes the training files of groups that this version of the package has not made yet."""
    passed = True
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        for group, recipe in [(name, one) for name in groups for one in recipes(name, smoke)]:
            request = {"group": group, "name": recipe.name, "folder": str(folder), "smoke": smoke}
            try:
                if not recipe.is_prepared(folder):
                    answer_of_worker("prepare", request, Path(scratch), 1800.0)
                print(recipe.name, flush=True)
            except CheckError as error:
                passed = False
                print(f"{recipe.name} failed: {error}", flush=True)
    size = sum(path.stat().st_size for path in folder.glob("*.xz"))
    print(f"version {package_version()}, {size:,} bytes")
    return 0 if passed else 1


def _run(options: Options, group: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        check = Check(options, group, Path(folder))
        card = check.record["card"] or "no card found"
        print(f"{group}: {'smoke run on the CPU, no CUDA result' if options.smoke else card}", flush=True)
        if options.prepared is not None:
            wanted = recipes(group, options.smoke)
            others = [recipe.name for recipe in wanted if not recipe.is_prepared(options.prepared)]
            if others:
                print(f"not prepared by this version, so planned now: {', '.join(others)}", flush=True)
        check.write()
        return check.run(GROUPS[group])


def _parser(description: str | None) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--group", nargs="+", choices=list(GROUPS), metavar="NAME", help="default: all")
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="make the training files, run nothing")
    parser.add_argument("--prepared", type=Path, metavar="FOLDER", help="use files that --prepare made")
    parser.add_argument("--smoke", action="store_true", help="tiny networks on the CPU provider")
    steps = list(dict.fromkeys(step.name for group in GROUPS.values() for step in group))
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=steps, help=f"of {', '.join(steps)}")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds for a group (default: 540)")
    return parser
