"""Sizes, directions and activation functions of one LSTM, GRU or RNN node."""

from collections.abc import Mapping
from dataclasses import dataclass

from onnxgc.errors import ShapeError, UnsupportedOperatorError
from onnxgc.model.core.draft import Draft
from onnxgc.model.core.ir import Node
from onnxgc.model.operators.facts import has_input

GATES: Mapping[str, int] = {"LSTM": 4, "GRU": 3, "RNN": 1}
_DEFAULT_ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
}
# Defaults of alpha and beta, for the functions that take them; None means that ONNX has no default.
_ACTIVATIONS: Mapping[str, tuple[str, tuple[float | None, ...]]] = {
    "affine": ("Affine", (None, None)),
    "elu": ("Elu", (1.0,)),
    "hardsigmoid": ("HardSigmoid", (0.2, 0.5)),
    "leakyrelu": ("LeakyRelu", (0.01,)),
    "relu": ("Relu", ()),
    "scaledtanh": ("ScaledTanh", (None, None)),
    "sigmoid": ("Sigmoid", ()),
    "softplus": ("Softplus", ()),
    "softsign": ("Softsign", ()),
    "tanh": ("Tanh", ()),
    "thresholdedrelu": ("ThresholdedRelu", (None,)),
}


@dataclass(frozen=True, slots=True)
class Activation:
    """One of ONNX's activation functions with its settings, alpha before beta."""

    function: str
    settings: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction: its index in the weights, the prefix of its names and its activations."""

    index: int
    is_reverse: bool
    prefix: str
    activations: tuple[Activation, ...]


@dataclass(frozen=True, slots=True)
class RecurrentSettings:
    """The settings of one node, its inputs' shapes checked.

    X: [T, B, I], W: [D, G H, I], R: [D, G H, H], B: [D, 2 G H], states: [D, B, H], Y: [T, D, B, H]; with
    layout 1 X: [B, T, I], states: [B, D, H], Y: [B, T, D, H].
    """

    dtype: int
    is_batch_first: bool
    steps: int
    batch: int
    features: int
    hidden: int
    gates: int
    directions: tuple[Direction, ...]
    clip: float

    @classmethod
    def from_node(cls, node: Node, draft: Draft) -> "RecurrentSettings":
        """The settings of a node.

        Raises:
            ShapeError: weights do not fit each other or the input.
            UnsupportedOperatorError: an unknown activation, or one without its settings.
        """
        source, recurrent = draft.required_type(node.inputs[0]), draft.required_type(node.inputs[2])
        is_batch_first = bool(node.attribute("layout", 0))
        first, second, features = source.shape
        settings = cls(
            dtype=source.dtype,
            is_batch_first=is_batch_first,
            steps=second if is_batch_first else first,
            batch=first if is_batch_first else second,
            features=features,
            hidden=recurrent.shape[-1],
            gates=GATES[node.op],
            directions=_directions(node),
            clip=float(node.attribute("clip", 0.0)),
        )
        settings._check_shapes(node, draft)
        return settings

    def _check_shapes(self, node: Node, draft: Draft) -> None:
        count, rows, hidden = len(self.directions), self.gates * self.hidden, self.hidden
        state = (self.batch, count, hidden) if self.is_batch_first else (count, self.batch, hidden)
        expected = {
            1: (count, rows, self.features),
            2: (count, rows, hidden),
            3: (count, 2 * rows),
            4: (self.batch,),
            5: state,
            6: state,
            7: (count, 3 * hidden),
        }
        for index, shape in expected.items():
            if has_input(node, index):
                actual = draft.required_type(node.inputs[index]).shape
                if actual != shape:
                    raise ShapeError(
                        f"{node.location} needs {list(shape)} as its input {index} ('{node.inputs[index]}'), "
                        f"which is {list(actual)}; check the model and --input-shapes"
                    )


def _directions(node: Node) -> tuple[Direction, ...]:
    name, kind = node.name, str(node.attribute("direction", "forward"))
    if kind == "bidirectional":
        names = [(f"{name}/forward", False), (f"{name}/reverse", True)]
    else:
        names = [(name, kind == "reverse")]
    activations = _activations(node, len(names))
    each = len(activations) // len(names)
    return tuple(
        Direction(index, is_reverse, prefix, activations[index * each : (index + 1) * each])
        for index, (prefix, is_reverse) in enumerate(names)
    )


def _activations(node: Node, directions: int) -> tuple[Activation, ...]:
    """The functions of all directions; each takes the next alpha and beta, if it needs them."""
    defaults = _DEFAULT_ACTIVATIONS[node.op] * directions
    functions = node.attribute("activations") or defaults
    if len(functions) != len(defaults):
        raise UnsupportedOperatorError(
            f"{node.location} has {len(functions)} activations but needs {len(defaults)}; "
            f"export the model with {len(defaults)} activations"
        )
    given = [iter(node.attribute(f"activation_{kind}") or ()) for kind in ("alpha", "beta")]
    activations: list[Activation] = []
    for function in functions:
        if function.lower() not in _ACTIVATIONS:
            raise UnsupportedOperatorError(
                f"{node.location} has the activation '{function}', which ONNX does not define; "
                f"export the model with one of {', '.join(sorted(_ACTIVATIONS))}"
            )
        name, usual = _ACTIVATIONS[function.lower()]
        settings = [next(values, default) for values, default in zip(given, usual, strict=False)]
        numbers = tuple(float(setting) for setting in settings if setting is not None)
        if len(numbers) < len(settings):
            raise UnsupportedOperatorError(
                f"{node.location} has the activation '{function}' without activation_alpha or "
                "activation_beta, which have no default in ONNX; export the model with both"
            )
        activations.append(Activation(name, numbers))
    return tuple(activations)
