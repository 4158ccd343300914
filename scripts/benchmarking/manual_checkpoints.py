"""Manual checkpointing of PyTorch modules."""

import functools
from collections.abc import Container
from typing import Any


def checkpoint_blocks(module: Any, blocks: Container[str]) -> Any:
    """`module` with `torch.utils.checkpoint` around its outermost blocks of classes with these names."""
    from torch.utils.checkpoint import checkpoint

    for child in module.children():
        if type(child).__name__ not in blocks:
            checkpoint_blocks(child, blocks)
        elif hasattr(child, "memory_efficient"):
            # The layer's input is a list that grows, so that a recomputation would see a longer one.
            child.memory_efficient = True
        else:
            child.forward = functools.partial(checkpoint, child.forward, use_reentrant=False)
    return module
