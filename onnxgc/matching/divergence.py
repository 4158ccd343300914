"""Where two networks diverge, and differences between models of one network."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnxgc.matching.cone_digests import LINEAR, batch_normalizations
from onnxgc.matching.graph_helpers import grouped
from onnxgc.matching.network_view import NetworkView, Pair
from onnxgc.model.core.ir import Node, TrainableModel

MAX_OPERATORS = 8
SHARED_WEIGHTS = "weights, some of which are shared between layers"
BATCH_NORMALISATIONS = "normalisations by batch statistics"


@dataclass(frozen=True, slots=True)
class Difference:
    """A property in which two models differ, and its description or number in each."""

    what: str
    a: str
    b: str


def frontier(
    a: NetworkView, b: NetworkView, pairs: Sequence[Pair], equal: Mapping[int, int], *, is_forward: bool
) -> tuple[Pair, ...]:
    """Matched pairs at the edge of the divergence: equal cones, and a neighbour without a match.

    Values of a loss that was added to the models are excluded.
    """
    ends = []
    for side, known in ((a, equal.keys()), (b, set(equal.values()))):
        edges = side.cones.readers if is_forward else side.cones.operands
        dependent = side.input_dependent_values()
        unknown = dependent - known
        ends.append({v for v in known & dependent if any(n in unknown for n, _ in edges.get(v, ()))})
    edge: dict[int, Pair] = {}
    for pair in pairs:
        value, other = a.structure.views[pair.a].value, b.structure.views[pair.b].value
        is_end = equal.get(value) == other and (value in ends[0] or other in ends[1])
        if is_end and pair.a in a.own and pair.b in b.own:
            edge.setdefault(value, pair)
    return tuple(edge[value] for value in sorted(edge))


def operators_after(side: NetworkView, tensor: str, matched: Collection[int]) -> tuple[str, ...]:
    """The unmatched operators after a tensor, up to and including the next layer of each branch.

    Layers and windows have their sizes, as in "Conv 3x3 64 to 64". If a layer is read only in slices, the
    slices end the branch.
    """
    cones, views = side.cones, side.structure.views
    packed = {whole for whole, _ in side.structure.parts.values()}
    reached = set(side.tensors_of[views[tensor].value])
    following: list[Node] = []
    for node in side.model.nodes:
        values = [views[name].value for name in node.outputs if name in views]
        is_packed = not packed.isdisjoint(values)
        is_matched = not is_packed and any(cones.anchors.get(value, value) in matched for value in values)
        if reached.isdisjoint(node.inputs) or side.own.isdisjoint(node.outputs) or is_matched:
            continue
        following.append(node)
        if _weight(side, node) is None or is_packed:
            reached.update(node.outputs)
    live: list[Node] = []
    wanted: set[str] = set()
    for node in reversed(following):
        is_live = any(name in views and views[name].value in cones.backward for name in node.outputs)
        if is_live or not wanted.isdisjoint(node.outputs):
            live.insert(0, node)
            wanted.update(node.inputs)
    return tuple(" ".join((node.op, *_sizes(side, node))) for node in live[:MAX_OPERATORS])


def _weight(side: NetworkView, node: Node) -> str | None:
    """The first operand that is a parameter, or a rearrangement of one."""
    parameters, views = side.model.parameters, side.structure.views
    return next((n for n in node.inputs if n not in views and side.origin_of(n) in parameters), None)


def _sizes(side: NetworkView, node: Node) -> Iterator[str]:
    """Sizes of weights and windows, which distinguish operators of one kind."""
    name = _weight(side, node)
    weight = () if name is None else side.model.types[name].shape
    kernel = node.attribute("kernel_shape") or (weight[2:] if node.op in ("Conv", "ConvTranspose") else ())
    group = int(node.attribute("group", 1))
    if kernel:
        yield "x".join(map(str, kernel))
    if node.op in ("Conv", "ConvTranspose") and len(weight) > 1:
        ends = (weight[1] * group, weight[0]) if node.op == "Conv" else (weight[0], weight[1] * group)
        yield f"{ends[0]} to {ends[1]}"
    elif node.op in ("MatMul", "Gemm") and len(weight) > 1:
        ends = (weight[-1], weight[-2]) if node.attribute("transB", 0) else (weight[-2], weight[-1])
        yield f"{ends[0]} to {ends[1]}"
    if group > 1:
        yield f"in {group} groups"
    for word, name, usual in (("stride", "strides", 1), ("pads", "pads", 0), ("dilation", "dilations", 1)):
        numbers = list(node.attribute(name) or ())
        if any(number != usual for number in numbers):
            yield f"{word} {numbers[0] if len(set(numbers)) == 1 else ','.join(map(str, numbers))}"
    if node.attribute("ceil_mode", 0):
        yield "rounded up"
    if node.attribute("count_include_pad", 0):
        yield "counting pads"


def differences(a: NetworkView, b: NetworkView, *, is_same: bool) -> tuple[Difference, ...]:
    """Differences in inputs, weight sharing, and normalisations by batch statistics."""
    result: list[Difference] = []
    if not is_same and _inputs(a.model) != _inputs(b.model):
        result.append(Difference("inputs", _named_inputs(a.model), _named_inputs(b.model)))
    if is_same:
        shared = _layers_of_weights(a), _layers_of_weights(b)
        counts = [str(sum(layers.values())) for layers in shared]
        if shared[0] != shared[1]:
            result.append(Difference(SHARED_WEIGHTS, *counts))
    epsilons = _epsilons(a), _epsilons(b)
    counts = [str(sum(side.values())) for side in epsilons]
    if counts[0] != counts[1]:
        result.append(Difference(BATCH_NORMALISATIONS, *counts))
    elif epsilons[0] != epsilons[1]:
        texts = [", ".join(sorted(side)) for side in epsilons]
        result.append(Difference(f"epsilon of {BATCH_NORMALISATIONS}", *texts))
    return tuple(result)


def _inputs(model: TrainableModel) -> Counter[tuple[int, ...]]:
    return Counter(tuple(sorted(model.types[name].shape)) for name in model.inputs)


def _named_inputs(model: TrainableModel) -> str:
    return " and ".join(f"'{name}' {'x'.join(map(str, model.types[name].shape))}" for name in model.inputs)


def _layers_of_weights(side: NetworkView) -> Counter[tuple[str, ...]]:
    """The number of weights by use: the products that read a weight."""
    cones, entities = side.cones, side.structure.entities
    users = grouped(
        (side.origin_of(entities[value].weights[0]), cones.forward[cones.anchors.get(value, value)])
        for value in cones.backward
        if entities[value].op in LINEAR and entities[value].weights
    )
    return Counter(tuple(sorted(digests)) for digests in users.values())


def _epsilons(side: NetworkView) -> Counter[str]:
    """The epsilons of normalisations by batch statistics, as operators or decomposed."""
    model, entities = side.model, side.structure.entities
    epsilons = [
        float(node.attribute("epsilon", 1e-5))
        for node in model.nodes
        if node.op == "BatchNormalization" and node.inputs[3] not in model.weights
    ]
    decomposed = batch_normalizations(side.structure).intersection(side.cones.backward)
    epsilons += [entities[value].term[2] for value in decomposed]
    return Counter(f"{epsilon:.3g}" for epsilon in epsilons)
