"""The paper's networks as graphs of the code of Feng and Huang, 2021, with known sums.

These graphs end at the logits and have fewer vertices than onnxgc's traces of the same files: an operator
that overwrites its input shares its vertex.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.planning.problem import CheckpointProblem, TensorCost
from scripts.benchmarking.records import MODELS

FLOAT_BYTES = 4
CIFAR_NETWORKS = ("amoebanet", "darts", "nasnet")


@dataclass(frozen=True, slots=True)
class PaperGraph:
    """A network with the batch and pixels of the paper's Table 1.

    `vertices` and `mebibytes` (of all vertices) are those of the paper's code. Sums of checkpoints and
    heaviest segment, source and target included, are in MiB: `code_mebibytes` is the result of that code,
    `cuts_mebibytes` the best known result of cuts in one order.
    """

    batch: int
    pixels: int
    vertices: int
    mebibytes: int
    code_mebibytes: int
    cuts_mebibytes: int


PAPER_GRAPHS: Mapping[str, PaperGraph] = {
    "alexnet": PaperGraph(1024, 224, 13, 2899, 1657, 1657),
    "amoebanet": PaperGraph(64, 32, 1015, 5961, 1076, 752),
    "darts": PaperGraph(64, 32, 1073, 6623, 1153, 845),
    "densenet121": PaperGraph(32, 224, 306, 4061, 756, 699),
    "densenet161": PaperGraph(16, 224, 406, 3775, 598, 570),
    "densenet169": PaperGraph(32, 224, 426, 4893, 791, 746),
    "densenet201": PaperGraph(16, 224, 506, 3149, 451, 437),
    "inception_v3": PaperGraph(32, 300, 220, 2880, 691, 661),
    "nasnet": PaperGraph(64, 32, 1149, 7217, 1130, 982),
    "resnet18": PaperGraph(256, 224, 41, 5024, 2108, 2108),
    "resnet34": PaperGraph(128, 224, 73, 3737, 1127, 1127),
    "resnet50": PaperGraph(64, 224, 106, 5146, 1507, 1507),
    "resnet101": PaperGraph(32, 224, 208, 3822, 851, 833),
    "resnet152": PaperGraph(16, 224, 310, 2683, 475, 475),
    "vgg11": PaperGraph(64, 224, 17, 2226, 1115, 1115),
    "vgg13": PaperGraph(64, 224, 19, 3402, 1825, 1825),
    "vgg16": PaperGraph(64, 224, 22, 3720, 1850, 1850),
    "vgg19": PaperGraph(64, 224, 25, 4039, 1899, 1899),
}


def paper_problem(name: str) -> CheckpointProblem:
    """The graph of a network of `PAPER_GRAPHS`: a vertex for the input and for the output of each operator.

    Omitted are Flatten, Dropout and Slice in front of certain operators, and outputs that a ReLU or an
    addition of ResNet overwrites; their consumer reads their inputs. CIFAR networks overwrite no tensor, and
    their skip connections are vertices.
    """
    omitted = {("Flatten", "Gemm"), ("Dropout", "Gemm"), ("Slice", "Conv")}
    if name not in CIFAR_NETWORKS:
        omitted |= {(op, "Relu") for op in ("Add", "BatchNormalization", "Conv", "Gemm")}
        omitted.add(("BatchNormalization", "Add"))
    model = onnx.load(MODELS / f"{name}.onnx")
    elements = _elements(model, PAPER_GRAPHS[name])
    operators = [node for node in model.graph.node if node.op_type != "ConstantOfShape"]
    readers: dict[str, list[str]] = {}
    for node in operators:
        for tensor in dict.fromkeys(node.input):
            readers.setdefault(tensor, []).append(node.op_type)

    sizes = {"x": elements["x"]}
    edges: list[tuple[str, str]] = []
    # The vertices of a tensor: its own, or those of the inputs of its omitted operator.
    vertices_of: dict[str, list[str]] = {"x": ["x"]}
    for node in operators:
        output = node.output[0]
        read = []
        for tensor in node.input:
            known = vertices_of.get(tensor, [])
            if known and name in CIFAR_NETWORKS and node.op_type == "Add" and "._ops." not in tensor:
                skip = f"{tensor} to {output}"
                sizes[skip] = elements[tensor]
                edges += [(vertex, skip) for vertex in known]
                known = [skip]
            read += known
        if len(readers.get(output, [])) == 1 and (node.op_type, readers[output][0]) in omitted:
            vertices_of[output] = read
            continue
        vertices_of[output] = [output]
        sizes[output] = elements[output]
        edges += [(vertex, output) for vertex in read]
    costs: dict[Vertex, TensorCost] = {vertex: TensorCost(FLOAT_BYTES * size) for vertex, size in sizes.items()}
    return CheckpointProblem(ComputationGraph.from_unsorted(sizes, edges), costs)


def _elements(model: onnx.ModelProto, graph: PaperGraph) -> dict[str, int]:
    """Number of elements of each tensor at the paper's batch and pixels."""
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = graph.batch
    for dimension in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        dimension.dim_value = graph.pixels
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    return {
        value.name: math.prod(d.dim_value for d in value.type.tensor_type.shape.dim)
        for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output)
    }
