"""Repeated blocks of a network, found by the paths in its names, as manual checkpointing uses them."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxgc.planning.schedule import Operator
from onnxgc.tracing.checkpoint_problem import TracedProblem
from onnxgc.tracing.step_graph import TrainingStep

Path = tuple[str, ...]

_SEPARATORS = re.compile(r"[/.]")
# `3`, `layer3`, `encoder_layer_3`, `Mixed_5b`; not an operator's `relu_3`, since it has no path before it.
_NUMBERED = re.compile(r"(?P<stem>.*?)[0-9]+[a-z]?")
_MAX_LEVELS = 3


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one nesting level, and the checkpoints with which each block is recomputed as a whole.

    `pattern` is their path with `#` for numbers, such as `layer#.#`. The checkpoints are the vertices outside
    all blocks, and those of a block that operators outside it read.
    """

    pattern: str
    count: int
    checkpoints: tuple[str, ...]


def repeated_blocks(traced: TracedProblem) -> tuple[Blocks, ...]:
    """Blocks of each nesting level that has some, the outermost first; empty if names have no paths."""
    paths = _paths(traced.step)
    found: list[Blocks] = []
    for level in range(1, _MAX_LEVELS + 1):
        block_of = _blocks_at(level, traced.step, paths)
        patterns = Counter(".".join(_pattern(name)) for name in dict.fromkeys(block_of.values()))
        if not patterns:
            continue
        pattern, count = patterns.most_common(1)[0]
        checkpoints = _checkpoints(traced, block_of)
        if all(checkpoints != other.checkpoints for other in found):
            found.append(Blocks(pattern, count, checkpoints))
    return tuple(found)


def _blocks_at(level: int, step: TrainingStep, paths: Mapping[str, Path]) -> dict[str, Path]:
    """The block of each operator that is in one.

    The path up to the numbered part of this level names a block. A block has at least two source operators, a
    pattern at least two blocks. Operators without a path between those of one block belong to it.
    """
    named = {name: _prefix(path, level) for name, path in paths.items()}
    origins = {(path, step.nodes[name].origin) for name, path in named.items() if path}
    sizes = Counter(path for path, _ in origins)
    patterns = Counter(_pattern(path) for path, size in sizes.items() if size > 1)
    block_of = {name: path for name, path in named.items() if path and sizes[path] > 1 and patterns[_pattern(path)] > 1}
    return _with_enclosed(step.graph.forward, block_of, set(paths))


def _with_enclosed(forward: Sequence[Operator], block_of: Mapping[str, Path], located: set[str]) -> dict[str, Path]:
    """`block_of` with the operators without a location that lie on a path within a single block."""
    before = _reachable_blocks(forward, block_of)
    after = _reachable_blocks(
        [Operator(operator.name, operator.outputs, operator.inputs) for operator in reversed(forward)], block_of
    )
    extended = dict(block_of)
    for operator in forward:
        if operator.name not in located:
            enclosing = before[operator.name] & after[operator.name]
            if len(enclosing) == 1:
                extended[operator.name] = min(enclosing)
    return extended


def _reachable_blocks(forward: Sequence[Operator], block_of: Mapping[str, Path]) -> dict[str, frozenset[Path]]:
    """For each operator, the blocks on which it depends through operators outside all blocks."""
    blocks_of_tensor: dict[str, frozenset[Path]] = {}
    found: dict[str, frozenset[Path]] = {}
    for operator in forward:
        before = frozenset[Path]().union(*(blocks_of_tensor.get(name, frozenset()) for name in operator.inputs))
        found[operator.name] = before
        block = block_of.get(operator.name)
        for name in operator.outputs:
            blocks = before if block is None else frozenset([block])
            blocks_of_tensor[name] = blocks_of_tensor.get(name, frozenset()) | blocks
    return found


def _checkpoints(traced: TracedProblem, block_of: Mapping[str, Path]) -> tuple[str, ...]:
    """Vertices outside all blocks, and those with a reader outside their block."""
    graph = traced.step.graph
    origin = {name: block_of.get(operator.name) for operator in graph.forward for name in operator.outputs}
    vertices = traced.problem.graph.vertices
    kept = {vertex for vertex in vertices if origin.get(str(vertex)) is None}
    for operator in graph.forward:
        own = {traced.vertex_of.get(name) for name in operator.outputs}
        for name in operator.inputs:
            vertex = traced.vertex_of.get(name)
            if vertex is not None and vertex not in own and origin.get(name) != block_of.get(operator.name):
                kept.add(vertex)
    return tuple(str(vertex) for vertex in vertices if vertex in kept)


def _paths(step: TrainingStep) -> dict[str, Path]:
    """Each operator's path in the network, from the name of its tensor, its node or a parameter."""
    model = step.model
    owner = {name: name for name in (*model.parameters, *(s.name for s in model.statistics))}
    found: dict[str, Path] = {}
    for node in (step.nodes[operator.name] for operator in step.graph.forward):
        read = [name for name in node.inputs if name in owner]
        if read and all(name in model.weights or name in owner for name in node.inputs if name):
            # The result of operators on weights alone, such as a transposed weight, counts as the weight.
            owner.update(dict.fromkeys(filter(None, node.outputs), owner[read[0]]))
        for name in (*node.outputs[:1], node.origin, *(owner[name] for name in read)):
            path = _path_of(name)
            if len(path) > 1:
                found[node.name] = path
                break
    return found


def _path_of(name: str) -> Path:
    """`layer1`, `0`, `conv1`, ... for both `/layer1/layer1.0/conv1/Conv` and `layer1.0.conv1`."""
    parts: list[str] = []
    before = ""
    for part in name.split("/"):
        # TorchScript prefixes a child's name with its container's.
        own = part.removeprefix(f"{before}.") if before else part
        before = part
        parts += filter(None, _SEPARATORS.split(own))
    return tuple(parts)


def _prefix(path: Path, level: int) -> Path:
    """The path up to the numbered part of this level, not counting the operator's own name at the end."""
    seen = 0
    for place, part in enumerate(path[:-1]):
        seen += _NUMBERED.fullmatch(part) is not None
        if seen == level:
            return path[: place + 1]
    return ()


def _pattern(path: Path) -> Path:
    """The path with `#` for its numbers."""
    numbered = [_NUMBERED.fullmatch(part) for part in path]
    return tuple(part if match is None else f"{match['stem']}#" for part, match in zip(path, numbered, strict=True))
