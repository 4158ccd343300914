"""One of two matched models: its values, the tensors that hold them, and keys that compare tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

from onnxgc.matching.cone_digests import ConeDigests, cone_digests, digest
from onnxgc.matching.graph_helpers import grouped, reachable
from onnxgc.matching.normal_form.builder import IdentifiedFunction
from onnxgc.matching.normal_form.entities import View
from onnxgc.matching.normal_form.value_graph import Structure
from onnxgc.matching.operators.registry import structure_of
from onnxgc.model.core.ir import Node, TrainableModel

_REARRANGING = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Cast")


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of each model with the same elements, those of b `factor` times as large.

    Both have the same dimensions in any order, unless the pair `is_rearranged`. Without `is_same_function`,
    they only reach the outputs in the same way: the networks differ before them. Dropout is not a difference,
    since some exporters omit it.
    """

    a: str
    b: str
    is_rearranged: bool = False
    factor: float = 1.0
    is_same_function: bool = True


@dataclass(frozen=True, slots=True)
class NetworkView:
    """A model with its structure and cones.

    `tensors_of` has the tensors of each value, in their order. `own` are the tensors that contribute
    to the model's outputs: all of them, if reading the model has removed the outputs. Other tensors belong to
    an added loss.
    """

    model: TrainableModel
    structure: Structure
    cones: ConeDigests
    tensors_of: Mapping[int, list[str]]
    readers: Mapping[str, list[str]]
    producers: Mapping[str, Node]
    own: frozenset[str]

    @classmethod
    def from_model(
        cls,
        model: TrainableModel,
        include_biases: bool = True,
        identified: Mapping[str, IdentifiedFunction] | None = None,
    ) -> "NetworkView":
        structure = structure_of(model, identified)
        views = structure.views
        outputs = dict.fromkeys(views[n].value for n in (model.loss, *model.outputs) if n in views)
        cones = cone_digests(structure, list(outputs), include_biases=include_biases)
        tensors_of = grouped((view.value, name) for name, view in views.items())
        readers = grouped(
            (name, output)
            for node in model.nodes
            for name in dict.fromkeys(node.inputs)
            for output in filter(None, node.outputs)
        )
        producers = {name: node for node in model.nodes for name in node.outputs}
        own = _contributors_to_outputs(model, producers)
        return cls(model, structure, cones, tensors_of, readers, producers, own)

    def root_of(self, name: str) -> str:
        """The tensor that this one is a rearrangement or multiple of."""
        value = self.structure.views[name].value
        while name in self.producers:
            before = [n for n in self.producers[name].inputs if n in self.structure.views]
            if not before or self.structure.views[before[0]].value != value:
                break
            name = before[0]
        return name

    def uses(self, label_of: Mapping[int, int]) -> Mapping[str, str]:
        """A digest of the uses of each tensor, without uses of other tensors with the same value.

        The labels of values are common to both models.
        """
        views, digests = self.structure.views, dict[str, str]()
        for name, view in reversed(views.items()):
            uses: list[str] = []
            for output in self.readers.get(name, ()):
                result = views.get(output)
                if result is not None and result.value == view.value:
                    uses.append(digests[output])
                elif result is not None:
                    uses.append(str(label_of.get(result.value, self.structure.entities[result.value].op)))
            digests[name] = digest(full_key(view), sorted(uses), name in self.model.outputs)
        return digests

    def forward(self) -> dict[int, str]:
        """Forward digests of the values that are live or held by a tensor."""
        cones = self.cones
        return {v: key for v, key in cones.forward.items() if v in cones.backward or v in self.tensors_of}

    def input_dependent_values(self) -> set[int]:
        dependent = {self.structure.views[name].value for name in self.model.inputs}
        for value in sorted(self.cones.operands):
            anchor = self.cones.anchors.get(value, value)
            if any(operand in dependent for operand, _ in self.cones.operands[anchor]):
                dependent.add(value)
        return dependent

    def origin_of(self, weight: object) -> object:
        """The stored tensor, or part of one, that a weight is a rearrangement of."""
        while isinstance(weight, str) and weight in self.producers:
            producer = self.producers[weight]
            if producer.op not in _REARRANGING:
                break
            weight = producer.inputs[0]
        return weight

    def outputs(self) -> list[int]:
        """The values of the model's outputs; of the loss, if reading has removed the outputs."""
        names = [name for name in self.model.outputs if name in self.structure.views] or [self.model.loss]
        return [self.structure.views[name].value for name in names]

    def output_digests(self) -> list[str]:
        return sorted(self.cones.forward[value] for value in self.outputs())


def full_key(view: View) -> object:
    """A key of scale, dropouts and dimensions, without the order of the latter."""
    dims = sorted(tuple((atom.size, atom.stride) for atom in dim) for dim in view.dims if dim)
    return (key_ignoring_layout(view), tuple(dims))


def key_ignoring_layout(view: View) -> object:
    return (f"{view.scale:.5g}", view.dropouts)


def key_ignoring_scale(view: View) -> object:
    return view.dropouts


def _contributors_to_outputs(model: TrainableModel, producers: Mapping[str, Node]) -> frozenset[str]:
    outputs = [name for name in model.outputs if name in producers]
    if not outputs:
        return frozenset(producers)
    contributors = reachable(outputs, lambda name: producers[name].inputs if name in producers else ())
    return frozenset(contributors.union(model.inputs))
