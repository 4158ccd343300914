"""Repeated blocks of a network, as the paths in its names tell: what checkpointing by hand goes by."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxgc.planning.schedule import Operator
from onnxgc.tracing.solver_graph import TracedProblem
from onnxgc.tracing.step_graph import TrainingStep

Path = tuple[str, ...]

_SEPARATORS = re.compile(r"[/.]")
# `3`, `layer3`, `encoder_layer_3`, `Mixed_5b`; no operator's `relu_3`, which has no path before it.
_NUMBERED = re.compile(r"(?P<stem>.*?)[0-9]+[a-z]?")
_DEEPEST = 3


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one level of nesting, and the vertices that are kept if each block runs again as a whole.

    `pattern` is what their paths have in common, such as `layer#.#`. Kept is what lies outside of the
    blocks, and of each block what others read.
    """

    pattern: str
    count: int
    checkpoints: tuple[str, ...]


def repeated_blocks(traced: TracedProblem) -> tuple[Blocks, ...]:
    """One for each level of nesting that has blocks, the outermost first; none where no names have paths."""
    paths = _paths(traced.step)
    found: list[Blocks] = []
    for level in range(1, _DEEPEST + 1):
        block_of = _blocks_at(level, traced.step, paths)
        patterns = Counter(".".join(_pattern(name)) for name in dict.fromkeys(block_of.values()))
        if not patterns:
            continue
        pattern, count = patterns.most_common(1)[0]
        checkpoints = _kept(traced, block_of)
        if all(checkpoints != other.checkpoints for other in found):
            found.append(Blocks(pattern, count, checkpoints))
    return tuple(found)


def _blocks_at(level: int, step: TrainingStep, paths: Mapping[str, Path]) -> dict[str, Path]:
    """The block of each operator that is in one.

    A block is named by a path up to the numbered part of this level; there are several of its pattern, and it
    has several operators of the source model. Operators without a path that lie between those of one block
    are part of it.
    """
    named = {name: _prefix(path, level) for name, path in paths.items()}
    origins = {(path, step.nodes[name].origin) for name, path in named.items() if path}
    sizes = Counter(path for path, _ in origins)
    patterns = Counter(_pattern(path) for path, size in sizes.items() if size > 1)
    block_of = {
        name: path
        for name, path in named.items()
        if path and sizes[path] > 1 and patterns[_pattern(path)] > 1
    }
    return _closed(step.graph.forward, block_of, set(paths))


def _closed(forward: Sequence[Operator], block_of: Mapping[str, Path], located: set[str]) -> dict[str, Path]:
    """The same with the operators that nothing locates and that lie on a way inside of one block."""
    behind = _reached(forward, block_of)
    ahead = _reached(
        [Operator(operator.name, operator.outputs, operator.inputs) for operator in reversed(forward)],
        block_of,
    )
    closed = dict(block_of)
    for operator in forward:
        if operator.name not in located:
            between = behind[operator.name] & ahead[operator.name]
            if len(between) == 1:
                closed[operator.name] = min(between)
    return closed


def _reached(forward: Sequence[Operator], block_of: Mapping[str, Path]) -> dict[str, frozenset[Path]]:
    """For each operator, the blocks that it depends on by operators of no block."""
    made: dict[str, frozenset[Path]] = {}
    found: dict[str, frozenset[Path]] = {}
    for operator in forward:
        before = frozenset[Path]().union(*(made.get(name, frozenset()) for name in operator.inputs))
        found[operator.name] = before
        own = block_of.get(operator.name)
        for name in operator.outputs:
            made[name] = made.get(name, frozenset()) | (before if own is None else frozenset([own]))
    return found


def _kept(traced: TracedProblem, block_of: Mapping[str, Path]) -> tuple[str, ...]:
    """Vertices outside of all blocks, and those that are read outside of the block that makes them."""
    graph = traced.step.graph
    maker = {name: block_of.get(operator.name) for operator in graph.forward for name in operator.outputs}
    vertices = traced.problem.graph.vertices
    kept = {vertex for vertex in vertices if maker.get(str(vertex)) is None}
    for operator in graph.forward:
        own = {traced.vertex_of.get(name) for name in operator.outputs}
        for name in operator.inputs:
            vertex = traced.vertex_of.get(name)
            if vertex is not None and vertex not in own and maker.get(name) != block_of.get(operator.name):
                kept.add(vertex)
    return tuple(str(vertex) for vertex in vertices if vertex in kept)


def _paths(step: TrainingStep) -> dict[str, Path]:
    """Where each operator is in the network: by its tensor's name, its node's, or that of a parameter."""
    model = step.model
    owner = {name: name for name in (*model.parameters, *(s.name for s in model.statistics))}
    found: dict[str, Path] = {}
    for node in (step.nodes[operator.name] for operator in step.graph.forward):
        read = [name for name in node.inputs if name in owner]
        if read and all(name in model.weights or name in owner for name in node.inputs if name):
            # A weight that is transposed first is still the weight.
            owner.update(dict.fromkeys(filter(None, node.outputs), owner[read[0]]))
        for name in (*node.outputs[:1], node.origin, *(owner[name] for name in read)):
            path = _path_of(name)
            if len(path) > 1:
                found[node.name] = path
                break
    return found


def _path_of(name: str) -> Path:
    """`/layer1/layer1.0/conv1/Conv` and `layer1.0.conv1` alike: `layer1`, `0`, `conv1`, ..."""
    parts: list[str] = []
    before = ""
    for part in name.split("/"):
        # TorchScript names a child by its container too.
        own = part.removeprefix(f"{before}.") if before else part
        before = part
        parts += filter(None, _SEPARATORS.split(own))
    return tuple(parts)


def _prefix(path: Path, level: int) -> Path:
    """The path up to its numbered part of a level; the last part is the operator's own."""
    seen = 0
    for place, part in enumerate(path[:-1]):
        seen += _NUMBERED.fullmatch(part) is not None
        if seen == level:
            return path[: place + 1]
    return ()


def _pattern(path: Path) -> Path:
    """The path with its numbers left open."""
    numbered = [_NUMBERED.fullmatch(part) for part in path]
    return tuple(
        part if match is None else f"{match['stem']}#" for part, match in zip(path, numbered, strict=True)
    )
