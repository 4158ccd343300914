"""Roles of weights, from the metadata that PyTorch's exporters write.

The newer exporter (torch.export, with onnxscript's optimizer) marks weights in metadata; the older one
(TorchScript) shows their roles by names and by Constant nodes alone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx

from onnxgc.model.core.ir import Weight
from onnxgc.model.core.stored_weights import ExportedAs, StoredWeight
from onnxgc.model.files.module_paths import names_in

_PRODUCER = "pytorch"
# Metadata of an initializer's value_info, written by torch.export and by onnxscript's optimizer.
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"
# Metadata of the graph: one line for each parameter and buffer of the module, folded ones included.
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
# A weight into which the optimizer folds a normalisation keeps its name and loses its marks; the suffix
# names its new bias.
_FUSED_BIAS = "_bias"
_IN_SIGNATURE = re.compile(r"^\w+: (\w+) target='([^']*)'", re.MULTILINE)
# Prefixes of the tensors that the older exporter computes; a module's path begins with a slash.
_COMPUTED = ("onnx::", "/")
_OF_CONSTANT_NODE = re.compile(r"^/(.*/)?Constant(_\d+)?_output_0$")
_FIRST_VERSION_OF_NEWER = 2


def with_exported_roles(model: onnx.ModelProto, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The weights with the roles that the exporter states.

    The newer exporter marks parameters and buffers. An unmarked weight is a constant, unless it was folded
    from a parameter or a normalisation was folded into it. The older exporter writes constants as Constant
    nodes. If a tool removed the marks of the newer exporter, only a module's name identifies a weight.
    """
    if model.producer_name != _PRODUCER:
        return dict(weights)
    marks = {value.name: _metadata(value) for value in model.graph.value_info}
    is_marked = any(_KIND in mark for mark in marks.values())
    declared, is_older = _declared(model.graph), _is_by_older(model)

    def role(name: str, weight: StoredWeight) -> ExportedAs:
        if is_marked:
            return _marked_role(name, marks, declared)
        return _role_by_older_exporter(name, weight) if is_older else _unmarked_role(name, weight)

    return {
        name: replace(weight, exported_as=role(name, weight)) if isinstance(weight, StoredWeight) else weight
        for name, weight in weights.items()
    }


def folding_notes(model: onnx.ModelProto) -> tuple[str, ...]:
    """Notes on parameters that the exporter folded into other weights or dropped."""
    folded: dict[str, None] = {}
    stored = {tensor.name for tensor in model.graph.initializer}
    declared = _declared(model.graph)
    for value in model.graph.value_info:
        sources = names_in(_metadata(value).get(_FOLDED_FROM, "")) if value.name in stored else []
        lost = (name for name in sources if name not in stored and _is_parameter(name, declared))
        folded.update(dict.fromkeys(lost))
    marked = {value.name for value in model.graph.value_info if value.metadata_props}
    if marked & stored:
        unmarked = (tensor.name for tensor in model.graph.initializer if tensor.name not in marked)
        folded.update(dict.fromkeys(name for name in unmarked if declared.get(name) == "PARAMETER"))
    dropped = [n for n, kind in declared.items() if kind == "PARAMETER" and n not in {*stored, *folded}]
    notes = []
    if folded:
        notes.append(
            f"the exporter stored values computed from {_listed(list(folded))}, which train in their place; "
            "torch.onnx.export(..., optimize=False) keeps the parameters"
        )
    if dropped:
        notes.append(
            f"parameters of the module are not in the file: {_listed(dropped)}; forward does not use them, "
            "or the exporter removed them because they have no effect at their initial values, such as a "
            "factor of 1 (torch.onnx.export(..., optimize=False) keeps those)"
        )
    return tuple(notes)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _marked_role(name: str, marks: Mapping[str, Mapping[str, str]], declared: Mapping[str, str]) -> ExportedAs:
    mark = marks.get(name, {})
    if kind := mark.get(_KIND):
        return ExportedAs.PARAMETER if kind == "PARAMETER" else ExportedAs.BUFFER
    if not mark and declared.get(name.removesuffix(_FUSED_BIAS)) == "PARAMETER":
        return ExportedAs.UNKNOWN
    sources = names_in(mark.get(_FOLDED_FROM, ""))
    known = {**{source: marks[source].get(_KIND, "") for source in sources if source in marks}, **declared}
    return ExportedAs.UNKNOWN if any(_is_parameter(s, known) for s in sources) else ExportedAs.CONSTANT


def _declared(graph: onnx.GraphProto) -> dict[str, str]:
    """The kinds of the module's parameters and buffers; empty if the graph lacks its signature."""
    signature = _metadata(graph).get(_SIGNATURE, "")
    return {target: kind for kind, target in _IN_SIGNATURE.findall(signature)}


def _is_parameter(name: str, declared: Mapping[str, str]) -> bool:
    """Whether the module has such a parameter; without its signature, every dotted name counts as one."""
    return declared[name] == "PARAMETER" if name in declared else "." in name


def _metadata(proto: onnx.GraphProto | onnx.ValueInfoProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in proto.metadata_props}


def _is_by_older(model: onnx.ModelProto) -> bool:
    """Whether the older exporter wrote the file, by its version or by names that are paths of modules."""
    version = model.producer_version.partition(".")[0]
    if version.isdigit() and int(version) < _FIRST_VERSION_OF_NEWER:
        return True
    names = (name for node in model.graph.node for name in (node.name, *node.input, *node.output))
    return any(name.startswith(_COMPUTED) for name in names)


def _unmarked_role(name: str, weight: StoredWeight) -> ExportedAs:
    """The role in a file of the newer exporter without marks: names of computed weights have no dot."""
    return ExportedAs.NAMED if weight.is_initializer and "." in name else ExportedAs.UNKNOWN


def _role_by_older_exporter(name: str, weight: StoredWeight) -> ExportedAs:
    # Simplifiers turn Constant nodes into initializers of the same name.
    if not weight.is_initializer or _OF_CONSTANT_NODE.search(name):
        return ExportedAs.CONSTANT
    return ExportedAs.UNKNOWN if name.startswith(_COMPUTED) else ExportedAs.NAMED
