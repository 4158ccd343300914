"""Checks on one GPU, in groups of less than ten minutes each.

    kernels        kernels of a step, races of forms of reductions and of weight gradients
    torch          PyTorch on the same card: eager, channels_last, mixed precision, checkpointed, compiled
    steps          fallbacks, executed order, peaks and times of the paper's networks, CUDA graph, exchange
    transformers   planned modules by PyTorch's allocator; transformers in ONNX Runtime and in PyTorch
    training       optimizer in the file, budgets, half precision, every gradient rule with and without TF32

Each group first checks that the CUDA build of ONNX Runtime loads and runs.

    python scripts/gpu_check.py --prepare FOLDER          plans and training files, made beforehand
    python scripts/gpu_check.py --group kernels --out benchmarks/gpu --prepared FOLDER
    python scripts/gpu_check.py --out FOLDER --smoke      tiny networks on the CPU provider, no CUDA claim

Needs numpy, onnx, torch, onnxruntime-gpu and this repository with its `models/` (scripts/build_models.py);
uses torchvision and transformers where installed. The record of a card keeps the results of other groups. It
is written after each row, so that an interrupted run leaves its results. Each row has its own process: a
crash or hang costs one, and no two share an arena. Exit code 1: a step failed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.gpu_checks.worker_process import work

if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], Path(sys.argv[3]))
    else:
        from scripts.gpu_checks.command import main

        sys.exit(main(sys.argv[1:], __doc__))
