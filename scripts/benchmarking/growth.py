"""Growth of solve times with the graph: networks, chains, random graphs and transformer-like graphs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from onnxgc.graph.computation_graph import ComputationGraph, Vertex
from onnxgc.planning.problem import CheckpointProblem, TensorCost
from onnxgc.solvers.registry import SOLVERS
from scripts.benchmarking.paper_graphs import PAPER_GRAPHS, paper_problem
from scripts.benchmarking.records import Progress, Record

TIMED = ("acg", "general", "peak")
CHAIN_VERTICES = (500, 1_000, 2_000, 5_000, 10_000)
RANDOM_VERTICES = (500, 1_000, 2_000)
TRANSFORMER_VERTICES = (500, 1_000, 2_000, 5_000, 10_000)
# Seconds of the published code of Feng and Huang, division tree and search, on a CPU; the chain's time is
# extrapolated from shorter chains. From 1,000 vertices on it ends in a recursion error.
PAPER_CODE_SECONDS = {
    "resnet50": 1.0,
    "densenet121": 23.0,
    "densenet161": 46.0,
    "densenet201": 95.0,
    "nasnet": 36.0,
    "chain of 500": 53_800.0,
}
MAX_SECONDS = 120.0
"""Predicted seconds beyond which a solver is skipped."""
_REPEATED_BELOW_SECONDS = 5.0
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Options:
    """Larger graphs are skipped."""

    most_vertices: int = 10_000


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """Seconds of each solver on each graph, the division tree included; `None` where it was skipped.

    A solver is skipped if quadratic growth from the preceding size would exceed `MAX_SECONDS`. Short searches
    are repeated; their time is the minimum.
    """
    rows: list[dict[str, Any]] = []
    before: dict[tuple[str, str], tuple[int, float]] = {}
    for family, name, problem in cases(options.most_vertices):
        vertices = len(problem.graph)
        progress(f"{name}: {vertices:,} vertices, {len(problem.graph.edges):,} edges")
        seconds: dict[str, float | None] = {}
        for solver in TIMED:
            known = before.get((family, solver))
            if known and known[1] * (vertices / known[0]) ** 2 > MAX_SECONDS:
                seconds[solver] = None
                progress(f"  {solver} skipped")
                continue
            seconds[solver] = _timed(solver, problem)
            before[family, solver] = vertices, seconds[solver] or 0.0
        rows.append(
            {
                "family": family,
                "name": name,
                "vertices": vertices,
                "seconds": seconds,
                "paper_code_seconds": PAPER_CODE_SECONDS.get(name),
            }
        )
    return {"graphs": rows}


def failures(figures: Any) -> list[str]:
    return []


def results_section(record: Record) -> str:
    graphs = record["figures"]["graphs"]
    times = [1000 * graph["seconds"]["acg"] for graph in graphs if graph["family"] == "network"]
    ratios = ", ".join(
        f"{graph['name']} {graph['paper_code_seconds'] / graph['seconds']['acg']:,.0f}"
        for graph in graphs
        if graph["paper_code_seconds"] is not None
    )
    compared = (
        f" The paper's code, timed separately, takes a multiple of that: {ratios} (the chain extrapolated)."
        if ratios
        else ""
    )
    return (
        f"**Solve times.** `acg`, its division tree included, takes {min(times):.1f} to {max(times):.0f} ms "
        f"on the paper's graphs.{compared}\n\n![Seconds of a search over the number of vertices](growth.svg)"
    )


def cases(most_vertices: int) -> Iterator[tuple[str, str, CheckpointProblem]]:
    """All graphs of up to `most_vertices` vertices by family and name, each family from small to large."""
    for network, graph in sorted(PAPER_GRAPHS.items(), key=lambda item: item[1].vertices):
        if graph.vertices <= most_vertices:
            yield "network", network, paper_problem(network)
    families: tuple[tuple[str, str, Sequence[int], Callable[[int], CheckpointProblem]], ...] = (
        ("chain", "chain of {:,}", CHAIN_VERTICES, random_chain),
        ("random", "random, {:,}", RANDOM_VERTICES, random_dag),
        ("transformer", "transformer, {:,}", TRANSFORMER_VERTICES, transformer),
    )
    for family, name, sizes, make in families:
        for size in sizes:
            if size <= most_vertices:
                yield family, name.format(size), make(size)


def random_chain(vertices: int) -> CheckpointProblem:
    """A chain of tensors of 1 to 1,000 MB."""
    return _problem(vertices, [(v, v + 1) for v in range(vertices - 1)])


def random_dag(vertices: int) -> CheckpointProblem:
    """Twice as many edges as vertices: each vertex reads a random earlier one, other pairs are random."""
    random = Random(vertices)
    edges = {(random.randrange(v), v) for v in range(1, vertices)}
    while len(edges) < 2 * vertices:
        tail, head = sorted(random.sample(range(vertices), 2))
        edges.add((tail, head))
    return _problem(vertices, sorted(edges))


def transformer(vertices: int) -> CheckpointProblem:
    """Blocks of attention and two-layer perceptron between residual additions, at most `vertices` in total.

    Sizes are in bytes of float32, for 64 tokens of width 256 with 4 heads.
    """
    tokens, width, heads = 64, 256, 4
    hidden, scores, inner = tokens * width, heads * tokens**2, 4 * tokens * width
    sizes = [hidden]
    edges: list[tuple[int, int]] = []

    def add(size: int, *read: int) -> int:
        sizes.append(size)
        edges.extend((tail, len(sizes) - 1) for tail in read)
        return len(sizes) - 1

    stream = 0
    while len(sizes) + 14 <= vertices:
        normal = add(hidden, stream)
        query, key, value = (add(hidden, normal) for _ in range(3))
        weights = add(scores, add(scores, query, key))
        stream = add(hidden, add(hidden, add(hidden, weights, value)), stream)
        normal = add(hidden, stream)
        stream = add(hidden, add(hidden, add(inner, add(inner, normal))), stream)
    return _with_sizes([4 * size for size in sizes], edges)


def _problem(vertices: int, edges: Sequence[tuple[int, int]]) -> CheckpointProblem:
    random = Random(vertices)
    return _with_sizes([random.randint(1, 1000) * 10**6 for _ in range(vertices)], edges)


def _with_sizes(sizes: Sequence[int], edges: Sequence[tuple[int, int]]) -> CheckpointProblem:
    costs: dict[Vertex, TensorCost] = {vertex: TensorCost(size) for vertex, size in enumerate(sizes)}
    return CheckpointProblem(ComputationGraph.from_unsorted(range(len(sizes)), edges), costs)


def _timed(name: str, problem: CheckpointProblem) -> float:
    solver = SOLVERS[name]
    seconds = [solver.solve(problem).seconds]
    while len(seconds) < _REPEATS and seconds[0] < _REPEATED_BELOW_SECONDS:
        seconds.append(solver.solve(problem).seconds)
    return min(seconds)
