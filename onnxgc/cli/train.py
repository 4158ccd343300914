"""`onnxgc train`: a training loop on ONNX Runtime."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Argument, Option

from onnxgc.cli.arguments import (
    BUDGET,
    FREEZE,
    FREEZE_BN,
    INPUT_SHAPES,
    LOSS,
    LOSS_MODEL,
    MODEL,
    PLAN_FILE,
    QUIET,
    REPORT,
    RUN,
    THREADS,
    TRAINABLE,
    Options,
    ProviderName,
    check_distinct,
    check_json_target,
    check_target,
    console_for,
    finite,
    given_options,
    globs_in,
    parse_shapes,
    progress_line,
    time_limit_option,
    with_flat_options,
    write_json,
)
from onnxgc.emission.atomic_files import check_model_writable, data_file
from onnxgc.errors import TrainingError
from onnxgc.model.files.load import check_model_file, load_proto, model_files
from onnxgc.report.terminal.command_tables import epochs_table, run_line
from onnxgc.report.terminal.safe_console import SafeConsole
from onnxgc.report.text.units import megabytes
from onnxgc.tracing.optimizers import UPDATE_RULES, UpdateRule
from onnxgc.training import Event, Trainer, constant, cosine, linear, one_cycle, step, with_warm_up
from onnxgc.training.data import read_arrays, split_arrays
from onnxgc.training.learning_rates import Schedule
from onnxgc.training.run_source import batch_of
from onnxgc.training.training_file import is_training_file

_SMOOTHING = 0.9
"""Weight of earlier updates in the shown loss."""
_DEFAULT_BATCH = 32
_FORWARD_MODEL = "the forward model of the training file; give it by --model"
_PLANNING_OPTIONS = (
    "--optimizer", "--momentum", "--nesterov", "--weight-decay", "--loss", "--budget", "--time-limit",
    "--plan", "--loss-model", "--trainable", "--freeze", "--freeze-bn", "--input-shapes",
)  # fmt: skip


class OptimizerName(StrEnum):
    """An optimizer of a training run."""

    SGD = "sgd"
    ADAMW = "adamw"
    ADAM = "adam"
    RMSPROP = "rmsprop"
    ADAGRAD = "adagrad"
    LION = "lion"


class ScheduleName(StrEnum):
    """How the learning rate changes over the run."""

    CONSTANT = "constant"
    STEP = "step"
    COSINE = "cosine"
    LINEAR = "linear"
    ONE_CYCLE = "one-cycle"


class _Data(Options, panel="Data and state"):
    """The data, and the files of the run."""

    data: str = Option(
        help="An .npz file with an array for each input, and labels or target. Arrays whose names end in "
        "_test or _validation are for evaluation."
    )
    validation: str | None = Option(None, help="An .npz file to evaluate on after each epoch.")
    out: str | None = Option(None, help="Write the model with the trained weights to this file, to deploy it.")
    state: str | None = Option(
        None, help="Save the run to this file [default: OUT's or MODEL's name + .state.safetensors]."
    )
    save_every: int | None = Option(None, min=1, help="Save after this many updates too, not only after epochs.")
    resume: bool = Option(False, help="Continue from the state if it exists.")

    def checked_state(self, model: str, forward: str | None, json_target: str | None) -> str:
        """The state file. Fails before any work if a file that is written exists already or is read."""
        state = self.state or f"{(self.out or Path(model).name).removesuffix('.onnx')}.state.safetensors"
        read = (*model_files(model), *(model_files(forward) if forward else ()), self.data, self.validation)
        weights = None if self.out is None else data_file(self.out)
        if self.out is not None:
            check_distinct("--out", self.out, *read)
            check_model_writable(self.out)
        check_target("--state", state, *read, self.out, weights)
        if weights is not None:
            check_distinct("--out", weights, *read)
        if os.path.exists(state) and not self.resume:
            raise TrainingError(
                f"the state '{state}' exists already; continue from it with --resume, or give --state another name"
            )
        check_json_target(json_target, *read, self.out, state)
        return state


class _Runs(Options, panel=RUN):
    """The steps of the run."""

    epochs: int = Option(1, min=1, help="Passes over the data, including those before resuming.")
    batch: int | None = Option(None, min=1, help="Samples in a step [default: 32].")
    accumulate: int = Option(1, min=1, help="Steps whose mean gradient makes one update.")
    provider: ProviderName | None = Option(None, help="Execution provider [default: cuda where available].")
    threads: int | None = THREADS
    cuda_graph: bool = Option(False, help="On cuda, replay the kernels of the first step.")
    seed: int = Option(0, min=0, help="Random seed of data order and drawn weights.")


class _Updates(Options, panel="Optimizer"):
    """The optimizer and its learning rate."""

    optimizer: OptimizerName = Option(
        OptimizerName.ADAMW, help="With the default settings of PyTorch, or of Lion's paper."
    )
    lr: float = Option(1e-3, min=0.0, callback=finite, help="Learning rate.")
    schedule: ScheduleName = Option(
        ScheduleName.CONSTANT, help="Learning rate over the run; step divides it by 10 after each third."
    )
    warm_up: int = Option(0, min=0, help="Updates over which the learning rate rises.")
    momentum: float = Option(0.0, min=0.0, callback=finite, help="Momentum of sgd and rmsprop.")
    nesterov: bool = Option(False, help="Nesterov momentum for sgd.")
    weight_decay: float | None = Option(
        None, min=0.0, callback=finite, help="Weight decay [default: 0.01 for adamw, 0 for others]."
    )
    clip_norm: float | None = Option(None, callback=finite, help="Maximum norm of all gradients together.")

    def with_settings(self) -> UpdateRule:
        """The optimizer.

        Raises:
            TrainingError: options apply to another one.
        """
        given: dict[str, Any] = {
            "momentum": self.momentum or None,
            "nesterov": self.nesterov or None,
            "weight_decay": self.weight_decay,
            "clip_norm": self.clip_norm,
        }
        settings = {name: value for name, value in given.items() if value is not None}
        kind = UPDATE_RULES[self.optimizer]
        for name in settings.keys() - {one.name for one in fields(kind)}:
            raise TrainingError(f"--{name} does not apply to {self.optimizer}; leave it out, or take --optimizer sgd")
        return kind(**settings)

    def rate_over(self, total: int) -> Schedule:
        """The learning rate over a run of `total` updates."""
        chosen = {
            ScheduleName.CONSTANT: lambda: constant(self.lr),
            ScheduleName.STEP: lambda: step(self.lr, max(1, -(-total // 3))),
            ScheduleName.COSINE: lambda: cosine(self.lr, total),
            ScheduleName.LINEAR: lambda: linear(self.lr, total),
            ScheduleName.ONE_CYCLE: lambda: one_cycle(self.lr, total),
        }[self.schedule]()
        return with_warm_up(chosen, self.warm_up)


class _Planning(Options, panel=MODEL):
    """How a forward model is planned and read, and the report."""

    budget: str | None = BUDGET
    plan: str | None = PLAN_FILE
    time_limit: float | None = time_limit_option()
    forward: str | None = Option(None, "--model", help="With a training file, the forward model that it was made from.")
    loss: str = LOSS
    loss_model: str | None = LOSS_MODEL
    trainable: list[str] | None = TRAINABLE
    freeze: list[str] | None = FREEZE
    freeze_bn: bool = FREEZE_BN
    input_shapes: list[str] | None = INPUT_SHAPES
    json_target: str | None = Option(
        None, "--json", rich_help_panel=REPORT, help="Write the figures of each epoch as JSON; - for stdout."
    )
    quiet: bool = QUIET

    def arguments(self) -> dict[str, Any]:
        """The options that are given, as arguments of `Trainer`."""
        options = self.values("forward", "json_target", "quiet") | {
            "loss": None if self.loss == "auto" else self.loss,
            "trainable": globs_in(self.trainable) or None,
            "freeze": globs_in(self.freeze) or None,
            "freeze_bn": self.freeze_bn or None,
            "input_shapes": parse_shapes(self.input_shapes or []) or None,
        }
        return {name: value for name, value in options.items() if value is not None}


@with_flat_options
def train_command(
    context: typer.Context,
    model: Annotated[str, Argument(help="Forward ONNX model, or training file that contains an optimizer.")],
    data: _Data,
    runs: _Runs,
    updates: _Updates,
    planning: _Planning,
) -> None:
    """Train a model on ONNX Runtime within the memory of its plan."""
    options = planning.arguments()
    check_model_file(model)
    state = data.checked_state(model, planning.forward, planning.json_target)
    given = dict(given_options(context))
    is_planned = is_training_file(load_proto(model)[0])
    workers = _workers()
    is_first = workers is None or workers.rank == 0
    console = console_for(planning.json_target, is_quiet=planning.quiet or not is_first)
    arrays = read_arrays(data.data)
    evaluated = None if data.validation is None else read_arrays(data.validation)
    batch = runs.batch
    if is_planned:
        _check_planned(given, planning.forward, data)
    elif planning.forward is None:
        batch = batch_of(model, options.get("input_shapes", {}), batch, _DEFAULT_BATCH)
    rate = _DeferredRate()
    with progress_line() as notify:
        trainer = Trainer(
            model,
            model=planning.forward,
            optimizer=None if is_planned else updates.with_settings(),
            learning_rate=rate,
            batch=batch,
            workers=workers,
            seed=runs.seed if "--seed" in given else None,
            progress=notify,
            **runs.values("epochs", "batch", "seed"),
            **options,
        )
    samples, tests = split_arrays(arrays, trainer.inputs)
    _check_tests(tests, data, can_evaluate=not is_planned or planning.forward is not None)
    rate.schedule = updates.rate_over(runs.epochs * (trainer.updates_of(samples) or 1))
    history = _fit(trainer, samples, tests if evaluated is None else evaluated, runs.epochs, data, state, console)
    if workers is not None:
        workers.close()
    if is_first:
        if data.out is not None:
            trainer.export(data.out)
            console.print(f"wrote {data.out}", markup=False)
        console.print(f"state: {state}", markup=False)
        write_json({**trainer.described(), "epochs": history}, planning.json_target)


def _fit(
    trainer: Trainer, samples: Any, tests: Mapping[str, Any], epochs: int, data: _Data, state: str, console: Console
) -> list[dict[str, Any]]:
    """Train, and print the figures of all epochs."""
    for note in trainer.report.get("notes", ()):
        console.print(f"note: {note}", markup=False)
    console.print(run_line(trainer.described()), markup=False)
    kinds: set[str] = set()
    with _bar(console) as show:
        history = trainer.fit(
            samples,
            epochs,
            validation=tests or None,
            state=state,
            save_every=data.save_every,
            resume=data.resume,
            callbacks=[show, lambda event: kinds.add(event.kind)],
        )
    if "update" not in kinds:
        note = f"the state has {len(history)} epochs already, which --epochs includes; none was added"
        console.print(f"note: {note}", markup=False)
    console.print(epochs_table(history))
    return history


def _check_planned(given: Mapping[str, str], forward: str | None, data: _Data) -> None:
    """Check the options for a training file, which has a plan and an optimizer already."""
    if "--clip-norm" in given:
        raise TrainingError(
            "gradient clipping is built into a training file: pass it when you create the file, or train "
            "from the forward model"
        )
    if fixed := [option for option in _PLANNING_OPTIONS if option in given]:
        raise TrainingError(f"a training file has its plan already; leave out {', '.join(fixed)}")
    if forward is None and (data.out or data.validation):
        raise TrainingError(f"{'--out' if data.out else '--validation'} needs {_FORWARD_MODEL}")


def _check_tests(tests: Mapping[str, Any], data: _Data, *, can_evaluate: bool) -> None:
    """Check the arrays for evaluation among the data."""
    listed = ", ".join(map(repr, tests))
    if tests and data.validation is not None:
        raise TrainingError(f"'{data.data}' contains {listed} for evaluation, as does --validation; drop one of them")
    if tests and not can_evaluate:
        raise TrainingError(f"evaluation on {listed} needs {_FORWARD_MODEL}")


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


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[Event], None]]:
    """Shows loss, speed and memory as a bar on a terminal, and failed saves as lines."""
    terminal = SafeConsole(file=sys.stderr, quiet=console.quiet)
    progress = Progress(
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}, {task.fields[speed]:.0f}/s, {task.fields[memory]}"),
        TimeRemainingColumn(compact=True),
        console=terminal,
        disable=not terminal.is_terminal,
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
