"""One of two workers: trains, and writes its parameters; started by the tests of workers."""

import os
import sys
from typing import Any

import numpy as np

from onnxgc.torch.torch_workers import TorchWorkers
from onnxgc.training import SGD
from tests.api.chains import chain
from tests.training.samples import make_trainer, samples


def main(folder: str) -> None:
    workers = TorchWorkers("gloo")
    trainer = make_trainer(chain(3), optimizer=SGD(momentum=0.9), learning_rate=0.05, batch=32, workers=workers)
    history = trainer.fit(samples(0, 192), 1, shuffle=False, state=f"{folder}/run.safetensors")
    figures: dict[str, Any] = {"loss": history[-1]["loss"], "samples": history[-1]["samples"], **trainer.parameters()}
    np.savez(f"{folder}/{workers.rank}.npz", **figures)
    workers.close()
    # Threads of PyTorch's that are still there when the interpreter ends would abort it.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
