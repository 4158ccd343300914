"""The paper's search for arbitrary computation graphs, made exact.

The plan minimises the paper's objective over all sets of checkpoints whose segments are independent
(reading A of `onnxgc.graph.segments`), on any directed acyclic graph.

Source: Feng & Huang, CVPR 2021, Algorithms 1, 5 and 6, with two deviations from the printed text:

* Algorithm 5 on a Linear segment is one shortest path over all of its splitting vertices. A member that
  is too heavy is bounded by kept vertices at both ends and then divided. (As printed, the algorithm
  solves only the part before such a member, and recurses into the wrong segment.)
* Algorithm 6 does not try every cost of every segment as the cap C on segments:
  `onnxgc.solvers.paper.segment_cap_search` bisects intervals of C instead.

Why the division tree loses no solution. A tree node is *closed* if both its ends are kept.

1. A Branch or Complicate segment (without splitting vertex) with an inner checkpoint is closed. Suppose
   its target j is not kept, and let K be the component of j. On a path through the inner checkpoint
   to j, the last checkpoint w feeds K. Since w does not split the segment, and no path reaches the
   segment's source through w, there is a path from the graph's source to j without w; its last
   checkpoint feeds K too. So K has two entries. The argument for the source is symmetric.
2. So between two neighbouring kept splitting vertices of a closed Linear segment there is either one
   member, itself closed, or several undivided members that form one component.
3. In a closed Branch segment each branch is a component, or closed, independently of the others.
4. A Complicate segment with an inner checkpoint keeps all its connectors. Suppose connector x is not
   kept, and let a, b be the entry and exit of its component K. Removing two vertices never
   separates connectors (ends included): the part separated from both ends of the segment would be
   a smaller segment around one of them. So K has all connectors but a and b, and those are the
   two ends, which are kept by 1; then K is the whole interior and there is no inner checkpoint.

By induction from the root, whose ends are always kept, every valid set appears in the tree, and each set
that appears there is valid. A cap leaves a choice only among the splitting vertices of a Linear segment:
any other segment heavier than the cap is divided in every set. So one walk from the root suffices.
"""

from dataclasses import dataclass
from itertools import pairwise

from onnxgc.graph.computation_graph import Vertex
from onnxgc.graph.division_tree import DivisionKind, DivisionTree, build_division_tree
from onnxgc.planning.plan import Objective
from onnxgc.planning.problem import CheckpointProblem
from onnxgc.solvers.base import Finding, Solver, SolverOptions, deadline_of
from onnxgc.solvers.paper.segment_cap_search import CappedOptimum, cheapest_stops, search_caps


class CappedSearch:
    """Algorithm 5: the cheapest checkpoints such that no segment is heavier than a cap.

    The constructor builds the division tree, which serves all caps.
    """

    def __init__(self, problem: CheckpointProblem) -> None:
        graph = problem.closed_graph()
        self._nodes: list[_Node] = []
        if len(graph) == 1:
            return
        number: dict[int, int] = {}
        for tree in build_division_tree(graph).walk():
            number[id(tree)] = len(self._nodes)
            self._nodes.append(self._prepare(problem, tree, [number[id(member)] for member in tree.members]))

    def cheapest_under(self, cap_bytes: int) -> CappedOptimum:
        """The optimum with segments of at most `cap_bytes`, at least 0. O(vertices)."""
        checkpoints: list[Vertex] = []
        kept_bytes = heaviest_bytes = 0
        closed = self._nodes[-1:]  # The root; empty for a graph of one vertex.
        while closed:
            node = closed.pop()
            if node.kind is DivisionKind.BRANCH:
                closed.extend(self._nodes[member] for member in node.members)
                continue
            if node.interior_bytes <= cap_bytes:
                heaviest_bytes = max(heaviest_bytes, node.interior_bytes)
                continue
            if node.kind is DivisionKind.LINEAR:
                # Neighbouring stops have one member between them, which may be divided.
                stops = cheapest_stops(node.stop_sizes, node.bytes_before, cap_bytes)
                for start, stop in pairwise(stops):
                    if stop > start + 1:
                        heaviest_bytes = max(heaviest_bytes, node.segment_bytes(start, stop))
                    else:
                        closed.append(self._nodes[node.members[start]])
            else:
                stops = list(range(len(node.stop_sizes)))
                closed.extend(self._nodes[member] for member in node.members)
            checkpoints.extend(node.connectors[stop - 1] for stop in stops[1:-1])
            kept_bytes += sum(node.stop_sizes[stop] for stop in stops[1:-1])
        return CappedOptimum(tuple(checkpoints), kept_bytes, heaviest_bytes)

    def _prepare(self, problem: CheckpointProblem, tree: DivisionTree, members: list[int]) -> "_Node":
        sizes = [0, *(problem.size_bytes(vertex) for vertex in tree.connectors), 0]
        inside = [self._nodes[member].interior_bytes for member in members]
        before = [0]
        if tree.kind is DivisionKind.LINEAR:
            for size, member_bytes in zip(sizes, inside, strict=False):
                before.append(before[-1] + size + member_bytes)
        return _Node(tree.kind, members, tree.connectors, sum(sizes) + sum(inside), sizes, before)


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of the division tree with its sums of bytes.

    `members` are node numbers. The stops of a node are its source, its connectors and its target;
    `stop_sizes` counts the two ends as 0. In a Linear node, `bytes_before[stop]` is the sum between the
    source and that stop.
    """

    kind: DivisionKind
    members: list[int]
    connectors: tuple[Vertex, ...]
    interior_bytes: int
    stop_sizes: list[int]
    bytes_before: list[int]

    def segment_bytes(self, start: int, stop: int) -> int:
        return self.bytes_before[stop] - self.bytes_before[start] - self.stop_sizes[start]


def search(problem: CheckpointProblem, options: SolverOptions) -> Finding:
    """Minimise the paper's objective over all sets of reading A. Exact without a time limit.

    O(vertices) for each cap, after one division of the graph.

    Args:
        problem: any acyclic graph, sizes in bytes.
        options: `time_limit_seconds` is used; it gives the best plan found and a lower bound.

    Source: the paper, Algorithm 6.
    """
    deadline = deadline_of(options)
    return search_caps(problem, CappedSearch(problem).cheapest_under, deadline)


ACG = Solver(
    name="acg", summary="the paper's optimal search over independent segments", search=search, exact_for=Objective.PAPER
)
