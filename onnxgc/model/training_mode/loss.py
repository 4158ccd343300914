"""Chooses the loss of a model, and its settings.

The choice precedes opset conversion: the converter would split a trailing Softmax over four dimensions into
several nodes, but the loss absorbs that Softmax.
"""

import ast
import difflib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onnxgc.errors import LossError, ShapeError
from onnxgc.model.core.draft import Draft, reads_of
from onnxgc.model.core.ir import Node

CROSS_ENTROPY, MSE, L1, BCE, OUTPUT = "cross-entropy", "mse", "l1", "bce", "output"
HUBER, SMOOTH_L1, FOCAL, COSINE = "huber", "smooth-l1", "focal", "cosine"


@dataclass(frozen=True, slots=True)
class _Setting:
    """A setting of a loss: its default, the values that it may have in words, and a test of them."""

    default: Any
    values: str
    fits: Callable[[Any], bool]


def _number(values: str, fits: Callable[[float], bool], default: float) -> _Setting:
    return _Setting(default, values, lambda value: _is_finite(value) and fits(value))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_weights(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_finite(one) and one >= 0 for one in value)


_ABOVE_0 = ("a number above 0", lambda value: value > 0, 1.0)
SETTINGS: Mapping[str, Mapping[str, _Setting]] = {
    CROSS_ENTROPY: {
        "smoothing": _number("a number from 0 to below 1", lambda value: 0 <= value < 1, 0.0),
        # The mean leaves out samples with this label, as in torch.
        "ignored": _Setting(-100, "a whole number", lambda value: type(value) is int and abs(value) < 2**62),
        "weights": _Setting([], "a list of numbers of at least 0, one a class", _are_weights),
    },
    MSE: {},
    BCE: {"positive": _number(*_ABOVE_0)},
    L1: {},
    HUBER: {"delta": _number(*_ABOVE_0)},
    SMOOTH_L1: {"beta": _number(*_ABOVE_0)},
    FOCAL: {
        "gamma": _number("a number of at least 0", lambda value: value >= 0, 2.0),
        "alpha": _number("a number from 0 to 1", lambda value: 0 <= value <= 1, 0.25),
    },
    COSINE: {},
}
"""The settings of each kind of loss, with the defaults of PyTorch and torchvision."""
LOSS_KINDS = tuple(SETTINGS)
_REARRANGING = frozenset(["Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Cast"])
_FEATURES_LAST = frozenset(["MatMul", "Gemm", "Einsum"])


@dataclass(frozen=True, slots=True)
class LossChoice:
    """The loss `kind` of a tensor, from which the model computes its output `output`.

    `class_axis` is the axis of the tensor's classes for cross-entropy. `settings` differ from the defaults.
    """

    kind: str
    output: str
    tensor: str
    class_axis: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)

    def setting(self, name: str) -> Any:
        return self.settings.get(name, SETTINGS[self.kind][name].default)


def choose_loss(draft: Draft, requested: str, trained: Collection[str] = ()) -> tuple[Draft, LossChoice]:
    """The draft with a note on the loss, and the loss: a kind, an output of the model, or `auto`.

    A kind may have settings: `cross-entropy(smoothing=0.1)`. `auto` takes a scalar output, else cross-entropy
    for class scores, else mean squared error. Outputs that depend on a `trained` weight precede others.

    Raises:
        LossError: no output fits, the named output does not exist or is no float scalar, or a setting is wrong.
        ShapeError: the output that the loss needs has no static shape.
    """
    name, _, text = requested.partition("(")
    if name in LOSS_KINDS and text and requested not in draft.outputs:
        settings = _parsed_settings(name, text, requested)
        draft, choice = choose_loss(draft, name, trained)
        return draft, replace(choice, settings=settings)
    if requested != "auto" and requested not in LOSS_KINDS:
        return draft, _named_output(draft, requested)
    if requested == "auto":
        for output in _computed_outputs(draft, trained):
            kind = draft.type_of(output)
            if kind is not None and kind.is_floating and kind.shape == ():
                choice = LossChoice(OUTPUT, output, output)
                return draft.with_notes(f"loss: the model's own output '{output}'"), choice
    output = _first_floating(draft, trained)
    choice = _automatic(draft, output) if requested == "auto" else _explicit(draft, output, requested)
    return draft.with_notes(_choice_note(draft, choice)), choice


def _parsed_settings(kind: str, text: str, requested: str) -> dict[str, Any]:
    """The settings in `smoothing=0.1, ignored=255)`."""
    known = SETTINGS[kind]
    names = ", ".join(known) or "none"
    try:
        call = ast.parse(f"settings({text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        given = {one.arg or "**": ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise LossError(
            f"--loss '{requested}' cannot be read; settings (for {kind}: {names}) are written as in "
            "cross-entropy(smoothing=0.1, ignored=255)"
        ) from None
    for name, value in given.items():
        if name not in known:
            raise LossError(f"--loss '{requested}': {kind} has no setting '{name}'; its settings are: {names}")
        if not known[name].fits(value):
            raise LossError(f"--loss '{requested}': {name} is {value!r}; it must be {known[name].values}")
    return given


def _named_output(draft: Draft, name: str) -> LossChoice:
    if name not in draft.outputs:
        close = difflib.get_close_matches(name, (*LOSS_KINDS, *draft.outputs), n=1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        known = ", ".join(f"'{output}'" for output in draft.outputs)
        raise LossError(
            f"--loss '{name}' is neither one of auto, {', '.join(LOSS_KINDS)} nor an output of the "
            f"model{hint}; its outputs are: {known}"
        )
    kind = draft.required_type(name)
    if not kind.is_floating or kind.element_count != 1:
        raise LossError(
            f"--loss '{name}' must be a single floating-point number, but the output has shape "
            f"{list(kind.shape)}{'' if kind.is_floating else ' and is not floating-point'}; "
            f"choose one of {', '.join(LOSS_KINDS)}"
        )
    return LossChoice(OUTPUT, name, name)


def _computed_outputs(draft: Draft, trained: Collection[str]) -> list[str]:
    """Outputs that are neither weights nor inputs; only those that training changes, if there are any."""
    computed = [name for name in draft.outputs if name not in draft.weights and name not in draft.inputs]
    changed = set(trained)
    for node in draft.nodes:
        if not changed.isdisjoint(reads_of(node)):
            changed.update(node.outputs)
    return [name for name in computed if name in changed] or computed


def _first_floating(draft: Draft, trained: Collection[str]) -> str:
    for output in _computed_outputs(draft, trained):
        kind = draft.type_of(output)
        if kind is not None and kind.is_floating:
            return output
    for output in draft.outputs:
        if output in draft.problems:
            raise ShapeError(draft.problems[output])
    names = ", ".join(f"'{output}'" for output in draft.outputs)
    raise LossError(
        f"no output ({names}) is a floating-point tensor that the model computes, so there is no loss; "
        "export the model with the scores or the loss as an output"
    )


def _automatic(draft: Draft, output: str) -> LossChoice:
    before_softmax = _before_softmax(draft, output)
    if before_softmax is not None:
        return before_softmax
    shape = draft.required_type(output).shape
    is_scores = len(shape) >= 2 and shape[1] > 1 and all(size == 1 for size in shape[2:])
    return LossChoice(CROSS_ENTROPY if is_scores else MSE, output, output)


def _explicit(draft: Draft, output: str, kind: str) -> LossChoice:
    if kind == CROSS_ENTROPY:
        before_softmax = _before_softmax(draft, output)
        if before_softmax is not None:
            return before_softmax
        shape = draft.required_type(output).shape
        if len(shape) < 2:
            raise LossError(
                f"--loss cross-entropy needs an output [N, C, ...], but '{output}' has shape {list(shape)}; "
                "choose mse, bce, l1, huber or smooth-l1"
            )
        return LossChoice(kind, output, output, _axis_by_producer(draft, output, len(shape)))
    sigmoid = _final_operator(draft, output, ("Sigmoid",)) if kind in (BCE, FOCAL) else None
    return LossChoice(kind, output, output if sigmoid is None else sigmoid.inputs[0])


def _before_softmax(draft: Draft, output: str) -> LossChoice | None:
    """Cross-entropy of the logits of a final Softmax over classes, if the output has one."""
    softmax = _final_operator(draft, output, ("Softmax", "LogSoftmax"))
    axis = None if softmax is None else _class_axis(draft, softmax)
    if softmax is None or axis is None:
        return None
    return LossChoice(CROSS_ENTROPY, output, softmax.inputs[0], axis)


def _final_operator(draft: Draft, output: str, wanted: tuple[str, ...]) -> Node | None:
    """The last operator before an output that does more than rearrange, if it is one of `wanted`."""
    producers = draft.producers()
    node = producers.get(output)
    while node is not None and not node.domain:
        if node.op in wanted:
            return node
        if node.op not in _REARRANGING:
            return None
        node = producers.get(node.inputs[0])
    return None


def _class_axis(draft: Draft, softmax: Node) -> int | None:
    """The axis that a Softmax sums over; None if it sums over several, or over samples."""
    shape = draft.required_type(softmax.inputs[0]).shape
    rank = len(shape)
    if rank < 2:
        return None
    axis = int(softmax.attribute("axis", -1 if draft.opset >= 13 else 1)) % rank
    if draft.opset < 13:
        # Up to opset 12 Softmax flattens all dimensions from `axis` on.
        wide = [position for position in range(axis, rank) if shape[position] > 1]
        if len(wide) > 1:
            return None
        axis = wide[0] if wide else axis
    return axis if axis > 0 else None


_LOGIT_ADJUSTMENTS = ("Add", "Cast", "Clip", "Div", "Identity", "Mul", "Sub", "Tanh", "Where")
"""Scales, biases and caps of logits; they do not move axes."""


def _axis_by_producer(draft: Draft, output: str, rank: int) -> int:
    """The axis of the classes: the last after a matrix product (language models), else the second."""
    producers = draft.producers()
    node = producers.get(output)
    while node is not None and node.op in _LOGIT_ADJUSTMENTS:
        node = next((producers[name] for name in node.inputs if name in producers), None)
    return rank - 1 if node is not None and node.op in _FEATURES_LAST else 1


def _choice_note(draft: Draft, choice: LossChoice) -> str:
    shape = list(draft.required_type(choice.tensor).shape)
    is_inner = choice.tensor != choice.output
    source = f", computed from '{choice.tensor}' before the final activation" if is_inner else ""
    axis = f", classes on axis {choice.class_axis}" if choice.kind == CROSS_ENTROPY and len(shape) > 2 else ""
    others = [output for output in draft.outputs if output != choice.output]
    listed = ", ".join(repr(name) for name in others)
    unused = f"; the loss does not use the other outputs ({listed})" if others else ""
    return f"loss: {choice.kind} of output '{choice.output}' {shape}{source}{axis}{unused}"
