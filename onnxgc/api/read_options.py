"""How a model is read."""

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import onnx

from onnxgc.errors import LossError, PlanError
from onnxgc.gradients.pooling import by_windows
from onnxgc.model.core.ir import TrainableModel
from onnxgc.model.files.load import load_proto
from onnxgc.model.files.loss_model import read_loss_model
from onnxgc.model.read import read_model
from onnxgc.runtime.ort import provider_of_forms
from onnxgc.tracing.optimizers import Optimizer, optimizer_as_json, optimizer_from_json, optimizer_of

LossModel = str | os.PathLike[str] | onnx.ModelProto


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of reading and tracing a model; a training file contains them, so that both can be repeated."""

    loss: str = "auto"
    trainable: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    keep_outputs: bool = False
    freeze_bn: bool = False
    untie: bool = False
    optimizer: Optimizer | None = None
    provider: str = "cpu"
    has_barriers: bool = True
    state: str = "initializers"
    loss_model: bytes = b""
    pools: str = "indices"
    portable: bool = False

    @classmethod
    def from_options(
        cls,
        loss: str,
        trainable: Sequence[str],
        freeze: Sequence[str],
        freeze_bn: bool,
        untie: bool,
        optimizer: Optimizer | str | None,
        provider: str | None,
        *,
        keep_outputs: bool = False,
        barriers: str = "auto",
        state: str = "initializers",
        loss_model: LossModel | None = None,
        pools: str = "indices",
        portable: bool = False,
    ) -> "ReadOptions":
        """The options as `onnxgc.optimize` takes them.

        Raises:
            LossError, ModelFileError: the loss model is not valid, or `loss` is given too.
            PlanError, RuntimeUnavailableError: barriers, state or the provider are unknown.
        """
        if loss_model is not None and loss != "auto":
            raise LossError(f"--loss '{loss}' and --loss-model both choose the loss; drop one of them")
        if barriers not in ("auto", "none"):
            raise PlanError(f"unknown barriers '{barriers}'; choose auto or none")
        if state not in ("initializers", "inputs"):
            raise PlanError(f"unknown state '{state}'; choose initializers or inputs")
        if pools not in ("indices", "windows"):
            raise PlanError(f"unknown pools '{pools}'; choose indices or windows")
        if portable and provider == "cuda":
            raise PlanError("a portable file has no forms for CUDA; leave out --portable or --provider cuda")
        return cls(
            loss,
            tuple(trainable),
            tuple(freeze),
            keep_outputs,
            freeze_bn,
            untie,
            optimizer_of(optimizer),
            "cpu" if portable else provider_of_forms(provider),
            barriers == "auto",
            state,
            b"" if loss_model is None else read_loss_model(loss_model),
            "windows" if portable else pools,
            portable,
        )

    def to_json(self) -> str:
        options = {**asdict(self), "optimizer": optimizer_as_json(self.optimizer)}
        del options["loss_model"]
        if self.loss_model:
            options["loss_model"] = base64.b64encode(self.loss_model).decode()
        return json.dumps(options, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "ReadOptions":
        """The options that `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: the text has another form.
        """
        options = json.loads(text)
        trainable, freeze = (tuple(map(str, options[key])) for key in ("trainable", "freeze"))
        # Files of earlier versions do not state these.
        later = {key: bool(options.get(key, False)) for key in ("freeze_bn", "untie")}
        optimizer = optimizer_from_json(options.get("optimizer"))
        loss, keep_outputs = str(options["loss"]), bool(options["keep_outputs"])
        provider, has_barriers = str(options.get("provider", "cpu")), bool(options.get("has_barriers", True))
        return cls(
            loss,
            trainable,
            freeze,
            keep_outputs,
            **later,
            optimizer=optimizer,
            provider=provider,
            has_barriers=has_barriers,
            state=str(options.get("state", "initializers")),
            loss_model=base64.b64decode(options.get("loss_model", "")),
            pools=str(options.get("pools", "indices")),
            portable=bool(options.get("portable", False)),
        )

    @property
    def loss_proto(self) -> onnx.ModelProto | None:
        """The model that computes the loss, if any."""
        return onnx.ModelProto.FromString(self.loss_model) if self.loss_model else None

    @property
    def stores_state(self) -> bool:
        """Whether the training file contains the first values of parameters and statistics."""
        return self.state == "initializers"


def read_with_options(
    source: str | os.PathLike[str] | onnx.ModelProto,
    options: ReadOptions,
    input_shapes: Mapping[str, tuple[int, ...]] | None,
) -> TrainableModel:
    model = read_model(
        source,
        input_shapes=input_shapes,
        loss=options.loss,
        trainable=options.trainable,
        freeze=options.freeze,
        freeze_bn=options.freeze_bn,
        untie=options.untie,
        provider=options.provider,
        # A run with an optimizer may be resumed, and must then draw the same numbers.
        counted_draws=options.optimizer is not None,
        loss_model=options.loss_proto,
    )
    if options.pools == "windows":
        model = by_windows(model)
    model = replace(model, is_portable=options.portable)
    if not options.keep_outputs:
        return model
    graph = load_proto(source)[0].graph
    fed = {value.name for value in (*graph.input, *graph.initializer)}
    excluded = [repr(value.name) for value in graph.output if value.name in fed]
    note = f"--keep-outputs excludes {', '.join(excluded)}, which are inputs of the step"
    return replace(model, notes=(*model.notes, note)) if excluded else model


def name_of(source: str | os.PathLike[str] | onnx.ModelProto) -> str:
    """The name of a model in reports: its path, or the name of its graph."""
    return source.graph.name if isinstance(source, onnx.ModelProto) else os.fspath(source)
