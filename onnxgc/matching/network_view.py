"""A model as one of two that are matched: its values, what holds them, and how tensors are alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnxgc.matching.cone_digests import ConeDigests, cones_of, digest
from onnxgc.matching.normal_form.builder import Along
from onnxgc.matching.normal_form.structure import Structure, View
from onnxgc.matching.operators.rules import structure_of
from onnxgc.model.core.ir import Node, TrainableModel

_REARRANGED = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Cast")


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of each model that hold the same elements, those of b `factor` times as large.

    They are in the same dimensions, maybe in another order of these, or else `is_rearranged`. Where not
    `is_same_function`, they only reach the outputs in the same way: something before them differs. Dropout
    is no difference: some exporters leave it out.
    """

    a: str
    b: str
    is_rearranged: bool = False
    factor: float = 1.0
    is_same_function: bool = True


@dataclass(frozen=True, slots=True)
class NetworkView:
    """A model with what is known of its values; `own` are the tensors that its outputs are made of.

    What comes behind them is the loss. All are its own where reading has left none of the outputs.
    """

    model: TrainableModel
    structure: Structure
    cones: ConeDigests
    holders: Mapping[int, list[str]]
    readers: Mapping[str, list[str]]
    producers: Mapping[str, Node]
    own: frozenset[str]

    @classmethod
    def of(
        cls,
        model: TrainableModel,
        are_biases_seen: bool = True,
        functions: Mapping[str, Along] | None = None,
    ) -> NetworkView:
        structure = structure_of(model, functions)
        outputs = [
            structure.views[name].value for name in (model.loss, *model.outputs) if name in structure.views
        ]
        producers = {name: node for node in model.nodes for name in node.outputs}
        readers: dict[str, list[str]] = {}
        for node in model.nodes:
            for name in dict.fromkeys(node.inputs):
                readers.setdefault(name, []).extend(filter(None, node.outputs))
        cones = cones_of(structure, list(dict.fromkeys(outputs)), are_biases_seen=are_biases_seen)
        return cls(model, structure, cones, structure.holders(), readers, producers, _own(model, producers))

    def root_of(self, name: str) -> str:
        """The tensor that this one is a rearrangement of, or a multiple."""
        value = self.structure.views[name].value
        while name in self.producers:
            before = [n for n in self.producers[name].inputs if n in self.structure.views]
            if not before or self.structure.views[before[0]].value != value:
                break
            name = before[0]
        return name

    def uses(self, label_of: Mapping[int, int]) -> Mapping[str, str]:
        """What is made of each tensor itself, and not of another that holds the same; values by labels."""
        views, found = self.structure.views, dict[str, str]()
        for name, view in reversed(views.items()):
            uses: list[str] = []
            for output in self.readers.get(name, ()):
                made = views.get(output)
                if made is not None and made.value == view.value:
                    uses.append(found[output])
                elif made is not None:
                    uses.append(str(label_of.get(made.value, self.structure.entities[made.value].op)))
            found[name] = digest(full_key(view), sorted(uses), name in self.model.outputs)
        return found

    def forward(self) -> dict[int, str]:
        """Forward digests of the values that matter: those that some tensor holds or an output needs."""
        cones = self.cones
        return {v: key for v, key in cones.forward.items() if v in cones.backward or v in self.holders}

    def fed(self) -> set[int]:
        """The values that depend on the model's inputs."""
        found = {self.structure.views[name].value for name in self.model.inputs}
        for value in sorted(self.cones.operands):
            anchor = self.cones.anchors.get(value, value)
            if any(operand in found for operand, _ in self.cones.operands[anchor]):
                found.add(value)
        return found

    def origin_of(self, weight: object) -> object:
        """What a weight is a rearrangement of, which is a stored tensor or a part of one."""
        while isinstance(weight, str) and weight in self.producers:
            made = self.producers[weight]
            if made.op not in _REARRANGED:
                break
            weight = made.inputs[0]
        return weight

    def outputs(self) -> list[int]:
        """The values of the model's own outputs; of the loss, where reading has left none of them."""
        names = [name for name in self.model.outputs if name in self.structure.views] or [self.model.loss]
        return [self.structure.views[name].value for name in names]

    def outputs_digests(self) -> list[str]:
        """What the outputs are functions of."""
        return sorted(self.cones.forward[value] for value in self.outputs())


def full_key(view: View) -> object:
    """What of a tensor does not depend on the order of its dimensions."""
    dims = sorted(tuple((atom.size, atom.stride) for atom in dim) for dim in view.dims if dim)
    return (but_for_layout(view), tuple(dims))


def but_for_layout(view: View) -> object:
    return (f"{view.scale:.5g}", view.dropouts)


def key_ignoring_scale(view: View) -> object:
    return view.dropouts


def _own(model: TrainableModel, producers: Mapping[str, Node]) -> frozenset[str]:
    pending = [name for name in model.outputs if name in producers]
    found = {*pending, *(model.inputs if pending else producers)}
    while pending:
        node = producers.get(pending.pop())
        new = [name for name in node.inputs if name not in found] if node else []
        found.update(new)
        pending += new
    return frozenset(found)
