"""Random training steps: forward graphs with a backward that reads some of the forward tensors."""

from random import Random

from onnxgc.graph.computation_graph import Vertex
from onnxgc.planning.joint_graph import JointGraph
from onnxgc.planning.problem import CheckpointProblem, TensorCost
from onnxgc.planning.schedule import Operator, StepGraph
from tests.graph.random_graphs import random_graph


def random_step_problem(random: Random, max_vertices: int) -> CheckpointProblem:
    """A problem with a random joint graph: gradients, workspaces and in-place operators.

    Some vertices have two operators, some a second output that only backward reads, and some cannot be
    recomputed.
    """
    graph = random_graph(random, max_vertices)
    sizes: dict[str, int] = {"x": 1, "seed": 1}
    members: dict[Vertex, tuple[str, ...]] = {}
    operators: dict[str, Operator] = {}
    backward: dict[str, list[tuple[tuple[str, ...], int, int]]] = {}
    for vertex in graph.vertices:
        name = f"t{vertex}"
        read = tuple(f"t{tail}" for tail in graph.predecessors(vertex)) or ("x",)
        sizes[name] = random.randint(0, 9)
        own = [name]
        last = f"f{vertex}"
        if random.random() < 0.2:
            sizes[f"{name}.raw"] = sizes[name]
            own.append(f"{name}.raw")
            operators[f"{last}.raw"] = Operator(
                f"{last}.raw", read, (f"{name}.raw",), workspace_bytes=random.randint(0, 3), flops=1
            )
            read = (f"{name}.raw", *(read[-1:] if random.random() < 0.3 else ()))
        outputs = [name]
        if random.random() < 0.2:
            sizes[f"{name}.extra"] = random.randint(1, 5)
            own.append(f"{name}.extra")
            outputs.append(f"{name}.extra")
        in_place = sizes.get(read[0]) == sizes[name] and random.random() < 0.5
        operators[last] = Operator(
            last,
            read,
            tuple(outputs),
            in_place=in_place,
            once=random.random() < 0.08,
            needs_all_outputs=random.random() < 0.3,
            workspace_bytes=random.choice([0, 0, random.randint(0, 4)]),
            flops=1,
        )
        members[vertex] = tuple(own)
        for operator in (f"{last}.raw", last):
            if operator not in operators:
                continue
            about = operators[operator]
            choice = [*about.inputs, *about.outputs]
            backward[operator] = [
                (tuple(n for n in choice if n != "x" and random.random() < 0.4), random.randint(0, 6), n)
                for n in range(random.randint(1, 2))
            ]
            for _, size, n in backward[operator]:
                sizes[f"{operator}.grad{n}"] = size

    costs = {vertex: TensorCost(sizes[f"t{vertex}"]) for vertex in graph.vertices}
    return CheckpointProblem(graph, costs, _joint(operators, backward, sizes, members))


def _joint(
    operators: dict[str, Operator],
    backward: dict[str, list[tuple[tuple[str, ...], int, int]]],
    sizes: dict[str, int],
    members: dict[Vertex, tuple[str, ...]],
) -> JointGraph:
    readers: dict[str, list[str]] = {}
    for name, known in operators.items():
        for tensor in known.inputs:
            readers.setdefault(tensor, []).append(name)

    def in_order(names: tuple[str, ...]) -> StepGraph:
        chunks: list[tuple[Operator, ...]] = []
        sources: list[str] = []
        for name in reversed(names):
            # Inputs are the gradients of all readers of this operator's outputs.
            after = [reader for tensor in operators[name].outputs for reader in readers.get(tensor, ())]
            incoming = tuple(f"{reader}.grad0" for reader in dict.fromkeys(after)) or ("seed",)
            for read, _, n in backward[name]:
                chunks.append((Operator(f"b.{name}.{n}", (*read, *incoming), (f"{name}.grad{n}",)),))
                sources.append(name)
        resident = frozenset({"x", "seed"})
        forward = tuple(operators[name] for name in names)
        outputs = tuple(f"{name}.grad1" for name in operators if len(backward[name]) > 1)
        return StepGraph(forward, tuple(chunks), tuple(sources), sizes, resident, outputs, frozenset(outputs))

    return JointGraph(in_order(tuple(operators)), members, in_order)
