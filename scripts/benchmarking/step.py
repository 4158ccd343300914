"""Time of a step of exported models, as a multiple of torch eager's.

Each model is exported, planned and run in a separate process, on one thread by default. Steps of ONNX Runtime
and of torch are interleaved; ratios are of the best times.

    python -m scripts.benchmarking.step NAME REQUEST RESULT    one model in this process
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from onnxgc.api import optimize
from onnxgc.report.text.units import shape_text
from onnxgc.runtime.ort import SessionSettings, make_session
from scripts.benchmarking.processes import failed_processes, rows_of_processes, write_result
from scripts.benchmarking.records import Progress, Record
from scripts.benchmarking.tables import machine_of, markdown_table, megabytes
from scripts.benchmarking.timing import interleaved_seconds

MODELS = ("resnet50", "vit_b_16", "bert", "gpt2", "mobilenet_v3_large")
STORE_ALL, PLANNED, EAGER = "store-all", "planned", "torch eager"


@dataclass(frozen=True, slots=True)
class Options:
    """`only` has names of models; `rounds` is the number of timed steps."""

    only: tuple[str, ...] = ()
    small: bool = False
    rounds: int = 5
    threads: int = 1


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """One row a model: times of each contender, and ratios to torch eager."""
    names = options.only or MODELS
    return {"rounds": options.rounds, "rows": rows_of_processes("step", "model", names, options, progress)}


def failures(figures: Mapping[str, Any]) -> list[str]:
    return failed_processes(figures["rows"])


def time_model(name: str, options: Options) -> dict[str, Any]:
    """The row of one model, in this process."""
    import torch

    from scripts.exports.torch_export import export_model
    from scripts.exports.torch_models import TORCH_MODELS

    progress = Progress()
    torch.set_num_threads(options.threads)
    model = TORCH_MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model.onnx"
        module, batch = export_model(name, source, options.small)
        with torch.no_grad():
            target = model.target(module(*batch.values()))

        def eager() -> None:
            module.zero_grad()
            model.loss_of(module(*batch.values()), target).backward()  # type: ignore[no-untyped-call]

        steps: dict[str, Callable[[], object]] = {EAGER: eager}
        peaks = {}
        for contender, solver in ((STORE_ALL, "store-all"), (PLANNED, None)):
            progress(f"{name}: {contender}")
            training = Path(folder) / f"{contender}.onnx"
            result = optimize(source, training, solver=solver, loss=model.loss, check=False)
            peaks[contender] = result.planned.profile.peak_bytes
            (label,) = result.planned.model.targets
            feeds = {key: value.numpy() for key, value in {**batch, label: target}.items()}
            steps[contender] = _session_step(training, feeds, options.threads)
        seconds = interleaved_seconds(steps, options.rounds, progress)
    return {
        "inputs": {key: list(value.shape) for key, value in batch.items()},
        "seconds": {contender: min(times) for contender, times in seconds.items()},
        "peak_bytes": peaks,
    }


def results_section(record: Record) -> str:
    figures = record["figures"]
    headings = (
        "model, inputs", "torch eager, s", "baseline / torch", "planned / torch", "peak, MB: baseline",
        "planned",
    )  # fmt: skip
    rows = [_document_row(row) for row in figures["rows"] if "error" not in row]
    return (
        "**Time of a step**, forward and backward, of models exported from PyTorch, compared with PyTorch "
        "eager in the same process, best of "
        f"{figures['rounds']}:\n\n{markdown_table(headings, rows)}\n\n{machine_of(record)}."
    )


def inputs_label(row: Mapping[str, Any]) -> str:
    """A model and the shapes of its inputs."""
    return f"{row['model']}, {' and '.join(map(shape_text, row['inputs'].values()))}"


def _session_step(training: Path, feeds: Mapping[str, Any], threads: int) -> Callable[[], object]:
    session = make_session(training, settings=SessionSettings(threads=threads))
    names = {value.name for value in session.get_inputs()}
    return partial(session.run, None, {key: value for key, value in feeds.items() if key in names})


def _document_row(row: Mapping[str, Any]) -> list[str]:
    eager, *ours = (row["seconds"][contender] for contender in (EAGER, STORE_ALL, PLANNED))
    peaks = (megabytes(row["peak_bytes"][contender]) for contender in (STORE_ALL, PLANNED))
    return [inputs_label(row), f"{eager:.2f}", *(f"{seconds / eager:.2f}" for seconds in ours), *peaks]


if __name__ == "__main__":
    write_result(time_model, Options)
