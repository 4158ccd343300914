"""Known faults of ONNX Runtime: wrong kernels and wrong graph rewrites, and how training files avoid them.

One entry a fault, with the pattern that triggers it. `onnxgc inspect` reports those in a user's model, whose
inference is wrong too; training files avoid them (`onnxgc.model.training_mode.runtime_safe_forms`,
`onnxgc.emission.computed_constants`). A test reproduces each fault, and so notices a version that fixes one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from onnxgc.model.core.draft import Draft
from onnxgc.model.core.ir import Array, Node
from onnxgc.model.core.stored_weights import is_external
from onnxgc.model.training_mode.runtime_safe_forms import are_distinct, is_mistaken_deviation

_POOLS = ("AveragePool", "MaxPool")
_SEEN = "1.31.1"
# Constants that are settings: exponents, pads, shapes.
_MAX_SETTING_ELEMENTS = 1024


@dataclass(frozen=True)
class FaultGraph:
    """A draft with the queries that fault patterns need."""

    draft: Draft

    @cached_property
    def producers(self) -> dict[str, Node]:
        return self.draft.producers()

    @cached_property
    def readers(self) -> dict[str, list[Node]]:
        return {name: [node for node, _ in found] for name, found in self.draft.consumers().items()}

    def nodes(self, *operators: str) -> Iterator[Node]:
        return (node for node in self.draft.nodes if node.op in operators and not node.domain)

    def producer_behind(self, node: Node, index: int, past: tuple[str, ...] = ("Cast", "Identity")) -> Node | None:
        """The producer of an input, behind operators that the runtime skips."""
        name = node.inputs[index] if len(node.inputs) > index else ""
        found = self.producers.get(name)
        while found is not None and found.op in past:
            found = self.producers.get(found.inputs[0])
        return None if found is None or found.domain else found

    def shape(self, name: str) -> tuple[int, ...] | None:
        kind = self.draft.type_of(name)
        return None if kind is None else kind.shape

    def constant(self, name: str) -> Array | None:
        weight = self.draft.weights.get(name)
        if weight is None or is_external(weight) or weight.type.element_count > _MAX_SETTING_ELEMENTS:
            return None
        return weight.load()


@dataclass(frozen=True, slots=True)
class RuntimeFault:
    """A fault of ONNX Runtime.

    Attributes:
        pattern: the operators that trigger it.
        cause: the optimisation or kernel.
        levels: optimisation levels at which it occurs.
        versions: versions in which it was reproduced.
        symptom: the effect.
        instead: the form in training files.
        source: the public report.
        find: yields the nodes of a graph that trigger it.
    """

    name: str
    pattern: str
    cause: str
    levels: str
    versions: str
    symptom: str
    instead: str
    source: str
    find: Callable[[FaultGraph], Iterator[Node]]


@dataclass(frozen=True, slots=True)
class FoundFault:
    """A fault in a model, with the names of the nodes that trigger it."""

    fault: RuntimeFault
    nodes: tuple[str, ...]

    def __str__(self) -> str:
        listed = ", ".join(f"'{name}'" for name in self.nodes[:3]) + ", ..." * (len(self.nodes) > 3)
        return (
            f"ONNX Runtime {self.fault.symptom} for {self.fault.pattern} ({listed}; "
            f"{self.fault.cause}, {self.fault.levels}); training files use {self.fault.instead}"
        )


def faults_in(draft: Draft) -> tuple[FoundFault, ...]:
    """The known faults in a graph whose types have been inferred."""
    graph = FaultGraph(draft)
    found = ((fault, tuple(_label(node) for node in fault.find(graph))) for fault in FAULTS)
    return tuple(FoundFault(fault, nodes) for fault, nodes in found if nodes)


def _label(node: Node) -> str:
    return node.origin or node.name or node.outputs[0]


def _vector_products(graph: FaultGraph) -> Iterator[Node]:
    for node in graph.nodes("MatMul"):
        left, right = graph.producer_behind(node, 0), graph.shape(node.inputs[1])
        if left is not None and left.op == "Transpose" and right is not None and len(right) == 1:
            yield node


def _shapes_of_reshapes(graph: FaultGraph) -> Iterator[Node]:
    outputs = set(graph.draft.outputs)
    for node in graph.nodes("Reshape"):
        if node.outputs[0] not in outputs:
            continue
        behind = graph.producer_behind(node, 1, ("Cast", "Identity", "Add", "Sub"))
        if behind is not None and behind.op == "Reshape":
            yield node


def _emptying_expands(graph: FaultGraph) -> Iterator[Node]:
    for node in graph.nodes("Expand"):
        source, result = graph.shape(node.inputs[0]), graph.shape(node.outputs[0])
        if source is None or result is None or 0 not in result:
            continue
        aligned = (1,) * (len(result) - len(source)) + source
        if any(old != 0 and new == 0 for old, new in zip(aligned, result, strict=True)):
            yield node


def _pools_of_pads(graph: FaultGraph) -> Iterator[Node]:
    for node in graph.nodes(*_POOLS):
        pad = graph.producer_behind(node, 0)
        if pad is None or pad.op != "Pad" or pad.attribute("mode", "constant") not in ("constant", b"constant"):
            continue
        pads = list(pad.attribute("pads") or ())
        if len(pad.inputs) > 1 and pad.inputs[1]:
            found = graph.constant(pad.inputs[1])
            pads = [] if found is None else [int(size) for size in found]
        if any(size > 0 for size in pads):
            yield node


def _activations_with_attributes(graph: FaultGraph) -> Iterator[Node]:
    for node in graph.draft.nodes:
        behind = graph.producer_behind(node, 0, ())
        if behind is None or behind.op != "Gemm" or node.domain or node.op not in _FUSED_ACTIVATIONS:
            continue
        extra = [name for name in node.attributes if name.startswith("__")]
        if extra and len(graph.readers.get(behind.outputs[0], ())) == 1:
            yield node


def _racing_scatters(graph: FaultGraph) -> Iterator[Node]:
    for node in graph.nodes("ScatterND"):
        reduction = node.attribute("reduction", "none")
        if reduction in ("add", "mul", b"add", b"mul") and not are_distinct(graph.draft.weights.get(node.inputs[1])):
            yield node


def _mistaken_normalisations(graph: FaultGraph) -> Iterator[Node]:
    for node in graph.nodes("Sqrt"):
        if is_mistaken_deviation(node, graph.producers, graph.draft):
            yield node


_FUSED_ACTIVATIONS = frozenset(
    {
        "Elu", "HardSigmoid", "LeakyRelu", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Tanh",
        "ThresholdedRelu",
    }
)  # fmt: skip

FAULTS: tuple[RuntimeFault, ...] = (
    RuntimeFault(
        "vector product",
        "a Transpose and a MatMul by a vector",
        "MatmulTransposeFusion",
        "from EXTENDED on",
        _SEEN,
        "computes another product",
        "a product of matrices",
        "not reported",
        _vector_products,
    ),
    RuntimeFault(
        "shape of a Reshape",
        "an output of a Reshape whose shape comes from another Reshape",
        "ReshapeFusion",
        "from BASIC on",
        _SEEN,
        "rejects the file",
        "shapes as constants",
        "microsoft/onnxruntime issue 32105",
        _shapes_of_reshapes,
    ),
    RuntimeFault(
        "emptying Expand",
        "an Expand of a size of one to zero",
        "ExpandElimination",
        "from BASIC on",
        _SEEN,
        "drops the Expand",
        "an empty Slice before it",
        "not reported",
        _emptying_expands,
    ),
    RuntimeFault(
        "Pad into a pool",
        "a Pad by constants before MaxPool or AveragePool",
        "PadFusion",
        "from BASIC on",
        _SEEN,
        "pools without the padded values, to another extent, or rejects the file",
        "pads that it cannot fold",
        "not reported",
        _pools_of_pads,
    ),
    RuntimeFault(
        "attribute on an activation",
        "an activation with an additional attribute behind a Gemm",
        "GemmActivationFusion",
        "from EXTENDED on",
        _SEEN,
        "rejects the file",
        "activations without the attribute",
        "not reported",
        _activations_with_attributes,
    ),
    RuntimeFault(
        "sums by ScatterND",
        "a ScatterND that adds or multiplies, with indices that may repeat",
        "its CPU kernel on several threads",
        "at every level",
        _SEEN,
        "loses updates",
        "ScatterElements",
        "not reported",
        _racing_scatters,
    ),
    RuntimeFault(
        "mistaken normalisation",
        "a layer normalisation with another exponent, swapped operands or another epsilon",
        "LayerNormFusion, SimplifiedLayerNormFusion",
        "from BASIC on",
        _SEEN,
        "computes a layer normalisation",
        "a power in place of the root",
        "not reported",
        _mistaken_normalisations,
    ),
)
"""In the order in which `inspect` reports them."""
