"""`onnxgc train`: a training loop on ONNX Runtime."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from onnxgc.cli.arguments import (
    MODEL,
    REPORT,
    RUN,
    Freeze,
    FreezeBn,
    InputShapes,
    Loss,
    Plan,
    Quiet,
    Threads,
    Trainable,
    budget_option,
    check_distinct,
    check_json_target,
    check_target,
    console_for,
    finite,
    given_options,
    parse_shapes,
    progress_line,
    time_limit_option,
    write_json,
)
from onnxgc.emission.atomic_files import check_model_writable, data_file
from onnxgc.errors import TrainingError
from onnxgc.model.files.load import check_model_file, model_files
from onnxgc.report.terminal.training_run import epochs_table, run_line
from onnxgc.report.text.units import megabytes
from onnxgc.training import SGD, AdamW, Event, Trainer, constant, cosine, step, with_warm_up
from onnxgc.training.data import read_arrays, split_arrays
from onnxgc.training.learning_rates import Schedule
from onnxgc.training.run_source import batch_of

_SMOOTHING = 0.9
"""Weight of earlier updates in the shown loss."""
_DEFAULT_BATCH = 32
_FORWARD_MODEL = "the forward model of the training file; give it by --model"
_PLANNING_OPTIONS = (
    "--optimizer", "--momentum", "--nesterov", "--weight-decay", "--loss", "--budget", "--time-limit",
    "--plan", "--trainable", "--freeze", "--freeze-bn", "--input-shapes",
)  # fmt: skip
_OPTIMIZER, _DATA = "Optimizer", "Data and state"


class OptimizerName(StrEnum):
    """An optimizer of a training run."""

    SGD = "sgd"
    ADAMW = "adamw"


class ScheduleName(StrEnum):
    """How the learning rate changes over the run."""

    CONSTANT = "constant"
    STEP = "step"
    COSINE = "cosine"


class ProviderName(StrEnum):
    """An execution provider of ONNX Runtime."""

    CPU = "cpu"
    CUDA = "cuda"


def train_command(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="Forward ONNX model, or training file that contains an optimizer.")
    ],
    data: Annotated[
        str,
        typer.Option(
            rich_help_panel=_DATA,
            help="An .npz file with an array for each input, and labels or target. Arrays whose names end in "
            "_test or _validation are for evaluation.",
        ),
    ],
    validation: Annotated[
        str | None,
        typer.Option(rich_help_panel=_DATA, help="An .npz file to evaluate on after each epoch."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_DATA, help="Write the model with the trained weights to this file, to deploy it."
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_DATA,
            help="Save the run to this file [default: OUT's or MODEL's name + .state.safetensors].",
        ),
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(
            min=1, rich_help_panel=_DATA, help="Save after this many updates too, not only after epochs."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", rich_help_panel=_DATA, help="Continue from the state if it exists.")
    ] = False,
    epochs: Annotated[
        int,
        typer.Option(
            min=1, rich_help_panel=RUN, help="Passes over the data, including those before resuming."
        ),
    ] = 1,
    batch: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=RUN, help="Samples in a step [default: 32].")
    ] = None,
    accumulate: Annotated[
        int, typer.Option(min=1, rich_help_panel=RUN, help="Steps whose mean gradient makes one update.")
    ] = 1,
    provider: Annotated[
        ProviderName | None,
        typer.Option(rich_help_panel=RUN, help="Execution provider [default: cuda where available]."),
    ] = None,
    threads: Threads = None,
    seed: Annotated[
        int, typer.Option(min=0, rich_help_panel=RUN, help="Random seed of data order and drawn weights.")
    ] = 0,
    optimizer: Annotated[
        OptimizerName, typer.Option(rich_help_panel=_OPTIMIZER, help="With PyTorch's default settings.")
    ] = OptimizerName.ADAMW,
    lr: Annotated[
        float,
        typer.Option("--lr", min=0.0, callback=finite, rich_help_panel=_OPTIMIZER, help="Learning rate."),
    ] = 1e-3,
    schedule: Annotated[
        ScheduleName,
        typer.Option(
            rich_help_panel=_OPTIMIZER,
            help="Learning rate over the run; step divides it by 10 after each third.",
        ),
    ] = ScheduleName.CONSTANT,
    warm_up: Annotated[
        int,
        typer.Option(min=0, rich_help_panel=_OPTIMIZER, help="Updates over which the learning rate rises."),
    ] = 0,
    momentum: Annotated[
        float,
        typer.Option(min=0.0, callback=finite, rich_help_panel=_OPTIMIZER, help="Momentum of sgd."),
    ] = 0.0,
    nesterov: Annotated[
        bool, typer.Option("--nesterov", rich_help_panel=_OPTIMIZER, help="Nesterov momentum for sgd.")
    ] = False,
    weight_decay: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            callback=finite,
            rich_help_panel=_OPTIMIZER,
            help="Weight decay [default: 0.01 for adamw, 0 for sgd].",
        ),
    ] = None,
    clip_norm: Annotated[
        float | None,
        typer.Option(
            callback=finite, rich_help_panel=_OPTIMIZER, help="Maximum norm of all gradients together."
        ),
    ] = None,
    budget: Annotated[str | None, budget_option()] = None,
    plan: Plan = None,
    time_limit: Annotated[float | None, time_limit_option("")] = None,
    forward: Annotated[
        str | None,
        typer.Option(
            "--model",
            rich_help_panel=MODEL,
            help="With a training file, the forward model that it was made from.",
        ),
    ] = None,
    loss: Loss = "auto",
    trainable: Trainable = None,
    freeze: Freeze = None,
    freeze_bn: FreezeBn = False,
    input_shapes: InputShapes = None,
    json_target: Annotated[
        str | None,
        typer.Option(
            "--json", rich_help_panel=REPORT, help="Write the figures of each epoch as JSON; - for stdout."
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train a model on ONNX Runtime within the memory of its plan."""
    shapes = parse_shapes(input_shapes or [])
    check_model_file(model)
    target = state or f"{(out or Path(model).name).removesuffix('.onnx')}.state.safetensors"
    read = (*model_files(model), *(model_files(forward) if forward else ()), data, validation)
    _check_files(read, target, out, json_target, resume=resume)
    given = dict(given_options(context))
    is_planned = _is_planned(model)
    workers = _workers()
    is_first = workers is None or workers.rank == 0
    console = console_for(json_target, is_quiet=quiet or not is_first)
    arrays = read_arrays(data)
    evaluated = None if validation is None else read_arrays(validation)
    if is_planned:
        _check_planned(given, forward, out, validation)
    options = _without_defaults(
        loss=None if loss == "auto" else loss,
        budget=budget,
        plan=plan,
        time_limit=time_limit,
        trainable=tuple(trainable or ()) or None,
        freeze=tuple(freeze or ()) or None,
        freeze_bn=freeze_bn or None,
        input_shapes=shapes or None,
    )
    rate = _DeferredRate()
    with progress_line() as notify:
        trainer = Trainer(
            model,
            model=forward,
            optimizer=None
            if is_planned
            else _optimizer(optimizer, momentum, nesterov, weight_decay, clip_norm),
            learning_rate=rate,
            batch=batch if is_planned or forward else batch_of(model, shapes, batch, _DEFAULT_BATCH),
            accumulate=accumulate,
            workers=workers,
            provider=None if provider is None else provider.value,
            threads=threads,
            seed=seed if "--seed" in given else None,
            progress=notify,
            **options,
        )
    samples, tests = split_arrays(arrays, trainer.inputs)
    _check_tests(tests, data, evaluated is not None, can_evaluate=not is_planned or forward is not None)
    tests = tests if evaluated is None else evaluated
    total = epochs * (trainer.updates_of(samples) or 1)
    rate.schedule = _schedule(schedule, lr, warm_up, total)
    for note in trainer.report.get("notes", ()):
        console.print(f"note: {note}", markup=False)
    console.print(run_line(trainer.described()), markup=False)
    kinds: set[str] = set()
    with _bar(Console(file=sys.stderr, quiet=quiet or not is_first), console) as show:
        history = trainer.fit(
            samples,
            epochs,
            validation=tests or None,
            state=target,
            save_every=save_every,
            resume=resume,
            callbacks=[show, lambda event: kinds.add(event.kind)],
        )
    if "update" not in kinds:
        note = f"the state has {len(history)} epochs already, which --epochs includes; none was added"
        console.print(f"note: {note}", markup=False)
    console.print(epochs_table(history))
    if workers is not None:
        workers.close()
    if is_first:
        _write_results(trainer, history, console, out, target, json_target)


def _without_defaults(**options: Any) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _check_files(
    read: Sequence[str | None], target: str, out: str | None, json_target: str | None, *, resume: bool
) -> None:
    if out is not None:
        check_distinct("--out", out, *read)
        check_model_writable(out)
    check_target("--state", target, *read, out, data_file(out) if out else None)
    if out is not None:
        check_distinct("--out", data_file(out), *read)
    if os.path.exists(target) and not resume:
        raise TrainingError(
            f"the state '{target}' exists already; continue from it with --resume, or give --state another "
            "name"
        )
    check_json_target(json_target, *read, out, target)


def _check_planned(
    given: Mapping[str, str], forward: str | None, out: str | None, validation: str | None
) -> None:
    """Check the options for a training file, which has a plan and an optimizer already."""
    if "--clip-norm" in given:
        raise TrainingError(
            "gradient clipping is built into a training file: pass it when you create the file, or train "
            "from the forward model"
        )
    if fixed := [option for option in _PLANNING_OPTIONS if option in given]:
        raise TrainingError(f"a training file has its plan already; leave out {', '.join(fixed)}")
    if forward is None and (out or validation):
        raise TrainingError(f"{'--out' if out else '--validation'} needs {_FORWARD_MODEL}")


def _check_tests(tests: Mapping[str, Any], data: str, has_validation: bool, *, can_evaluate: bool) -> None:
    listed = ", ".join(map(repr, tests))
    if tests and has_validation:
        raise TrainingError(
            f"'{data}' contains {listed} for evaluation, as does --validation; drop one of them"
        )
    if tests and not can_evaluate:
        raise TrainingError(f"evaluation on {listed} needs {_FORWARD_MODEL}")


def _write_results(
    trainer: Trainer,
    history: Sequence[Mapping[str, Any]],
    console: Console,
    out: str | None,
    state: str,
    json_target: str | None,
) -> None:
    if out is not None:
        trainer.export(out)
        console.print(f"wrote {out}", markup=False)
    console.print(f"state: {state}", markup=False)
    write_json({**trainer.described(), "epochs": history}, json_target)


class _DeferredRate:
    """A learning rate whose schedule is set once the amount of data is known."""

    schedule: Schedule = staticmethod(constant(0.0))

    def __call__(self, updates: int) -> float:
        return self.schedule(updates)


def _workers() -> Any:
    """The processes of a torchrun with several, else None."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    from onnxgc.torch.torch_workers import from_environment

    return from_environment()


def _is_planned(model: str) -> bool:
    from onnxgc.model.files.load import load_proto
    from onnxgc.training.training_file import is_training_file

    return is_training_file(load_proto(model)[0])


def _optimizer(
    name: OptimizerName, momentum: float, nesterov: bool, decay: float | None, clip_norm: float | None
) -> SGD | AdamW:
    if name is OptimizerName.SGD:
        return SGD(momentum, nesterov, decay or 0.0, clip_norm)
    if momentum or nesterov:
        raise TrainingError(
            "--momentum and --nesterov apply to sgd only; add --optimizer sgd, or leave them out"
        )
    return AdamW(clip_norm=clip_norm) if decay is None else AdamW(weight_decay=decay, clip_norm=clip_norm)


def _schedule(name: ScheduleName, rate: float, warm_up: int, total: int) -> Schedule:
    chosen = {
        ScheduleName.CONSTANT: lambda: constant(rate),
        ScheduleName.STEP: lambda: step(rate, max(1, -(-total // 3))),
        ScheduleName.COSINE: lambda: cosine(rate, total),
    }[name]()
    return with_warm_up(chosen, warm_up)


@contextmanager
def _bar(progress_console: Console, console: Console) -> Iterator[Callable[[Event], None]]:
    """Shows loss, speed and memory as a bar on a terminal, and failed saves as lines."""
    progress = Progress(
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}, {task.fields[speed]:.0f}/s, {task.fields[memory]}"),
        TimeRemainingColumn(compact=True),
        console=progress_console,
        disable=not progress_console.is_terminal,
        transient=True,
    )
    with progress:
        task = progress.add_task("", epoch=1, loss=0.0, speed=0.0, memory="", total=None)
        smoothed: list[float] = []

        def show(event: Event) -> None:
            if event.kind == "unsaved":
                console.print(f"the run continues, but it was not saved: {event.message}", markup=False)
            if event.kind != "update":
                smoothed.clear()
                return
            before = smoothed[-1] if smoothed else event.loss
            smoothed[:] = [_SMOOTHING * before + (1 - _SMOOTHING) * event.loss]
            done = event.updates - (event.epoch - 1) * (event.of_updates or 0)
            progress.update(
                task,
                epoch=event.epoch,
                completed=done,
                total=event.of_updates,
                loss=smoothed[0],
                speed=event.samples / max(event.seconds, 1e-9),
                memory=f"peak {megabytes(_peak_bytes())}",
            )

        yield show


def _peak_bytes() -> int:
    """The peak memory of this process; 0 where the system does not report it."""
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
