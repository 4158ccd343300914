"""`onnxgc train`: a training loop on ONNX Runtime."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from onnxgc.cli.arguments import (
    Freeze,
    FreezeBn,
    InputShapes,
    Loss,
    Quiet,
    Threads,
    Trainable,
    check_apart,
    check_json_target,
    check_target,
    console_for,
    finite,
    parse_shapes,
    settings_of,
    stages,
    write_json,
)
from onnxgc.emission.write import check_model_writable, data_file
from onnxgc.errors import TrainingError
from onnxgc.model.files.load import check_model_file, files_of
from onnxgc.report.tables import megabytes
from onnxgc.report.training import epochs_table, run_line
from onnxgc.training import SGD, AdamW, Event, Trainer, constant, cosine, step, with_warm_up
from onnxgc.training.data import read_arrays, split_arrays
from onnxgc.training.learning_rates import Schedule
from onnxgc.training.source import batch_of

_LOSSES_SHOWN = 0.9
"""How much of the shown loss is that of earlier updates."""


class OptimizerName(StrEnum):
    """What updates the parameters."""

    SGD = "sgd"
    ADAMW = "adamw"


class ScheduleName(StrEnum):
    """How the learning rate changes over the run."""

    CONSTANT = "constant"
    STEP = "step"
    COSINE = "cosine"


class ProviderName(StrEnum):
    """Where it trains."""

    CPU = "cpu"
    CUDA = "cuda"


def train_command(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A forward ONNX model, or a training file with an optimizer in it.")
    ],
    data: Annotated[
        str,
        typer.Option(
            help="An .npz file: an array for each input, and labels or target. Arrays whose names end in "
            "_test or _validation are evaluated on."
        ),
    ],
    out: Annotated[
        str | None, typer.Option(help="The model's own file with the trained weights, to deploy.")
    ] = None,
    forward: Annotated[
        str | None, typer.Option("--model", help="Of a training file, the forward model that it was made of.")
    ] = None,
    validation: Annotated[
        str | None, typer.Option(help="An .npz file to evaluate on after each epoch.")
    ] = None,
    loss: Loss = "auto",
    optimizer: Annotated[OptimizerName, typer.Option(help="With PyTorch's settings.")] = OptimizerName.ADAMW,
    lr: Annotated[float, typer.Option("--lr", min=0.0, callback=finite, help="The learning rate.")] = 1e-3,
    schedule: Annotated[
        ScheduleName, typer.Option(help="The rate over the run: step is a tenth after each third of it.")
    ] = ScheduleName.CONSTANT,
    warm_up: Annotated[int, typer.Option(min=0, help="Updates in which the rate rises to its value.")] = 0,
    momentum: Annotated[float, typer.Option(min=0.0, callback=finite, help="Of sgd.")] = 0.0,
    nesterov: Annotated[bool, typer.Option("--nesterov", help="Of sgd.")] = False,
    weight_decay: Annotated[
        float | None, typer.Option(min=0.0, callback=finite, help="[default: 0.01 for adamw, 0 for sgd]")
    ] = None,
    clip_norm: Annotated[
        float | None, typer.Option(callback=finite, help="The largest norm of all gradients together.")
    ] = None,
    epochs: Annotated[
        int, typer.Option(min=1, help="Passes over the data, those before resuming included.")
    ] = 1,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples of a step [default: 32].")] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Steps whose mean gradient makes one update.")] = 1,
    budget: Annotated[str | None, typer.Option(help="As in optimize.")] = None,
    time_limit: Annotated[
        float | None, typer.Option(min=0.0, callback=finite, help="As in optimize.")
    ] = None,
    plan: Annotated[str | None, typer.Option(help="As in optimize.")] = None,
    trainable: Trainable = None,
    freeze: Freeze = None,
    freeze_bn: FreezeBn = False,
    input_shapes: InputShapes = None,
    state: Annotated[
        str | None,
        typer.Option(help="Where the run is saved [default: OUT's or MODEL's name + .state.safetensors]."),
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Save after so many updates, not after epochs alone.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the state where it is there.")] = False,
    provider: Annotated[
        ProviderName | None, typer.Option(help="[default: cuda where the machine has it]")
    ] = None,
    threads: Threads = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data's order, and of drawn weights.")] = 0,
    json_target: Annotated[
        str | None, typer.Option("--json", help="Figures of each epoch as JSON, - for stdout.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train a model on ONNX Runtime in the memory of its plan, and write it back to be deployed."""
    shapes = parse_shapes(input_shapes or [])
    check_model_file(model)
    target = state or f"{(out or Path(model).name).removesuffix('.onnx')}.state.safetensors"
    read = (*files_of(model), *(files_of(forward) if forward else ()), data, validation)
    if out is not None:
        check_apart("--out", out, *read)
        check_model_writable(out)
    check_target("--state", target, *read, out, data_file(out) if out else None)
    if out is not None:
        check_apart("--out", data_file(out), *read)
    if os.path.exists(target) and not resume:
        raise TrainingError(
            f"there is a state '{target}' already; go on from it by --resume, or give --state another name"
        )
    check_json_target(json_target, *read, out, target)
    workers = _workers()
    is_first = workers is None or workers.rank == 0
    console = console_for(json_target, is_quiet=quiet or not is_first)
    arrays = read_arrays(data)
    evaluated = None if validation is None else read_arrays(validation)
    is_planned = _is_planned(model)
    chosen = None if is_planned else _optimizer(optimizer, momentum, nesterov, weight_decay, clip_norm)
    given_options = dict(settings_of(context))
    if is_planned and (fixed := [option for option in _OF_PLANNING if option in given_options]):
        raise TrainingError(f"a training file is planned already; leave out {', '.join(fixed)}")
    if is_planned and forward is None and (out or validation):
        raise TrainingError(f"{'--out' if out else '--validation'} needs {_FORWARD_MODEL}")
    given = {
        "loss": None if loss == "auto" else loss,
        "budget": budget,
        "plan": plan,
        "trainable": tuple(trainable or ()),
        "freeze": tuple(freeze or ()),
        "freeze_bn": freeze_bn,
        "input_shapes": shapes,
    }
    options: dict[str, Any] = {key: value for key, value in given.items() if value}
    if time_limit is not None:
        options["time_limit"] = time_limit
    rate = _Late()
    with stages() as tell:
        trainer = Trainer(
            model,
            model=forward,
            optimizer=chosen,
            learning_rate=rate,
            batch=batch if is_planned or forward else batch_of(model, shapes, batch, _DEFAULT_BATCH),
            accumulate=accumulate,
            workers=workers,
            provider=None if provider is None else provider.value,
            threads=threads,
            seed=seed if "--seed" in given_options else None,
            progress=tell,
            **options,
        )
    samples, tests = split_arrays(arrays, trainer.inputs)
    listed = ", ".join(map(repr, tests))
    if tests and evaluated is not None:
        raise TrainingError(f"'{data}' has {listed} to evaluate on beside --validation; leave one out")
    if tests and is_planned and forward is None:
        raise TrainingError(f"to evaluate on {listed} needs {_FORWARD_MODEL}")
    tests = tests if evaluated is None else evaluated
    total = epochs * (trainer.updates_of(samples) or 1)
    rate.schedule = _schedule(schedule, lr, warm_up, total)
    for note in trainer.report.get("notes", ()):
        console.print(f"note: {note}", markup=False)
    console.print(run_line(trainer.described()), markup=False)
    heard: set[str] = set()
    with _bar(Console(file=sys.stderr, quiet=quiet or not is_first), console) as shown:
        history = trainer.fit(
            samples,
            epochs,
            validation=tests or None,
            state=target,
            save_every=save_every,
            resume=resume,
            callbacks=[shown, lambda event: heard.add(event.kind)],
        )
    if "update" not in heard:
        note = f"the state has {len(history)} epochs already, which --epochs counts; none was added"
        console.print(f"note: {note}", markup=False)
    console.print(epochs_table(history))
    if workers is not None:
        workers.close()
    if not is_first:
        return
    if out is not None:
        trainer.export(out)
        console.print(f"wrote {out}", markup=False)
    console.print(f"state: {target}", markup=False)
    write_json({**trainer.described(), "epochs": history}, json_target)


_DEFAULT_BATCH = 32
_FORWARD_MODEL = "the forward model of the training file; give it by --model"
_OF_PLANNING = (
    "--optimizer", "--momentum", "--nesterov", "--weight-decay", "--clip-norm", "--loss", "--budget",
    "--time-limit", "--plan", "--trainable", "--freeze", "--freeze-bn", "--input-shapes",
)  # fmt: skip


class _Late:
    """A learning rate that is known once the data are."""

    schedule: Schedule = staticmethod(constant(0.0))

    def __call__(self, updates: int) -> float:
        return self.schedule(updates)


def _workers() -> Any:
    """The other processes where torchrun has started several, or None."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    from onnxgc.torch.workers import from_environment

    return from_environment()


def _is_planned(model: str) -> bool:
    from onnxgc.model.files.load import load_proto
    from onnxgc.training.files import is_training_file

    return is_training_file(load_proto(model)[0])


def _optimizer(
    name: OptimizerName, momentum: float, nesterov: bool, decay: float | None, clip_norm: float | None
) -> SGD | AdamW:
    if name is OptimizerName.SGD:
        return SGD(momentum, nesterov, decay or 0.0, clip_norm)
    if momentum or nesterov:
        raise TrainingError("--momentum and --nesterov are settings of sgd; choose it, or leave them out")
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
    """A bar with loss, speed and memory where somebody looks, and a line for what went wrong."""
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
                console.print(f"the run goes on, but is not saved: {event.message}", markup=False)
            if event.kind != "update":
                smoothed.clear()
                return
            before = smoothed[-1] if smoothed else event.loss
            smoothed[:] = [_LOSSES_SHOWN * before + (1 - _LOSSES_SHOWN) * event.loss]
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
    """The most memory that this process has had; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
