"""Random layered operator graphs, a common test case of rematerialisation without structure to exploit.

Operators of a layer read from the preceding layer, and some through a skip connection from an earlier layer.
Sizes and durations are independent.
"""

from random import Random
from typing import Any

MAX_SKIPPED_LAYERS = 10
_SKIP_SHARE = 0.3
"""Share of operators with a skip connection."""


def layered_graph(operators: int, seed: int, width: int = 8) -> dict[str, Any]:
    """An operator graph (in the form of `onnxgc solve --budget`) with layers of up to `width` operators."""
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
                if random.random() < _SKIP_SHARE:
                    skipped = random.randint(1, min(MAX_SKIPPED_LAYERS, len(layers)))
                    read.add(random.choice(layers[-skipped]))
                edges += [[tail, node] for tail in sorted(read)]
            edges += [[tail, random.choice(layer)] for tail in sorted(unread)]
        layers.append(layer)
        count += len(layer)
    nodes = [
        {"id": node, "size": random.randint(1, 1_000), "duration": random.randint(1, 1_000)}
        for node in range(operators)
    ]
    return {"nodes": nodes, "edges": edges}
