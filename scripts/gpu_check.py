"""Checks on one GPU, within eight minutes.

    1. the CUDA build of ONNX Runtime loads, finds its libraries and runs a MatMul on the card
    2. operators of a training graph that fall back to the CPU, and the copies that this causes
    3. executed order against the schedule, and the cost of barriers
    4. measured against simulated peak, and step time, for the baseline and the plan
    5. the same for exports of PyTorch, compared with PyTorch eager and manual checkpointing
    6. in-place updates through IO binding, and DLPack exchange with torch without a copy
    7. every gradient rule in float32, float16 and bfloat16 against torch float64
    8. other forms of the weight gradients of convolutions

Needs numpy, onnx, torch, onnxruntime-gpu and this repository.

    python scripts/gpu_check.py --out benchmarks/gpu     one JSON record, named after the card
    python scripts/gpu_check.py --out FOLDER --smoke     tiny networks on the CPU provider, no CUDA claim

The record is written after each step and each network, so that an interrupted run leaves its results.
Work on the card runs in separate processes: a crash or hang costs one figure, and no two figures share
an arena. Exit code 1: a step failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.gpu_checks.check import Check
from scripts.gpu_checks.settings import PAPER_NETWORKS, SMOKE_NETWORKS, Options
from scripts.gpu_checks.steps import STEPS, run_step
from scripts.gpu_checks.workers import work


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        check = Check(options, Path(folder))
        card = check.record["card"] or "no card found"
        print("smoke run on the CPU: no CUDA result" if options.smoke else card, flush=True)
        check.write()
        passed = [run_step(check, step) for step in STEPS if step.number in options.only]
    return 0 if all(passed) else 1


def _parse(arguments: Sequence[str] | None) -> Options:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--smoke", action="store_true", help="tiny networks on the CPU provider")
    numbers = [step.number for step in STEPS]
    parser.add_argument("--only", type=int, nargs="+", metavar="STEP", choices=numbers)
    parser.add_argument(
        "--networks", nargs="+", metavar="NAME", help="in place of all; steps 2, 3 and 8 take the first"
    )
    parser.add_argument("--limit-s", type=float, default=460.0, help="seconds for all steps (default: 460)")
    parser.add_argument(
        "--network-limit-s", type=float, default=120.0, help="seconds for one network (default: 120)"
    )
    given = parser.parse_args(arguments)
    networks = SMOKE_NETWORKS if given.smoke else PAPER_NETWORKS
    return Options(
        given.out,
        given.smoke,
        given.limit_s,
        given.network_limit_s,
        tuple(given.networks or (network.name for network in networks)),
        tuple(given.only or numbers),
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main())
