"""Random layered operator graphs, as studied in work on rematerialisation: no structure to rely on.

Operators stand in layers. Each reads from the layer before it, and now and then from one a few layers
back, as skip connections do; sizes and durations are drawn without regard to each other.
"""

from __future__ import annotations

from random import Random
from typing import Any

_FURTHEST = 10
"""A skip connection reaches back over so many layers at most."""
_SKIPPING = 0.3
"""The share of operators with a skip connection."""


def layered_graph(operators: int, seed: int, width: int = 8) -> dict[str, Any]:
    """An operator graph (the form of `onnxgc solve --budget`) with layers of up to `width` operators."""
    random = Random(seed)
    layers: list[list[int]] = []
    edges: list[list[int]] = []
    count = 0
    while count < operators:
        layer = list(range(count, min(operators, count + random.randint(1, width))))
        if layers:
            unread = set(layers[-1])
            for node in layer:
                read = set(random.sample(layers[-1], random.randint(1, min(3, len(layers[-1])))))
                unread -= read
                if random.random() < _SKIPPING:
                    read.add(random.choice(layers[-random.randint(1, min(_FURTHEST, len(layers)))]))
                edges += [[tail, node] for tail in sorted(read)]
            edges += [[tail, random.choice(layer)] for tail in sorted(unread)]
        layers.append(layer)
        count += len(layer)
    nodes = [
        {"id": node, "size": random.randint(1, 1_000), "duration": random.randint(1, 1_000)}
        for node in range(operators)
    ]
    return {"nodes": nodes, "edges": edges}
